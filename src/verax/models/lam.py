"""LAM, a sentence encoder: MiniLM's embeddings and feed-forward blocks around layers of a hierarchical delta rule.

Published in PyTorch (Qonsult1001/arxiv, folder LAM) and as SAID-LAM-v1. This file follows its equations and has its
parameter names. `LamConfig.rule` selects the layer: as published, faults included, or corrected (docs/lam.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value
from verax.files import JsonObject
from verax.models.bert import BertOutput
from verax.nn import Embedding, LayerNorm, Linear, fused_linear
from verax.nn.layers import INIT_STD
from verax.ops.hierarchical import HierarchicalState, Perceptron, ResonanceFlux

__all__ = ["EnhancedHierarchicalDeltaNet", "HierarchicalGatedDeltaNet", "LamConfig", "LamModel", "LamState", "Rule"]

Rule = Literal["hierarchical", "local", "gated"]

CHUNK_SIZES = {"hierarchical": 64, "local": 128}
"""Tokens in a chunk of each published rule, if the checkpoint has no `chunk_size`."""

PAD_FROM, PAD_TO = 64, 32
"""Padding of the published layer: sequences of at least `PAD_FROM` tokens become a multiple of `PAD_TO` long."""

Decay = Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")]
"""Part of a memory that a token leaves."""

TAPS = 4
"""Taps of the short convolutions."""

HEAD_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class LamConfig:
    """Sizes and initial values of a model, under their names in config.json and in its `lam_config`."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    layer_norm_eps: Epsilon = 1e-12
    max_position_embeddings: Size = 32768
    """Length of the longest sequence, in tokens."""
    num_positions: Size = 512
    """Rows of MiniLM's table of positions. The rows of a longer sequence are interpolated."""
    type_vocab_size: Size = 2
    rule: Rule = "local"
    """Delta rule: `"hierarchical"` (two states, variant B) or `"local"` (the published package's, variant C), both as
    published; or `"gated"`, the hierarchical gated delta rule, which is causal and independent of padding and batch."""
    chunk_size: Count = 0
    """Tokens in a chunk of a published rule, whose results depend on it; `CHUNK_SIZES` if 0."""
    coupling_interval: Size = 64
    """Tokens of the gated rule after which its two memories are mixed."""
    fast_decay_init: Decay = 0.3
    slow_decay_init: Decay = 0.85
    allow_neg_eigval: bool = False
    """True if beta reaches 2 instead of 1."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LamConfig:
        """Read a config.json of `model_type` lam."""
        values = read_fields(config, cls, _SIZES)
        for key, only in _ONLY.items():
            if config.get(key, only) != only:
                raise UnsupportedModelError(f"{key} {config[key]!r} is not supported; lam models have {only!r}")
        for key, same in _SYNONYMS.items():
            if key in config and config[key] != config[same]:
                raise UnsupportedModelError(f"config.json has {key} {config[key]} and {same} {config[same]}")
        layer = JsonObject(read_value(config, "lam_config", dict, {}), f"{file_of(config)}: lam_config")
        for key, only in _DESCRIPTIONS.items():
            if layer.pop(key, only) != only:
                raise UnsupportedModelError(f"lam_config.{key} is not supported unless it is {only!r}")
        unknown = sorted(set(layer) - set(_LAYER))
        if unknown:
            raise UnsupportedModelError(f"lam_config has unknown {', '.join(unknown)}; known are {', '.join(_LAYER)}")
        if layer.get("rule", "local") not in get_args(Rule):
            known = ", ".join(get_args(Rule))
            raise UnsupportedModelError(f"rule {layer['rule']!r} is not supported; there are {known}")
        values |= read_fields(layer, cls, _LAYER)
        values.setdefault("num_positions", min(512, values.get("max_position_embeddings", 512)))
        read = cls(**values)
        check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        return read


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("layer_norm_eps", "max_position_embeddings", "num_positions", "type_vocab_size"),
)
_LAYER = ("rule", "chunk_size", "coupling_interval", "fast_decay_init", "slow_decay_init", "allow_neg_eigval")
_ONLY = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
_SYNONYMS = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}
_DESCRIPTIONS = {
    "use_hierarchical_decay": True,
    "use_enhanced_flux": True,
    "complexity": "O(n)",
    "memory_type": "dual_state",
}
"""Entries of `lam_config` that describe a published model, with their only value."""


class LamState(NamedTuple):
    """State of a `HierarchicalGatedDeltaNet` after a piece of a sequence, from which the next piece continues."""

    convolution: Float[Array, "B taps C"]
    """Last inputs of the three convolutions, concatenated along channels."""
    rule: HierarchicalState


class ShortConvolution(nnx.Module):
    """Depthwise convolution of four taps, then SiLU, in float32. The caller pads its inputs."""

    def __init__(self, channels: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        bound = TAPS**-0.5
        new = lambda *shape: nnx.Param(jax.random.uniform(rngs.params(), shape, dtype, -bound, bound))
        self.conv = nnx.Dict(weight=new(channels, 1, TAPS), bias=new(channels))

    def __call__(self, x: Float[Array, "B S C"]) -> Float[Array, "B T C"]:
        """Outputs `[B, T, C]` of inputs `[B, T + 3, C]`: output t depends on inputs t to t + 3."""
        weight, bias = self.conv.weight[...].astype(x.dtype), self.conv.bias[...].astype(x.dtype)
        T = x.shape[1] - TAPS + 1
        return jax.nn.silu(sum((x[:, j : j + T] * weight[:, 0, j] for j in range(TAPS)), start=bias))


class TwoLayers(nnx.Module):
    """Perceptron of two layers, under the keys 0 and 2: PyTorch's `Sequential` counts the activation between them.

    The rules take arrays, so each layer holds plain parameters: the weight of a `Linear` may be packed.
    """

    def __init__(self, size_in: int, hidden: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        for key, shape in (("0", (hidden, size_in)), ("2", (1, hidden))):
            weight = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, dtype))
            setattr(self, key, nnx.Dict(weight=weight, bias=nnx.Param(jnp.zeros(shape[0], dtype))))

    def weights(self) -> Perceptron:
        """Weights as arrays, for the delta rules of `ops`."""
        layers = [getattr(self, key) for key in ("0", "2")]
        return Perceptron(*(w[...] for layer in layers for w in (layer.weight, layer.bias)))


class FluxParameters(nnx.Module):
    """Parameters of `resonance_flux`: a bilinear form and a temperature of each head, and two shared perceptrons."""

    def __init__(self, heads: int, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        bound = 0.1 * math.sqrt(6 / (2 * size * heads))
        self.W_bilinear = nnx.Param(jax.random.uniform(rngs.params(), (heads, size, size), dtype, -bound, bound))
        self.temp = nnx.Param(jnp.full(heads, math.sqrt(size), dtype))
        self.flux_net = TwoLayers(2 * size + 1, size // 2, dtype=dtype, rngs=rngs)
        self.token_flux_proj = TwoLayers(2 * size, size // 2, dtype=dtype, rngs=rngs)

    def weights(self) -> ResonanceFlux:
        """Weights as arrays, for the delta rules of `ops`."""
        return ResonanceFlux(
            self.W_bilinear[...], self.temp[...], self.flux_net.weights(), self.token_flux_proj.weights()
        )


class HeadNorm(nnx.Module):
    """RMS normalisation of each head. `gate` is in the checkpoints but not used."""

    def __init__(self, size: int, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.gate = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise the last axis."""
        return ops.rms_norm(x, self.weight[...], HEAD_NORM_EPSILON)


class EnhancedHierarchicalDeltaNet(nnx.Module):
    """Published layer, under its published parameter names: rule `hierarchical` (variant B) or `local` (C).

    A sentence's result depends on its padding and its batch, for three reasons: the convolutions include the next
    token, padding is treated as tokens, and `hierarchical` couples the rows of a batch from the third chunk on.
    """

    def __init__(self, config: LamConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        D, H = config.hidden_size, config.num_attention_heads
        self.config = config
        self.q_proj = Linear(D, D, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(D, D, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(D, D, dtype=dtype, rngs=rngs)
        self.b_proj = Linear(D, H, dtype=dtype, rngs=rngs)
        self.q_conv1d = ShortConvolution(D, dtype=dtype, rngs=rngs)
        self.k_conv1d = ShortConvolution(D, dtype=dtype, rngs=rngs)
        self.v_conv1d = ShortConvolution(D, dtype=dtype, rngs=rngs)
        self.fast_decay_proj = Linear(D, H, bias=True, dtype=dtype, rngs=rngs)
        self.fast_decay_bias = nnx.Param(jnp.full(H, math.log(config.fast_decay_init), dtype))
        self.slow_decay_proj = Linear(D, H, bias=True, dtype=dtype, rngs=rngs)
        self.slow_decay_bias = nnx.Param(jnp.full(H, math.log(config.slow_decay_init), dtype))
        self.resonance_flux = FluxParameters(H, D // H, dtype=dtype, rngs=rngs)
        self.fast_gate_proj = Linear(D, H, dtype=dtype, rngs=rngs)
        self.slow_gate_proj = Linear(D, H, dtype=dtype, rngs=rngs)
        self.g_proj = Linear(D, D, dtype=dtype, rngs=rngs)
        self.o_norm = HeadNorm(D // H, dtype=dtype)
        self.o_proj = Linear(D, D, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], tuple[Array, Array] | None]:
        """Outputs, and the final fast and slow states (None for `local`), from which no later call can continue."""
        T = x.shape[1]
        if T >= PAD_FROM:
            x = jnp.pad(x, ((0, 0), (0, -T % PAD_TO), (0, 0)))
        qkv, gate = self.project_in(x)
        # Two taps before a token and one after it.
        q, k, v = self.convolve(jnp.pad(qkv, ((0, 0), (2, 1), (0, 0))))
        beta, decays, gates = self.token_gates(x)
        rule = (q, k, v, beta, jax.tree.map(jax.nn.sigmoid, decays), gates, self.resonance_flux.weights())
        chunk_size = self.config.chunk_size or CHUNK_SIZES[self.config.rule]
        if self.config.rule == "local":
            (out, _), states = ops.local_delta_rule(*rule, chunk_size=chunk_size), None
        else:
            out, states = ops.hierarchical_delta_rule(*rule, chunk_size=chunk_size)
        return self.project_out(out, gate)[:, :T], states

    def project_in(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T C"], Float[Array, "B T D"]]:
        """Queries, keys and values, concatenated `[B, T, 3 D]`, and the logits of the output gate `[B, T, D]`."""
        *qkv, gate = fused_linear(x, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        return jnp.concatenate(qkv, axis=-1), gate

    def convolve(self, qkv: Float[Array, "B S C"]) -> list[Float[Array, "B T H K"]]:
        """Queries, keys and values `[B, T, H, K]` after the convolutions, from `[B, T + 3, 3 D]`."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        pieces = (conv(piece) for conv, piece in zip(convs, jnp.split(qkv, 3, axis=-1), strict=True))
        heads = self.config.num_attention_heads
        return [piece.reshape(*piece.shape[:2], heads, piece.shape[2] // heads) for piece in pieces]

    def token_gates(self, x: Float[Array, "B T D"]) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """Betas, logits of the decays (fast, slow), and output gates (fast, slow), `[B, T, H]` each."""
        beta, fast, slow, fast_gate, slow_gate = fused_linear(
            x, self.b_proj, self.fast_decay_proj, self.slow_decay_proj, self.fast_gate_proj, self.slow_gate_proj
        )
        decays = (
            fast + self.fast_decay_bias[...].astype(jnp.float32),
            slow + self.slow_decay_bias[...].astype(jnp.float32),
        )
        beta = jax.nn.sigmoid(beta) * (2 if self.config.allow_neg_eigval else 1)
        return beta, decays, (jax.nn.sigmoid(fast_gate), jax.nn.sigmoid(slow_gate))

    def project_out(self, out: Float[Array, "B T H V"], gate: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Layer output: heads normalised, gated, and projected."""
        return self.o_proj(self.o_norm(out).reshape(gate.shape) * jax.nn.sigmoid(gate))


class HierarchicalGatedDeltaNet(EnhancedHierarchicalDeltaNet):
    """Layer of the rule `gated`, with the same parameters: causal, independent of padding and batch, resumable.

    The published layer applies a decay once in a chunk. This one applies its `coupling_interval`-th root at each token.
    """

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]: its state is another
        self, x: Float[Array, "B T D"], lengths: Int[Array, "B"] | None = None, state: LamState | None = None
    ) -> tuple[Float[Array, "B T D"], LamState]:
        """Outputs, and the state from which a later piece of the sequences continues.

        `lengths`: tokens of each row that are not padding; all if None. Outputs of padding mean nothing.
        """
        B, T, D = x.shape
        before = jnp.zeros((B, TAPS - 1, 3 * D), jnp.float32) if state is None else state.convolution
        qkv, gate = self.project_in(x)
        qkv = jnp.concatenate([before, qkv], axis=1)
        q, k, v = self.convolve(qkv)
        beta, decays, gates = self.token_gates(x)
        interval = self.config.coupling_interval
        fast, slow = (jax.nn.log_sigmoid(decay) / interval for decay in decays)
        out, rule = ops.hierarchical_gated_delta_rule(
            q,
            k,
            v,
            beta,
            (fast, slow),
            gates,
            self.resonance_flux.weights(),
            lengths=lengths,
            initial_state=None if state is None else state.rule,
            output_final_state=True,
            coupling_interval=interval,
        )
        assert rule is not None
        ends = jnp.full((B,), T) if lengths is None else lengths
        tail = jax.vmap(lambda a, n: lax.dynamic_slice_in_dim(a, n, TAPS - 1))(qkv, ends)
        return self.project_out(out, gate), LamState(tail, rule)


class Embeddings(nnx.Module):
    """Word, position and token-type embeddings, summed and normalised. A sentence is all of type 0."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.hidden_size
        self.config = config
        self.word_embeddings = Embedding(config.vocab_size, D, dtype=dtype, rngs=rngs)
        self.position_embeddings = Embedding(config.num_positions, D, dtype=dtype, rngs=rngs)
        self.token_type_embeddings = Embedding(config.type_vocab_size, D, dtype=dtype, rngs=rngs)
        self.LayerNorm = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "#B"]) -> Float[Array, "B T D"]:
        """Embeddings, float32.

        `tokens`: token ids. `lengths`: number of tokens over which the table of positions is interpolated if it is
        shorter than T.
        """
        T, rows = tokens.shape[1], self.config.num_positions
        if rows >= T:
            positions = self.position_embeddings(jnp.arange(T))
        else:
            # The first and the last token keep the first and the last row. In whole numbers, which are exact.
            steps = jnp.maximum(lengths[:, None], rows) - 1
            at = jnp.minimum(jnp.arange(T), steps) * (rows - 1)
            low, part = at // steps, (at % steps / steps)[..., None]
            high = self.position_embeddings(jnp.minimum(low + 1, rows - 1))
            positions = (1 - part) * self.position_embeddings(low) + part * high
        types = self.token_type_embeddings(jnp.zeros(1, jnp.int32))
        return self.LayerNorm(self.word_embeddings(tokens) + positions + types)


class Block(nnx.Module):
    """Rest of a layer around its delta rule: two normalised residual sums, and the feed-forward between them."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.published = config.rule != "gated"
        D, F = config.hidden_size, config.intermediate_size
        self.attention = nnx.Dict(output=nnx.Dict(LayerNorm=LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)))
        self.intermediate = nnx.Dict(dense=Linear(D, F, bias=True, dtype=dtype, rngs=rngs))
        self.output = BertOutput(F, config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mixed: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = self.attention.output.LayerNorm(mixed, x)
        inner = ops.gelu(self.intermediate.dense(x))
        # As published, GELU is applied twice: by MiniLM's module and again by LAM's.
        return self.output(ops.gelu(inner) if self.published else inner, x)


class LamModel(nnx.Module):
    """LAM's encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    ignored_weights = (
        r"^teacher_model\.encoder\.layer\.\d+\.attention\.(self|output\.dense)\.",
        r"position_ids$",
        r"^(embeddings|deltanet_norms|deltanet_ffns|ffn_norms|output_denses|pooler)\.",
    )
    """Patterns of keys that are not loaded: the replaced attention, an old constant, duplicates of the teacher."""

    def __init__(self, config: LamConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        layer = HierarchicalGatedDeltaNet if config.rule == "gated" else EnhancedHierarchicalDeltaNet
        D, depth = config.hidden_size, range(config.num_hidden_layers)
        # Modules taken from MiniLM. The pooler is in the files and in the published number of parameters, but not used.
        self.teacher_model = nnx.Dict(
            embeddings=Embeddings(config, dtype=dtype, rngs=rngs),
            encoder=nnx.Dict(layer=nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in depth])),
            pooler=nnx.Dict(dense=Linear(D, D, bias=True, dtype=dtype, rngs=rngs)),
        )
        self.deltanet_layers = nnx.List([layer(config, dtype=dtype, rngs=rngs) for _ in depth])

    takes_packed_sentences = False
    """True if several sentences may lie in one row."""

    @property
    def depends_on_padding(self) -> bool:
        """True if a sentence's states change with its padding or its batch, as states by the published rules do."""
        return self.config.rule != "gated"

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"] | None = None) -> Float[Array, "B T D"]:
        """Final hidden states, float32. Sentences are padded on the right; the states of padding mean nothing.

        `tokens`: token ids. T is at most `max_position_embeddings`. `lengths`: tokens of each sentence that are not
        padding; all if None. The published rules ignore it, and their results depend on the padding.
        """
        gated = self.config.rule == "gated"
        whole = jnp.full((1,), tokens.shape[1])
        teacher: Any = self.teacher_model
        x = teacher.embeddings(tokens, lengths if gated and lengths is not None else whole)
        for layer, block in zip(self.deltanet_layers, teacher.encoder.layer, strict=True):
            mixed, _ = layer(x, lengths) if isinstance(layer, HierarchicalGatedDeltaNet) else layer(x)
            x = block(x, mixed)
        return x
