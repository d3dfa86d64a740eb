"""Sides of `verax bench delta`, which are checked before they are timed."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax.bench.case import Case, Side, ratios, time_case
from verax.bench.harness import limit_seconds
from verax.bench.timing import Samples
from verax.errors import VeraxError
from verax.machine import peak_growth

__all__ = ["check", "error_ratio", "jax_side", "measure", "torch_side"]


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
    gradients: bool = False,
) -> Side:
    """A PyTorch call, which may take gradients only with `gradients`.

    With `compiled`, the time of the first call is that of compiling.
    """

    def call() -> list[Any]:
        with torch.inference_mode(not gradients):
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
    errors = {name: check(case, name, platform) for name in case.sides}
    peaks = {name: peak_bytes(side, platform) for name, side in case.sides.items()}
    samples = time_case(case, runs=runs, warmup=warmup, report=report)
    sides = {
        name: _numbers(case, side, samples[name], machine)
        | {"compile_s": side.compile_s, "peak_bytes": peaks[name], "error": errors[name], "platform": platform}
        for name, side in case.sides.items()
    }
    return {
        "section": case.group,
        "case": case.name,
        "sizes": dict(case.sizes),
        "runs": case.chosen,
        "bytes_moved": case.bytes_moved,
        "tolerance": case.tolerance,
        "sides": sides,
        "ratios": ratios(case, samples),
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
    side, errors = case.sides[name], []
    outputs = side.call()
    for i, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        found = tuple(output.shape), str(output.dtype).removeprefix("torch."), _platform(output)
        claimed = expected.shape, side.dtypes[min(i, len(side.dtypes) - 1)], platform
        if found != claimed:
            raise VeraxError(f"{case.name}, {name}: output {i} is {found}; it claims to be {claimed}")
        errors.append(error_ratio(_numpy(output), expected))
    if not max(errors) <= case.tolerance:
        raise VeraxError(
            f"{case.name}, {name}: computes something else: its error against float64 is {max(errors):.2g} of the "
            f"result, more than {case.tolerance:.2g}"
        )
    return max(errors)


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
            # Freed memory that the C library keeps would be used again, and not counted.
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
