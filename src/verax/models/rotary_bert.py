"""Nomic, GTE and Jina v3 encoders: BERT with rotary positions (arXiv:2104.09864), and mostly a gated feed-forward.

Nomic Embed v1.5 (arXiv:2402.01613) and v2 (arXiv:2502.07972), which has experts in every second layer, GTE's and
Snowflake's multilingual models (arXiv:2407.19669) and jina-embeddings-v3 (arXiv:2409.10173) differ in biases, in their
feed-forward and in the names of their weights. Follows transformers' `NomicBertModel`, `GteModel` and
`JinaEmbeddingsV3Model`, and for v2 the checkpoint's own code; module paths are GTE's keys. No code of a checkpoint is
run: its config.json is read by the names of the published code too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Positive, Size, check_multiple, file_of, read_fields, read_value
from verax.files import JsonObject
from verax.models.bert import ACTIVATIONS, BertEmbeddings, BertPooler, check_activation
from verax.models.qwen3_moe import Gate
from verax.nn import LayerNorm, Linear, Sentences, fused_gelu_mlp, fused_swiglu

__all__ = [
    "GteConfig",
    "GteForSequenceClassification",
    "GteModel",
    "JinaV3Config",
    "JinaV3Model",
    "NomicBertConfig",
    "NomicBertModel",
]

Rotary = tuple[Float[Array, "B T h"], Float[Array, "B T h"]]

_SWITCHES: dict[str, Any] = {
    "causal": False,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "pack_qkv": True,
    "parallel_block": False,
    "position_embedding_type": "rope",
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "use_rms_norm": False,
}
"""Keys of the published code, and the value that is computed here."""

_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}
"""Names of transformers' keys in files of Nomic's own code."""


@dataclass(frozen=True)
class GteConfig:
    """Sizes of a model, under transformers' names in config.json."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    rotary: ops.RotaryConfig
    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-12
    max_position_embeddings: Size = 8192
    type_vocab_size: Count = 1
    attention_bias: bool = True
    gate: str | None = "fused"
    """`"fused"`: one matrix of the input above the gate; `"split"`: two matrices; None: no gate."""
    mlp_bias: bool = True
    """True if the second layer of the feed-forward has a bias; the first has one too if there is no gate."""
    experts: NomicExpertsConfig | None = None
    """Experts of some layers; None if every layer has a feed-forward part."""

    has_position_table: ClassVar[bool] = False
    rope_theta: ClassVar[float] = 160_000.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Read a config.json of `model_type` gte, new, nomic_bert or jina_embeddings_v3."""
        for key, expected in _SWITCHES.items():
            if (given := config.get(key, expected)) is not None and given != expected:
                raise UnsupportedModelError(f"{file_of(config)}: {key} {given!r} is not supported; {expected!r} is")
        values = read_fields(config, cls, _FIELDS)
        hidden_size, heads = values["hidden_size"], values["num_attention_heads"]
        check_multiple(config, hidden_size=hidden_size, num_attention_heads=heads)
        read = cls(**values, rotary=_rotary(config, cls.rope_theta, hidden_size // heads))
        check_activation(read.hidden_act)
        return read


_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
_FIELDS += ("layer_norm_eps", "max_position_embeddings", "type_vocab_size")


@dataclass(frozen=True)
class NomicExpertsConfig:
    """Sizes of the experts of Nomic Embed v2, under their names in config.json."""

    num_experts: Size
    moe_top_k: Size = 1
    moe_every_n_layers: Count = 0
    """Layers 1, 1 + n, 1 + 2 n, ... have experts."""


@dataclass(frozen=True)
class NomicBertConfig(GteConfig):
    """Sizes of Nomic Embed."""

    hidden_act: str = "silu"
    max_position_embeddings: Size = 2048
    type_vocab_size: Count = 2

    attention_bias: bool = False
    gate: str | None = "split"
    mlp_bias: bool = False

    rope_theta: ClassVar[float] = 1000.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Read a config.json of `model_type` nomic_bert, of transformers or of Nomic's own code."""
        named = {key: config[old] for key, old in _NOMIC_KEYS.items() if old in config and key not in config}
        if named.get("hidden_act") == "swiglu":
            named["hidden_act"] = "silu"
        config = JsonObject({**config, **named}, file_of(config))
        heads = read_value(config, "num_attention_heads", Size)
        head_dim = read_value(config, "head_dim", Size, None)
        if head_dim is not None and head_dim * heads != config.get("hidden_size"):
            raise UnsupportedModelError(
                f"{config.where}: head_dim {head_dim} times num_attention_heads {heads} is not hidden_size"
            )
        read = super().from_hf(config)
        biases = {key: read_value(config, key, bool, False) for key in ("mlp_fc1_bias", "mlp_fc2_bias")}
        gate = "split" if config.get("activation_function", "swiglu") == "swiglu" else None
        if len(set(biases.values())) > 1 or (gate and any(biases.values())):
            raise UnsupportedModelError(
                f"{config.where}: mlp_fc1_bias and mlp_fc2_bias {biases}: expected neither, or without a gate both"
            )
        experts = NomicExpertsConfig(**read_fields(config, NomicExpertsConfig)) if config.get("num_experts") else None
        if experts is not None and (gate or experts.moe_every_n_layers < 2 or experts.moe_top_k > experts.num_experts):
            raise UnsupportedModelError(
                f"{config.where}: num_experts {experts.num_experts} is supported without a gate (activation_function "
                "gelu), with moe_every_n_layers from 2 on and moe_top_k up to num_experts"
            )
        return replace(
            read,
            attention_bias=read_value(config, "qkv_proj_bias", bool, False),
            gate=gate,
            mlp_bias=biases["mlp_fc2_bias"],
            experts=experts,
        )


@dataclass(frozen=True)
class JinaV3Config(GteConfig):
    """Sizes of jina-embeddings-v3; `verax.Encoder` reads the adapters of its tasks."""

    layer_norm_eps: Epsilon = 1e-5
    max_position_embeddings: Size = 8194

    gate: str | None = None

    rope_theta: ClassVar[float] = 20_000.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Read a config.json of `model_type` jina_embeddings_v3, or of xlm-roberta with rotary positions."""
        config = JsonObject(dict(config), file_of(config))
        if config.get("position_embedding_type") == "rotary":
            del config["position_embedding_type"]
            config.setdefault("rope_theta", read_value(config, "rotary_emb_base", Positive, cls.rope_theta))
        return super().from_hf(config)


def _rotary(config: Mapping[str, Any], theta: float, head_dim: int) -> ops.RotaryConfig:
    """Rotation of heads, among them the fixed NTK scaling of the published code (https://kexue.fm/archives/9706)."""
    config = JsonObject({"rope_theta": theta, **config}, file_of(config))
    scaling = read_value(config, "rope_scaling", dict, {})
    if config.get("rope_parameters") or scaling.get("type", scaling.get("rope_type")) != "ntk":
        return ops.RotaryConfig.from_hf(config)
    scaling = JsonObject(scaling, f"{config.where}: rope_scaling")
    if scaling.get("mixed_b") is not None:
        raise UnsupportedModelError(f"{scaling.where}: mixed_b is not supported")
    factor = read_value(scaling, "factor", Positive)
    divisors = (factor ** (2 / head_dim),) * (head_dim // 2)
    return ops.RotaryConfig(read_value(config, "rope_theta", Positive) * factor, "divided", divisors=divisors)


class RotaryAttention(nnx.Module):
    """Attention of every token to all tokens of its sentence, by rotary positions."""

    def __init__(self, config: GteConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, bias = config.hidden_size, config.attention_bias
        self.heads = config.num_attention_heads
        self.dtype = jnp.dtype(dtype)
        self.qkv_proj = Linear(D, 3 * D, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(D, D, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], 3, self.heads, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        q, k = ops.apply_rotary(q, *rotary), ops.apply_rotary(k, *rotary)
        out = ops.attention(q, k.astype(self.dtype), v.astype(self.dtype), causal=False, segments=segments)
        return self.o_proj(out.reshape(x.shape))


class RotaryMLP(nnx.Module):
    """Feed-forward: `down(up(x) * act(gate(x)))`, or `down(act(up(x)))` without a gate."""

    def __init__(self, config: GteConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F, kind = config.hidden_size, config.intermediate_size, config.gate
        self.activation = ACTIVATIONS[config.hidden_act]
        self.up_proj = None if kind == "fused" else Linear(D, F, bias=kind is None, dtype=dtype, rngs=rngs)
        self.gate_proj = Linear(D, F, dtype=dtype, rngs=rngs) if kind == "split" else None
        self.up_gate_proj = Linear(D, 2 * F, dtype=dtype, rngs=rngs) if kind == "fused" else None
        self.down_proj = Linear(F, D, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.up_gate_proj is not None:
            up, gate = jnp.split(self.up_gate_proj(x), 2, axis=-1)
            return self.down_proj(up * self.activation(gate))
        assert self.up_proj is not None
        if self.gate_proj is not None:
            if self.activation is ACTIVATIONS["silu"]:
                return self.down_proj(fused_swiglu(x, self.gate_proj, self.up_proj))
            return self.down_proj(self.up_proj(x) * self.activation(self.gate_proj(x)))
        y = fused_gelu_mlp(x, self.up_proj, self.down_proj) if self.activation is ops.gelu else None
        return self.down_proj(self.activation(self.up_proj(x))) if y is None else y


class NomicExperts(nnx.Module):
    """Feed-forward parts `down(act(up(x)))`, of which each token passes k, and one bias for their weighted sum.

    The weights are the probabilities over all experts, which do not add up to 1 for the k largest.
    """

    def __init__(self, config: GteConfig, experts: NomicExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F, E = config.hidden_size, config.intermediate_size, experts.num_experts
        self.k = experts.moe_top_k
        self.activation = ACTIVATIONS[config.hidden_act]
        self.router = Gate(D, E, rngs=rngs)
        self.w1 = nnx.Param(Linear(D, E * F, dtype=dtype, rngs=rngs).weight[...])
        self.w2 = nnx.Param(Linear(D, E * F, dtype=dtype, rngs=rngs).weight[...])
        self.bias = nnx.Param(jnp.zeros(D, dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        weights, experts = jax.lax.top_k(jax.nn.softmax(self.router(x), axis=-1), self.k)
        up, down = (w[...].reshape(self.router.weight.shape[0], -1, x.shape[-1]) for w in (self.w1, self.w2))
        y = self.activation(ops.grouped_linear(x[..., None, :], up, experts))
        y = ops.grouped_linear(y, down.swapaxes(1, 2), experts)
        return jnp.sum(y * weights[..., None], axis=-2) + self.bias[...]


class RotaryLayer(nnx.Module):
    """Attention, then feed-forward, each normalised after the residual sum."""

    def __init__(self, config: GteConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = RotaryAttention(config, dtype=dtype, rngs=rngs)
        self.attn_ln = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
        experts = config.experts
        if experts is not None and index % experts.moe_every_n_layers == 1:
            self.mlp: nnx.Module = NomicExperts(config, experts, dtype=dtype, rngs=rngs)
        else:
            self.mlp = RotaryMLP(config, dtype=dtype, rngs=rngs)
        self.mlp_ln = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"], rotary: Rotary, segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = self.attn_ln(self.attention(x, rotary, segments), x)
        return self.mlp_ln(self.mlp(x), x)


class GteModel(nnx.Module):
    """The encoder, from tokens to hidden states. All tokens have type 0, as the published models are used.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    ignored_weights: tuple[str, ...] = (
        r"^((new|gte|nomic_bert|roberta)\.)?pooler\.",
        r"^(cls|lm_head|classifier)\.",
        r"inv_freq$",
    )
    """Patterns of keys that are not loaded: the pooler, heads of pre-training and of sparse vectors
    (gte-multilingual-base), a constant of old checkpoints."""

    key_aliases: tuple[tuple[str, str], ...] = ((r"^", "new."), (r"^", "gte."))
    """Keys of the same weights in checkpoints with a head."""

    def __init__(self, config: GteConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs, has_pooler: bool = False):
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype=dtype, rngs=rngs)
        layers = [RotaryLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        self.encoder = nnx.Dict(layer=nnx.List(layers))
        self.pooler = BertPooler(config, dtype=dtype, rngs=rngs) if has_pooler else None

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Final hidden states, float32. The arguments are as in `BertModel`."""
        config = self.config
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = ops.rotary_tables(sentences.positions, config.rotary, head_dim)
        x = self.embeddings(tokens, sentences.positions, types)
        for layer in self.encoder.layer:
            x = layer(x, rotary, sentences.segments)
        return x


def _renamed(prefixes: tuple[str, ...], attention: str, **mlp: str) -> tuple[tuple[str, str], ...]:
    """Aliases of GTE's keys in the layout that Nomic and Jina share, by names of theirs."""
    layer, other = r"^encoder\.layer\.(\d+)\.", r"encoder.layers.\1."
    names = {"attention.qkv_proj": f"{attention}.Wqkv", "attention.o_proj": f"{attention}.out_proj"}
    names |= {"attn_ln": "norm1", "mlp_ln": "norm2", **{f"mlp.{name}": f"mlp.{to}" for name, to in mlp.items()}}
    pairs = [(rf"{layer}{name.replace('.', chr(92) + '.')}\.", f"{other}{to}.") for name, to in names.items()]
    pairs += [(r"^embeddings\.LayerNorm\.", "emb_ln."), (r"^embeddings\.(word|token_type)", r"embeddings.\1")]
    return tuple((pattern, prefix + to) for prefix in prefixes for pattern, to in pairs)


class NomicBertModel(GteModel):
    """Nomic's encoder, from tokens to hidden states."""

    key_aliases = (
        *_renamed(("", "nomic_bert.", "bert."), "attn", up_proj="fc11", gate_proj="fc12", down_proj="fc2"),
        *_renamed(("",), "attn", up_proj="fc1", router="router.layer"),
        (r"^encoder\.layer\.(\d+)\.mlp\.(w1|w2)$", r"encoder.layers.\1.mlp.experts.mlp.\2"),
        (r"^encoder\.layer\.(\d+)\.mlp\.bias$", r"encoder.layers.\1.mlp.experts.bias"),
    )
    """Nomic's names of the weights."""


class JinaV3Model(GteModel):
    """jina-embeddings-v3's encoder, from tokens to hidden states."""

    ignored_weights = (*GteModel.ignored_weights, r"\.parametrizations\.weight\.")
    """Patterns of keys that are not loaded, among them the adapters of tasks, which are in the weights by then."""

    key_aliases = _renamed(("", "roberta."), "mixer", up_proj="fc1", down_proj="fc2")
    """Jina's names of the weights."""


class GteForSequenceClassification(nnx.Module):
    """A cross-encoder of GTE: one logit for a pair of texts, from the pooled first token."""

    ignored_weights = (r"inv_freq$",)
    """Patterns of keys that are not loaded: a constant of old checkpoints."""

    key_aliases = ((r"^new\.", "gte."),)
    """transformers' name of the encoder."""

    def __init__(self, config: GteConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.new = GteModel(config, dtype=dtype, rngs=rngs, has_pooler=True)
        self.classifier = Linear(config.hidden_size, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. The arguments are as in `BertModel`."""
        assert self.new.pooler is not None
        return self.classifier(self.new.pooler(sentences.first(self.new(tokens, sentences, types))))[:, 0]
