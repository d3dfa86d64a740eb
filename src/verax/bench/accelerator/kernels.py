"""Kernels part: experimental implementations, which no program runs unless they are named, beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verax import ops
from verax.bench.accelerator.row import Measured, Row
from verax.bench.case import Case, time_case
from verax.bench.ops.attention import paged_decode_case, ragged_case, whole_sequence_case
from verax.bench.ops.linear import linear_cases
from verax.bench.ops.sampling import sampling_case

__all__ = ["measure_kernels"]

RUNS, WARMUP = 20, 2


def measure_kernels(*, rehearse: bool) -> Iterator[Measured]:
    """Milliseconds of each experimental implementation, and the factor by which it is faster than each other one.

    The reference takes part where it is what is chosen.

    Args:
        rehearse: the smallest cases only.
    """
    for case in _cases(rehearse):
        yield Measured(list(_rows(case)))


def _cases(rehearse: bool) -> Iterator[Case]:
    """Decode steps of Qwen3-0.6B and 8B, a prompt's chunk, a chunk beside decodes, and a feed-forward layer of 8B.

    Whole sequences are a layer of Wan 1.3B at 81 frames of 480 x 832, and one of Gemma 3 270M with a sliding window.
    Tokens are drawn from Qwen3's vocabulary.
    """
    if rehearse:
        yield paged_decode_case(2, 40)
        yield whole_sequence_case(48, heads=2)
        yield whole_sequence_case(48, heads=2, kv_heads=1, window=16)
        yield sampling_case(2, vocab=600, top_k=50, top_p=0.95)
        return
    for rows, length in ((1, 8192), (16, 1024), (64, 2048), (256, 512)):
        yield paged_decode_case(rows, length)
    yield paged_decode_case(64, 2048, cache_dtype="int8")
    yield paged_decode_case(64, 2048, heads=32)
    yield ragged_case([4096], [512])
    yield ragged_case([1024] * 33, [1] * 32 + [480])
    yield whole_sequence_case(32760)
    yield whole_sequence_case(8192, heads=4, kv_heads=1, size=256, window=512)
    yield from linear_cases(4096, 12288, (1, 16, 64), ("int8", "int4-128", "float8-128"), None)
    for rows, top_k, top_p in ((1, 50, 1.0), (16, 50, 1.0), (16, 0, 0.95), (64, 50, 0.95)):
        yield sampling_case(rows, top_k=top_k, top_p=top_p)


def _rows(case: Case) -> Iterator[Row]:
    name = f"{case.group}, {case.name}"
    implementations = ops.operations()[case.group].implementations
    kernels = [side for side in case.sides if implementations[side].experimental]
    if not kernels:
        yield Row(name, note=f"no experimental implementation takes it on {ops.target().platform}")
        return
    # The reference writes out what the others do not, and may take seconds.
    left_out = {side for side in case.sides if implementations[side].is_reference}.union(kernels) - {case.chosen}
    others = [side for side in case.sides if side not in left_out]
    kept = {side: case.sides[side] for side in (*others, *kernels)}
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
            beside={side: samples[kernel].ratio_to(samples[side]) for side in others},
        )
