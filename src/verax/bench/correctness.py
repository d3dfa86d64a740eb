"""Each implementation of each operation compared with its reference: `python -m verax.bench.correctness`.

The calls are the operations' own examples and the cases of `verax bench ops`. A part of `verax bench accelerator`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.bench.harness import Case, error_ratio
from verax.bench.ops import CASES, grouped_cases, linear_cases, paged_decode
from verax.ops.sampling import INTS

__all__ = ["arguments_of", "compare", "compare_operations"]

REFERENCE = "reference"

TOLERANCE, ROUNDED_TOLERANCE = 5e-3, 2e-2
"""Largest error over the root mean square of the reference, in float32 (whose products are TF32 on a GPU, bfloat16 on a
TPU, by default) and where something is bfloat16."""

OWN_LAYOUT = ("pack_weight",)
"""Operations whose implementations each have a layout of their own, so that outputs are not comparable."""

LARGEST = 1 << 24
"""Elements of the arguments of an example beyond which a rehearsal leaves it out."""

KINDS = ("bfloat16", "int8", "int4-32", "float8-128", "Q4_K")
"""Kinds of weight whose products are compared."""

INT_LIMITS = {
    **{"top_k": 50, "num_prompt": 512, "min_length": 512, "num_bias": 300},
    **{"seed_high": 1 << 31, "seed_low": 1 << 31},
}
"""Exclusive upper bounds of the integer sampling parameters."""


def _permuted(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.permutation(int(np.prod(shape))).reshape(shape)


PAGES = ("paged_attention[3]", "paged_decode_attention[3]", "write_pages[2]")
SLOTS = ("delta_slot_recurrence[2].slot", "sample[2]")
TOKENS = ("sample[1]", "sample[4].bias_ids", "sample[4].banned", "token_logprobs[1]")

INTEGERS: Mapping[str, tuple[int, Any] | Callable[..., np.ndarray]] = {
    **dict.fromkeys((*PAGES, *SLOTS), _permuted),
    **dict.fromkeys(TOKENS, (0, 151936)),
    **dict.fromkeys(("delta_chunk_scan[2]", "delta_chunk_scan_backward[2]"), (0, 1)),
    **dict.fromkeys(("delta_slot_recurrence[2].fresh", "token_logprobs[2]"), (0, 2)),
    "paged_attention[4]": (40, 128),
    "paged_attention[5]": lambda rng, shape: 8 * np.arange(*shape),
    "paged_decode_attention[4]": (1, 128),
    "write_pages[3]": (0, 16),
    "grouped_linear[2]": lambda rng, shape: rng.permuted(np.tile(np.arange(128), (shape[0], 1)), axis=1)[:, : shape[1]],
    "sample[3]": (1, 512),
    "sample[4].ints": (0, [INT_LIMITS[name] for name in INTS]),
}
"""Integers and flags of the examples, by operation and place, between two bounds or drawn by a function: pages and
slots that are not shared, lengths that fit, different experts, tokens of the vocabulary."""

UNIT = (".q", ".k", ".read", ".erase", ".write", ".found")
SHARES = (".beta", ".keep", ".decays[0]", ".decays[1]", ".gates[0]", ".gates[1]", ".floats")
"""Ends of the places of vectors of length one, and of numbers from 0 to 1."""


def compare_operations(rehearse: bool) -> Iterator[dict[str, Any]]:
    """Compare each implementation that takes a call here; a row for each call, as `compare` returns it."""
    rng = np.random.default_rng(0)
    for name, operation in ops.operations().items():
        for example in operation.examples:
            if rehearse and sum(x.size for x in jax.tree.leaves(example.args) if hasattr(x, "size")) > LARGEST:
                continue
            args = arguments_of(name, example, rng)
            arrays = [any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(argument)) for argument in args]
            static = tuple(i for i, has_arrays in enumerate(arrays) if not has_arrays)
            calls = {
                impl.name: partial(jax.jit(partial(impl.function, **example.kwargs), static_argnums=static), *args)
                for impl in operation.supporting(*args, **example.kwargs)
            }
            if len(calls) > 1 and name not in OWN_LAYOUT:
                rounded = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(args) if hasattr(x, "dtype"))
                yield compare(f"{name}, {example.label}" if example.label else name, calls, rounded)
    for case in rehearsal_cases() if rehearse else _cases():
        if REFERENCE in case.sides and len(case.sides) > 1:
            calls = {name: side.call for name, side in case.sides.items()}
            yield compare(f"{case.group}, {case.name}", calls, case.sides[REFERENCE].dtypes[0] == "bfloat16")


def rehearsal_cases() -> Iterable[Case]:
    """Cases of a rehearsal."""
    return [paged_decode(2, 40)]


def _cases() -> Iterator[Case]:
    yield from linear_cases(1024, 3072, (1, 4, 128), KINDS)
    yield from grouped_cases(("bfloat16",))
    yield from (make() for group in ("attention", "conv") for make in CASES[group])


def compare(case: str, calls: Mapping[str, Callable[[], Any]], rounded: bool) -> dict[str, Any]:
    """Compare the implementations of a call with the reference.

    Args:
        case: name of the call.
        calls: the call by each implementation.
        rounded: True if something is bfloat16.

    Returns:
        `case`, the `errors` by implementation, and `error`: what failed or is off, empty if nothing.
    """
    errors, failures, expected = {}, [], None
    for name in (REFERENCE, *(name for name in calls if name != REFERENCE)):
        try:
            outputs = calls[name]()
            if name == REFERENCE:
                expected = outputs
            else:
                errors[name] = _largest_error(outputs, expected)
        except (RuntimeError, ValueError, TypeError) as error:  # the next implementation may run
            failures.append(f"{name}: {type(error).__name__}: {error}")
    tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
    failures += [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error <= tolerance]
    return {"case": case, "errors": errors, "error": "; ".join(failures)}


def _largest_error(outputs: Any, expected: Any) -> float:
    """Largest error of several outputs, over the RMS of what is expected; of integers, the share that differ."""
    errors = []
    for mine, theirs in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if mine.shape != theirs.shape:
            raise ValueError(f"its output has shape {mine.shape}, the reference's {theirs.shape}")
        if jnp.issubdtype(theirs.dtype, jnp.integer):
            errors.append(float(np.mean(np.asarray(mine) != np.asarray(theirs))))
        else:
            errors.append(error_ratio(np.asarray(mine, np.float64), np.asarray(theirs, np.float64)))
    return max(errors, default=0.0)


def arguments_of(name: str, example: ops.Example, rng: np.random.Generator) -> Sequence[Any]:
    """Arguments of an example of the operation `name`, with random numbers in the place of shapes."""

    def value(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        place = name + jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            rule = INTEGERS[place]
            return jnp.asarray(rule(rng, leaf.shape) if callable(rule) else rng.integers(*rule, leaf.shape), leaf.dtype)
        numbers = rng.standard_normal(leaf.shape, np.float32)
        if place.endswith(UNIT):
            numbers /= np.linalg.norm(numbers, axis=-1, keepdims=True)
        elif place.endswith(SHARES):
            numbers = rng.uniform(0, 1, leaf.shape)
        elif place.endswith(".g"):
            numbers = -np.abs(numbers)
        return jnp.asarray(numbers, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, example.args)


if __name__ == "__main__":
    rows = list(compare_operations("--rehearse" in sys.argv))
    wrong = [f"{row['case']}: {row['error']}" for row in rows if row["error"]]
    sys.stdout.write(json.dumps({"rows": rows, "error": "; ".join(wrong)}) + "\n")
    sys.exit(bool(wrong))
