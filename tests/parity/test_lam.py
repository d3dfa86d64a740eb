"""The published LAM against PyTorch in float64: an independent reference, written from the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

from tests.support.lam import abstract, lam_config, load_lam, relative, run
from tests.support.tiny import weights_of
from verax import ops
from verax.compare.references.lam import LamSentenceEncoder
from verax.nn import Linear, pack_linear_weights
from verax.ops.cpu import library
from verax.ops.packed import PackedWeight

VARIANTS = {"hierarchical": "B", "local": "C"}


def pair(rule, folder, dtype=jnp.float32, sizes=None, **layer):
    """Our model and theirs in float64, with the same weights. `sizes` replaces entries of config.json."""
    config = lam_config(rule=rule, **layer) | (sizes or {})
    theirs = LamSentenceEncoder(
        vocab_size=211,
        d_model=config["hidden_size"],
        num_heads=3,
        num_layers=2,
        intermediate_size=config["intermediate_size"],
        max_positions=160,
        variant=VARIANTS[rule],
        allow_neg_eigval=layer.get("allow_neg_eigval", False),
    )
    weights = weights_of(abstract(config))
    theirs.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
    return load_lam(folder, config, dtype, weights), theirs.eval().double()


def hidden(theirs, tokens):
    with torch.no_grad():
        return theirs.hidden(torch.tensor(tokens)).numpy()


# One token; few; one chunk; padded to one chunk of 96; two chunks of 64; more tokens than positions.
@pytest.mark.parametrize(
    ("rule", "T"), [*(("hierarchical", T) for T in (20, 70, 128, 200)), *(("local", T) for T in (1, 64, 70, 200))]
)
def test_hidden_states_match_the_reference(rule, T, tmp_path):
    ours, theirs = pair(rule, tmp_path)
    tokens = np.random.default_rng(T).integers(0, 211, (2, T))
    assert relative(run(ours, tokens), hidden(theirs, tokens)) < 1e-5


@pytest.mark.parametrize("rule", VARIANTS)
def test_beta_may_go_up_to_two(rule, tmp_path):
    ours, theirs = pair(rule, tmp_path, allow_neg_eigval=True)
    tokens = np.random.default_rng(0).integers(0, 211, (2, 128))
    assert relative(run(ours, tokens), hidden(theirs, tokens)) < 2e-5


@pytest.mark.parametrize("packs", [False, True], ids=["as stored", "packed"])
@pytest.mark.parametrize("rule", VARIANTS)
def test_pooled_and_normalised_embeddings_match_the_reference(rule, packs, tmp_path):
    # Sizes whose weights every layout of a processor takes.
    ours, theirs = pair(rule, tmp_path, sizes={"hidden_size": 96, "intermediate_size": 160} if packs else None)
    if packs:
        pack_linear_weights(ours)
        weights = [layer.weight.get_value() for _, layer in nnx.iter_modules(ours) if isinstance(layer, Linear)]
        assert any(isinstance(weight, PackedWeight) for weight in weights) == library.has("fma")
    tokens, lengths = np.random.default_rng(0).integers(0, 211, (3, 90)), np.array([90, 31, 64])
    mask = np.arange(90) < lengths[:, None]
    pooled = (run(ours, tokens, jnp.asarray(lengths)) * mask[..., None]).sum(1)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), torch.tensor(mask.astype(int))).numpy()
    assert np.abs(pooled / np.linalg.norm(pooled, axis=-1, keepdims=True) - expected).max() < 1e-6


@pytest.mark.parametrize("rule", VARIANTS)
def test_bfloat16_is_no_further_from_float32_than_pytorchs_bfloat16(rule, tmp_path):
    ours, theirs = pair(rule, tmp_path, jnp.bfloat16)
    rounded = theirs.bfloat16()
    tokens = np.random.default_rng(0).integers(0, 211, (4, 128))
    with torch.no_grad():
        got = rounded.hidden(torch.tensor(tokens)).double().numpy()
    truth = hidden(rounded.double(), tokens)
    assert relative(run(ours, tokens), truth) <= 0.8 * relative(got, truth)


def test_layer_states_and_regulariser_match_the_reference(tmp_path):
    ours, theirs = pair("hierarchical", tmp_path)
    x = np.random.default_rng(0).standard_normal((2, 192, 48)).astype(np.float32)
    with torch.no_grad():
        y, _, states, loss = theirs.deltanet_layers[0](torch.tensor(x).double(), use_cache=True)
    got, left = jax.jit(lambda layer, x: layer(x))(ours.deltanet_layers[0], jnp.asarray(x))
    assert relative(got, y.numpy()) < 1e-5
    for a, b in zip(left, states, strict=True):
        assert relative(a, b.numpy()) < 1e-5
    np.testing.assert_allclose(ops.hierarchical.orthogonality_loss(left), float(loss), rtol=1e-5)
