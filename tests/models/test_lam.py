"""LAM by itself: sizes, names, configurations, the faults of the published layer, and the gated one without them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.lam import abstract, lam_config, load_lam, relative, run, shapes
from tests.support.tiny import weights_of
from verax.errors import CheckpointError, UnsupportedModelError
from verax.models import encoder

PUBLISHED = {
    "model_type": "lam",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_layers": 6,
    "num_attention_heads": 12,
    "num_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 32768,
    "position_embedding_type": "absolute",
    "lam_config": {
        "fast_decay_init": 0.3,
        "slow_decay_init": 0.85,
        "use_hierarchical_decay": True,
        "use_enhanced_flux": True,
        "complexity": "O(n)",
        "memory_type": "dual_state",
    },
}
TOKENS = np.random.default_rng(0).integers(0, 211, (2, 150))


def test_the_published_sizes_make_the_published_number_of_parameters():
    sizes = shapes(PUBLISHED)
    assert sum(int(np.prod(s)) for s in sizes.values()) == 23_848_788
    one = [s for name, s in sizes.items() if name.startswith("deltanet_layers.3.")]
    assert sum(int(np.prod(s)) for s in one) == 780_622
    assert set(shapes({**PUBLISHED, "lam_config": {"rule": "gated"}})) == set(sizes)


def test_published_files_may_hold_the_teachers_attention_and_weights_twice(tmp_path):
    config = lam_config()
    weights = weights_of(abstract(config))
    extra = {
        "teacher_model.encoder.layer.0.attention.self.query.weight": np.zeros((48, 48), np.float32),
        "teacher_model.encoder.layer.0.attention.output.dense.bias": np.zeros(48, np.float32),
        "teacher_model.embeddings.position_ids": np.arange(160),
        "deltanet_norms.0.weight": np.zeros(48, np.float32),
    }
    np.testing.assert_array_equal(
        run(load_lam(tmp_path / "a", config, weights=weights | extra), TOKENS),
        run(load_lam(tmp_path / "b", config, weights=weights), TOKENS),
    )
    with pytest.raises(CheckpointError, match=r"deltanet_layers\.9\.x"):
        load_lam(tmp_path / "c", config, weights=weights | {"deltanet_layers.9.x": np.zeros(3, np.float32)})


def test_more_tokens_than_positions_are_stretched_over_them_by_the_length_of_each(tmp_path):
    """Long padding of a row with few tokens must not move the positions."""
    model = load_lam(tmp_path, lam_config(rule="gated"))
    tokens = np.random.default_rng(0).integers(0, 211, (2, 300))
    lengths = jnp.array([200, 100])
    together = run(model, tokens, lengths)
    assert relative(together[:1, :200], run(model, tokens[:1, :200])) < 1e-5
    assert relative(together[1:, :100], run(model, tokens[1:, :100])) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"position_embedding_type": "relative"}, "position_embedding_type 'relative'"),
        ({"num_heads": 6}, "num_heads 6 and num_attention_heads 12"),
        ({"num_attention_heads": 7, "num_heads": 7}, "hidden_size 384 is not a multiple of num_attention_heads 7"),
        ({"vocab_size": "many"}, "vocab_size: expected a whole number of 1 to 16777216, got 'many'"),
        ({"lam_config": {"rule": "softmax"}}, "rule 'softmax' is not supported; there are hierarchical, local, gated"),
        ({"lam_config": {"chunks": 3}}, "lam_config has unknown chunks; known are rule,"),
        ({"lam_config": {"use_enhanced_flux": False}}, "lam_config.use_enhanced_flux"),
        ({"lam_config": {"coupling_interval": 0}}, "lam_config: coupling_interval: expected a whole number of 1 to"),
        ({"lam_config": {"fast_decay_init": 2}}, "fast_decay_init: expected a number between 0 and 1"),
        ({"intermediate_size": ...}, "lacks intermediate_size"),  # not there
    ],
)
def test_configurations_that_are_not_supported_are_named(changes, message):
    with pytest.raises((CheckpointError, UnsupportedModelError)) as raised:
        encoder({key: value for key, value in {**PUBLISHED, **changes}.items() if value is not ...})
    assert message in str(raised.value)
