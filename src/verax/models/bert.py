"""BERT's encoder (Devlin et al., 2018, arXiv:1810.04805): the model of MiniLM, BGE, E5, GTE and most sentence encoders.

RoBERTa (arXiv:1907.11692), XLM-RoBERTa (arXiv:1911.02116) and CamemBERT (arXiv:1911.03894) differ in their table of
positions, and in the head of their cross-encoders; ELECTRA (arXiv:2003.10555) in that head, and in embeddings of their
own size; MPNet (arXiv:2004.09297) in a bias of its scores by relative positions; DistilBERT (arXiv:1910.01108) in names
alone. Follows transformers' `BertModel`, `XLMRobertaModel`, `ElectraModel`, `MPNetModel` and `DistilBertModel`; module
paths are BERT's keys. The pooler is loaded where a classifier stands on it; sentence encoders do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from verax import ops
from verax.errors import UnsupportedModelError
from verax.fields import Count, Depth, Epsilon, Size, check_multiple, file_of, read_fields, read_value
from verax.models.umt5 import position_rows
from verax.nn import Embedding, LayerNorm, Linear, Sentences, fused_gelu_mlp, fused_linear
from verax.ops.attention import biased_attention

__all__ = [
    "ACTIVATIONS",
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "DistilBertForMaskedLM",
    "DistilBertModel",
    "ElectraForSequenceClassification",
    "ElectraModel",
    "MPNetForMaskedLM",
    "MPNetModel",
    "RobertaForSequenceClassification",
]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": ops.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def check_activation(name: str, key: str = "hidden_act") -> None:
    """Check the name of an activation function in a config.json, which has it under `key`."""
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(f"{key} {name!r} is not supported; those supported are {known}")


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a model, under their names in config.json."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-12
    max_position_embeddings: Size = 512
    """Length of the longest sequence, in tokens."""
    type_vocab_size: Count = 2
    first_position: Count = 0
    """Row of the first token's position in the table: in RoBERTa that after the padding token's, which has its id."""
    embedding_size: Count = 0
    """Numbers in an embedding of ELECTRA, where that is another size; 0 for `hidden_size`."""
    relative_attention_num_buckets: Count = 0
    """Rows of MPNet's table of relative positions, whose numbers are added to the scores; 0 without such a table."""
    tie_word_embeddings: bool = True
    """False where the head of pre-training has a matrix of its own for its logits."""

    has_position_table: ClassVar[bool] = True
    """True if a table has an embedding of each position."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read a config.json of `model_type` bert, roberta, xlm-roberta, camembert, electra, mpnet or distilbert."""
        family = read_value(config, "model_type", str, "bert")
        positions = config.get("position_embedding_type") or "absolute"
        decoder = read_value(config, "is_decoder", bool, False)
        if positions != "absolute" or decoder:
            what = "a decoder" if decoder else f"position_embedding_type {positions!r}"
            raise UnsupportedModelError(
                f"{family} with {what} is not supported; only encoders with absolute positions are"
            )
        if family == "distilbert":
            names = [*_DISTILBERT, "vocab_size", "max_position_embeddings", "tie_word_embeddings"]
            read = cls(**read_fields(config, cls, names, _DISTILBERT), type_vocab_size=0)
            check_multiple(config, dim=read.hidden_size, n_heads=read.num_attention_heads)
        else:
            read = cls(**read_fields(config, cls, _FIELDS))
            check_multiple(config, hidden_size=read.hidden_size, num_attention_heads=read.num_attention_heads)
        check_activation(read.hidden_act, "activation" if family == "distilbert" else "hidden_act")
        if family == "mpnet":
            buckets = read_value(config, "relative_attention_num_buckets", Size, _MPNET_BUCKETS)
            if buckets != _MPNET_BUCKETS:  # transformers reads the size of the table, and always fills this many rows
                raise UnsupportedModelError(
                    f"{file_of(config)}: relative_attention_num_buckets {buckets} is not supported; {_MPNET_BUCKETS} is"
                )
            read = replace(_roberta(read, 2), relative_attention_num_buckets=buckets, type_vocab_size=0)
        elif family in ("roberta", "xlm-roberta", "camembert"):
            read = _roberta(read, read_value(config, "pad_token_id", Count, 1) + 1)
        elif family == "electra":
            size = read_value(config, "embedding_size", Size, 128)
            read = replace(read, embedding_size=0 if size == read.hidden_size else size)
        return read


_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")
_FIELDS += ("layer_norm_eps", "max_position_embeddings", "type_vocab_size", "tie_word_embeddings")
_DISTILBERT = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
_DISTILBERT |= {"num_attention_heads": "n_heads", "hidden_act": "activation"}
"""Names of DistilBERT's keys."""

_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128
"""Rows of MPNet's table of relative positions, and the distance from which on all keys of a side share one."""


def _roberta(read: BertConfig, first_position: int) -> BertConfig:
    """Configuration of RoBERTa, whose file counts the rows of its table of positions."""
    rows = read.max_position_embeddings
    if rows <= first_position:
        raise UnsupportedModelError(f"max_position_embeddings {rows} leaves no position after row {first_position}")
    return replace(read, max_position_embeddings=rows - first_position, first_position=first_position)


class BertEmbeddings(nnx.Module):
    """Word, position and token-type embeddings, summed and normalised. Families of BERT may lack the last two."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D, types = getattr(config, "embedding_size", 0) or config.hidden_size, config.type_vocab_size
        self.types = types
        self.first_position = getattr(config, "first_position", 0)
        rows = self.first_position + config.max_position_embeddings if config.has_position_table else 0
        self.word_embeddings = Embedding(config.vocab_size, D, dtype=dtype, rngs=rngs)
        self.position_embeddings = Embedding(rows, D, dtype=dtype, rngs=rngs) if rows else None
        self.token_type_embeddings = Embedding(types, D, dtype=dtype, rngs=rngs) if types else None
        self.LayerNorm = LayerNorm(D, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Embeddings; `types` are all 0 if None."""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            if self.first_position:
                positions = _without_padding(tokens == self.first_position - 1, positions)
            x = x + self.position_embeddings(self.first_position + positions)
        if self.token_type_embeddings is not None:
            # A tokenizer may know two types where the model has one.
            given = jnp.zeros((1, 1), jnp.int32) if types is None else jnp.minimum(types, self.types - 1)
            x = x + self.token_type_embeddings(given)
        return self.LayerNorm(x)


def _without_padding(padding: Bool[Array, "B T"], positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions in each sentence of RoBERTa, which does not count padding tokens, not even a text's: theirs are -1."""
    count = jnp.cumsum(padding, axis=1)
    starts = jnp.arange(padding.shape[1]) - positions
    before = jnp.take_along_axis(count - padding, starts, axis=1)
    return jnp.where(padding, -1, positions - (count - before))


class BertSelfAttention(nnx.Module):
    """Attention of every token to all tokens of its sentence."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        D = config.hidden_size
        self.heads = config.num_attention_heads
        self.dtype = jnp.dtype(dtype)
        self.query = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)
        self.key = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)
        self.value = Linear(D, D, bias=True, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"], bias: Float[Array, "*#B #N #T T"] | None = None
    ) -> Float[Array, "B T D"]:
        qkv = fused_linear(x, self.query, self.key, self.value, dtypes=(jnp.float32, self.dtype, self.dtype))
        q, k, v = (y.reshape(*x.shape[:2], self.heads, -1) for y in qkv)
        if bias is not None:
            return biased_attention(q, k, v, bias, segments, q.shape[-1] ** -0.5).reshape(x.shape)
        return ops.attention(q, k, v, causal=False, segments=segments).reshape(x.shape)


class BertOutput(nnx.Module):
    """Projection, residual sum and normalisation."""

    def __init__(self, size_in: int, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = Linear(size_in, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)

    def __call__(self, x: Float[Array, "B T F"], residual: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.LayerNorm(self.dense(x), residual)


class BertAttention(nnx.Module):
    """Self-attention with its output projection."""

    def __init__(self, config: Any, self_class: type[Any], *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.self = self_class(config, dtype=dtype, rngs=rngs)
        self.output = BertOutput(config.hidden_size, config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], *places: Any) -> Float[Array, "B T D"]:
        return self.output(self.self(x, *places), x)


class BertIntermediate(nnx.Module):
    """First half of the feed-forward block."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return self.activation(self.dense(x))


class BertLayer(nnx.Module):
    """Attention, then feed-forward, each normalised after the residual sum."""

    def __init__(self, config: Any, self_class: type[Any], *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = BertAttention(config, self_class, dtype=dtype, rngs=rngs)
        self.intermediate = BertIntermediate(config, dtype=dtype, rngs=rngs)
        self.output = BertOutput(config.intermediate_size, config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], *places: Any) -> Float[Array, "B T D"]:
        """States after the layer. `places`: what its attention takes, such as the tokens' segments."""
        x = self.attention(x, *places)
        up, down = self.intermediate, self.output
        y = fused_gelu_mlp(x, up.dense, down.dense) if up.activation is ops.gelu else None
        return down(up(x), x) if y is None else down.LayerNorm(y, x)


class BertPooler(nnx.Module):
    """Summary of a text for a classifier: a layer on the first token's state."""

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, first: Float[Array, "S D"]) -> Float[Array, "S D"]:
        return jnp.tanh(self.dense(first))


class BertModel(nnx.Module):
    """The encoder, from tokens to hidden states.

    Matmuls take inputs that are rounded to the weights' dtype. Everything between them is float32.
    """

    hides_tokens = True
    """Some tokens of a sentence may be hidden from the others, see `Sentences.hidden`."""

    ignored_weights = (r"^((bert|roberta)\.)?pooler\.", r"^(cls|lm_head)\.", r"position_ids$")
    """Patterns of keys that are not loaded: the pooler, heads of pre-training, a constant of old checkpoints."""

    key_aliases = (
        (r"^", "bert."),
        (r"^", "roberta."),
        (r"LayerNorm\.weight$", "LayerNorm.gamma"),
        (r"LayerNorm\.bias$", "LayerNorm.beta"),
        (r"^(.*LayerNorm)\.weight$", r"bert.\1.gamma"),
        (r"^(.*LayerNorm)\.bias$", r"bert.\1.beta"),
    )
    """Other keys of the same weights: under `bert.` or `roberta.` with a head, and the keys of the first releases."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs, has_pooler: bool = False):
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype=dtype, rngs=rngs)
        if size := config.embedding_size:
            self.embeddings_project = Linear(size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        layers = [BertLayer(config, BertSelfAttention, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        parts: dict[str, Any] = {"layer": nnx.List(layers)}
        if buckets := config.relative_attention_num_buckets:
            parts["relative_attention_bias"] = Embedding(buckets, config.num_attention_heads, dtype=dtype, rngs=rngs)
        self.encoder = nnx.Dict(**parts)
        self.pooler = BertPooler(config, dtype=dtype, rngs=rngs) if has_pooler else None

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Final hidden states, float32. The states of a sentence depend on its own tokens only.

        `sentences`: where the sentences lie; of at most `max_position_embeddings` tokens each. `types`: token types, 0
        and 1 for the texts of a pair; all 0 if None.
        """
        x = self.embeddings(tokens, sentences.positions, types)
        if self.config.embedding_size:
            x = self.embeddings_project(x)
        bias = sentences.hidden_bias()
        if buckets := self.config.relative_attention_num_buckets:
            # Tokens of a sentence lie next to each other, so that a distance in the row is one in the sentence.
            rows = jnp.asarray(position_rows(buckets, _MPNET_DISTANCE, tokens.shape[1]))
            relative = self.encoder.relative_attention_bias(rows).transpose(2, 0, 1)
            bias = relative if bias is None else relative + bias
        for layer in self.encoder.layer:
            x = layer(x, sentences.segments, bias)
        return x


class ElectraModel(BertModel):
    """ELECTRA's encoder, from tokens to hidden states."""

    ignored_weights = (r"^(discriminator|generator)_", r"position_ids$")
    """Patterns of keys that are not loaded: heads of pre-training, a constant of old checkpoints."""

    key_aliases = ((r"^", "electra."),)
    """Keys of the same weights in checkpoints with a head."""


_LAYER = r"^encoder\.layer\.(\d+)\."


def _with_prefix(prefix: str, names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Aliases of a layer's keys and of all others, with and without the prefix that checkpoints with a head have."""
    pairs = [(_LAYER + pattern, name) for pattern, name in names.items()] + [(r"^", "")]
    return tuple((pattern, before + name) for before in ("", prefix) for pattern, name in pairs)


class MPNetModel(BertModel):
    """MPNet's encoder, from tokens to hidden states."""

    ignored_weights = (r"^(mpnet\.)?pooler\.", r"^lm_head\.", r"position_ids$")
    """Patterns of keys that are not loaded: the pooler, the head of pre-training, a constant of old checkpoints."""

    key_aliases = _with_prefix(
        "mpnet.",
        {
            r"attention\.self\.(q|k|v)[a-z]+": r"encoder.layer.\1.attention.attn.\2",
            r"attention\.output\.dense": r"encoder.layer.\1.attention.attn.o",
            r"attention\.output\.LayerNorm": r"encoder.layer.\1.attention.LayerNorm",
        },
    )
    """MPNet's names of the weights, with and without a head."""


class DistilBertModel(BertModel):
    """DistilBERT's encoder, from tokens to hidden states."""

    ignored_weights = (r"^vocab_", r"^(pre_)?classifier\.", r"position_ids$")
    """Patterns of keys that are not loaded: heads, a constant of old checkpoints."""

    key_aliases = _with_prefix(
        "distilbert.",
        {
            r"attention\.self\.(q|k|v)[a-z]+": r"transformer.layer.\1.attention.\2_lin",
            r"attention\.output\.dense": r"transformer.layer.\1.attention.out_lin",
            r"attention\.output\.LayerNorm": r"transformer.layer.\1.sa_layer_norm",
            r"intermediate\.dense": r"transformer.layer.\1.ffn.lin1",
            r"output\.dense": r"transformer.layer.\1.ffn.lin2",
            r"output\.LayerNorm": r"transformer.layer.\1.output_layer_norm",
        },
    )
    """DistilBERT's names of the weights, with and without a head."""


class MaskedLMHead(nnx.Module):
    """Logits of the vocabulary at each token, by the word embeddings or a matrix of its own."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        # RoBERTa's and MPNet's heads have GELU, whatever the layers have.
        self.activation = ops.gelu if config.first_position else ACTIVATIONS[config.hidden_act]
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, dtype))
        sizes = config.vocab_size, config.hidden_size
        self.decoder = None if config.tie_word_embeddings else Embedding(*sizes, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], embeddings: Embedding) -> Float[Array, "B T V"]:
        decoder = embeddings if self.decoder is None else self.decoder
        return decoder.attend(self.norm(self.activation(self.dense(x)))) + self.bias[...].astype(jnp.float32)


class BertForMaskedLM(BertModel):
    """BERT or RoBERTa with its head of pre-training, from tokens to logits of the vocabulary."""

    tied_weights: ClassVar[Mapping[str, str]] = {"head.decoder.weight": "embeddings.word_embeddings.weight"}
    """Key of the head's matrix, and of the embeddings that it is where config.json has them tied."""

    key_aliases = (
        (r"^head\.bias$", "cls.predictions.decoder.bias"),
        (r"^head\.bias$", "lm_head.decoder.bias"),
        (r"^head\.(bias|decoder)", r"cls.predictions.\1"),
        (r"^head\.dense", "cls.predictions.transform.dense"),
        (r"^head\.norm", "cls.predictions.transform.LayerNorm"),
        (r"^head\.norm\.weight$", "cls.predictions.transform.LayerNorm.gamma"),
        (r"^head\.norm\.bias$", "cls.predictions.transform.LayerNorm.beta"),
        (r"^head\.norm", "lm_head.layer_norm"),
        (r"^head\.", "lm_head."),
        *BertModel.key_aliases,
    )
    """BERT's and RoBERTa's names of the head's weights, and the encoder's."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.head = MaskedLMHead(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits, float32. The arguments are as in `BertModel`."""
        return self.head(super().__call__(tokens, sentences, types), self.embeddings.word_embeddings)


class MPNetForMaskedLM(BertForMaskedLM):
    """MPNet with its head of pre-training."""

    key_aliases = (*BertForMaskedLM.key_aliases, *MPNetModel.key_aliases)
    """MPNet's names of the weights; the head's are RoBERTa's."""


class DistilBertForMaskedLM(BertForMaskedLM):
    """DistilBERT with its head of pre-training."""

    ignored_weights = (r"^vocab_projector\.weight$", r"position_ids$")
    """Patterns of keys that are not loaded: a tied copy of the embeddings, a constant of old checkpoints."""

    key_aliases = (
        (r"^head\.dense", "vocab_transform"),
        (r"^head\.norm", "vocab_layer_norm"),
        (r"^head\.bias", "vocab_projector.bias"),
        (r"^head\.decoder", "vocab_projector"),
        *DistilBertModel.key_aliases,
    )
    """DistilBERT's names of the weights."""


class BertForSequenceClassification(nnx.Module):
    """A cross-encoder: one logit for a pair of texts, from the pooled first token."""

    ignored_weights = (r"position_ids$",)
    """Patterns of keys that are not loaded: a constant of old checkpoints."""

    key_aliases = ((r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta"))
    """The keys of the first releases."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.bert = BertModel(config, dtype=dtype, rngs=rngs, has_pooler=True)
        self.classifier = Linear(config.hidden_size, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. The arguments are as in `BertModel`."""
        assert self.bert.pooler is not None
        return self.classifier(self.bert.pooler(sentences.first(self.bert(tokens, sentences, types))))[:, 0]


class RobertaClassificationHead(nnx.Module):
    """Two layers on the first token's state."""

    def __init__(self, config: BertConfig, activation: Callable[[Array], Array], *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = activation
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        self.out_proj = Linear(config.hidden_size, 1, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, first: Float[Array, "S D"]) -> Float[Array, "S 1"]:
        return self.out_proj(self.activation(self.dense(first)))


class RobertaForSequenceClassification(nnx.Module):
    """A cross-encoder of RoBERTa or XLM-RoBERTa: one logit for a pair of texts."""

    ignored_weights = (r"position_ids$", r"^roberta\.pooler\.")
    """Patterns of keys that are not loaded: a constant of old checkpoints, and a pooler that the head does not use."""

    key_aliases: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Other keys of the same weights."""

    activation: ClassVar[Any] = staticmethod(jnp.tanh)

    def __init__(self, config: BertConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.roberta = BertModel(config, dtype=dtype, rngs=rngs)
        self.classifier = RobertaClassificationHead(config, self.activation, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]) -> Float[Array, "S"]:
        """Logit of each pair, float32. The arguments are as in `BertModel`."""
        return self.classifier(sentences.first(self.roberta(tokens, sentences, types)))[:, 0]


class ElectraForSequenceClassification(RobertaForSequenceClassification):
    """A cross-encoder of ELECTRA: one logit for a pair of texts."""

    key_aliases = ((r"^roberta\.", "electra."),)
    """ELECTRA's names of the weights."""

    activation = staticmethod(ops.gelu)
