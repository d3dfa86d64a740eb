"""Linear, Embedding, convolutions, norms and low-rank adapters: parameters as the checkpoint stores them, arithmetic by
`verax.ops`; and the weights of a whole model in the layout in which the processor multiplies them fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from verax import ops
from verax.nn.parallel import concatenate_parts, num_parts, part_index, sum_parts
from verax.ops.conv import Padding, Stride
from verax.ops.division import Division
from verax.ops.linear import rounded_to
from verax.ops.memory import HostMemory


@dataclass(frozen=True)
class LowRank:
    """Low-rank adapters of one linear layer (LoRA, Hu et al., 2021, arXiv:2106.09685), several of them in one batch.

    The matrices of all adapters lie in two stacks. A product with each stack and a choice between them serve a batch
    whose tokens use different adapters, as in S-LoRA (arXiv:2311.03285). The inner width is small, so that computing
    all adapters for all tokens costs less than sorting the tokens. R is the number of adapters times their rank. An
    adapter's scale is part of its rows of `up`.
    """

    down: Float[Array, "R D"]
    up: Float[Array, "F R"]
    chosen: Bool[Array, "T R"]
    """True for the rows of `down` that belong to the token's adapter."""

    def change(self, reduced: Float[Array, "*B R"]) -> Float[Array, "*B F"]:
        """Change of the layer's result, of the inputs' products with `down`; the T tokens have any shape B."""
        return ops.linear(jnp.where(self.chosen.reshape(reduced.shape), reduced, 0.0), self.up)


def low_rank_changes(x: Float[Array, "*B D"], adapters: Sequence[LowRank]) -> tuple[Float[Array, "*B F"], ...]:
    """Changes of the results `[*B, F]` of several layers with the same input."""
    reduced = ops.multi_linear(x, [adapter.down for adapter in adapters])
    return tuple(adapter.change(product) for adapter, product in zip(adapters, reduced, strict=True))


INIT_STD = 0.02
"""Standard deviation of fresh weights: GPT-2's, and transformers' `initializer_range`."""


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    return nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, dtype))


class Linear(nnx.Module):
    """`x W^T + b` with `weight [out, in]`: an array, or `ops.QuantizedWeight`, `BlockQuantizedWeight`, `PackedWeight`.

    `divided` says how several devices share it (`nn.parallel`). `"out"`: each computes a part of the outputs. `"in"`:
    each takes a part of the inputs, and the results are summed. `"vocabulary"`: as `"out"`, and the results are
    concatenated. None: each device does all of it.

    Args:
        size_in: inputs, D.
        size_out: outputs, F.
        divided: how devices share the layer.
        unit: outputs that one device must hold together, such as the outputs of a head; with `"in"`, inputs. Several
            numbers for several matrices in one, as in `ops.division.Division`.
        repeats: True if devices may share a unit where there are more of them than units.
    """

    low_rank: LowRank | None = None
    """Adapters whose changes are added to the result. An engine sets them while it traces a step."""

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool = False,
        divided: Literal["out", "in", "vocabulary"] | None = None,
        unit: int | tuple[int, ...] = 1,
        repeats: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (size_out, size_in), dtype)
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None
        self.divided = divided
        self.unit = unit
        self.repeats = repeats

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of each divided parameter."""
        if self.divided is None:
            return {}
        if self.divided == "in":
            return {"weight": Division(axis=1, unit=self.unit)}
        rows = Division(unit=self.unit, repeats=self.repeats)
        return {"weight": rows} if self.bias is None else {"weight": rows, "bias": rows}

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        """Map the last axis."""
        bias = None if self.bias is None else self.bias[...]
        partial = self.divided == "in" and num_parts() > 1  # the bias is added once, to the sum
        y = ops.linear(x, self.weight.get_value(), None if partial else bias)
        if self.low_rank is not None:
            y = y + low_rank_changes(x, [self.low_rank])[0]
        if partial:
            y = sum_parts(y)
            return y if bias is None else y + bias.astype(jnp.float32)
        return concatenate_parts(y) if self.divided == "vocabulary" else y


def fused_linear(
    x: Float[Array, "*B D"], *layers: Linear, dtypes: Sequence[DTypeLike] | None = None
) -> tuple[Array, ...]:
    """Results `layer(x)`, `[*B, F]`, of several layers, in one operation where there is a fast implementation of it.

    They are rounded to `dtypes`, or stay float32. Layers that are divided must be divided by `"out"`.
    """
    weights = [layer.weight.get_value() for layer in layers]
    if ops.multi_linear.select(x, weights).is_reference:
        # so that a trace of the model has each layer's result
        return rounded_to((layer(x) for layer in layers), dtypes)
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    adapters = [layer.low_rank for layer in layers if layer.low_rank is not None]
    if not adapters:
        return ops.multi_linear(x, weights, biases, dtypes)
    ys = zip(layers, ops.multi_linear(x, weights, biases), strict=True)
    changes = iter(low_rank_changes(x, adapters))
    return rounded_to((y if layer.low_rank is None else y + next(changes) for layer, y in ys), dtypes)


def fused_gelu_mlp(
    x: Float[Array, "*B D"], up: Linear, down: Linear, *, approximate: bool = False
) -> Float[Array, "*B F"] | None:
    """Result `down(gelu(up(x)))` where there is a fast implementation of it in one operation.

    Elsewhere None: the caller then calls its modules, so that a trace of the model has the result of each. The layers
    must not be divided. `approximate` GELU is by tanh.
    """
    weights = up.weight.get_value(), down.weight.get_value()
    biases = [None if layer.bias is None else layer.bias[...] for layer in (up, down)]
    if up.low_rank is not None or down.low_rank is not None:
        return None
    if ops.gelu_mlp.select(x, *weights, *biases).is_reference:
        return None
    return ops.gelu_mlp(x, *weights, *biases, approximate=approximate)


def fused_swiglu(x: Float[Array, "*B D"], gate: Linear, up: Linear) -> Float[Array, "*B F"]:
    """Result `silu(gate(x)) * up(x)`, in one operation where there is a fast implementation of it.

    Layers that are divided must be divided by `"out"`.
    """
    weights = gate.weight.get_value(), up.weight.get_value()
    biases = [None if layer.bias is None else layer.bias[...] for layer in (gate, up)]
    adapted = gate.low_rank is not None or up.low_rank is not None
    if adapted or ops.swiglu.select(x, *weights, *biases).is_reference:
        gated, y = fused_linear(x, gate, up)
        return jax.nn.silu(gated) * y
    return ops.swiglu(x, *weights, *biases)


def split_swiglu(x: Float[Array, "*B D"], gate_up: Linear) -> Float[Array, "*B F"]:
    """Result `silu(gate(x)) * up(x)` of a layer that has the rows of `gate` above the rows of `up`."""
    gate, up = jnp.split(gate_up(x), 2, axis=-1)
    return jax.nn.silu(gate) * up


class Embedding(nnx.Module):
    """Rows of `weight [V, D]` by token, in float32; `attend` multiplies by its transpose (a tied output head).

    The weight is an array, an `ops.QuantizedWeight` or `ops.BlockQuantizedWeight`, of which single rows are
    dequantised, or an `ops.PackedWeight`. With `divided="vocabulary"` each of several devices holds the rows of a part
    of the tokens (`nn.parallel`).
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        divided: Literal["vocabulary"] | None = None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (vocab_size, size), dtype)
        self.divided = divided

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of each divided parameter."""
        return {} if self.divided is None else {"weight": Division()}

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Look tokens up."""
        if self.divided is None or num_parts() == 1:
            return self._rows(tokens)
        size = self.weight.get_value().shape[0]
        at = tokens - part_index() * size
        here = (at >= 0) & (at < size)  # one device has the row, and the others add zeros
        return sum_parts(jnp.where(here[..., None], self._rows(jnp.clip(at, 0, size - 1)), 0.0))

    def _rows(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        weight = self.weight.get_value()
        if isinstance(weight, ops.QuantizedWeight | ops.BlockQuantizedWeight | ops.PackedWeight):
            return weight.rows(tokens)
        return weight[tokens].astype(jnp.float32)

    def attend(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Score each token against `x`."""
        y = ops.linear(x, self.weight.get_value())
        return y if self.divided is None else concatenate_parts(y)


def _kernel(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param[Array]:
    """Fresh weights with the variance of PyTorch's: a third of one over the number of products in a sum."""
    return nnx.Param((3 * math.prod(shape[1:])) ** -0.5 * jax.random.normal(rngs.params(), shape, dtype))


class _Convolution(nnx.Module):
    """Weight `[out, in, *kernel]`, bias, stride and padding of a convolution."""

    def __init__(
        self,
        size_in: int,
        size_out: int,
        kernel: tuple[int, ...],
        *,
        stride: Stride = 1,
        padding: Padding = 0,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.stride = stride
        self.padding = padding
        self.weight = _kernel(rngs, (size_out, size_in, *kernel), dtype)
        self.bias = nnx.Param(jnp.zeros(size_out, dtype))


class Conv2d(_Convolution):
    """Convolution of images with `weight [out, in, kh, kw]` and a bias; in the dtype of its input."""

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B Hout Wout O"]:
        """Convolve each image."""
        return ops.conv2d(x, self.weight[...], self.bias[...], stride=self.stride, padding=self.padding)


class CausalConv3d(_Convolution):
    """Convolution of frames, none of which sees a later one, with `weight [out, in, kt, kh, kw]` and a bias."""

    def __call__(
        self, x: Float[Array, "B T H W C"], before: Float[Array, "B P H W C"] | None = None
    ) -> Float[Array, "B Tout Hout Wout O"]:
        """Convolve the frames of `x` after the frames `before`, which are `kt - 1` frames of zeros if None.

        The layer's `padding` surrounds each frame.
        """
        return ops.conv3d(x, self.weight[...], self.bias[...], stride=self.stride, padding=self.padding, cache=before)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32; `zero_centered` weights are what is added to 1."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike, zero_centered: bool = False):
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nnx.Param(jnp.zeros(size, dtype) if zero_centered else jnp.ones(size, dtype))

    @property
    def scale(self) -> Float[Array, "D"]:
        """Factors of the normalised numbers, `[D]`."""
        weight = self.weight[...]
        return 1.0 + weight.astype(jnp.float32) if self.zero_centered else weight

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise the last axis."""
        return ops.rms_norm(x, self.scale, self.eps)


class DividedRMSNorm(RMSNorm):
    """Root-mean-square normalisation over the heads of all devices, each of which has some.

    `unit` and `repeats` are as in `Linear`. A head that several devices share counts for each: the mean is the same.
    """

    def __init__(self, size: int, *, eps: float, unit: int, repeats: bool = False, dtype: DTypeLike):
        super().__init__(size, eps=eps, dtype=dtype)
        self.unit = unit
        self.repeats = repeats

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of the weight."""
        return {"weight": Division(unit=self.unit, repeats=self.repeats)}

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise the last axis, of which this is the device's part."""
        if num_parts() == 1:
            return super().__call__(x)
        total = sum_parts(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
        scale = jax.lax.rsqrt(total / (x.shape[-1] * num_parts()) + self.eps)
        return x * scale * self.weight[...].astype(jnp.float32)


class LayerNorm(nnx.Module):
    """Normalisation by mean and variance over the last axis, with a weight and mostly a bias, in float32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike, bias: bool = True):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*B D"], residual: Float[Array, "*B D"] | None = None) -> Float[Array, "*B D"]:
        """Normalise the last axis of x, or of the sum of x and a residual."""
        weight = self.weight[...]
        bias = jnp.zeros_like(weight) if self.bias is None else self.bias[...]
        return ops.layer_norm(x, weight, bias, self.eps, residual)


class Sequential(nnx.List):
    """Modules and functions applied in turn; a module's name is its place, as in PyTorch's `Sequential`."""

    def __call__(self, x: Array) -> Array:
        """Apply the modules and functions in turn; return the last result."""
        for apply in self:
            x = apply(x)
        return x


def pack_linear_weights(model: Any, *, few_rows: bool = False) -> None:
    """Replace the weights of linear layers by those that `ops.pack_weight` makes of them, in place.

    Weights are packed one after the other, so that both forms are in memory of one weight only.

    `few_rows`: True for a language model, whose decode steps have few rows. A table of embeddings that is its output
    head too (`is_tied_head`) is packed as well.
    """
    pack, memory = jax.jit(ops.pack_weight, static_argnames="few_rows"), HostMemory()
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear) or (few_rows and isinstance(layer, Embedding) and is_tied_head(model, layer)):
            weight = layer.weight.get_value()
            if not ops.pack_weight.select(weight, few_rows=few_rows).is_reference:  # else it would be a copy
                packed = pack(weight, few_rows=few_rows)
                layer.weight = nnx.Param[Any](jax.tree.map(memory.moved, packed))


def packed_copy(model: Any, *, few_rows: bool = False) -> Any:
    """Model with packed weights in modules of its own. The modules of `model` keep the arrays that they have.

    The arguments are as in `pack_linear_weights`.
    """
    copy = nnx.merge(*nnx.split(model))
    pack_linear_weights(copy, few_rows=few_rows)
    return copy


def is_tied_head(model: Any, table: Embedding) -> bool:
    """True if a table of embeddings is the output head of its model too.

    `model.config.tie_word_embeddings` says so. Without a configuration, or that field in it, no table is a head.
    """
    config: Any = getattr(model, "config", None)
    tied = getattr(config, "tie_word_embeddings", False)
    return tied and table.weight.get_value().shape[0] == config.vocab_size
