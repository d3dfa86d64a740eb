"""Ulysses sequence parallelism (Jacobs et al., 2023, arXiv:2309.14509) of Wan's diffusion transformer.

Each device holds a part of every frame's tokens. Only self-attention needs the others: an all-to-all before it gives a
device all tokens of some heads, and one after it gives the tokens back. Frames stay whole in number and order, and so
do their times and the ranges of keys of block-causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import lax
from jaxtyping import Array, Float

from verax.models.wan.layers import AttentionFn

__all__ = ["SequenceParallel"]


@dataclass(frozen=True)
class SequenceParallel:
    """Division of each frame's tokens over an axis of a mesh; its methods run inside `jax.shard_map`.

    A device's part is a clip of one row of tokens, `[B, F, 1, s, D]`, in which all layers but self-attention and the
    rotary positions work as they are. `s` is `height * width / n`, and the n devices of the axis divide the heads too.

    Attributes:
        axis: name of the mesh's axis.
        height, width: tokens of a whole frame.
    """

    axis: str
    height: int
    width: int

    def divide(self, latents: Float[Array, "B F hp wp C"]) -> Float[Array, "B F p sp C"]:
        """This device's part of the latents, whose patches of p x p stand side by side."""
        B, F, hp, _, C = latents.shape
        p = hp // self.height
        grid = latents.reshape(B, F, self.height, p, self.width, p, C).transpose(0, 1, 3, 2, 4, 5, 6)
        return self._own(grid.reshape(B, F, p, -1, C), axis=3)

    def gather(self, latents: Float[Array, "B F p sp C"]) -> Float[Array, "B F hp wp C"]:
        """The latents of whole frames from all devices' parts: the inverse of `divide`."""
        B, F, p, _, C = latents.shape
        row = lax.all_gather(latents, self.axis, axis=3, tiled=True)
        grid = row.reshape(B, F, p, self.height, self.width, p, C).transpose(0, 1, 3, 2, 4, 5, 6)
        return grid.reshape(B, F, self.height * p, self.width * p, C)

    def rotary(self, table: Float[Array, "T H"]) -> Float[Array, "t H"]:
        """Rows of a rotary table of all tokens, in the order (frame, row, column), that are this device's."""
        frames = table.reshape(-1, self.height * self.width, table.shape[-1])
        return self._own(frames, axis=1).reshape(-1, table.shape[-1])

    def attention(self, attend: AttentionFn) -> AttentionFn:
        """`attend` among the tokens of all devices, each of which computes some of the heads."""

        def attend_all(
            q: Float[Array, "B t N H"], k: Float[Array, "B t N H"], v: Float[Array, "B t N H"]
        ) -> Float[Array, "B t N H"]:
            out = attend(*map(self._heads_for_tokens, (q, k, v)))
            # The output's projection rounds to the weights' dtype, which is the values', in any case.
            return self._tokens_for_heads(out.astype(v.dtype))

        return attend_all

    def _heads_for_tokens(self, x: Float[Array, "B t N H"]) -> Float[Array, "B T M H"]:
        B, _, N, H = x.shape
        n = lax.axis_size(self.axis)
        frames = x.reshape(B, -1, self.height * self.width // n, N, H)
        return lax.all_to_all(frames, self.axis, split_axis=3, concat_axis=2, tiled=True).reshape(B, -1, N // n, H)

    def _tokens_for_heads(self, x: Float[Array, "B T M H"]) -> Float[Array, "B t N H"]:
        B, _, M, H = x.shape
        frames = x.reshape(B, -1, self.height * self.width, M, H)
        own = lax.all_to_all(frames, self.axis, split_axis=2, concat_axis=3, tiled=True)
        return own.reshape(B, -1, M * lax.axis_size(self.axis), H)

    def _own(self, x: Array, axis: int) -> Array:
        size = x.shape[axis] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, axis)
