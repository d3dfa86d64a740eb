"""Correctness parts of `verax bench accelerator`: tests/gpu, and every implementation against its reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import verax
from verax import ops
from verax.bench.delta.cases import error_ratio
from verax.bench.harness import Case
from verax.bench.ops.attention import attention_cases, paged_decode_case
from verax.bench.ops.conv import conv_cases
from verax.bench.ops.linear import grouped_cases, linear_cases
from verax.bench.results import Measured, Row
from verax.ops.sampling import INTS

__all__ = ["arguments_of", "compare_outputs", "measure_operations", "measure_tests"]

REFERENCE = "reference"

TOLERANCE, ROUNDED_TOLERANCE = 5e-3, 2e-2
"""Largest error over the root mean square of the reference, in float32 (whose products are TF32 on a GPU, bfloat16 on a
TPU, by default) and where something is bfloat16."""

LARGEST = 1 << 24
"""Elements of the arguments of an example beyond which a rehearsal leaves it out."""

KINDS = ("bfloat16", "int8", "int4-32", "float8-128", "Q4_K")
"""Kinds of weight whose products are compared."""

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _permuted(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.permutation(int(np.prod(shape))).reshape(shape)


_INTEGERS: Mapping[str, Draw] = {
    "delta_chunk_scan[2]": lambda rng, shape: np.zeros(shape),
    "delta_chunk_scan_backward[2]": lambda rng, shape: np.zeros(shape),
    "delta_slot_recurrence[2].slot": _permuted,
    "delta_slot_recurrence[2].fresh": lambda rng, shape: rng.integers(0, 2, shape),
    "paged_attention[3]": _permuted,
    "paged_attention[4]": lambda rng, shape: rng.integers(40, 128, shape),
    "paged_attention[5]": lambda rng, shape: 8 * np.arange(*shape),
    "paged_decode_attention[3]": _permuted,
    "paged_decode_attention[4]": lambda rng, shape: rng.integers(1, 128, shape),
    "write_pages[2]": _permuted,
    "write_pages[3]": lambda rng, shape: rng.integers(0, 16, shape),
    "grouped_linear[2]": lambda rng, shape: rng.permuted(np.tile(np.arange(128), (shape[0], 1)), axis=1)[:, : shape[1]],
    "sample[1]": lambda rng, shape: rng.integers(0, 151936, shape),
    "sample[2]": _permuted,
    "sample[3]": lambda rng, shape: rng.integers(1, 512, shape),
    "sample[4].ints": lambda rng, shape: rng.integers(0, [_INT_LIMITS[name] for name in INTS], shape),
    "sample[4].bias_ids": lambda rng, shape: rng.integers(0, 151936, shape),
    "sample[4].banned": lambda rng, shape: rng.integers(0, 151936, shape),
    "token_logprobs[1]": lambda rng, shape: rng.integers(0, 151936, shape),
    "token_logprobs[2]": lambda rng, shape: rng.integers(0, 2, shape),
}
"""Integers and flags of the examples, by operation and place: pages and slots that are not shared, lengths that fit,
different experts, tokens of the vocabulary."""

_INT_LIMITS = {
    "top_k": 50,
    "num_prompt": 512,
    "seed_high": 1 << 31,
    "seed_low": 1 << 31,
    "min_length": 512,
    "num_bias": 300,
}
"""Exclusive upper bounds of the integer sampling parameters."""

_UNIT = (".q", ".k", ".read", ".erase", ".write", ".found")
_SHARES = (".beta", ".keep", ".decays[0]", ".decays[1]", ".gates[0]", ".gates[1]", ".floats")


def measure_tests(rehearse: bool) -> Iterator[Measured]:
    """Outcome of `pytest tests/gpu`, where this runs in a checkout."""
    root = Path(verax.__file__).parents[2]
    if not (root / "tests" / "gpu").is_dir():
        yield [Row("tests/gpu", note="left out: no checkout")], None
        return
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["it printed nothing"]
    error = "" if done.returncode == 0 else next((x for x in lines if x.startswith(("FAILED", "ERROR"))), lines[-1])
    yield [Row("tests/gpu", note=lines[-1].strip("= "), error=error)], None


def measure_operations(rehearse: bool) -> Iterator[Measured]:
    """Largest error of each implementation that takes a call here, a row for each operation and call.

    Args:
        rehearse: without the largest examples and cases.
    """
    rng = np.random.default_rng(0)
    for name, operation in ops.operations().items():
        for example in operation.examples():
            case = f"{name}, {example.label}" if example.label else name
            if rehearse and sum(x.size for x in jax.tree.leaves(example.args) if hasattr(x, "size")) > LARGEST:
                continue
            args = arguments_of(name, example, rng)
            static = tuple(i for i, argument in enumerate(args) if isinstance(argument, int | float))
            calls = {
                impl.name: partial(jax.jit(partial(impl.function, **example.kwargs), static_argnums=static), *args)
                for impl in operation.supporting(*args, **example.kwargs)
            }
            if len(calls) > 1:
                rounded = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(args) if hasattr(x, "dtype"))
                yield [_compared(case, calls, rounded)], None
    for case in _cases(rehearse):
        if REFERENCE in case.sides and len(case.sides) > 1:
            calls = {name: side.call for name, side in case.sides.items()}
            rounded = case.sides[REFERENCE].dtypes[0] == "bfloat16"
            yield [_compared(f"{case.group}, {case.name}", calls, rounded)], None


def _cases(rehearse: bool) -> Iterator[Case]:
    """Cases of `verax bench ops`: other dtypes and sizes than the examples', quantised weights among them."""
    if rehearse:
        yield paged_decode_case(2, 40)
        return
    yield from linear_cases(1024, 3072, (1, 4, 128), KINDS, None)
    yield from grouped_cases(("bfloat16",), None)
    yield from attention_cases()
    yield from conv_cases()


def _compared(case: str, calls: Mapping[str, Callable[[], Any]], rounded: bool) -> Row:
    """Row of a call: the error of the worst implementation, and the names of all.

    Args:
        case: name of the call.
        calls: the call by each implementation.
        rounded: True if something is bfloat16.
    """
    errors, failures, expected = {}, [], None
    for name in (REFERENCE, *(name for name in calls if name != REFERENCE)):
        try:
            outputs = calls[name]()
            if name == REFERENCE:
                expected = outputs
            else:
                errors[name] = compare_outputs(outputs, expected)
        except (RuntimeError, ValueError, TypeError) as error:  # the next implementation may run
            failures.append(f"{name}: {type(error).__name__}: {error}")
    tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
    failures += [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error <= tolerance]
    note = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return Row(case, max(errors.values(), default=None), "error", note=note, error="; ".join(failures))


def compare_outputs(found: Any, expected: Any) -> float:
    """Largest error of several outputs, over the RMS of what is expected; of integers, the share that differ.

    Raises:
        ValueError: if an output has another shape.
    """
    errors = []
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if mine.shape != theirs.shape:
            raise ValueError(f"its output has shape {mine.shape}, the reference's {theirs.shape}")
        if jnp.issubdtype(theirs.dtype, jnp.integer):
            errors.append(float(np.mean(np.asarray(mine) != np.asarray(theirs))))
        else:
            errors.append(error_ratio(np.asarray(mine, np.float64), np.asarray(theirs, np.float64)))
    return max(errors, default=0.0)


def arguments_of(name: str, example: ops.Example, rng: np.random.Generator) -> Sequence[Any]:
    """Arguments of an example with random numbers in the place of shapes.

    Args:
        name: name of the operation.
        example: one of its examples.
        rng: source of the numbers.
    """

    def value(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        place = name + jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(_INTEGERS[place](rng, leaf.shape), leaf.dtype)
        numbers = rng.standard_normal(leaf.shape, np.float32)
        if place.endswith(_UNIT):
            numbers /= np.linalg.norm(numbers, axis=-1, keepdims=True)
        elif place.endswith(_SHARES):
            numbers = rng.uniform(0, 1, leaf.shape)
        elif place.endswith(".g"):
            numbers = -np.abs(numbers)
        return jnp.asarray(numbers, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, example.args)
