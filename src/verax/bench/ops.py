"""Operations by themselves: every form, torch, and the machine's measured limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops, progress
from verax.bench.core import Benchmark
from verax.bench.machine import num_cores
from verax.bench.ops_attention import Case, attention_cases
from verax.bench.ops_conv import conv_cases
from verax.bench.timing import interleave
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
    """Time operations in each of their forms, interleaved; a report as JSON holds it.

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
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = None if torch is None else _torch_tensor(torch, dense, dtype)
        for count in rows:
            x = jnp.asarray(rng.standard_normal((count, size_in), np.float32))
            sides = _forms(x, weight)
            if torch is not None:
                tensor = _torch_tensor(torch, x, dtype)
                sides["torch"] = lambda a=tensor, w=theirs: torch.nn.functional.linear(a, w)
            products = 2 * count * size_out * size_in
            chosen = ops.linear.select(x, weight).name
            yield Case("linear", f"{kind}, {count} rows", dtype, weight.nbytes, products, chosen, sides)


def measure_case(case: Case, benchmark: Benchmark, runs: int, warmup: int) -> dict[str, Any]:
    """Time the forms of one operation, interleaved; numbers as a report holds them, the chosen form's at the top."""
    samples = interleave(case.sides, runs=runs, warmup=warmup)
    ours = samples[case.chosen]
    return {
        "operation": case.operation,
        "case": case.name,
        "runs": case.chosen,
        **benchmark.against_limit(ours.median, bytes_moved=case.bytes_moved, flops=case.products, dtype=case.dtype),
        "sides": {name: side.to_dict(case.bytes_moved) for name, side in samples.items()},
        "ratios": {name: ours.ratio_to(side) for name, side in samples.items() if name != case.chosen},
    }


def _forms(x: jax.Array, weight: Any) -> Sides:
    """Every form of the operation that can take this call here, by name."""
    sides: Sides = {}
    for name, form in ops.linear.forms.items():
        usable = form.accepts(x, weight) or name == "plain" or (name == "native" and library.available())
        if usable and form.runs_on(jax.default_backend()):
            run = jax.jit(form.function)
            sides[name] = lambda run=run: jax.block_until_ready(run(x, weight))
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
    torch.set_num_threads(num_cores())
    return torch


def _torch_tensor(torch: Any, array: jax.Array, dtype: str) -> Any:
    return torch.from_numpy(np.array(array.astype(jnp.float32))).to(getattr(torch, dtype))
