"""Memory of a forward pass of Wan's transformer on a CPU, by the compiler's account; nothing runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.cpu import needs_library
from verax._compat import compiler_options
from verax.models.wan.layers import Float32Linear
from verax.models.wan.model import WanConfig, WanModel
from verax.ops.memory import ROWS

D, F = 128, 1024
CONFIG = WanConfig(dim=D, ffn_dim=F, num_heads=8, num_layers=2, in_dim=4, out_dim=1, text_dim=10, freq_dim=16)
FRAMES, SIDE = 16, 64
TOKENS = FRAMES * SIDE**2


def temporary(config, timesteps):
    """Bytes between the layers of a pass in bfloat16."""
    model = nnx.eval_shape(lambda: WanModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    shape = jax.ShapeDtypeStruct
    latents = shape((1, FRAMES, 2 * SIDE, 2 * SIDE, config.in_dim), jnp.float32)
    text = shape((1, 7, config.text_dim), jnp.float32)
    context = jax.eval_shape(lambda state, text: nnx.merge(graph, state).encode_context(text), state, text)

    def run(state, latents, timesteps, context):
        return nnx.merge(graph, state)(latents, timesteps, context)

    lowered = jax.jit(run, compiler_options=compiler_options("cpu")).lower(state, latents, timesteps, context)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@needs_library
@pytest.mark.parametrize("shape", [(1,), (1, FRAMES)], ids=["one time", "a time of each frame"])
def test_a_pass_keeps_the_tokens_their_queries_keys_and_values(shape):
    timesteps = jax.ShapeDtypeStruct(shape, jnp.int32)
    tokens = 4 * TOKENS * D
    # Residual stream and queries in float32, keys and values in bfloat16, and the rotary tables. The feed-forward of
    # all tokens alone would be 12 times the residual stream.
    kept = 3.3 * tokens
    block = ROWS * (6 * F + 8 * 4 * D)
    found = temporary(CONFIG, timesteps)
    assert found < kept + block
    deeper = temporary(dataclasses.replace(CONFIG, num_layers=5), timesteps)
    assert deeper < 1.02 * found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_float32_layer_is_exact_and_makes_no_copy_of_its_weight(dtype):
    layer = Float32Linear(512, 768, bias=True, dtype=dtype, rngs=nnx.Rngs(3))
    layer.bias[...] = jnp.linspace(-1.0, 1.0, 768).astype(dtype)
    graph, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((3, 512), np.float32))
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x).compile()
    weight, bias = (np.asarray(one[...], np.float64) for one in (layer.weight, layer.bias))
    np.testing.assert_allclose(program(state, x), np.float64(x) @ weight.T + bias, atol=1e-6, rtol=1e-6)
    assert program.memory_analysis().temp_size_in_bytes < 4 * weight.size / 8
