"""On any device: every implementation that takes an operation's example gives the result of the reference.

A CPU leaves out the largest examples, and the sizes of models that `verax bench ops` times.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.bench.harness import error_ratio
from verax.bench.ops import CASES, grouped_cases, linear_cases
from verax.ops.sampling import INTS

TOLERANCE, ROUNDED_TOLERANCE = 5e-3, 2e-2
"""Largest error over the root mean square of the reference, in float32 (whose products are TF32 on a GPU, bfloat16 on a
TPU, by default) and where something is bfloat16."""

OWN_LAYOUT = ("pack_weight",)
"""Operations whose implementations each have a layout of their own, so that outputs are not comparable."""

ON_CPU = jax.default_backend() == "cpu"

LARGEST = 1 << 22
"""Elements of the arguments of an example beyond which a CPU leaves it out."""

INT_LIMITS = {
    **{"top_k": 50, "num_prompt": 512, "min_length": 512, "num_bias": 300},
    **{"seed_high": 1 << 31, "seed_low": 1 << 31},
}
"""Exclusive upper bounds of the integer sampling parameters."""


def permuted(rng, shape):
    return rng.permutation(int(np.prod(shape))).reshape(shape)


PAGES = ("paged_attention[3]", "paged_decode_attention[3]", "write_pages[4]")
SLOTS = ("delta_slot_recurrence[2].slot", "sample[2]")
TOKENS = ("sample[1]", "sample[4].bias_ids", "sample[4].banned", "token_logprobs[1]")

INTEGERS: Mapping[str, tuple[int, Any] | Callable[..., np.ndarray]] = {
    **dict.fromkeys((*PAGES, *SLOTS), permuted),
    **dict.fromkeys(TOKENS, (0, 151936)),
    **dict.fromkeys(("delta_chunk_scan[2]", "delta_chunk_scan_backward[2]"), (0, 1)),
    **dict.fromkeys(("delta_slot_recurrence[2].fresh", "token_logprobs[2]"), (0, 2)),
    "paged_attention[4]": (40, 128),
    "paged_attention[5]": lambda rng, shape: 8 * np.arange(*shape),
    "paged_decode_attention[4]": (1, 128),
    "write_pages[5]": (0, 16),
    "grouped_linear[2]": lambda rng, shape: rng.permuted(np.tile(np.arange(128), (shape[0], 1)), axis=1)[:, : shape[1]],
    "sample[3]": (1, 512),
    "sample[4].ints": (0, [INT_LIMITS[name] for name in INTS]),
}
"""Integers and flags of the examples, by operation and place, between two bounds or drawn by a function: pages and
slots that are not shared, lengths that fit, different experts, tokens of the vocabulary."""

UNIT = (".q", ".k", ".read", ".erase", ".write", ".found")
SHARES = (".beta", ".keep", ".decays[0]", ".decays[1]", ".gates[0]", ".gates[1]", ".floats")
"""Ends of the places of vectors of length one, and of numbers from 0 to 1."""

EXAMPLES = [
    pytest.param(name, example, id=f"{name}, {example.label}")
    for name, operation in ops.operations().items()
    for example in operation.examples
    if not ON_CPU or sum(x.size for x in jax.tree.leaves(example.args) if hasattr(x, "size")) <= LARGEST
]


def arguments_of(name, example):
    """Arguments of an example of the operation `name`, with random numbers in the place of shapes."""
    rng = np.random.default_rng(0)

    def value(path, leaf):
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


def assert_equal_results(results, rounded):
    """Compare each implementation's result with the reference's, leaf by leaf; of integers, the share that differs."""
    for name, outputs in results.items():
        pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(results["reference"]), strict=True)
        for i, (ours, expected) in enumerate(pairs):
            assert ours.shape == expected.shape, (name, i)
            if jnp.issubdtype(expected.dtype, jnp.integer):
                error = np.mean(np.asarray(ours) != np.asarray(expected))
            else:
                error = error_ratio(np.asarray(ours, np.float64), np.asarray(expected, np.float64))
            assert error <= (ROUNDED_TOLERANCE if rounded else TOLERANCE), (name, i)


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_implementations_equal_the_reference_on_examples(name, example):
    args, operation = arguments_of(name, example), ops.operations()[name]
    arrays = [any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(argument)) for argument in args]
    static = tuple(i for i, has_arrays in enumerate(arrays) if not has_arrays)
    run = lambda impl: jax.jit(partial(impl.function, **example.kwargs), static_argnums=static)(*args)
    implementations = operation.supporting(*args, **example.kwargs)
    assert implementations
    if len(implementations) > 1 and name not in OWN_LAYOUT:
        rounded = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(args) if hasattr(x, "dtype"))
        assert_equal_results({impl.name: run(impl) for impl in implementations}, rounded)


@pytest.mark.skipif(ON_CPU, reason="needs an accelerator: the sizes are models'")
@pytest.mark.parametrize("group", ["linear", "grouped", "attention", "conv"])
def test_implementations_equal_the_reference_at_the_sizes_of_models(group):
    products = {
        "linear": lambda: linear_cases(1024, 3072, (1, 4, 128), ("bfloat16", "int8", "int4-32", "float8-128", "Q4_K")),
        "grouped": lambda: grouped_cases(("bfloat16",)),
    }
    for case in products[group]() if group in products else (make() for make in CASES[group]):
        if "reference" in case.sides:
            results = {name: side.call() for name, side in case.sides.items()}
            assert_equal_results(results, case.sides["reference"].dtypes[0] == "bfloat16")
