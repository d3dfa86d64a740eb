"""Operations by themselves: every implementation, torch, and the machine's measured limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verax import machine, progress
from verax.bench.harness import (
    Benchmark,
    Case,
    Side,
    case_result,
    check_names,
    import_torch,
    time_sides,
    torch_versions,
)
from verax.bench.ops import attention, conv, linear
from verax.bench.ops.linear import WEIGHTS
from verax.bench.results import outliers, rounds, slug, spread, table
from verax.ops.cpu import library

__all__ = ["OPERATIONS", "bench_ops", "measure_case"]

OPERATIONS = ("linear", "grouped", "attention", "conv")
"""Groups of cases: products with a weight; with a mixture of experts; attention over whole sequences and over pages,
with the cache's writes; convolutions of a video VAE. One more, `paged`, is the decode step by number of sequences."""

READ = "streaming read"
"""Side of each case that shows the memory's bandwidth while the others run."""


def bench_ops(
    *,
    size_in: int = 4096,
    size_out: int = 11008,
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 128),
    weights: Sequence[str] | None = None,
    operations: Sequence[str] = OPERATIONS,
    against: Sequence[str] = (),
    runs: int,
    warmup: int,
) -> dict[str, Any]:
    """Time operations in each of their implementations, interleaved.

    The arguments are the options of `verax bench ops`. torch runs its operation in the same dtype; quantised weights
    are compared with bfloat16.

    Raises:
        InvalidParameterError: for an unknown weight or side.
        MissingDependencyError: if torch is asked for and not there.
    """
    weights = list(WEIGHTS) if weights is None else weights
    check_names("weights", weights, WEIGHTS)
    check_names("operations", operations, (*OPERATIONS, "paged"))
    check_names("against", against, ["torch"])
    torch = import_torch()[0] if "torch" in against else None
    groups = {
        "linear": lambda: linear.linear_cases(size_in, size_out, rows, weights, torch),
        "grouped": lambda: linear.grouped_cases(weights, torch),
        "attention": lambda: attention.attention_cases(torch),
        "conv": lambda: conv.conv_cases(torch),
        "paged": lambda: (attention.paged_decode_case(2**power, 512) for power in range(7)),
    }
    benchmark, cases = Benchmark("ops"), []
    with progress.bar("measuring") as report:
        for operation in operations:
            for case in groups[operation]():
                cases.append(measure_case(case, benchmark, runs, warmup))
                report(len(cases), None, f"{case.group}, {case.name}")
    settings = {
        "operations": list(operations),
        "size_in": size_in,
        "size_out": size_out,
        "runs": runs,
        "warmup": warmup,
        "cpu_level": library.level(),
    }
    names = {f"{case['group']}, {case['case']}, {case['chosen']}": case["sides"][case["chosen"]] for case in cases}
    return benchmark.result(
        slug(*operations, str(size_in) if operations == ["linear"] and size_in != 4096 else ""),
        title="Operations",
        intro=f"The weight of linear is {size_out} x {size_in}. CPU kernels: {settings['cpu_level'] or 'none'}. "
        f"{rounds(settings)}; the implementations take turns in a round, each called again and again for 20 ms, the "
        "first call not counted, weights of linear never from a cache. GB/s counts what has to be moved once, as it is "
        "stored; memory GB/s is a read of 512 MiB that takes its turn with the implementations. The limit is that, or "
        "the products at the measured rate. The last columns: the factor by which it is faster than that "
        "implementation.",
        settings=settings,
        versions={} if torch is None else torch_versions(torch),
        tables=[_table(cases)],
        notes=outliers(names),
        cases=cases,
    )


def _table(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    others = sorted({name for case in cases for name in case["ratios"]})
    ratio = lambda name: lambda case: f"{case['ratios'][name]:.2f}x" if name in case["ratios"] else ""
    return table(
        cases,
        {
            "operation": lambda case: case["group"],
            "case": lambda case: case["case"],
            "runs": lambda case: case["chosen"],
            "median ms": lambda case: f"{1e3 * case['sides'][case['chosen']]['median_s']:.2f}",
            "P10-P90 ms": lambda case: spread(case["sides"][case["chosen"]]),
            "GB/s": lambda case: f"{case['gb_per_s']:.1f}",
            "memory GB/s": lambda case: f"{case['bandwidth_gb_per_s']:.1f}",
            "GFLOP/s": lambda case: f"{case['gflop_per_s']:.0f}",
            "of the limit": lambda case: f"{100 * case['fraction_of_limit']:.0f}%",
            **{name: ratio(name) for name in others},
        },
    )


def measure_case(case: Case, benchmark: Benchmark, runs: int, warmup: int) -> dict[str, Any]:
    """Time the implementations of one operation, interleaved."""
    for side in case.sides.values():
        side.call()  # compiles
    samples = time_sides({**case.sides, READ: Side(benchmark.read)}, runs=runs, warmup=warmup, short=True)
    bandwidth = machine.READ_BYTES / samples.pop(READ).median
    chosen = case.sides[case.chosen]
    work = benchmark.against_limit(
        samples[case.chosen].median,
        bytes_moved=case.bytes_moved,
        flops=chosen.flops,
        dtype=chosen.dtypes[0],
        bandwidth=bandwidth,
    )
    work["bandwidth_gb_per_s"] = bandwidth / 1e9
    return {"group": case.group, **case_result(case.name, case.chosen, samples, case.bytes_moved, **work)}
