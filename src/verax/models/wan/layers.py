"""Parts of Wan's diffusion transformer (Wan Team, 2025, arXiv:2503.20314): attention, rotary positions, the block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from verax import ops
from verax.models.video_model import AttentionFn
from verax.nn import LayerNorm, Linear, RMSNorm, Sequential, fused_gelu_mlp, fused_linear

Rotary = tuple[Array, Array]


def block_causal(attend: AttentionFn, block: int) -> AttentionFn:
    """Attention in which a query attends to the keys of its own block of `block` tokens and of earlier blocks.

    Each block of queries takes its range of keys, so that no score is computed and then masked. The last block may be
    shorter.
    """

    def blockwise(q: Array, k: Array, v: Array) -> Array:
        T = q.shape[1]
        ends = [min(begin + block, T) for begin in range(0, T, block)]
        return jnp.concatenate(
            [attend(q[:, begin:end], k[:, :end], v[:, :end]) for begin, end in zip([0, *ends], ends, strict=False)],
            axis=1,
        )

    return blockwise


def rotary_tables(
    frames: int, height: int, width: int, head_dim: int
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """cos and signed sin for `rotate`, of tokens in the order (frame, row, column).

    A head has H / 2 pairs of numbers: H // 6 turn with the row, as many with the column, and the rest with the frame.
    Each axis has its own frequencies `10000 ^ -(i / pairs)`, in radians per step.
    """
    across = head_dim // 6
    axes = [(frames, head_dim // 2 - 2 * across), (height, across), (width, across)]
    # Angles in float64, as both references have them: a late frame turns many times.
    angles = [np.outer(np.arange(n), 10000.0 ** -(np.arange(pairs) / pairs)) for n, pairs in axes]

    def table(function: Callable[[np.ndarray], np.ndarray]) -> Array:
        parts = []
        for axis, angle in enumerate(angles):
            shape = [1, 1, 1, angle.shape[1]]
            shape[axis] = angle.shape[0]
            part = jnp.asarray(function(angle).astype(np.float32)).reshape(shape)
            parts.append(jnp.broadcast_to(part, (frames, height, width, angle.shape[1])))
        return jnp.concatenate(parts, -1).reshape(frames * height * width, -1)

    cos, sin = table(np.cos), table(np.sin)
    return jnp.repeat(cos, 2, axis=-1), jnp.stack([-sin, sin], axis=-1).reshape(cos.shape[0], -1)


def rotate(x: Float[Array, "B T N H"], rotary: Rotary) -> Float[Array, "B T N H"]:
    """Turn each pair of neighbours `(x1, x2)` to `(x1 cos - x2 sin, x2 cos + x1 sin)`: the interleaved convention."""
    cos, sin = (table[:, None] for table in rotary)
    return x * cos + ops.swap_pairs(x) * sin


def gelu_tanh(x: Array) -> Array:
    """GELU by its approximation with tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


class Float32Linear(Linear):
    """Linear layer in float32 with a weight of float32 or bfloat16, for the time embedding and the head."""

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        """Map the last axis."""
        weight, bias = self.weight.get_value(), None if self.bias is None else self.bias[...]
        if weight.dtype == jnp.float32:
            return ops.linear(x, weight, bias)
        # Three bfloat16 numbers add up to a float32 exactly. In float32, the weight would take as much memory as the
        # tokens of a short clip.
        parts, rest = list[Array](), x.astype(jnp.float32)
        for _ in range(3):
            # Not by a cast and back, which XLA leaves out.
            parts.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
            rest = rest - parts[-1]
        y = jnp.sum(ops.linear(jnp.stack(parts), weight), axis=0)
        return y if bias is None else y + bias.astype(jnp.float32)


class PatchEmbedding(nnx.Module):
    """Linear map of each patch of a frame. Its weight `[D, C, 1, patch, patch]` is stored as a convolution's."""

    def __init__(self, C: int, D: int, patch: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        shape = (D, C, 1, patch, patch)
        self.weight = nnx.Param((C * patch**2) ** -0.5 * jax.random.normal(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(D, dtype))

    def __call__(self, latents: Float[Array, "B F hp wp C"]) -> Float[Array, "B F h w D"]:
        """Map latents to tokens `[B, F, h, w, D]`."""
        weight = self.weight[...]
        B, F, hp, wp, C = latents.shape
        p = weight.shape[-1]
        patches = latents.reshape(B, F, hp // p, p, wp // p, p, C).transpose(0, 1, 2, 4, 6, 3, 5)
        return ops.linear(patches.reshape(*patches.shape[:4], -1), weight.reshape(len(weight), -1), self.bias[...])


class ImageEmbedding(nnx.Module):
    """Map from the image encoder's states to the model's width D.

    `positions`: tokens of a first and a last image, to whose states positions are added; None for one image.
    """

    def __init__(self, size_in: int, D: int, *, positions: int | None = None, dtype: DTypeLike, rngs: nnx.Rngs):
        self.emb_pos = None if positions is None else nnx.Param(jnp.zeros((1, positions, size_in), dtype))
        # PyTorch's default eps, unlike the other norms'.
        norm_in, norm_out = (LayerNorm(size, eps=1e-5, dtype=dtype) for size in (size_in, D))
        inner, outer = (Linear(size_in, size, bias=True, dtype=dtype, rngs=rngs) for size in (size_in, D))
        self.proj = Sequential([norm_in, inner, ops.gelu, outer, norm_out])

    def __call__(self, image: Float[Array, "B P I"]) -> Float[Array, "B P D"]:
        """Tokens of the image for cross-attention, `[B, P, D]`."""
        return self.proj(image if self.emb_pos is None else image + self.emb_pos[...])


def sinusoid(timesteps: Num[Array, "B G"], size: int) -> Float[Array, "B G size"]:
    """cos and then sin of `t / 10000 ^ (i / half)`, to float32's accuracy.

    References compute in float64. Here angles are in turns, of which only the fraction counts. The product of `t` and
    the leading 12 bits of a frequency is exact in float32 while t is a whole number below 4096. Its fraction is taken
    before the product with the remaining bits is added.
    """
    half = size // 2
    turns = 10000.0 ** -(np.arange(half) / half) / (2 * np.pi)
    unit = 2.0 ** (np.floor(np.log2(turns)) - 11)
    leading = np.round(turns / unit) * unit
    whole = jnp.floor(timesteps.astype(jnp.float32))[..., None]
    part = timesteps.astype(jnp.float32)[..., None] - whole
    exact = whole * leading.astype(np.float32)
    angle = exact - jnp.floor(exact) + whole * (turns - leading).astype(np.float32) + part * turns.astype(np.float32)
    return jnp.concatenate([jnp.cos(2 * np.pi * angle), jnp.sin(2 * np.pi * angle)], axis=-1)


def normalize(
    x: Float[Array, "B F h w D"], shift: Float[Array, "B #F D"], scale: Float[Array, "B #F D"], eps: float
) -> Float[Array, "B F h w D"]:
    """`layer_norm(x) (1 + scale) + shift`, in float32; shift and scale are of each frame, or one for all frames."""
    D = x.shape[-1]
    x = ops.layer_norm(x, jnp.ones(D, jnp.float32), jnp.zeros(D, jnp.float32), eps)
    return x * (1 + _of_frames(scale)) + _of_frames(shift)


def _of_frames(x: Float[Array, "B F D"]) -> Float[Array, "B F 1 1 D"]:
    return x[:, :, None, None]


class CrossKeys(NamedTuple):
    """Normalised keys, and values, of text and image for one layer, in the weights' dtype; B counts prompts."""

    k: Float[Array, "B S N H"]
    v: Float[Array, "B S N H"]
    k_img: Float[Array, "B P N H"] | None
    v_img: Float[Array, "B P N H"] | None


class Projections(nnx.Module):
    """Parameters of either attention of a block: four projections, and norms of queries and keys over all heads."""

    def __init__(self, D: int, heads: int, *, eps: float, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(Linear, D, D, bias=True, dtype=dtype, rngs=rngs)
        self.heads = heads
        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.norm_q, self.norm_k = RMSNorm(D, eps=eps, dtype=dtype), RMSNorm(D, eps=eps, dtype=dtype)

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of keys and values, and of weights that are not quantised."""
        return self.norm_k.weight.get_value().dtype

    def split(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        """Divide the last axis among the heads."""
        return x.reshape(*x.shape[:2], self.heads, -1)


class SelfAttention(Projections):
    """Attention among all tokens, with queries and keys turned by their positions."""

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, attend: AttentionFn) -> Float[Array, "B T D"]:
        """Attention of each token to all."""
        q, k, v = ops.update_rows(self._project, self.split(x), *(table[None] for table in rotary))
        return ops.update_rows(self.o, attend(q, k, v).reshape(x.shape))

    def _project(
        self, x: Float[Array, "B T N H"], cos: Float[Array, "1 T H"], sin: Float[Array, "1 T H"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"], Float[Array, "B T N H"]]:
        """Queries, keys and values of tokens whose numbers are divided among the heads."""
        x = x.reshape(*x.shape[:2], -1)
        q, k, v = fused_linear(x, self.q, self.k, self.v, dtypes=(jnp.float32, jnp.float32, self.dtype))
        q = rotate(self.split(self.norm_q(q)), (cos[0], sin[0]))
        k = rotate(self.split(self.norm_k(k)), (cos[0], sin[0]))
        return q, k.astype(self.dtype), self.split(v)


class CrossAttention(Projections):
    """Attention to the text, and with keys and values of its own to the image; the two results are added."""

    def __init__(self, D: int, heads: int, *, image: bool, eps: float, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(D, heads, eps=eps, dtype=dtype, rngs=rngs)
        self.k_img = Linear(D, D, bias=True, dtype=dtype, rngs=rngs) if image else None
        self.v_img = Linear(D, D, bias=True, dtype=dtype, rngs=rngs) if image else None
        self.norm_k_img = RMSNorm(D, eps=eps, dtype=dtype) if image else None

    def keys(self, text: Float[Array, "B S D"], image: Float[Array, "B P D"] | None) -> CrossKeys:
        """Keys and values of text and image. They do not depend on the time, so that all steps share them."""
        k, v = self.split(self.norm_k(self.k(text))), self.split(self.v(text))
        k_img = v_img = None
        if image is not None and self.k_img and self.v_img and self.norm_k_img:
            k_img = self.split(self.norm_k_img(self.k_img(image))).astype(self.dtype)
            v_img = self.split(self.v_img(image)).astype(self.dtype)
        return CrossKeys(k.astype(self.dtype), v.astype(self.dtype), k_img, v_img)

    def __call__(self, x: Float[Array, "B T D"], keys: CrossKeys, attend: AttentionFn) -> Float[Array, "B T D"]:
        """Attention of each token to the context of `keys`."""

        def attend_rows(x: Array) -> Array:
            q = self.split(self.norm_q(self.q(x)))
            out = attend(q, keys.k, keys.v)
            if keys.k_img is not None and keys.v_img is not None:
                out += attend(q, keys.k_img, keys.v_img)
            return self.o(out.reshape(x.shape))

        return ops.update_rows(attend_rows, x)


class Block(nnx.Module):
    """Self-attention, cross-attention and feed-forward on the float32 residual stream.

    The time's embedding shifts and scales the inputs, and gates the outputs, of self-attention and feed-forward. Each
    frame may have its own time.
    """

    def __init__(self, D: int, F: int, heads: int, *, image: bool, eps: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.eps = eps
        self.modulation = nnx.Param(D**-0.5 * jax.random.normal(rngs.params(), (1, 6, D), dtype))
        self.self_attn = SelfAttention(D, heads, eps=eps, dtype=dtype, rngs=rngs)
        self.norm3 = LayerNorm(D, eps=eps, dtype=dtype)
        self.cross_attn = CrossAttention(D, heads, image=image, eps=eps, dtype=dtype, rngs=rngs)
        inner, outer = (Linear(*sizes, bias=True, dtype=dtype, rngs=rngs) for sizes in ((D, F), (F, D)))
        self.ffn = Sequential([inner, gelu_tanh, outer])

    def __call__(
        self,
        x: Float[Array, "B F h w D"],
        e0: Float[Array, "B #F 6 D"],
        keys: CrossKeys,
        rotary: Rotary,
        attend: AttentionFn,
        attend_self: AttentionFn,
    ) -> Float[Array, "B F h w D"]:
        """One layer.

        Args:
            x: the residual stream.
            keys: of text and image.
            rotary: cos and sin of each token.
            attend: attention to keys of the context.
            attend_self: attention among tokens.
        """
        B, *_, D = x.shape
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = jnp.moveaxis(_modulated(self.modulation, e0), 2, 0)
        tokens = normalize(x, shift, scale, self.eps).reshape(B, -1, D)
        x = x + _of_frames(gate) * self.self_attn(tokens, rotary, attend_self).reshape(x.shape)
        x = x + self.cross_attn(self.norm3(x).reshape(B, -1, D), keys, attend).reshape(x.shape)
        tokens = normalize(x, shift_ffn, scale_ffn, self.eps).reshape(B, -1, D)
        return x + _of_frames(gate_ffn) * ops.update_rows(self._feed_forward, tokens).reshape(x.shape)

    def _feed_forward(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        inner, _, outer = self.ffn
        y = fused_gelu_mlp(x, inner, outer, approximate=True)
        return self.ffn(x) if y is None else y


class Head(nnx.Module):
    """Map from the residual stream to the numbers of each patch, after a norm that the time's embedding modulates."""

    def __init__(self, D: int, size_out: int, *, eps: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.eps = eps
        self.modulation = nnx.Param(D**-0.5 * jax.random.normal(rngs.params(), (1, 2, D), dtype))
        self.head = Float32Linear(D, size_out, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B F h w D"], e: Float[Array, "B #F D"]) -> Float[Array, "B F h w P"]:
        """Numbers of each token's patch, float32 `[B, F, h, w, P]`."""
        B, F, *_, D = x.shape
        table = jnp.broadcast_to(_modulated(self.modulation, e[:, :, None]), (B, F, 2, D))

        def frame(inputs: tuple[Array, Array]) -> Array:
            tokens, of_frame = (part[:, None] for part in inputs)
            return self.head(normalize(tokens, of_frame[:, :, 0], of_frame[:, :, 1], self.eps))[:, 0]

        # A frame at a time. Else XLA:CPU's matmul library takes the last block's whole feed-forward and the head for
        # one program, and writes each constant in it out at that size: 4 GB for 57 frames at 544 x 960.
        return lax.map(frame, (x.swapaxes(0, 1), table.swapaxes(0, 1))).swapaxes(0, 1)


def _modulated(table: nnx.Param[Array], e: Float[Array, "B F #M D"]) -> Float[Array, "B F M D"]:
    return table[...].astype(jnp.float32) + e
