"""Public names of the package, and what its import brings."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import verax


def test_every_public_name_can_be_had():
    for name in verax.__all__:
        assert getattr(verax, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = verax.nothing


@pytest.mark.parametrize("module", ["verax", "verax.cli"])
def test_importing_is_quick_because_it_brings_no_jax(module):
    code = f"import sys, {module}; print([m for m in ('jax', 'torch', 'flax', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_using_the_engine_brings_no_torch():
    code = "import sys, verax.text.engine.llm, verax.cli; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_version_is_the_changelogs_and_stands_nowhere_else():
    root = Path(__file__).parents[1]
    newest = re.search(r"(?m)^## \[?(\d+\.\d+\.\d+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest is not None
    assert newest[1] == verax.__version__
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/verax/__init__.py"
