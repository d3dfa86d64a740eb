"""Public names of the package, and what its import brings."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import verax


@pytest.mark.parametrize(
    ("modules", "absent"),
    [("verax, verax.cli", {"jax", "torch", "flax", "numpy"}), ("verax.text.engine.llm", {"torch", "transformers"})],
    ids=["commands", "engine"],
)
def test_an_import_is_quick_because_it_brings_no_large_library(modules, absent):
    code = f"import sys, {modules}; print({absent} & sys.modules.keys())"
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
