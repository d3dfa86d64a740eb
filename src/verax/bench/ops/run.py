"""Operations by themselves: every implementation, torch, and the machine's measured limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verax import machine, progress
from verax.bench.case import Case, ratios, time_case
from verax.bench.harness import Benchmark
from verax.bench.ops.attention import attention_cases
from verax.bench.ops.conv import conv_cases
from verax.bench.ops.grouped import grouped_cases
from verax.bench.ops.linear import WEIGHTS, linear_cases
from verax.bench.ops.sides import import_torch
from verax.errors import InvalidParameterError
from verax.ops.cpu import library

__all__ = ["OPERATIONS", "bench_ops", "measure_case"]

OPERATIONS = ("linear", "grouped", "attention", "conv")
"""Groups of cases: products with a weight; with a mixture of experts; attention over whole sequences and over pages,
with the cache's writes; convolutions of a video VAE."""

READ = "streaming read"
"""The side of each case that shows the memory's bandwidth while the others run."""


def bench_ops(
    *,
    size_in: int,
    size_out: int,
    rows: Sequence[int],
    weights: Sequence[str],
    operations: Sequence[str] = OPERATIONS,
    against: Sequence[str] = (),
    runs: int,
    warmup: int,
) -> dict[str, Any]:
    """Time operations in each of their implementations, interleaved; a report as JSON holds it.

    Args:
        size_in, size_out: of the weight `[size_out, size_in]`.
        rows: of the input; one case each.
        weights: names out of `WEIGHTS`.
        operations: names out of `OPERATIONS`.
        against: `"torch"` for its operation in the same dtype; quantised weights go against bfloat16.
        runs: counted rounds. With `warmup` rounds before them.

    Raises:
        InvalidParameterError: for an unknown weight or side.
        MissingDependencyError: if torch is asked for and not there.
    """
    for name, given, known in (
        ("weights", weights, WEIGHTS),
        ("operations", operations, OPERATIONS),
        ("against", against, ("torch",)),
    ):
        unknown = [item for item in given if item not in known]
        if unknown:
            raise InvalidParameterError(f"{name}: expected {', '.join(known)}, got {unknown[0]!r}")
    torch = import_torch() if "torch" in against else None
    benchmark, cases = Benchmark("ops"), []
    groups = {
        "linear": lambda: linear_cases(size_in, size_out, rows, weights, torch),
        "grouped": lambda: grouped_cases(weights, torch),
        "attention": lambda: attention_cases(torch),
        "conv": lambda: conv_cases(torch),
    }
    with progress.bar("measuring") as report:
        for operation in operations:
            for case in groups[operation]():
                cases.append(measure_case(case, benchmark, runs, warmup))
                report(len(cases), None, f"{case.group}, {case.name}")
    versions = {} if torch is None else {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    settings = {
        "operations": list(operations),
        "size_in": size_in,
        "size_out": size_out,
        "runs": runs,
        "warmup": warmup,
        "cpu_level": library.level(),
    }
    return benchmark.result(settings, versions, cases=cases)


def measure_case(case: Case, benchmark: Benchmark, runs: int, warmup: int) -> dict[str, Any]:
    """Time the implementations of one operation, interleaved; the chosen one comes first in the result."""
    for side in case.sides.values():
        side.call()  # compiles
    samples = time_case(case, runs=runs, warmup=warmup, beside={READ: benchmark.read})
    bandwidth = machine.READ_BYTES / samples.pop(READ).median
    ours, chosen = samples[case.chosen], case.sides[case.chosen]
    return {
        "operation": case.group,
        "case": case.name,
        "runs": case.chosen,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        **benchmark.against_limit(
            ours.median, bytes_moved=case.bytes_moved, flops=chosen.flops, dtype=chosen.dtypes[0], bandwidth=bandwidth
        ),
        "sides": {name: side.to_dict(case.bytes_moved) for name, side in samples.items()},
        "ratios": ratios(case, samples),
    }
