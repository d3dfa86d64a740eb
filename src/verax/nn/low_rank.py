"""Low-rank adapters beside a linear layer (LoRA, Hu et al., 2021, arXiv:2106.09685), several of them in one batch.

The matrices of all adapters lie in two stacks. A product with each stack and a choice between them serve a batch whose
tokens use different adapters, as in S-LoRA (arXiv:2311.03285). The inner width is small, so that computing all adapters
for all tokens costs less than sorting the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from verax import ops

__all__ = ["LowRank", "low_rank_changes"]


@dataclass(frozen=True)
class LowRank:
    """Stacked matrices of the adapters beside one layer, and what each token takes of them.

    R is the number of adapters times their rank. An adapter's scale is part of its rows of `up`.
    """

    down: Float[Array, "R D"]
    up: Float[Array, "F R"]
    chosen: Bool[Array, "T R"]
    """True for the rows of `down` that belong to the token's adapter."""

    def change(self, reduced: Float[Array, "*B R"]) -> Float[Array, "*B F"]:
        """Change of the layer's result, of the inputs' products with `down`; the T tokens have any shape B."""
        return ops.linear(jnp.where(self.chosen.reshape(reduced.shape), reduced, 0.0), self.up)


def low_rank_changes(x: Float[Array, "*B D"], adapters: Sequence[LowRank]) -> tuple[Float[Array, "*B F"], ...]:
    """Changes of the results of several layers with the same input."""
    reduced = ops.multi_linear(x, [adapter.down for adapter in adapters])
    return tuple(adapter.change(each) for adapter, each in zip(adapters, reduced, strict=True))
