"""A small random LAM: its config.json, its weights by name, and checkpoints of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from tests.support.tiny import weights_of
from verax.checkpoint import Checkpoint, load_module
from verax.models import encoder


def lam_config(**layer):
    return {
        "model_type": "lam",
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_positions": 160,
        "lam_config": layer,
    }


def abstract(config):
    """The model of a config.json, shapes only."""
    model, sizes = encoder(config)
    return nnx.eval_shape(lambda: model(sizes, rngs=nnx.Rngs(0)))


def shapes(config):
    """Shapes by name."""
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract(config)))}


def load_lam(folder, config, dtype=jnp.float32, weights=None):
    """Write a checkpoint to `folder` and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights or weights_of(abstract(config)), folder / "model.safetensors")
    model = abstract(config)
    return load_module(model, Checkpoint.open(folder), dtype=dtype, ignore=type(model).ignored_weights)


compiled = jax.jit(lambda model, tokens, lengths: model(tokens, lengths))


def run(model, tokens, lengths=None):
    """Hidden states, compiled."""
    return np.asarray(compiled(model, jnp.asarray(tokens), lengths), np.float64)


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)
