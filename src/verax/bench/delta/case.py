"""One comparison of `verax bench delta`: sides that claim to do the same work, checked before they are timed."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax.bench.harness import limit_seconds
from verax.bench.timing import UNTIMED, Samples, calls_in_turn, interleave
from verax.errors import VeraxError
from verax.machine import peak_growth

__all__ = ["Case", "Side", "error_ratio", "jax_side", "measure", "torch_side"]


@dataclass(frozen=True)
class Side:
    """One implementation of a case."""

    call: Callable[[], Sequence[Any]]
    """Runs it once; its outputs, JAX's or torch's arrays, finished."""
    flops: int
    """What its formula counts (`delta_work`)."""
    dtypes: Sequence[str] = ("float32",)
    """Of the outputs; the last one, of the rest too. The first is what the products are set against."""
    compile_s: float | None = None
    """None where nothing is compiled."""
    planned_bytes: int | None = None
    """What XLA plans for results and temporaries."""


@dataclass(frozen=True)
class Case:
    """One piece of work and all who do it."""

    section: str
    name: str
    sizes: Mapping[str, int]
    bytes_moved: int
    """What has to be read and written, each once."""
    expected: Sequence[np.ndarray]
    """The outputs, computed in float64."""
    tolerance: float
    """Most `error_ratio` of any side."""
    chosen: str
    """The side that others are set against: what a call of verax without a choice runs."""
    sides: Mapping[str, Side]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why a side is not there, by its name."""


def jax_side(function: Callable[..., Any], *arguments: Any, flops: int, donated: Any = None) -> Side:
    """A function compiled for its arguments, which lie on JAX's default device.

    Args:
        function: of `arguments`, and of `donated` before them if there is some.
        arguments: trees of arrays.
        flops: what the formula that the function follows counts.
        donated: an array that the call may overwrite. The function's last output takes its place in the next call.
    """
    kept = jax.device_put(arguments)
    given = () if donated is None else (jnp.array(donated),)
    begin = time.perf_counter()
    # A new function for each side: JAX knows those that it has traced, whatever implementation an operation has by now.
    run = jax.jit(lambda *all: function(*all), donate_argnums=tuple(range(len(given)))).lower(*given, *kept).compile()
    seconds = time.perf_counter() - begin

    def call() -> list[jax.Array]:
        nonlocal given
        outputs = jax.tree.leaves(jax.block_until_ready(run(*given, *kept)))
        given = outputs[len(outputs) - len(given) :]
        return outputs

    plan = run.memory_analysis()
    planned = None if plan is None else plan.output_size_in_bytes + plan.temp_size_in_bytes
    return Side(call, flops, compile_s=seconds, planned_bytes=planned)


def torch_side(
    torch: Any,
    function: Callable[..., Any],
    *arguments: Any,
    flops: int,
    dtypes: Sequence[str] = ("float32",),
    compiled: bool = False,
) -> Side:
    """A PyTorch call without gradients; with `compiled`, the time of the first call is that of compiling."""

    def call() -> list[Any]:
        with torch.inference_mode():
            outputs = [x for x in jax.tree.leaves(function(*arguments)) if isinstance(x, torch.Tensor)]
        if outputs[0].device.type == "cuda":
            torch.cuda.synchronize()
        return outputs

    seconds = None
    if compiled:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
    return Side(call, flops, dtypes, compile_s=seconds)


def measure(
    case: Case,
    machine: Mapping[str, float],
    *,
    platform: str,
    runs: int,
    warmup: int,
    report: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Check every side, then time them in turn; numbers as a report holds them.

    Raises:
        VeraxError: if a side computes something else, or elsewhere, than it claims.
    """
    errors, loops = {}, {}
    for name, side in case.sides.items():
        errors[name] = check(case, name, platform)
        loops[name] = calls_in_turn(side.call)
    peaks = {name: peak_bytes(side, platform) for name, side in case.sides.items()}
    calls = {name: side.call for name, side in case.sides.items()}
    samples = interleave(calls, runs=runs, warmup=warmup, loops=loops, untimed=UNTIMED, report=report)
    sides = {
        name: _numbers(case, side, samples[name], machine)
        | {"compile_s": side.compile_s, "peak_bytes": peaks[name], "error": errors[name], "platform": platform}
        for name, side in case.sides.items()
    }
    ours = samples[case.chosen]
    return {
        "section": case.section,
        "case": case.name,
        "sizes": dict(case.sizes),
        "runs": case.chosen,
        "bytes_moved": case.bytes_moved,
        "tolerance": case.tolerance,
        "sides": sides,
        "ratios": {name: ours.ratio_to(side) for name, side in samples.items() if name != case.chosen},
        "skipped": dict(case.skipped),
    }


def _numbers(case: Case, side: Side, samples: Samples, machine: Mapping[str, float]) -> dict[str, Any]:
    limit = limit_seconds(machine, bytes_moved=case.bytes_moved, flops=side.flops, dtype=side.dtypes[0])
    return {
        **samples.to_dict(side.flops),
        "flops": side.flops,
        "gb_per_s": case.bytes_moved / samples.median / 1e9,
        "limit_s": limit,
        "fraction_of_limit": limit / samples.median,
        "dtype": side.dtypes[0],
        "planned_bytes": side.planned_bytes,
    }


def check(case: Case, name: str, platform: str) -> float:
    """The largest error ratio of a side's outputs, after their shapes, dtypes and devices."""
    side, ratios = case.sides[name], []
    outputs = side.call()
    for i, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        found = tuple(output.shape), str(output.dtype).removeprefix("torch."), _platform(output)
        claimed = expected.shape, side.dtypes[min(i, len(side.dtypes) - 1)], platform
        if found != claimed:
            raise VeraxError(f"{case.name}, {name}: output {i} is {found}; it claims to be {claimed}")
        ratios.append(error_ratio(_numpy(output), expected))
    if not max(ratios) <= case.tolerance:
        raise VeraxError(
            f"{case.name}, {name}: computes something else: its error against float64 is {max(ratios):.2g} of the "
            f"result, more than {case.tolerance:.2g}"
        )
    return max(ratios)


def error_ratio(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def _platform(array: Any) -> str:
    if isinstance(array, jax.Array):
        return " and ".join(sorted({device.platform for device in array.devices()}))
    return "gpu" if array.device.type == "cuda" else array.device.type


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array if isinstance(array, jax.Array) else array.detach().cpu().double(), np.float64)


def peak_bytes(side: Side, platform: str) -> int | None:
    """Memory of one call beyond its arguments: measured on a CPU and for torch, XLA's plan on other devices."""
    if platform == "cpu":
        gc.collect()
        if sys.platform == "linux":
            # What the C library keeps of freed memory would be used again, and not counted.
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        with peak_growth() as growth:
            side.call()
        return growth()
    if side.planned_bytes is not None:
        return side.planned_bytes
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    side.call()
    return cuda.max_memory_allocated() - before
