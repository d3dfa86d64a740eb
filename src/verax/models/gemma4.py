"""Gemma 4, text: windows in most layers, larger heads in the others, shared keys, and embeddings for each layer.

Follows transformers' `Gemma4ForCausalLM` and the language model of its `Gemma4ForConditionalGeneration`, whose towers
for images and sound are not read; module paths are the keys of their checkpoints. The last layers attend to the keys
and values of the last layer of their kind before them, and have none of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Count, Positive, Size, check_multiple, read_layer_types, read_value
from verax.files import JsonObject
from verax.models import gemma3, qwen3_moe
from verax.models.causal_lm import AttentionFn, text_config
from verax.models.gemma3 import GELU, ScaledEmbedding, rotary_of_kind
from verax.models.qwen3 import (
    FULL,
    SLIDING,
    Qwen3Config,
    Qwen3ForCausalLM,
    decoder_fields,
    norm,
    split_heads,
)
from verax.models.qwen3_moe import ExpertsConfig
from verax.nn import Linear, fused_linear
from verax.ops.attention import soft_capped
from verax.ops.rope import rotary_settings

__all__ = ["Gemma4Config", "Gemma4ForCausalLM"]

_DEFAULTS = (
    {"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}
    | {"tie_word_embeddings": True, "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
)
_UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0}
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Values that a file may leave out."""

RotaryTables = tuple[Float[Array, "*B T _"], Float[Array, "*B T _"]]
"""cos and sin of the angles of each position."""

KeysAndValues = dict[int, tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]]]
"""Keys and values by layer, for the layers that share them."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Qwen3Config):
    """Sizes and flags, by the names of config.json where these are clear.

    `num_hidden_layers` and `windows` are of the layers with keys and values of their own.
    """

    shared_heads: ClassVar[tuple[str, ...]] = ("num_key_value_heads", "num_global_key_value_heads")
    shared_layers: tuple[int, ...]
    """For each of the layers after these, the layer whose keys and values it attends to."""
    global_head_dim: Size
    """Size of a head in layers without a window."""
    num_global_key_value_heads: Size | None
    """Heads of keys and values in layers without a window; None for as many as in the others."""
    keys_are_values: bool
    """True if layers without a window make values out of the projection of keys."""
    double_wide_mlp: bool
    """True for twice the `intermediate_size` in layers that share keys."""
    hidden_size_per_layer_input: Count
    """Size of a token's embedding for each layer; 0 for none."""
    vocab_size_per_layer_input: Size
    experts: ExpertsConfig | None
    """Experts of every layer, in addition to its feed-forward part."""
    final_logit_softcapping: Positive | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Read a config.json of `model_type` gemma4_text or gemma4_unified_text, or the text part of such a model."""
        unified = read_value(config, "model_type", str) in ("gemma4_unified", "gemma4_unified_text")
        text = text_config(config, **{**_DEFAULTS, **(_UNIFIED if unified else {})})
        text["rope_parameters"] = rotary_settings(text) or _ROPE
        fields = decoder_fields(text, rotary_of_kind(text, FULL, "rope_theta"), GELU)
        depth, shared = fields["num_hidden_layers"], read_value(text, "num_kv_shared_layers", Count, 0)
        kinds = [SLIDING if (i + 1) % 6 else FULL for i in range(depth)]
        kinds = [*read_layer_types(text, depth, kinds, {FULL, SLIDING})[:-1], FULL]  # as transformers has it
        own = depth - shared
        if own < 1 or not set(kinds[own:]) <= set(kinds[:own]):
            raise UnsupportedModelError(
                f"{text.where}: num_kv_shared_layers {shared} of {depth} layers leaves no layer of some kind with keys"
            )
        window = read_value(text, "sliding_window", Size)
        equal = read_value(text, "attention_k_eq_v", bool, False)
        heads, size = _global_heads(text, kinds, fields, equal)
        return cls(
            **{**fields, "num_hidden_layers": own},
            windows=tuple(window if kind == SLIDING else None for kind in kinds[:own]),
            local_rotary=rotary_of_kind(text, SLIDING, "rope_local_base_freq"),
            shared_layers=tuple(max(i for i in range(own) if kinds[i] == kind) for kind in kinds[own:]),
            global_head_dim=size,
            num_global_key_value_heads=heads,
            keys_are_values=equal,
            double_wide_mlp=read_value(text, "use_double_wide_mlp", bool, False),
            hidden_size_per_layer_input=read_value(text, "hidden_size_per_layer_input", Count, 256),
            vocab_size_per_layer_input=read_value(text, "vocab_size_per_layer_input", Size, 262_144),
            experts=_experts(text, depth),
            final_logit_softcapping=read_value(text, "final_logit_softcapping", Positive, None),
        )

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values of a layer, and their size."""
        if self.windows[layer] is not None:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads or self.num_key_value_heads, self.global_head_dim

    def source(self, layer: int) -> int:
        """Layer whose keys and values a layer attends to."""
        own = self.num_hidden_layers
        return layer if layer < own else self.shared_layers[layer - own]


def _global_heads(
    config: JsonObject, kinds: list[str], fields: Mapping[str, Any], equal: bool
) -> tuple[int | None, int]:
    """Heads of keys and values in layers without a window, None for as many as in others, and their size.

    Files have them in `global_head_dim` and `num_global_key_value_heads`, or layer by layer in `per_layer_config`.
    """
    heads, size = fields["num_key_value_heads"], fields["head_dim"]
    changes = {"head_dim": read_value(config, "global_head_dim", Size, 512)}
    if equal:
        changes["num_key_value_heads"] = read_value(config, "num_global_key_value_heads", Size, heads)
    by_layer = read_value(config, "per_layer_config", dict[str, dict[str, Size]], None)
    if by_layer is not None:
        full = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
        by_layer = {name.lstrip("0") or "0": sizes for name, sizes in by_layer.items()}  # numbers, of equal lengths
        changes = by_layer.get(full[0], {})
        expected = {layer: changes for layer in full if changes}
        if by_layer != expected or not changes.keys() <= {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(
                f"{config.where}: per_layer_config other than one head_dim and num_key_value_heads of the layers that "
                f"have no window by layer_types ({', '.join(full)}) is not supported"
            )
    given = changes.get("num_key_value_heads", heads)
    check_multiple(config, num_attention_heads=fields["num_attention_heads"], num_global_key_value_heads=given)
    return None if given == heads else given, changes.get("head_dim", size)


def _experts(config: JsonObject, depth: int) -> ExpertsConfig | None:
    if not read_value(config, "enable_moe_block", bool, False):
        return None
    named = {**config, "num_experts_per_tok": read_value(config, "top_k_experts", Size)}
    return ExpertsConfig.from_hf(JsonObject(named, config.where), depth)


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries, keys and values, the last without a weight."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, N, bias, self.source = config.hidden_size, config.num_attention_heads, config.qkv_bias, config.source(layer)
        K, H = config.layer_heads(self.source)
        self.window, self.size, self.eps = config.windows[self.source], H, config.rms_norm_eps
        own = self.source == layer
        self.q_proj = Linear(D, N * H, bias=bias, divided="out", unit=H, dtype=dtype, rngs=rngs)
        self.q_norm = norm(config, dtype, H)
        new = partial(Linear, D, K * H, bias=bias, divided="out", unit=H, repeats=True, dtype=dtype, rngs=rngs)
        self.k_proj = new() if own else None
        self.k_norm = norm(config, dtype, H) if own else None
        self.v_proj = new() if own and not (config.keys_are_values and self.window is None) else None
        self.o_proj = Linear(N * H, D, bias=config.output_bias, divided="in", unit=H, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: RotaryTables, attend: AttentionFn, kept: KeysAndValues
    ) -> Float[Array, "*B T D"]:
        layers = [layer for layer in (self.q_proj, self.k_proj, self.v_proj) if layer is not None]
        q, *keys = (split_heads(y, self.size) for y in fused_linear(x, *layers))
        q = ops.apply_rotary(self.q_norm(q), *rotary)
        if self.k_norm is not None:
            v = ops.rms_norm(keys[-1], jnp.ones(self.size, jnp.float32), self.eps)
            kept[self.source] = ops.apply_rotary(self.k_norm(keys[0]), *rotary), v
        out = attend(self.source, q, *kept[self.source], window=self.window, scale=1.0)
        return self.o_proj(out.reshape(*out.shape[:-2], -1))


class Router(nnx.Module):
    """Choice of k experts for each token, and their weights, which add up to 1 before each expert's own factor."""

    def __init__(self, config: Gemma4Config, experts: ExpertsConfig, *, rngs: nnx.Rngs):
        self.proj = qwen3_moe.Gate(config.hidden_size, experts.num_experts, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(config.hidden_size, jnp.float32))
        self.per_expert_scale = nnx.Param(jnp.ones(experts.num_experts, jnp.float32))
        self.k, self.eps = experts.num_experts_per_tok, config.rms_norm_eps

    def __call__(self, x: Float[Array, "*B D"]) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
        x = ops.rms_norm(x, self.scale[...] * x.shape[-1] ** -0.5, self.eps)
        weights, experts = jax.lax.top_k(jax.nn.softmax(self.proj(x), axis=-1), self.k)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights * self.per_expert_scale[...][experts], experts


class Experts(qwen3_moe.Experts):
    """Feed-forward parts with GeGLU, of which each token passes k."""

    def gated(self, y: Float[Array, "*B E"]) -> Float[Array, "*B F"]:
        """Gate times input, out of both."""
        gate, up = jnp.split(y, 2, axis=-1)
        return jax.nn.gelu(gate, approximate=True) * up


class DecoderLayer(nnx.Module):
    """Attention, then feed-forward and experts, then the token's embedding for this layer."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, P, experts = config.hidden_size, config.hidden_size_per_layer_input, config.experts
        wide = config.double_wide_mlp and layer >= config.num_hidden_layers
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        sizes = replace(config, intermediate_size=config.intermediate_size * 2) if wide else config
        self.mlp = gemma3.MLP(sizes, dtype=dtype, rngs=rngs)
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)
        self.pre_feedforward_layernorm = norm(config, dtype)
        self.post_feedforward_layernorm = norm(config, dtype)
        self.layer_scalar = nnx.Param(jnp.ones(1, dtype))
        if P:
            self.per_layer_input_gate = Linear(D, P, dtype=dtype, rngs=rngs)
            self.per_layer_projection = Linear(P, D, dtype=dtype, rngs=rngs)
            self.post_per_layer_input_norm = norm(config, dtype)
        self.router = None if experts is None else Router(config, experts, rngs=rngs)
        if experts is not None:
            self.experts = Experts(config, experts, dtype=dtype, rngs=rngs)
            self.post_feedforward_layernorm_1 = norm(config, dtype)
            self.post_feedforward_layernorm_2 = norm(config, dtype)
            self.pre_feedforward_layernorm_2 = norm(config, dtype)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        own: Float[Array, "*B T P"] | None,
        rotary: RotaryTables,
        attend: AttentionFn,
        kept: KeysAndValues,
    ) -> Float[Array, "*B T D"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, attend, kept))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.router is not None:
            weights, experts = self.router(x)
            chosen = self.experts(self.pre_feedforward_layernorm_2(x), experts, weights)
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(chosen)
        x = x + self.post_feedforward_layernorm(y)
        if own is not None:
            gated = jax.nn.gelu(self.per_layer_input_gate(x), approximate=True) * own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        # As in transformers, where it is a buffer, training leaves it as it is.
        return x * jax.lax.stop_gradient(self.layer_scalar[...]).astype(jnp.float32)


class Decoder(nnx.Module):
    """Token embeddings, the layers, and the final norm."""

    def __init__(self, config: Gemma4Config, layer_class: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config, P = config, config.hidden_size_per_layer_input
        D, depth = config.hidden_size, config.num_hidden_layers + len(config.shared_layers)
        divided = config.vocabulary_division
        self.embed_tokens = ScaledEmbedding(config.vocab_size, D, divided=divided, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer_class(config, i, dtype=dtype, rngs=rngs) for i in range(depth)])
        self.norm = norm(config, dtype)
        if P:
            rows = config.vocab_size_per_layer_input
            self.embed_tokens_per_layer = ScaledEmbedding(
                rows, depth * P, scaled_as=P, divided=divided, dtype=dtype, rngs=rngs
            )
            self.per_layer_model_projection = Linear(D, depth * P, dtype=dtype, rngs=rngs)
            self.per_layer_projection_norm = norm(config, dtype, P)

    def __call__(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*B T"], attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        config, kept = self.config, KeysAndValues()
        x = self.embed_tokens(tokens)
        own = self.embed_for_layers(tokens, x) if config.hidden_size_per_layer_input else None
        whole = ops.rotary_tables(positions, config.rotary, config.global_head_dim)
        local = ops.rotary_tables(positions, config.local_rotary or config.rotary, config.head_dim)
        for i, layer in enumerate(self.layers):
            rotary = whole if config.windows[config.source(i)] is None else local
            x = layer(x, None if own is None else own[..., i, :], rotary, attend, kept)
        return self.norm(x)

    def embed_for_layers(self, tokens: Int[Array, "*B T"], x: Float[Array, "*B T D"]) -> Float[Array, "*B T L P"]:
        """Embeddings of tokens for each layer, of the token and of the residual stream before the first layer."""
        P = self.config.hidden_size_per_layer_input
        projected = split_heads(self.per_layer_model_projection(x) * x.shape[-1] ** -0.5, P)
        looked_up = split_heads(self.embed_tokens_per_layer(tokens), P)
        return (self.per_layer_projection_norm(projected) + looked_up) * 2**-0.5


class Gemma4ForCausalLM(Qwen3ForCausalLM):
    """The language model: `Qwen3ForCausalLM` with another decoder and, in most, a cap on its logits."""

    decoder_class: ClassVar[Any] = Decoder
    layer_class = DecoderLayer
    key_aliases = gemma3.Gemma3ForCausalLM.key_aliases
    stacked_weights = qwen3_moe.STACKED_EXPERTS

    @property
    def ignored_weights(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Patterns of keys that are not needed: of towers, and of keys and values in layers that share another's."""
        own, shared = self.config.num_hidden_layers, self.config.shared_layers
        layers = "|".join(str(own + i) for i in range(len(shared))) or "none"
        towers = r"^(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\."
        return towers, rf"\blayers\.({layers})\.self_attn\.[kv]_(proj|norm)\.", re.escape("rotary_emb.inv_freq")

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        return soft_capped(super().logits(hidden), self.config.final_logit_softcapping)
