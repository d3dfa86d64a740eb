"""VACE (Jiang et al., 2025, arXiv:2503.07598): a control clip, masks and reference pictures for Wan's transformer.

Copies of some blocks run on tokens of the control condition, and what they give is added to the residual stream after
their originals. Follows Wan2.1's `vace_model.py` and diffusers' `WanVACETransformer3DModel`, which agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from verax import ops
from verax.models.video_model import Control, Pictures
from verax.models.wan.layers import Block, CrossKeys
from verax.models.wan.vae import WanVae
from verax.nn import Linear


def encode_control(vae: WanVae, pictures: Pictures, *, frames: int, chunk: int) -> Float[Array, "1 F h w E"]:
    """Control condition: latents of what is kept, latents of what is to be replaced, and the mask.

    Gray stands for the pixels that one of the two leaves out. Without a mask, all is to be replaced. A latent has a
    mask channel for each of its pixels, of the frame in the middle of its frames. References are latent frames before
    the clip's, with zeros for the other channels.
    """
    clip, mask, references = pictures.video, pictures.mask, pictures.references
    assert clip is not None
    share = jnp.ones((*clip.shape[:-1], 1)) if mask is None else (mask.mean(-1, keepdims=True) + 1) / 2
    replaced = share > 0.5
    kept, new = (vae.encode(jnp.where(where, clip, 0.0), chunk=chunk) for where in (~replaced, replaced))
    F, h, w = kept.shape[1:4]
    p = vae.config.pixels_per_latent
    middle = ((np.arange(F) + 0.5) * frames / F).astype(int)
    squares = share[:, middle, ..., 0].reshape(1, F, h, p, w, p).transpose(0, 1, 2, 4, 3, 5)
    condition = jnp.concatenate([kept, new, squares.reshape(1, F, h, w, p * p)], axis=-1)
    if references is None:
        return condition
    pictured = [vae.encode(references[:, i : i + 1], chunk=chunk) for i in range(references.shape[1])]
    before = jnp.concatenate(pictured, axis=1)
    before = jnp.pad(before, [(0, 0)] * 4 + [(0, condition.shape[-1] - before.shape[-1])])
    return jnp.concatenate([before, condition], axis=1)


class ControlContext(NamedTuple):
    """Context of prompts and of a control condition: cross-attention keys of blocks and control blocks.

    `scale`: scale of what each control block adds.
    """

    keys: tuple[CrossKeys, ...]
    control_keys: tuple[CrossKeys, ...]
    latents: Float[Array, "B F hp wp E"]
    scale: Float[Array, "B L"]


def control_context(keys: Any, control_keys: Any, control: Control, rows: int) -> ControlContext:
    """Context of some rows of prompts, each with the control condition."""
    latents, scale = control
    return ControlContext(
        keys,
        control_keys,
        jnp.broadcast_to(latents, (rows, *latents.shape[1:])),
        jnp.broadcast_to(scale, (rows, *scale.shape)),
    )


class ControlBlock(Block):
    """Block on the tokens of the control condition. The first one adds the residual stream to them before it."""

    def __init__(
        self,
        D: int,
        F: int,
        heads: int,
        *,
        first: bool = False,
        image: bool,
        eps: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(D, F, heads, image=image, eps=eps, dtype=dtype, rngs=rngs)
        self.before_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs) if first else None
        self.after_proj = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)


def run_controlled(
    run: Callable[[Any, Any, Any], tuple[Any, None]],
    blocks: Iterable[nnx.Module],
    control_blocks: Mapping[int, ControlBlock],
    x: Float[Array, "B F h w D"],
    control: Float[Array, "B F h w D"],
    context: ControlContext,
    shared: tuple[Any, ...],
) -> Float[Array, "B F h w D"]:
    """Residual stream after all blocks, and what control blocks add to it.

    Each control block runs just before its original, so that no more than one's result is kept.

    Args:
        run: one of the blocks, as `scan_blocks` takes it.
        control_blocks: control blocks by the number of their originals.
        x: the residual stream.
        control: tokens of the control condition.
        shared: arguments of blocks except for tokens and keys: `e0`, rotary tables, and both attentions.
    """
    e0, rotary, attend, attend_self = shared
    added = iter(zip(context.control_keys, jnp.moveaxis(context.scale, -1, 0), strict=True))
    for i, (block, keys) in enumerate(zip(blocks, context.keys, strict=True)):
        hint = None
        if (copy := control_blocks.get(i)) is not None:
            control_keys, scale = next(added)
            control = control if copy.before_proj is None else copy.before_proj(control) + x
            control = ops.materialize(copy(control, e0, control_keys, rotary, attend, attend_self))
            hint = copy.after_proj(control) * scale[:, None, None, None, None]
        x, _ = run(x, block, keys)
        x = x if hint is None else x + hint
    return x
