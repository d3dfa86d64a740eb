"""Kernels part: experimental implementations, which no program runs unless they are named, beside those that run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verax import ops
from verax.bench.accelerator.row import Measured, Row
from verax.bench.case import Case, time_case
from verax.bench.ops.attention import paged_decode_case, ragged_case
from verax.bench.ops.linear import linear_cases

__all__ = ["measure_kernels"]

RUNS, WARMUP = 20, 2


def measure_kernels(*, rehearse: bool) -> Iterator[Measured]:
    """Milliseconds of each experimental implementation, and the factor by which it is faster than what is chosen.

    Args:
        rehearse: the smallest case only.
    """
    for case in _cases(rehearse):
        yield Measured(list(_rows(case)))


def _cases(rehearse: bool) -> Iterator[Case]:
    """Decode steps of Qwen3-0.6B and 8B, a prompt's chunk, a chunk beside decodes, and a feed-forward layer of 8B."""
    if rehearse:
        yield paged_decode_case(2, 40)
        return
    for rows, length in ((1, 8192), (16, 1024), (64, 2048), (256, 512)):
        yield paged_decode_case(rows, length)
    yield paged_decode_case(64, 2048, cache_dtype="int8")
    yield paged_decode_case(64, 2048, heads=32)
    yield ragged_case([4096], [512])
    yield ragged_case([1024] * 33, [1] * 32 + [480])
    yield from linear_cases(4096, 12288, (1, 16, 64), ("int8", "int4-128"), None)


def _rows(case: Case) -> Iterator[Row]:
    name = f"{case.group}, {case.name}"
    implementations = ops.operations()[case.group].implementations
    kernels = [side for side in case.sides if implementations[side].experimental]
    if not kernels:
        yield Row(name, note=f"no experimental implementation takes it on {ops.target().platform}")
        return
    kept = {side: case.sides[side] for side in (case.chosen, *kernels)}
    for side in kept.values():
        side.call()  # compiles
    samples = time_case(replace(case, sides=kept), runs=RUNS, warmup=WARMUP)
    for kernel in kernels:
        seconds = samples[kernel].median
        yield Row(
            f"{name}, {kernel}",
            value=1e3 * seconds,
            unit="ms",
            seconds=seconds,
            flops=case.sides[kernel].flops,
            bytes_moved=case.bytes_moved,
            beside={case.chosen: samples[kernel].ratio_to(samples[case.chosen])},
        )
