"""Qwen3, Qwen2/Qwen2.5, Llama 3.x and Mistral: decoder-only transformers that differ by a few flags.

The other families of language models are made of the parts of this file: a family's own file reads its config.json and
replaces what differs.

Follows transformers' `Qwen3ForCausalLM`, `Qwen2ForCausalLM`, `LlamaForCausalLM` and `MistralForCausalLM`; module paths
are the keys of their checkpoints. Reports: Qwen3 (arXiv:2505.09388), Qwen2 (arXiv:2407.10671), Llama 3
(arXiv:2407.21783), Mistral 7B (arXiv:2310.06825).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import (
    MAX_SIZE,
    Count,
    Depth,
    Epsilon,
    Size,
    check_multiple,
    file_of,
    read_fields,
    read_layer_types,
    read_value,
)
from verax.models.causal_lm import AttentionFn, RunRecurrent, causal_attention, text_config
from verax.nn import Embedding, Linear, RMSNorm, fused_linear, fused_swiglu

__all__ = ["PredictionHead", "Qwen3Config", "Qwen3ForCausalLM"]

FULL, SLIDING = "full_attention", "sliding_attention"

Rotary = tuple[Float[Array, "*B T _"], ...] | None
"""cos and sin of the angles of each position, and what a family adds to them; None in a layer without positions."""


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes and flags of the family, by the names of config.json where these are clear."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Epsilon
    rotary: ops.RotaryConfig
    tie_word_embeddings: bool
    max_position_embeddings: Size
    qk_norm: bool = True
    """Qwen3: RMSNorm on each head of q and k."""
    qkv_bias: bool = False
    """Qwen2: bias on q, k and v. Llama's `attention_bias` adds one on the output as well."""
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[Size | None, ...] = ()
    """Sliding window of each layer, None for full attention; empty if no layer has one."""
    local_rotary: ops.RotaryConfig | None = None
    """Rotation in layers that see a window; None for the rotation of the others."""
    vocabulary_division: Literal["vocabulary"] | None = "vocabulary"
    """`divided` of embeddings and output head; None where devices do not divide the vocabulary: each has them whole."""
    num_nextn_predict_layers: Count = 0
    """Layers of the head that predicts further tokens, if the model is loaded with it: 1, or 0."""

    zero_centered_norms: ClassVar[bool] = False
    """True where the weights of norms are added to 1."""
    gated_attention: ClassVar[bool] = False
    """True where each head's output is scaled by a gate, which `q_proj` gives next to the head's query."""
    score_options: ClassVar[Mapping[str, float | None]] = MappingProxyType({})
    """Keywords of `AttentionFn` that all layers share."""

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Window of each layer in tokens; None for a layer that sees everything."""
        return self.windows or (None,) * self.num_hidden_layers

    @property
    def rotaries(self) -> tuple[ops.RotaryConfig | None, ...]:
        """Rotation in each layer, in a context as long as `max_position_embeddings`; None for a layer without one."""
        rotaries = (self.rotary if window is None else self.local_rotary or self.rotary for window in self.windows)
        given = tuple(rotaries) or (self.rotary,) * self.num_hidden_layers
        return tuple(rotary.for_context(self.max_position_embeddings) for rotary in given)

    def of_prediction_head(self) -> Any:
        """Configuration of the prediction head's layer, which follows the others and sees everything."""
        windows = (*self.windows, None) if self.windows else ()
        return replace(self, num_hidden_layers=self.num_hidden_layers + 1, windows=windows)

    def for_context(self, tokens: int) -> Any:
        """Configuration for sequences of at most `tokens` tokens; LongRoPE's rotation depends on the longest."""
        if not self.rotary.long_divisors:
            return self
        return replace(self, max_position_embeddings=min(tokens, self.max_position_embeddings))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read a config.json of `model_type` qwen3, qwen2, llama, mistral or eurobert, or a qwen3_vl one's text part.

        A text's positions are equal along all axes of Qwen3-VL's rotation, which is the plain one then.
        """
        text = text_config(config)
        fields = decoder_fields(text, ops.RotaryConfig.from_hf(text))
        return cls(**fields, windows=_windows(text, fields["num_hidden_layers"]))


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def decoder_fields(
    config: Mapping[str, Any], rotary: ops.RotaryConfig, activation: tuple[Any, ...] = ("hidden_act", "silu")
) -> dict[str, Any]:
    """`Qwen3Config`'s fields from a config.json, as this family and its relatives read them.

    `rotary`: rotation of heads, of layers that see everything. `activation`: key of the activation of feed-forward
    layers, and the values that the family has, the default first.
    """
    key, *known = activation
    if (given := config.get(key, known[0])) not in known:
        raise UnsupportedModelError(f"{key} {given!r} is not supported; this family uses {known[0]!r}")
    family = read_value(config, "model_type", str, "")
    if config.get("per_layer_config") and not family.startswith("gemma4"):
        raise UnsupportedModelError(
            f"{file_of(config)}: per_layer_config is not supported; in this family all layers have the same settings"
        )
    sizes = read_fields(config, Qwen3Config, _REQUIRED)
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_heads = read_value(config, "num_key_value_heads", Size, heads)
    check_multiple(config, num_attention_heads=heads, num_key_value_heads=kv_heads)
    head_dim = read_value(config, "head_dim", Size, 128 if family == "qwen3" else None)
    if head_dim is None:
        check_multiple(config, hidden_size=width, num_attention_heads=heads)
        head_dim = width // heads
    rotated_size = int(head_dim * rotary.fraction)
    if rotated_size < 2 or rotated_size % 2:
        raise UnsupportedModelError(
            f"{file_of(config)}: {rotated_size} numbers of a head are rotated, with head_dim {head_dim} and "
            f"partial_rotary_factor {rotary.fraction}; expected an even number"
        )
    for divisors in filter(None, (rotary.divisors, rotary.long_divisors)):
        if len(divisors) != rotated_size // 2:
            raise CheckpointError(
                f"{file_of(config)}: {len(divisors)} rotary factors do not fit {rotated_size} rotated numbers of a head"
            )
    attention_bias = read_value(config, "attention_bias", bool, False)
    longest = read_value(config, "max_position_embeddings", Size, 32768)
    if rotary.kind == "yarn":  # many files have the length before scaling
        scaling = dict(rotary.scaling)
        scaled = scaling["original_max_position_embeddings"] * scaling["factor"]
        longest = max(longest, int(min(scaled, MAX_SIZE)))
    return dict(
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_value(config, "rms_norm_eps", Epsilon, 1e-5 if family == "eurobert" else 1e-6),
        rotary=rotary,
        tie_word_embeddings=read_value(config, "tie_word_embeddings", bool, False),
        max_position_embeddings=longest,
        qk_norm=family.startswith(("qwen3", "gemma3", "olmo")),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=read_value(config, "mlp_bias", bool, False),
    )


def _windows(config: Mapping[str, Any], depth: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, as transformers reads them; empty if no layer has one."""
    family = config.get("model_type")
    if family in ("mistral", "ministral"):
        windowed = config.get("sliding_window", 0) is not None
    else:
        windowed = read_value(config, "use_sliding_window", bool, False)
    window = read_value(config, "sliding_window", Size) if windowed else None
    # Qwen3-MoE's files have that key too, which nothing reads.
    border = read_value(config, "max_window_layers", Count, 28) if family in ("qwen2", "qwen3", "qwen2_moe") else 0
    if family == "qwen2_moe":
        sliding = [i % 2 == 0 and i < border for i in range(depth)]
    else:
        sliding = [i >= border for i in range(depth)]
    kinds = [SLIDING if window is not None and slides else FULL for slides in sliding]
    known = {FULL, SLIDING}
    if family in ("mistral", "qwen3_moe"):  # whose classes do not read layer_types
        known = {*kinds}
    elif family in ("llama", "eurobert", "qwen3_vl", "qwen3_vl_text"):  # whose classes have no windows
        known = {FULL}
    return layer_windows(config, window, kinds, known)


def layer_windows(
    config: Mapping[str, Any], window: int | None, kinds: Sequence[str], known: Collection[str] = (FULL, SLIDING)
) -> tuple[int | None, ...]:
    """Sliding window of each layer by `layer_types` of a config.json, or by `kinds` without it; empty for no window.

    `window`: tokens that a sliding layer sees; None if such layers are not in use. `known`: kinds that the family has.
    """
    kinds = read_layer_types(config, len(kinds), kinds, known)
    if SLIDING not in kinds:
        return ()
    if window is None:
        raise UnsupportedModelError(f"{file_of(config)} has {SLIDING} layers, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in kinds)


Projected = tuple[
    Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"], Float[Array, "*B T N H"] | None
]
"""Queries, keys and values by head, and the gate of the outputs where there is one."""


def norm(config: Any, dtype: DTypeLike, size: int | None = None) -> RMSNorm:
    """Norm of the residual stream, or of `size` numbers, as the family has it."""
    zero_centered = config.zero_centered_norms
    return RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps, zero_centered=zero_centered, dtype=dtype)


def split_heads(x: Float[Array, "*B D"], size: int) -> Float[Array, "*B N H"]:
    """Heads of `size` numbers out of the last axis."""
    return x.reshape(*x.shape[:-1], -1, size)


def rotated(
    q: Float[Array, "*B T N H"], k: Float[Array, "*B T K H"], rotary: Rotary
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"]]:
    """Queries and keys at their positions."""
    return (q, k) if rotary is None else (ops.apply_rotary(q, *rotary), ops.apply_rotary(k, *rotary))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and, by family, normalised queries and keys, and gated outputs."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config = config
        Q = 2 * H if config.gated_attention else H
        self.q_proj = Linear(D, N * Q, bias=config.qkv_bias, divided="out", unit=Q, dtype=dtype, rngs=rngs)
        kv = partial(Linear, D, K * H, bias=config.qkv_bias, divided="out", unit=H, repeats=True)
        self.k_proj = kv(dtype=dtype, rngs=rngs)
        self.v_proj = kv(dtype=dtype, rngs=rngs)
        self.o_proj = Linear(N * H, D, bias=config.output_bias, divided="in", unit=H, dtype=dtype, rngs=rngs)
        self.q_norm = norm(config, dtype, H) if config.qk_norm else None
        self.k_norm = norm(config, dtype, H) if config.qk_norm else None

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        q, k, v, gate = self.project(x)
        q, k = self.rotate(q, k, rotary)
        out = attend(layer, q, k, v, window=self.config.sliding_windows[layer], **self.score_options())
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*out.shape[:-2], -1))

    def score_options(self) -> Mapping[str, Any]:
        """Keywords of `AttentionFn` in addition to the window."""
        return self.config.score_options

    def project(self, x: Float[Array, "*B T D"]) -> Projected:
        """Queries, keys and values by head; and the gate of the outputs, or None."""
        H, gate = self.config.head_dim, None
        queries, keys, values = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        if self.config.gated_attention:
            q, gate = jnp.split(split_heads(queries, 2 * H), 2, axis=-1)
        else:
            q = split_heads(queries, H)
        return q, split_heads(keys, H), split_heads(values, H), gate

    def rotate(
        self, q: Float[Array, "*B T N H"], k: Float[Array, "*B T K H"], rotary: Rotary
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"]]:
        """Queries and keys, normalised, at their positions."""
        if self.q_norm is None or self.k_norm is None:
            return rotated(q, k, rotary)
        scales, eps = (self.q_norm.scale, self.k_norm.scale), self.q_norm.eps
        if rotary is None or ops.norm_rotary.select(q, k, *scales, *rotary, eps).is_reference:
            # so that a trace of the model has each layer's result
            return rotated(self.q_norm(q), self.k_norm(k), rotary)
        return ops.norm_rotary(q, k, *scales, *rotary, eps)


class MLP(nnx.Module):
    """Gated feed-forward: SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(D, F, bias=bias, divided="out", dtype=dtype, rngs=rngs)
        self.up_proj = Linear(D, F, bias=bias, divided="out", dtype=dtype, rngs=rngs)
        self.down_proj = Linear(F, D, bias=bias, divided="in", dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.down_proj(fused_swiglu(x, self.gate_proj, self.up_proj))


class DecoderLayer(nnx.Module):
    """Attention, then feed-forward, each on a normalised copy of the residual stream."""

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[Any] = MLP

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.self_attn = self.attention_class(config, dtype=dtype, rngs=rngs)
        self.mlp = self.feed_forward(config, layer, dtype=dtype, rngs=rngs)
        self.input_layernorm = norm(config, dtype)
        self.post_attention_layernorm = norm(config, dtype)

    def feed_forward(self, config: Any, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
        """Feed-forward part of a layer."""
        return self.mlp_class(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*B T D"], rotary: Rotary, layer: int, attend: AttentionFn
    ) -> Float[Array, "*B T D"]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Token embedding, layers of a class, and the final norm."""

    embedding_class: ClassVar[type[Embedding]] = Embedding

    def __init__(self, config: Any, layer_class: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        V, D = config.vocab_size, config.hidden_size
        self.embed_tokens = self.embedding_class(V, D, divided=config.vocabulary_division, dtype=dtype, rngs=rngs)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([layer_class(config, i, dtype=dtype, rngs=rngs) for i in layers])
        self.norm = norm(config, dtype)

    def __call__(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*B T"], *mixers: AttentionFn | RunRecurrent
    ) -> Float[Array, "*B T D"]:
        """Hidden states; `mixers` are the functions by which the layers let tokens see each other."""
        x = self.embed(tokens)
        for i, (layer, rotary) in enumerate(zip(self.layers, self.rotary_tables(positions), strict=True)):
            x = layer(x, rotary, i, *mixers)
        return self.norm(x)

    def embed(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
        """Residual stream before the first layer."""
        return self.embed_tokens(tokens)

    def rotary_tables(self, positions: Int[Array, "*B T"]) -> list[Rotary]:
        """Tables of cos and sin for each layer; layers of the same rotation share theirs."""
        rotaries, H = self.config.rotaries, self.config.head_dim
        tables = {rotary: ops.rotary_tables(positions, rotary, H) for rotary in dict.fromkeys(rotaries) if rotary}
        return [tables.get(rotary) for rotary in rotaries]


class PredictionHead(nnx.Module):
    """Head of multi-token prediction (MTP): what the model's final hidden states would be one token later.

    Follows vLLM's `Qwen3NextMultiTokenPredictor`; paths are the keys under `mtp.` of Qwen3-Next's and Qwen3.5's
    checkpoints. From the hidden state at t, after the final norm, and the token at t + 1 it makes a hidden state of
    which the model's own output head predicts the token at t + 2. Applied to its own hidden state and that token, it
    predicts the next one. Report: DeepSeek-V3 (arXiv:2412.19437).
    """

    def __init__(self, config: Any, layer_class: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, within, self.layer = config.hidden_size, config.of_prediction_head(), config.num_hidden_layers
        self.rotary, self.head_dim = within.rotaries[self.layer], config.head_dim
        self.pre_fc_norm_embedding = norm(config, dtype)
        self.pre_fc_norm_hidden = norm(config, dtype)
        self.fc = Linear(2 * D, D, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer_class(within, self.layer, dtype=dtype, rngs=rngs)])
        self.norm = norm(config, dtype)

    def __call__(
        self,
        hidden: Float[Array, "*B T D"],
        embedded: Float[Array, "*B T D"],
        positions: Int[Array, "*B T"],
        *mixers: AttentionFn | RunRecurrent,
    ) -> Float[Array, "*B T D"]:
        """Hidden states one token later, float32.

        `hidden`: final hidden states at `positions`. `embedded`: embeddings of the tokens that follow them. `mixers`:
        as in `Decoder`, whose layers the head's layer follows in number.
        """
        x = jnp.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1)
        rotary = self.rotary and ops.rotary_tables(positions, self.rotary, self.head_dim)
        return self.norm(self.layers[0](self.fc(x), rotary, self.layer, *mixers))


class Qwen3ForCausalLM(nnx.Module):
    """The language model: `model(tokens, positions, attend)` gives hidden states, `model.logits` the vocabulary scores.

    The residual stream and everything between matmuls is float32; matmul inputs are rounded to the weights' dtype.
    """

    ignored_weights = (r"rotary_emb\.inv_freq$", r"^mtp\.", r"^model\.visual\.")
    """Patterns of keys that a model does without: of old checkpoints, of a prediction head that is not in use, and of
    a vision tower."""

    key_aliases = ((r"^model\.", ""), (r"^model\.", "model.language_model."), (r"^model\.", "language_model."))
    """Other keys of the same weights: without a head, and with a vision tower, which has the language model one level
    further down."""

    decoder_class: ClassVar[type[Decoder]] = Decoder
    layer_class: ClassVar[Any] = DecoderLayer

    tied_weights = MappingProxyType({"lm_head.weight": "model.embed_tokens.weight"})
    """Keys whose weights are another key's if `config.tie_word_embeddings` is set."""

    def __init__(self, config: Any, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.model = self.decoder_class(config, self.layer_class, dtype=dtype, rngs=rngs)
        D, V, tied = config.hidden_size, config.vocab_size, config.tie_word_embeddings
        self.lm_head = None if tied else Linear(D, V, divided=config.vocabulary_division, dtype=dtype, rngs=rngs)
        head = lambda: PredictionHead(config, self.layer_class, dtype=dtype, rngs=rngs)
        self.mtp = head() if config.num_nextn_predict_layers else None

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the weights that are not quantised, and of keys and values."""
        return self.model.norm.weight[...].dtype  # embeddings may be quantised

    def __call__(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*B T"] | None = None, attend: AttentionFn | None = None
    ) -> Float[Array, "*B T D"]:
        """Final hidden states, float32. Without `attend`: causal attention over `[B, T]` tokens at positions 0..T-1."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return self.model(tokens, positions, attend or causal_attention(self.dtype))

    def predict(
        self,
        hidden: Float[Array, "*B T D"],
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*B T"],
        *mixers: AttentionFn | RunRecurrent,
    ) -> Float[Array, "*B T D"]:
        """Hidden states one token later than `hidden`, which is at `positions`, by the prediction head.

        `tokens`: tokens at `positions + 1`. `mixers`: as in `Decoder`.
        """
        assert self.mtp is not None
        return self.mtp(hidden, self.model.embed(tokens), positions, *mixers)

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores over the vocabulary, float32."""
        return self.model.embed_tokens.attend(hidden) if self.lm_head is None else self.lm_head(hidden)
