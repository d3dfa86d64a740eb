"""The tables of `docs/accelerators.md`, of the compilations of `compile.py` and `kernels.py`.

`python -m tests.targets.table` writes both, `python -m tests.targets.table kernels` one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.targets.compile import CASES, Case, Compiled, compiled
from tests.targets.kernels import KERNELS, Kernel, Resources, compiled_kernel
from verax.files import write_text

__all__ = ["marks", "render", "render_kernels", "replaced"]

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
COLUMNS = ("model, layers", "program", "device", "arguments", "temporaries", "code", "collectives", "compiled in")

KERNEL_COLUMNS = (
    "operation",
    "call",
    "device, implementation",
    "registers",
    "memory on the chip",
    "spills",
    "GFLOP",
    "MB",
    "limit",
    "predicted",
)


def render(results: Mapping[Case, Sequence[Compiled]]) -> str:
    """A Markdown table of compilations."""
    return _table(COLUMNS, (row for case, result in results.items() for row in _rows(case, result)))


def render_kernels(results: Mapping[Kernel, Resources]) -> str:
    """A Markdown table of kernels."""
    return _table(KERNEL_COLUMNS, (_kernel_row(kernel, resources) for kernel, resources in results.items()))


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))


def _kernel_row(kernel: Kernel, resources: Resources) -> tuple[str, ...]:
    return (
        kernel.operation,
        kernel.case,
        f"{kernel.device}, {kernel.implementation}",
        "" if resources.registers is None else str(resources.registers),
        f"{resources.memory / 1024:,.0f} KiB",
        f"{resources.spills} B" if resources.registers is not None else f"{resources.spills} registers",
        f"{kernel.flops / 1e9:,.2f}",
        f"{kernel.bytes_moved / 1e6:,.1f}",
        f"{1e6 * kernel.limit:,.0f} us",
        f"{1e6 * kernel.limit / kernel.predicted:,.0f} us, {kernel.predicted:.0%}",
    )


def _rows(case: Case, programs: Sequence[Compiled]) -> Iterator[tuple[str, ...]]:
    device = f"{case.devices} x {case.device}"
    for one in programs:
        head, seconds = (f"{case.model}, {case.depth}", one.name, device), f"{one.seconds:.0f} s"
        if one.refused or one.findings is None:
            yield (*head, "refused", f"needs {_gib(one.needed)}", "", "", seconds)
            continue
        kinds = ", ".join(f"{count} {kind}" for kind, count in one.findings.collectives.items()) or "none"
        yield (*head, *map(_gib, (one.arguments, one.temporaries, one.code)), kinds, seconds)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def marks(name: str) -> tuple[str, str]:
    """Lines of the page before and after a table."""
    return f"<!-- {name}: written by make test-targets -->", f"<!-- {name}: end of what make test-targets writes -->"


def replaced(page: str, name: str, table: str) -> str:
    """A page with the table between its marks."""
    begin, end = marks(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


TABLES: Mapping[str, Callable[[], str]] = {
    "programs": lambda: render({case: compiled(case) for case in CASES}),
    "kernels": lambda: render_kernels({kernel: compiled_kernel(kernel) for kernel in KERNELS}),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), name, TABLES[name]()))
