"""Layers of the package: a folder imports from lower floors only, and no files import each other in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "verax"

FLOORS = (
    {"errors", "shapes"},
    {"_optional", "files", "progress", "builtin", "_buckets", "options"},
    {"_compat", "fields", "page", "published", "sampling_fields"},
    {"machine", "ops"},
    {"nn"},
    {"models"},
    {"checkpoint"},
    {"loading"},
    {"text", "video"},
    {"embed"},
    {"train", "compare", "plan"},
    {"serve"},
    {"batch"},
    {"ray"},
    {"verax"},
    {"bench"},
    {"cli"},
    {"__main__"},
)
"""Folders and files of each floor, the lowest first. Folders of one floor do not import each other."""


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, including late imports and imports of types."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = SOURCES.parent / name.replace(".", "/")
                names.add(name if place.is_dir() or place.with_suffix(".py").is_file() else str(node.module))
    return {name for name in names if name.partition(".")[0] == "verax"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder(module: str) -> str:
    return ".".join(module.split(".")[1:2]) or module


@pytest.fixture(scope="module")
def graph():
    paths = sorted(SOURCES.rglob("*.py"))
    return {module_name(path): imports(path) - {module_name(path)} for path in paths}


def test_every_folder_imports_from_lower_floors_only(graph):
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    upwards = [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in sorted(targets)
        if folder(target) != folder(module) and floor[folder(target)] >= floor[folder(module)]
    ]
    assert upwards == []


def test_no_files_import_each_other_in_a_circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
