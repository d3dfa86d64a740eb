"""Qwen3.5 and Qwen3-Next, text: three gated delta layers for each layer of gated attention, dense or with experts.

Follows transformers' `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM` and `Qwen3NextForCausalLM`; module paths are the
keys of their checkpoints.
The delta layers follow Gated DeltaNet (Yang et al., 2024, arXiv:2412.06464), the gate on attention Qiu et al. (2025,
arXiv:2505.06708).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Size, check_multiple, read_fields, read_layer_types, read_value
from verax.models import qwen3_moe
from verax.models.causal_lm import AttentionFn, RunRecurrent, causal_attention, run_from_zeros, text_config
from verax.models.qwen3 import (
    Attention,
    Qwen3Config,
    Qwen3ForCausalLM,
    Rotary,
    decoder_fields,
    norm,
    split_heads,
)
from verax.models.qwen3_moe import STACKED_EXPERTS, ExpertsConfig
from verax.nn import Linear, RMSNorm, fused_linear
from verax.nn.parallel import own_part
from verax.ops.division import Division

__all__ = ["DeltaState", "Qwen35Config", "Qwen35ForCausalLM"]

ATTENTION, DELTA = "full_attention", "linear_attention"

ROTATED = 0.25
"""Fraction of a head that is rotated, if config.json has none."""


class DeltaState(NamedTuple):
    """State of a delta layer for N sequences, float32 with weights of any dtype.

    Rounding errors of a state would add up over the tokens, since it is never recomputed.
    """

    inputs: Float[Array, "N w C"]
    """Last inputs of the convolution, oldest first; w is its width less 1."""
    memory: Float[Array, "N HV K V"]
    """State of the delta rule: a map from keys to values for each value head."""


class DeltaInputs(NamedTuple):
    """Inputs of a delta layer for each token."""

    qkv: Float[Array, "B T C"]
    """Queries, keys and values, before the convolution."""
    z: Float[Array, "B T V"]
    """Gate."""
    b: Float[Array, "B T HV"]
    """Write strength, before the sigmoid."""
    a: Float[Array, "B T HV"]
    """Decay, before the softplus."""


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear."""

    layer_types: tuple[str, ...]
    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size
    experts: ExpertsConfig | None
    """None if every layer has a feed-forward part."""
    fused_projections: bool
    """Qwen3-Next: a delta layer's q, k, v and z come from one projection, interleaved by key head; b and a likewise."""
    zero_centered_norms: ClassVar[bool] = True
    gated_attention: ClassVar[bool] = True
    divided_delta: bool = True
    """False on devices that cannot divide the key heads: each then has the delta layers whole."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Read a config.json of qwen3_5_text, qwen3_5_moe_text or qwen3_next, or the text part of one."""
        text = text_config(config, head_dim=256)
        family = read_value(text, "model_type", str, None)
        moe = family in ("qwen3_next", "qwen3_5_moe_text")
        if moe and "moe_intermediate_size" in text:  # the only width, if every layer has experts
            text.setdefault("intermediate_size", text["moe_intermediate_size"])
        fields = decoder_fields(text, ops.RotaryConfig.from_hf(text, fraction=ROTATED))
        depth = fields["num_hidden_layers"]
        interval = read_value(text, "full_attention_interval", Size, 4)
        default = [DELTA if (i + 1) % interval else ATTENTION for i in range(depth)]
        if not read_value(text, "attn_output_gate", bool, True):
            raise UnsupportedModelError(f"{family} with attn_output_gate false is not supported")
        sizes = read_fields(text, cls, _REQUIRED)
        names = ("linear_num_value_heads", "linear_num_key_heads")
        check_multiple(text, **{name: sizes[name] for name in names})
        return cls(
            **fields,
            layer_types=read_layer_types(text, depth, default, {ATTENTION, DELTA}),
            **sizes,
            experts=ExpertsConfig.from_hf(text, depth) if moe else None,
            fused_projections=family == "qwen3_next",
        )

    @property
    def value_heads_per_key(self) -> int:
        """Value heads that read one key head, next to each other."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def key_head_channels(self) -> tuple[int, int, int]:
        """Channels of one key head: its query, its key, and the values that read it."""
        return self.linear_key_head_dim, self.linear_key_head_dim, self.value_heads_per_key * self.linear_value_head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values of a delta layer."""
        return self.linear_num_key_heads * sum(self.key_head_channels)

    def new_state(self, layer: int, num_seqs: int) -> DeltaState | None:
        """Zeroed state of a delta layer; None for an attention layer."""
        if self.layer_types[layer] == ATTENTION:
            return None
        size = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        return DeltaState(
            inputs=jnp.zeros((num_seqs, self.linear_conv_kernel_dim - 1, self.convolved), jnp.float32),
            memory=jnp.zeros((num_seqs, *size), jnp.float32),
        )

    def of_prediction_head(self) -> Any:
        """Configuration of the prediction head's layer, which attends and has experts if the others do."""
        depth, experts = self.num_hidden_layers, self.experts
        if experts is not None:
            experts = replace(experts, layers=experts.layers | {depth})
        return replace(super().of_prediction_head(), layer_types=(*self.layer_types, ATTENTION), experts=experts)

    def on_devices(self, devices: int) -> Qwen35Config:
        """Configuration on `devices` devices, which divide delta layers by key heads if they can."""
        return replace(self, divided_delta=self.linear_num_key_heads % devices == 0)

    def state_axes(self, layer: int) -> DeltaState | None:
        """Axes of channels and of value heads, which devices divide; None for a state that each device has whole."""
        axes: dict[str, Any] = {"inputs": 2, "memory": 1}
        return DeltaState(**axes) if self.divided_delta and self.layer_types[layer] == DELTA else None


_REQUIRED = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


class GatedDeltaNet(nnx.Module):
    """The gated delta rule over short convolutions of the input, normalised and gated by head; a `ReplayableLayer`.

    Each of several devices has some of the key heads, and the value heads that read them. The projections of b and a
    are whole: they have a row for each value head, too few for quantised weights, which store 16 rows together.
    """

    def __init__(self, config: Qwen35Config, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        D, HV = config.hidden_size, config.linear_num_value_heads
        values = HV * config.linear_value_head_dim
        K, _, V = config.key_head_channels
        divided = partial(Linear, D, divided="out" if config.divided_delta else None, dtype=dtype, rngs=rngs)
        if config.fused_projections:
            self.in_proj_qkvz = divided(config.convolved + values, unit=2 * K + 2 * V)
            self.in_proj_ba = Linear(D, 2 * HV, dtype=dtype, rngs=rngs)
        else:
            self.in_proj_qkv = divided(config.convolved, unit=(K, K, V))
            self.in_proj_z = divided(values, unit=V)
            self.in_proj_b = Linear(D, HV, dtype=dtype, rngs=rngs)
            self.in_proj_a = Linear(D, HV, dtype=dtype, rngs=rngs)
        taps = config.linear_conv_kernel_dim
        convolution = taps**-0.5 * jax.random.normal(rngs.params(), (config.convolved, 1, taps), dtype)
        self.conv1d = nnx.Dict(weight=nnx.Param(convolution))
        # float32 in bfloat16 models too, as published: a rounded decay is another decay after a thousand tokens.
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (HV,), minval=0.01, maxval=16.0)))
        self.dt_bias = nnx.Param(jnp.ones(HV))
        self.norm = RMSNorm(config.linear_value_head_dim, eps=config.rms_norm_eps, dtype=jnp.float32)
        into = "in" if config.divided_delta else None
        self.out_proj = Linear(values, D, divided=into, unit=V, dtype=dtype, rngs=rngs)

    @property
    def divisions(self) -> Mapping[str, Division]:
        """Division of each divided parameter outside of the projections."""
        if not self.config.divided_delta:
            return {}
        heads = Division(unit=self.config.value_heads_per_key)
        return {"conv1d.weight": Division(unit=self.config.key_head_channels), "A_log": heads, "dt_bias": heads}

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: DeltaState | None = None,
        cu_seqlens: Int[Array, "M"] | None = None,
        slots: ops.StateSlots | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        return self.advance(self.project(x), state, cu_seqlens, slots)

    def advance(
        self,
        projected: DeltaInputs,
        state: DeltaState | None,
        cu_seqlens: Int[Array, "M"] | None,
        slots: ops.StateSlots | None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Outputs and states after tokens, by what `project` makes of them."""
        qkv, z, b, a = projected
        inputs, memory = state or (None, None)
        where: Any = {"cu_seqlens": cu_seqlens, "slots": slots}
        qkv, inputs = ops.short_convolution(qkv, self.conv1d.weight[...], initial_state=inputs, **where)
        config = self.config
        keys = (qkv.shape[-1] - z.shape[-1]) // 2  # of the heads that this device has
        q, k, v = jnp.split(jax.nn.silu(qkv), (keys, 2 * keys), axis=-1)
        q, k = split_heads(q, config.linear_key_head_dim), split_heads(k, config.linear_key_head_dim)
        out, memory = ops.gated_delta_rule(
            q,
            k,
            split_heads(v, config.linear_value_head_dim),
            g=-jnp.exp(self.A_log[...]) * jax.nn.softplus(a + self.dt_bias[...]),
            beta=jax.nn.sigmoid(b),
            initial_state=memory,
            output_final_state=True,
            use_qk_l2norm=True,
            **where,
        )
        out = self.norm(out) * jax.nn.silu(split_heads(z, config.linear_value_head_dim))
        assert memory is not None
        return self.out_proj(out.reshape(*z.shape[:-1], -1)), DeltaState(inputs, memory)

    def project(self, x: Float[Array, "B T D"]) -> DeltaInputs:
        """Inputs of `advance` for each token. Each array has the channels of this device's heads."""
        if not self.config.fused_projections:
            qkv, z, b, a = fused_linear(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        else:
            K, _, V = self.config.key_head_channels
            grouped = split_heads(self.in_proj_qkvz(x), 2 * K + 2 * V)
            parts = jnp.split(grouped, (K, 2 * K, 2 * K + V), axis=-1)
            by_key_head = jnp.split(split_heads(self.in_proj_ba(x), 2 * self.config.value_heads_per_key), 2, axis=-1)
            q, k, v, z, b, a = (part.reshape(*x.shape[:-1], -1) for part in (*parts, *by_key_head))
            qkv = jnp.concatenate([q, k, v], axis=-1)
        return DeltaInputs(qkv, z, own_part(b), own_part(a)) if self.config.divided_delta else DeltaInputs(qkv, z, b, a)


class DecoderLayer(qwen3_moe.DecoderLayer):
    """A delta layer or gated attention, then feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, config: Qwen35Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        if config.layer_types[layer] == DELTA:
            self.linear_attn = GatedDeltaNet(config, dtype=dtype, rngs=rngs)
        else:
            self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp = self.feed_forward(config, layer, dtype=dtype, rngs=rngs)
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn, run_recurrent: RunRecurrent
    ) -> Float[Array, "*B T D"]:
        normed = self.input_layernorm(x)
        if hasattr(self, "linear_attn"):
            x = x + run_recurrent(layer, normed, self.linear_attn)
        else:
            x = x + self.self_attn(normed, rotary, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35ForCausalLM(Qwen3ForCausalLM):
    """The language model: `model(tokens, positions, attend, run_recurrent)` gives hidden states, `logits` scores."""

    layer_class = DecoderLayer

    stacked_weights = STACKED_EXPERTS
    """Keys of single experts, as Qwen3-Next has them; Qwen3.5's checkpoints have the stacks."""

    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*B T"] | None = None,
        attend: AttentionFn | None = None,
        run_recurrent: RunRecurrent | None = None,
    ) -> Float[Array, "*B T D"]:
        """Final hidden states, float32.

        Without the functions: `[B, T]` tokens at positions 0..T-1, causal attention, zeroed states.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return self.model(tokens, positions, attend or causal_attention(self.dtype), run_recurrent or run_from_zeros())
