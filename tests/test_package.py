"""Public names of the package, the time of its import, its docstrings, and its tests."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import verax

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "verax"


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
    code = "import sys, verax.text.llm, verax.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def modules_without_own_tests():
    """Files of the package, relative to it, for which no test file of the same name is at the same place in tests."""
    for path in sorted(SOURCES.rglob("*.py")):
        module = path.relative_to(SOURCES)
        own = TESTS / module.parent / f"test_{module.stem.removeprefix('_')}.py"
        if not module.stem.startswith("__") and not own.exists():
            yield module.as_posix()


def test_every_module_has_its_own_tests_or_a_row_in_the_table_of_the_readme():
    rows = dict(re.findall(r"^\| `([^`]+\.py)` \| (.+) \|$", (TESTS / "README.md").read_text(), re.MULTILINE))
    without = set(modules_without_own_tests())
    assert sorted(without - set(rows)) == []  # add a row
    assert sorted(set(rows) - without) == []  # the module is gone, or has its own tests now: delete the row
    named = {name for tests in rows.values() for name in re.findall(r"`([^`]+)`", tests)}
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []
    assert [module for module, tests in rows.items() if not re.fullmatch(r"none|`[^`]+`(, `[^`]+`)*", tests)] == []


NOT_A_NOUN = {"Of", "What", "That", "How", "Whether", "Where", "Which", "Why", "As"}
"""First words that docstrings must not have. A docstring begins with its noun or an imperative verb."""


def docstrings(source):
    """Line and text of every docstring of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def without_noun(source):
    """Lines and beginnings of docstrings whose first word is in `NOT_A_NOUN`."""
    return [
        f"{line}: {text.splitlines()[0]}"
        for line, text in docstrings(source)
        if (first := re.match(r"\W*(\w+)", text)) and first[1] in NOT_A_NOUN
    ]


def test_docstrings_begin_with_a_noun_or_an_imperative_verb():
    files = sorted(SOURCES.rglob("*.py"))
    found = [f"{path.relative_to(SOURCES)}:{line}" for path in files for line in without_noun(path.read_text())]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',
        'class A:\n    """Of a thing."""',
        'def f():\n    """Whether it holds.\n\n    More.\n    """',
        'class A:\n    x: int = 0\n    """How many."""',
        'LIMIT = 3\n"""Where it ends."""',
    ],
)
def test_a_docstring_that_begins_otherwise_is_found(source):
    assert len(without_noun(source)) == 1
    assert without_noun(source.replace("Wh", "N").replace("Of", "Size of").replace("How", "Number")) == []


def test_the_version_is_that_of_the_changelog_and_stands_nowhere_else():
    root = Path(__file__).parents[1]
    newest = re.search(r"(?m)^## \[?(\d+\.\d+\.\d+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert newest is not None
    assert newest[1] == verax.__version__
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/verax/__init__.py"
