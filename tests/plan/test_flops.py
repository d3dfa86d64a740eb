"""Operations of a plan against XLA's own count of a compiled program, in models large enough that products prevail; of
a clip's decoder, whose frames are enlarged in loops, against the products of its trace.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.support.tiny import HYBRID, tiny_config
from verax import models, ops
from verax.bench.harness import count_products
from verax.loading import model_shapes
from verax.models.wan.vae import WanVae, WanVaeConfig
from verax.nn import Sentences
from verax.plan.devices import find_device
from verax.plan.model import Described
from verax.plan.text import plan_embed, text_plan
from verax.plan.video import decode_flops

DEVICE = find_device("test", memory=1e9, bandwidth=1e11, flops=1e13)
WIDE = dict(hidden_size=256, intermediate_size=640, vocab_size=2048)
EXPERTS = dict(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=256, tie_word_embeddings=False)
ENCODER = dict(WIDE, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)


def counted(function, *shapes):
    """Operations that XLA counts in a compiled function of arrays, whose loops count once."""
    with ops.use_implementations(**dict.fromkeys(ops.operations(), "reference")):
        return jax.jit(function).lower(*shapes).compile().cost_analysis()["flops"]


def of_model(model, function, *arguments):
    """Operations of a function of a module and arrays."""
    graph, state = nnx.split(model)
    return counted(lambda state, *arrays: function(nnx.merge(graph, state), *arrays), state, *arguments)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def check(planned, counted):
    """Elementwise operations, which a plan leaves out, are some hundredths of the products."""
    assert planned <= counted < 1.1 * planned


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen3", {"tie_word_embeddings": False, "head_dim": 32}), ("qwen3_moe", EXPERTS), ("qwen3_5_text", HYBRID)],
)
def test_a_decode_step_of_a_language_model(family, changes):
    config = tiny_config(family, **(WIDE | changes))
    plan = text_plan(Described("model", "text", config), DEVICE, dtype="float32")

    def step(model, ids, lengths):
        states = models.hidden_states(model, ids, Sentences.padded(lengths, 1))
        return model.logits(states[:, -1])

    result = of_model(plan.model, step, shape(4, 1, dtype=jnp.int32), shape(4, dtype=jnp.int32))
    check(plan.row("step", 4, [(0, 1)])["flops"], result)


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_a_sentence_encoder(model_type):
    config = {"model_type": model_type, **ENCODER}
    (program,) = plan_embed(Described("model", "embedding", config), DEVICE, batch_size=2, max_length=16)["programs"]
    architecture, sizes = models.encoder(config)
    module = model_shapes(architecture, sizes, dtype=jnp.float32)

    def encode(model, ids, lengths):
        return models.hidden_states(model, ids, Sentences.padded(lengths, 16))

    result = of_model(module, encode, shape(2, 16, dtype=jnp.int32), shape(2, dtype=jnp.int32))
    check(program["flops"], result)


RESIDUAL = dict(base_dim=24, decoder_base_dim=32, is_residual=True, patch_size=2, in_channels=12, out_channels=12)


@pytest.mark.parametrize("changes", [{"base_dim": 32}, RESIDUAL], ids=["plain", "residual"])
def test_the_decoder_of_a_clip(changes):
    config = WanVaeConfig(dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=(False, True), **changes)
    vae = nnx.eval_shape(lambda: WanVae(config, rngs=nnx.Rngs(0)))
    (graph, state), latents = nnx.split(vae), (1, 33, 32, 32, config.z_dim)
    traced = count_products(lambda state, z: nnx.merge(graph, state).decode(z), state, shape(*latents))
    assert decode_flops(vae, latents) == traced
