"""Adapters of a linear layer: what they add is the same with a weight of any precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.gguf import encode
from verax import ops
from verax.nn import Linear, LowRank, fused_linear

D, RANK = 64, 3
RNG = np.random.default_rng(0)
SLOTS = np.asarray([1, -1, 0, 1, 0])


def weight_of(kind, size_out):
    weight = jnp.asarray(RNG.standard_normal((size_out, D)) * D**-0.5, jnp.float32)
    if kind in ("float32", "bfloat16"):
        return weight.astype(kind)
    if kind == "Q8_0":
        return jax.tree.map(jnp.asarray, ops.BlockQuantizedWeight.from_blocks(kind, encode(weight, kind)))
    return ops.quantize(weight, *{"int8": (8, None), "int4": (4, 32)}[kind])


def layer_of(kind, size_out):
    layer = Linear(D, size_out, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.weight.set_value(weight_of(kind, size_out))
    layer.bias.set_value(jnp.asarray(RNG.standard_normal(size_out), jnp.float32))
    return layer


def matrices(size_out):
    down, up = RNG.standard_normal((2, RANK, D)), RNG.standard_normal((2, size_out, RANK))
    return down.astype(np.float32), up.astype(np.float32)


def attach(layer, down, up):
    """Give a layer the matrices of both slots."""
    chosen = np.repeat(np.arange(2), RANK)[None] == SLOTS[:, None]
    layer.low_rank = LowRank(
        jnp.asarray(down.reshape(-1, D)), jnp.asarray(np.concatenate(up, axis=1)), jnp.asarray(chosen)
    )


def change_of(x, down, up):
    """What each token's adapter adds, in float64; nothing for those without one."""
    x, change = np.asarray(x, np.float64), np.zeros((*x.shape[:-1], up.shape[1]))
    for index, slot in zip(np.ndindex(x.shape[:-1]), SLOTS, strict=True):
        if slot >= 0:
            change[index] = up[slot].astype(np.float64) @ (down[slot].astype(np.float64) @ x[index])
    return change


@pytest.mark.parametrize("shape", [(5, D), (1, 5, D), (5, 1, D)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "Q8_0"])
def test_a_layer_adds_what_each_tokens_adapter_says(kind, shape):
    layer, (down, up) = layer_of(kind, 48), matrices(48)
    x = jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    base = np.asarray(layer(x), np.float64)
    attach(layer, down, up)
    np.testing.assert_allclose(np.asarray(layer(x)) - base, change_of(x, down, up), atol=2e-4)


@pytest.mark.parametrize("kind", ["float32", "int8", "Q8_0"])
def test_joined_layers_add_each_its_own(kind):
    layers, pairs = [layer_of(kind, size) for size in (48, 16, 32)], [matrices(size) for size in (48, 16, 32)]
    x = jnp.asarray(RNG.standard_normal((5, D)), jnp.float32)
    base = [np.asarray(y, np.float64) for y in fused_linear(x, *layers)]
    for layer, pair in list(zip(layers, pairs, strict=True))[1:]:
        attach(layer, *pair)
    first, *others = [np.asarray(y) - b for y, b in zip(fused_linear(x, *layers), base, strict=True)]
    np.testing.assert_array_equal(first, 0)
    for got, pair in zip(others, pairs[1:], strict=True):
        np.testing.assert_allclose(got, change_of(x, *pair), atol=2e-4)


def test_a_token_without_an_adapter_keeps_its_bits():
    layer, (down, up) = layer_of("bfloat16", 48), matrices(48)
    x = jnp.asarray(RNG.standard_normal((5, D)), jnp.float32)
    base = np.asarray(layer(x))
    attach(layer, down, up)
    np.testing.assert_array_equal(np.asarray(layer(x))[SLOTS < 0], base[SLOTS < 0])
