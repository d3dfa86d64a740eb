"""Weights of PyTorch's models: spread at random, and moved to models of ours by the table between their names."""

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx


def spread(model, seed=0):
    """Random weights in place of a torch model's own: of real spread, norms and tables included."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        scales = "norm" in key and key.endswith(("weight", "gamma"))
        if weight.ndim > 1 and not scales and "embed" not in key and "bias" not in key:
            weight.data = 1.5 * noise * (weight.numel() / weight.shape[0]) ** -0.5
        else:
            weight.data = 0.5 * noise + scales
    return model.eval()


def from_torch(build, table, state, dtype=None, *, reshape=False):
    """Module `build()` with the weights of a torch model's `state_dict`, which must have exactly its parameters.

    Args:
        build: function to our module.
        table: table of names, of which several of the reference's may be parts of one of ours.
        state: the reference's tensors by name.
        dtype: dtype of our weights; the module's own if None.
        reshape: True where axes of one may differ, as in CLIP's embeddings.
    """
    parts = {}
    for key, tensor in state.items():
        name, part = table.backward(key)
        parts.setdefault(name, {})[part] = tensor.float().numpy()
    whole = {name: np.concatenate([found[i] for i in sorted(found)]) for name, found in parts.items()}
    graph, params = nnx.split(nnx.eval_shape(build))
    filled = []
    for path, leaf in nnx.to_flat_state(params):
        array = whole.pop(".".join(map(str, path)))
        assert array.size == leaf.size if reshape else array.shape == leaf.shape
        filled.append((path, leaf.replace(jnp.asarray(array.reshape(leaf.shape), dtype or leaf.dtype))))
    assert not whole, f"left over: {sorted(whole)}"
    return nnx.merge(graph, nnx.from_flat_state(filled))
