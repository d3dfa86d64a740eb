"""UMT5's encoder against transformers' UMT5EncoderModel, with random weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.layouts import from_torch, spread
from verax.checkpoint.video.names import UMT5
from verax.models.umt5 import UMT5Config, UMT5EncoderModel, position_rows

SIZES = dict(vocab_size=100, d_model=20, d_kv=6, d_ff=36, num_layers=3, num_heads=5, feed_forward_proj="gated-gelu")
LENGTHS = np.array([200, 131, 1])


def reference(**changes):
    model = spread(transformers.UMT5EncoderModel(transformers.UMT5Config(**{**SIZES, **changes})))
    for block in model.encoder.block:  # scores are not scaled: trained queries are small
        block.layer[0].SelfAttention.q.weight.data *= SIZES["d_kv"] ** -0.5
    return model


def ours(theirs, dtype=jnp.float32):
    config = UMT5Config.from_hf(theirs.config.to_dict())
    state = {key: tensor for key, tensor in theirs.state_dict().items() if key != "encoder.embed_tokens.weight"}
    return from_torch(lambda: UMT5EncoderModel(config, dtype=dtype, rngs=nnx.Rngs(0)), UMT5, state, dtype)


def prompts():
    tokens = np.random.default_rng(1).integers(1, 100, (3, 200))
    return np.where(np.arange(200) < LENGTHS[:, None], tokens, 0).astype(np.int32)


def run(theirs, tokens):
    mask = np.arange(tokens.shape[1]) < LENGTHS[:, None]
    with torch.no_grad():
        states = theirs(torch.from_numpy(tokens).long(), torch.from_numpy(mask).long()).last_hidden_state
    return states.double().numpy() * mask[..., None]


@pytest.mark.parametrize("changes", [{}, {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 50}])
def test_float32_states_are_those_of_transformers(changes):
    theirs = reference(**changes)
    got = np.asarray(ours(theirs)(jnp.asarray(prompts()), jnp.asarray(LENGTHS)))
    expected = run(theirs.double(), prompts())
    assert np.abs(expected).mean() > 0.3
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16():
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both.
    rounded = reference().bfloat16()
    theirs = run(rounded, prompts())
    got = np.asarray(ours(rounded, jnp.bfloat16)(jnp.asarray(prompts()), jnp.asarray(LENGTHS)))
    truth = run(rounded.float(), prompts())
    assert np.linalg.norm(got - truth) <= 1.1 * np.linalg.norm(theirs - truth)


def test_every_distance_has_the_row_that_transformers_gives_it():
    attention = reference().encoder.block[0].layer[0].SelfAttention
    offsets = torch.arange(700)[None, :] - torch.arange(700)[:, None]
    expected = attention._relative_position_bucket(offsets).numpy()
    np.testing.assert_array_equal(position_rows(UMT5Config(), 700), expected)
