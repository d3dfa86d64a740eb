"""The package's own imports, read from its sources: a graph of files, and what it may look like."""

from __future__ import annotations

import ast
from collections import abc
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Graph = dict[str, set[str]]
"""Modules that each module imports, by dotted name. Every module of the package is a key."""


def import_graph(root: Path) -> Graph:
    """Imports of the package in the folder `root` among its own modules.

    Imports inside functions and under `TYPE_CHECKING` count: a dependency that is late or only of types is still one.
    So does `importlib.import_module("package.name")`.
    """
    sources = {_module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    return {name: set(_imports(name, path, sources)) - {name} for name, path in sources.items()}


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, path: Path, known: abc.Container[str]) -> abc.Iterator[str]:
    package = module.partition(".")[0]
    parents = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*parents[: len(parents) - node.level + 1]] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            submodules = [f"{source}.{alias.name}" for alias in node.names]
            found = [name if name in known else source for name in submodules]
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "attr", ""),
            getattr(node.func, "id", ""),
        ):
            found = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        yield from (name for name in found if name.partition(".")[0] == package)


def folder(module: str) -> str:
    """Folder or file directly below the package; the package's own name for its `__init__`."""
    return ".".join(module.split(".")[1:2]) or module


def forbidden(graph: Graph, allowed: abc.Mapping[str, abc.Collection[str]]) -> list[str]:
    """One line for each import that leaves its folder and is not in the folder's row.

    A row has folders ("models") and single modules ("text.tokenizer").
    """
    lines = []
    for module, targets in sorted(graph.items()):
        here = folder(module)
        if here not in allowed:
            lines.append(f"{module}: {here} has no row in the table")
            continue
        for target in sorted(targets):
            name = target.partition(".")[2]
            if folder(target) not in (here, *allowed[here]) and name not in allowed[here]:
                may = ", ".join(sorted(allowed[here])) or "nothing of the package"
                lines.append(f"{module} imports {target}, but {here} may import {may}")
    return lines


def upwards(allowed: abc.Mapping[str, abc.Collection[str]]) -> list[str]:
    """One line for each entry of a table that names a folder whose row does not come before."""
    rows = list(allowed)
    return [
        f"{here} may import {name}, which does not stand above it in the table"
        for i, here in enumerate(rows)
        for name in allowed[here]
        if name.partition(".")[0] not in rows[:i]
    ]


def circle(graph: Graph) -> list[str]:
    """Modules of one circle of imports, the first also last; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []
