"""The tables of `docs/accelerators.md`, of the compilations of `compile.py` and `kernels.py`.

`python -m tests.targets.table` writes both, `python -m tests.targets.table kernels` one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.targets.compile import CASES, Case, Compiled, compiled
from tests.targets.kernels import KERNELS, Kernel, Resources, compiled_kernel
from verax.files import write_text

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"

COLUMNS = {
    "programs": "model, layers | program | device | arguments | temporaries | code | collectives | compiled in",
    "kernels": "operation | call | device, implementation | registers | memory on the chip | spills | GFLOP | MB | "
    "limit | predicted",
}


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


def _program_row(case: Case, one: Compiled) -> tuple[str, ...]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in one.collectives.items()) or "none"
    sizes = (f"{size / 2**30:.2f} GiB" for size in (one.arguments, one.temporaries, one.code))
    head = (f"{case.model}, {case.depth}", one.name, f"{case.devices} x {case.device}")
    return (*head, *sizes, kinds, f"{one.seconds:.0f} s")


def rows(name: str) -> Iterator[tuple[str, ...]]:
    """Rows of a table, of which every program is compiled."""
    if name == "programs":
        return (_program_row(case, one) for case in CASES for one in compiled(case))
    return (_kernel_row(kernel, compiled_kernel(kernel)) for kernel in KERNELS)


def replaced(page: str, name: str, rows: Iterator[tuple[str, ...]]) -> str:
    """A page with the table between its marks."""
    begin, end = (
        f"<!-- {name}: written by make test-targets -->",
        f"<!-- {name}: end of what make test-targets writes -->",
    )
    columns = COLUMNS[name].split(" | ")
    table = "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    for name in sys.argv[1:] or COLUMNS:
        write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), name, rows(name)))
