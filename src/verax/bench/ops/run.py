"""Operations by themselves: every implementation, torch, and the machine's measured limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import machine, ops, progress
from verax.bench.harness import Benchmark
from verax.bench.ops.attention import Case, attention_cases
from verax.bench.ops.conv import conv_cases
from verax.bench.timing import UNTIMED, calls_in_turn, interleave
from verax.checkpoint.host_memory import HostMemory
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.ops.cpu import library

__all__ = ["OPERATIONS", "WEIGHTS", "bench_ops", "measure_case"]

OPERATIONS = ("linear", "attention", "conv")
"""Groups of cases: products with a weight; attention over whole sequences and over pages, with the cache's writes;
convolutions of a video VAE."""

WEIGHTS: dict[str, tuple[int, int | None] | None] = {
    "float32": None,
    "bfloat16": None,
    "int8": (8, None),
    "int8-32": (8, 32),
    "int8-128": (8, 128),
    "int4-32": (4, 32),
    "int4-128": (4, 128),
}
"""Kinds of weight by name; of quantised ones, the bits and how many inputs share a scale."""

READ = "streaming read"
"""The side of each case that shows the memory's bandwidth while the others run."""

COLD = 256 << 20
"""Bytes of weights that the calls of `linear` take in turn: no cache holds what the next one reads."""

Sides = dict[str, Callable[[], object]]


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
    torch = _torch() if "torch" in against else None
    benchmark, cases = Benchmark("ops"), []
    groups = {
        "linear": lambda: _linear_cases(size_in, size_out, rows, weights, torch),
        "attention": lambda: attention_cases(torch),
        "conv": lambda: conv_cases(torch),
    }
    with progress.bar("measuring") as report:
        for operation in operations:
            for case in groups[operation]():
                cases.append(measure_case(case, benchmark, runs, warmup))
                report(len(cases), None, f"{case.operation}, {case.name}")
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


def _linear_cases(
    size_in: int, size_out: int, rows: Sequence[int], weights: Sequence[str], torch: Any
) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((size_out, size_in), np.float32)).astype(jnp.bfloat16)
    for kind in weights:
        weight = _weight(dense, kind)
        held = [_as_loaded(weight) for _ in range(_num_copies(weight.nbytes))]
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = [] if torch is None else [_torch_tensor(torch, dense, dtype)]
        theirs += [tensor.clone() for tensor in theirs for _ in range(1, _num_copies(tensor.nbytes))]
        for count in rows:
            x = jnp.asarray(rng.standard_normal((count, size_in), np.float32))
            sides = _implementations(x, held)
            if torch is not None:
                sides["torch"] = _in_turn(partial(torch.nn.functional.linear, _torch_tensor(torch, x, dtype)), theirs)
            products = 2 * count * size_out * size_in
            chosen = ops.linear.select(x, weight).name
            yield Case("linear", f"{kind}, {count} rows", dtype, weight.nbytes, products, chosen, sides)


def _in_turn(run: Callable[[Any], object], weights: Sequence[Any]) -> Callable[[], object]:
    """A call with the next of the weights, round and round."""
    turn = itertools.cycle(weights)
    return lambda: run(next(turn))


def _as_loaded(weight: Any) -> Any:
    """A copy that lies in memory as a checkpoint's weights do."""
    memory = HostMemory()
    return jax.tree.map(lambda array: jax.device_put(memory.copy(array, np.dtype(array.dtype))), weight)


def _num_copies(nbytes: int) -> int:
    return math.ceil(COLD / nbytes)


def measure_case(case: Case, benchmark: Benchmark, runs: int, warmup: int) -> dict[str, Any]:
    """Time the implementations of one operation, interleaved; the chosen one comes first in the result."""
    for run in case.sides.values():
        run()  # compiles
    sides = {**case.sides, READ: benchmark.read}
    loops = {name: calls_in_turn(run) for name, run in sides.items()}
    samples = interleave(sides, runs=runs, warmup=warmup, loops=loops, untimed=UNTIMED)
    bandwidth = machine.READ_BYTES / samples.pop(READ).median
    ours = samples[case.chosen]
    return {
        "operation": case.operation,
        "case": case.name,
        "runs": case.chosen,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        **benchmark.against_limit(
            ours.median, bytes_moved=case.bytes_moved, flops=case.products, dtype=case.dtype, bandwidth=bandwidth
        ),
        "sides": {name: side.to_dict(case.bytes_moved) for name, side in samples.items()},
        "ratios": {name: ours.ratio_to(side) for name, side in samples.items() if name != case.chosen},
    }


def _implementations(x: jax.Array, weights: Sequence[Any]) -> Sides:
    """Every implementation of the operation that can take this call here, by name."""
    sides: Sides = {}
    for name, impl in ops.linear.implementations.items():
        forced = impl.is_reference or (name == "native" and impl.runs_on(ops.target()) and library.available())
        if forced or impl.supports(x, weights[0]):
            run = partial(jax.jit(impl.function), x)
            sides[name] = _in_turn(lambda weight, run=run: jax.block_until_ready(run(weight)), weights)
    return sides


def _weight(dense: jax.Array, kind: str) -> Any:
    scheme = WEIGHTS[kind]
    if scheme is None:
        return dense.astype(kind)
    return jax.jit(ops.quantize, static_argnums=(1, 2))(dense, *scheme)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("comparing with torch needs it: pip install 'verax[parity]'") from error
    torch.set_num_threads(machine.num_cores())
    return torch


def _torch_tensor(torch: Any, array: jax.Array, dtype: str) -> Any:
    return torch.from_numpy(np.array(array.astype(jnp.float32))).to(getattr(torch, dtype))
