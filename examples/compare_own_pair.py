"""Your own two models, compared layer by layer: a PyTorch one and its port, whose mistake is found.

Run it with `python examples/compare_own_pair.py`, or the right port alone with `verax compare own
examples/compare_own_pair.py`. Needs `pip install 'verax[parity]'`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from verax.compare import compare

torch.manual_seed(0)
reference = torch.nn.Sequential(
    torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5)
).eval()


class Port(nnx.Module):
    """The same in Flax, with names of its own and `gelu` as a parameter."""

    def __init__(self, gelu):
        self.gelu = gelu
        self.up = nnx.Linear(12, 32, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(32, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 5, rngs=nnx.Rngs(0))
        for ours, theirs in ((self.up, reference[0]), (self.norm, reference[2]), (self.down, reference[3])):
            weight = jnp.asarray(theirs.weight.detach().numpy())
            (ours.scale if ours is self.norm else ours.kernel).set_value(weight.T)  # Flax has [in, out]
            ours.bias.set_value(jnp.asarray(theirs.bias.detach().numpy()))

    def __call__(self, x):
        """`[B, 12]` to `[B, 5]`."""
        return self.down(self.norm(self.gelu(self.up(x))))


ours = Port(lambda x: jax.nn.gelu(x, approximate=False))
names = {"up": "0", "norm": "2", "down": "3"}  # ours, and what PyTorch calls it
inputs = (np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32),)

if __name__ == "__main__":
    for title, port in (("tanh", Port(jax.nn.gelu)), ("exact", ours)):
        result = compare(reference, port, *inputs, names=names, guess=False)
        first = "every layer agrees" if result.first is None else f"the first layer that is off is {result.first.name}"
        print(f"GELU {title}: {first}")
        for row in result.rows:
            print(f"  {row.name:10} relative error {row.errors.l2:.1e}")
