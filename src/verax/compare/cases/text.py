"""Cases of `verax compare text` and `embed`: a checkpoint in transformers, or LAM in PyTorch, and in verax."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array

from verax import builtin, checkpoint, ops
from verax._optional import require_optional
from verax.checkpoint import Checkpoint
from verax.checkpoint.load import random_weights
from verax.compare.case import Case, Inputs, Side
from verax.compare.outputs import LogitsComparison, VectorsComparison, compare_logits, compare_vectors
from verax.compare.torch_side import torch
from verax.compare.trace import Watch
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.loading import DEQUANTIZE, load_causal_lm, load_model
from verax.models import CausalLM, causal_lm, encoder, hidden_states, is_causal
from verax.models.bert import BertModel
from verax.models.modernbert import ModernBertModel
from verax.nn import Sentences
from verax.text.tokens.tokenizer import Tokenizer

TOKENS = 40
"""Tokens of each row. It differs from every number of heads, so that no axes are mistaken for each other."""

VECTORS = 4
"""Rows of an encoder's tokens: from three texts on there is a nearest one."""

LAM_TOKENS = 192
"""Tokens of each row: three chunks of the published layer."""

RANDOM_TEXT = (
    {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 320, "hidden_size": 64}
    | {"intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True}
    | {"max_position_embeddings": 512}
)
RANDOM_MOE = (
    {**RANDOM_TEXT, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    | {"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [1]}
)
RANDOM_BERT = (
    {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 320, "hidden_size": 48}
    | {"intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 128}
    | {"type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
)
RANDOM = {"tiny": RANDOM_TEXT, "moe": RANDOM_MOE}
"""Configurations of random language models, by size: dense, and one of experts."""
VARIANTS = {"hierarchical": "B", "local": "C"}
"""The published rules of LAM, and what its PyTorch form calls them."""


NOTHING = Inputs()
"""Inputs that give nothing, so that all is random."""


WEIGHTS = (r"(attn|attention|attention\.self|SelfAttention)\[1\]$", r"\.mlp\[1\]$")
"""Outputs of transformers' modules that ours do not have: weights of eager attention, and of gpt-oss's experts."""


def text_case(
    model: str | Path | None, scratch: Path, *, inputs: Inputs = NOTHING, tokens: int | None = None, size: str = "tiny"
) -> Case:
    """A language model in transformers and in verax: logits of every position.

    Both sides have the dequantised weights of a GGUF file, in the dtype of the comparison.

    Args:
        model: a folder, hub id or GGUF file; `"random"` for a small one of random weights; None for the built-in model.
        inputs: texts, or `input_ids` `[B, T]` with an `attention_mask` `[B, T]` of what is padded on the right; random
            tokens if there are neither.
        tokens: number of random tokens in each of two rows.
        size: a random model's: `tiny`, or `moe` with experts.
    """
    lib = transformers()
    if size not in RANDOM:
        raise InvalidParameterError(f"size: expected {' or '.join(RANDOM)}, got {size!r}")
    if model == "random":
        model = _random_folder(RANDOM[size], scratch, causal_lm)
    opened = Checkpoint.open(builtin.text_model() if model is None else model)
    source: dict[str, Any] = {"pretrained_model_name_or_path": opened.folder}
    is_file = opened.folder.is_file()
    if is_file:
        require_optional("accelerate")  # transformers' reader of these files needs it
        source = {"pretrained_model_name_or_path": opened.folder.parent, "gguf_file": opened.folder.name}
    architecture, config = causal_lm(opened.config)
    longest = getattr(config, "max_position_embeddings", None)
    rows = _rows(opened, config.vocab_size, inputs, tokens or TOKENS, count=2, longest=longest)
    given = (rows.ids,)  # nothing sees padding to its right

    def reference(dtype: str) -> Side:
        loaded: Any = lib.AutoModelForCausalLM.from_pretrained(
            **source, dtype=getattr(torch(), dtype), attn_implementation="eager"
        )
        code = sys.modules[type(loaded).__module__]
        names = ("rotary_q", "rotary_k")
        rotary = Watch(code, "apply_rotary_pos_emb", outputs=names, axes=(0, 2, 1, 3))
        watch = (rotary,) if hasattr(code, rotary.attribute) else ()  # a registered model may have learned positions
        call = lambda model, tokens: model(input_ids=tokens, use_cache=False)
        return Side(loaded.eval(), given, call=call, watch=watch, inputs=(r"self_attn\.o_proj$",), without=WEIGHTS)

    def ours(dtype: str) -> Side:
        rotary = Watch(ops, "apply_rotary", outputs=("rotary_q", "rotary_k"))
        loaded = load_causal_lm(opened, dtype=dtype, quantization=DEQUANTIZE if is_file else None)
        call = lambda model, tokens: model.logits(model(tokens))
        return Side(loaded, given, call=call, watch=(rotary,), inputs=(r"self_attn\.o_proj$",))

    about = {"model": _name(model, opened), "architecture": architecture.__name__, **rows.about}

    def judge(theirs: np.ndarray, mine: np.ndarray) -> LogitsComparison:
        # Each position is about the token after it; the last one's is not there, and any will do.
        after = np.roll(rows.ids, -1, axis=1)
        return compare_logits(theirs[rows.real], mine[rows.real], after[rows.real].tolist())

    return Case(f"{architecture.__name__} and transformers", reference, ours, judge=judge, about=about)


def embed_case(model: str | Path | None, scratch: Path, *, inputs: Inputs = NOTHING, tokens: int | None = None) -> Case:
    """A text encoder, in transformers or LAM in its PyTorch form, and in verax: hidden states.

    LAM's rule `gated`, which is verax's own and the built-in model's, has no PyTorch form: its weights are
    compared under the published rule `hierarchical`.

    `model`: a folder or hub id; `"random"` for a small BERT of random weights; None for the built-in LAM. `tokens`:
    number of random tokens in each of four rows.
    """
    if model == "random":
        model = _random_folder(RANDOM_BERT, scratch, encoder)
    opened = Checkpoint.open(builtin.encoder() if model is None else model)
    name = _name(model, opened)
    if opened.config.get("model_type") == "lam":
        return _lam_case(opened, name, inputs, tokens)
    kind = str(opened.config.get("model_type"))
    model_class, config = encoder(opened.config)
    is_language_model = hasattr(model_class, "logits") and is_causal(opened.config)
    if model_class not in (BertModel, ModernBertModel) and not is_language_model:
        raise UnsupportedModelError(
            f"{opened.folder}: {model_class.__name__} is not compared layer by layer; the encoders that are: BERT, "
            "RoBERTa, XLM-RoBERTa, ModernBERT, LAM, and language models whose tokens see those before them only"
        )
    theirs = EncoderReference(transformers(), opened.folder, config, kind)
    longest = config.max_position_embeddings
    rows = _rows(opened, config.vocab_size, inputs, tokens or TOKENS, count=VECTORS, longest=longest)

    def reference(dtype: str) -> Side:
        arguments = theirs.arguments(rows.ids, rows.real)
        return Side(theirs.load(dtype), arguments, call=theirs.call, inputs=theirs.inputs, without=WEIGHTS)

    def ours(dtype: str) -> Side:
        loaded = load_model(opened, model_class, config, dtype=dtype)
        return Side(loaded, (rows.ids, rows.lengths), call=_states_of_padded, inputs=theirs.inputs)

    about = {"model": name, "architecture": model_class.__name__, **rows.about}
    return Case(f"{model_class.__name__} and transformers", reference, ours, judge=rows.pooled, about=about)


def _lam_case(opened: Checkpoint, name: str, inputs: Inputs, tokens: int | None) -> Case:
    torch()
    from verax.compare.references.lam import LamSentenceEncoder

    config: Any = encoder(opened.config)[1]
    rule = config.rule if config.rule in VARIANTS else "hierarchical"
    longest = config.max_position_embeddings
    rows = _rows(opened, config.vocab_size, inputs, tokens or min(LAM_TOKENS, longest), count=VECTORS, longest=longest)
    layer = {**(opened.config.get("lam_config") or {}), "rule": rule}
    as_published = {**opened.config, "lam_config": layer}
    watched = (r"\.o_norm$",)

    def reference(dtype: str) -> Side:
        loaded = LamSentenceEncoder(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_layers=config.num_hidden_layers,
            intermediate_size=config.intermediate_size,
            max_positions=config.num_positions,
            variant=VARIANTS[rule],
            chunk_size=config.chunk_size or None,
            allow_neg_eigval=config.allow_neg_eigval,
        )
        embeddings = loaded.teacher_model.embeddings
        embeddings.token_type_embeddings = torch().nn.Embedding(config.type_vocab_size, config.hidden_size)
        weights = {key: np.array(opened.read(key), np.float32) for key in loaded.state_dict()}
        loaded.load_state_dict({key: torch().from_numpy(weight) for key, weight in weights.items()})
        loaded = loaded.eval().to(getattr(torch(), dtype))
        regulariser = (r"deltanet_layers\.\d+\[3\]$",)  # nobody reads it here, and it is not computed
        call = lambda model, tokens: model.hidden(tokens)
        return Side(loaded, (rows.ids,), call=call, inputs=watched, without=regulariser)

    def ours(dtype: str) -> Side:
        loaded = load_model(opened, *encoder(as_published), dtype=dtype)
        states = (r"deltanet_layers\.\d+\[1\]",)  # the reference gives them only to a cache
        return Side(loaded, (rows.ids,), inputs=watched, without=states)

    about = {"model": name, "architecture": "LamModel", "rule": rule, **rows.about}
    if rule != config.rule:
        about["note"] = (
            f"the model's own rule, {config.rule}, has no PyTorch form: "
            f"its weights are compared under the published rule {rule}"
        )
    return Case("LAM and its PyTorch form", reference, ours, judge=rows.pooled, about=about)


def transformers() -> Any:
    """The package transformers, with its log and progress bars off."""
    package = require_optional("transformers")
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package


def _random_folder(config: Mapping[str, Any], folder: Path, find: Any) -> Path:
    architecture, sizes = find(config)
    abstract = nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0)))
    return checkpoint.save(random_weights(abstract), folder, config=config)


class _Rows(NamedTuple):
    """Tokens `[B, T]`, padded on the right, and the number of tokens in each row, `[B]`."""

    ids: np.ndarray
    lengths: np.ndarray
    origin: Mapping[str, str]

    @property
    def real(self) -> np.ndarray:
        """Mask `[B, T]`, True for tokens and False for padding."""
        return np.arange(self.ids.shape[1]) < self.lengths[:, None]

    @property
    def about(self) -> dict[str, Any]:
        """Entries of a report."""
        return {"tokens": list(self.ids.shape), **self.origin}

    def pooled(self, theirs: np.ndarray, mine: np.ndarray) -> VectorsComparison:
        """Comparison of the mean of each row's hidden states, an encoder's vector before it is normalised."""
        weights = self.real[..., None] / self.lengths[:, None, None]
        return compare_vectors((theirs * weights).sum(axis=1), (mine * weights).sum(axis=1))


def _rows(
    opened: Checkpoint, vocab_size: int, inputs: Inputs, tokens: int, *, count: int, longest: int | None = None
) -> _Rows:
    """Tokens of texts, or given tokens, or `count` rows of `tokens` random ones."""
    given = inputs.checked({"input_ids": (None, None), "attention_mask": (None, None)}, texts=True)
    if inputs.texts:
        tokenizer = Tokenizer.from_checkpoint(opened)
        encoded = [tokenizer.encode(text) for text in inputs.texts]
        if not all(encoded):
            raise InvalidParameterError(f"inputs: text {encoded.index([]) + 1} has no tokens")
        lengths = np.array([len(row) for row in encoded], np.int32)
        ids = np.zeros((len(encoded), max(lengths)), np.int64)
        for row, text in zip(ids, encoded, strict=True):
            row[: len(text)] = text
    elif given:
        ids, lengths = _given_rows(given, vocab_size)
    else:
        # Not 0, padding in many models, whose embedding PyTorch gives no gradient.
        ids = np.random.default_rng(0).integers(1, vocab_size, (count, tokens))
        lengths = np.full(count, tokens, np.int32)
    if longest is not None and ids.shape[1] > longest:
        raise InvalidParameterError(f"inputs: {ids.shape[1]} tokens in a row, and the model takes {longest}")
    return _Rows(ids, lengths, inputs.about)


def _given_rows(given: Mapping[str, np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    if "input_ids" not in given:
        raise InvalidParameterError("inputs: input_ids is missing, the tokens that attention_mask is about")
    ids, mask = given["input_ids"], given.get("attention_mask", np.ones_like(given["input_ids"]))
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidParameterError(f"inputs: input_ids are integers from 0 to {vocab_size - 1}")
    lengths = (mask != 0).sum(axis=1).astype(np.int32)
    if mask.shape != ids.shape or not np.array_equal(mask != 0, np.arange(ids.shape[1]) < lengths[:, None]):
        raise InvalidParameterError("inputs: attention_mask is of input_ids' shape, ones and then zeros in each row")
    if not lengths.all():
        raise InvalidParameterError(f"inputs: row {int(lengths.argmin())} of attention_mask has no tokens")
    return ids.astype(np.int64), lengths


def _name(model: str | Path | None, opened: Checkpoint) -> str:
    return "built-in" if model is None else "random" if opened.folder == model else str(model)


def _states_of_padded(model: Any, tokens: Array, lengths: Array) -> Array:
    """Hidden states as in transformers, also at padding: a language model's padding sees the sentence before it."""
    sentences = Sentences.padded(lengths, tokens.shape[1])
    return model(tokens) if isinstance(model, CausalLM) else hidden_states(model, tokens, sentences)


_HIDDEN = -1e9
"""Score of a key that a query does not see; bfloat16 holds it too."""


class EncoderReference:
    """An encoder of transformers: BERT and RoBERTa, ModernBERT, or a language model without its head.

    `kind`: `model_type` of the configuration.
    """

    def __init__(self, package: Any, folder: Path, config: Any, kind: str):
        self._package, self._folder, self._config = package, folder, config
        self._kind = kind if kind in ("bert", "roberta", "xlm-roberta", "modernbert") else "causal"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Patterns of the modules whose input is recorded: the ones after the attention."""
        places = {"modernbert": r"attn\.Wo$", "causal": r"self_attn\.o_proj$"}
        return (places.get(self._kind, r"attention\.output\.dense$"),)

    def load(self, dtype: str) -> Any:
        """The model. Its modules have the paths of ours."""
        lib = self._package
        auto = lib.AutoModelForCausalLM if self._kind == "causal" else lib.AutoModel
        options = {} if self._kind in ("causal", "modernbert") else {"add_pooling_layer": False}
        loaded: Any = auto.from_pretrained(
            self._folder, dtype=getattr(torch(), dtype), attn_implementation="eager", **options
        )
        return loaded.eval()

    def arguments(self, ids: np.ndarray, real: np.ndarray) -> tuple[Any, ...]:
        """Arguments of `call` after the model. `ids`: tokens `[B, T]`. `real`: mask `[B, T]`, False for padding."""
        if self._kind == "causal":  # nothing sees padding to its right
            return (ids,)
        T = ids.shape[1]
        same = real[:, None, :, None] == real[:, None, None, :]
        every = np.where(same, 0.0, _HIDDEN).astype(np.float32)
        if self._kind == "modernbert":
            near = abs(np.arange(T)[:, None] - np.arange(T)) <= self._config.local_attention // 2
            return ids, every, np.where(near, every, _HIDDEN).astype(np.float32)
        padding = self._config.first_position - 1  # RoBERTa's padding token, which has no place; -1 in BERT
        return ids, every, np.cumsum(ids != padding, axis=1) * (ids != padding) + padding

    def call(self, model: Any, ids: Any, *masks: Any) -> Any:
        """Hidden states."""
        if self._kind == "causal":
            return model.model(input_ids=ids, use_cache=False).last_hidden_state
        seen, other = masks[0].to(model.dtype), masks[1]
        if self._kind == "modernbert":
            layers = {"full_attention": seen, "sliding_attention": other.to(model.dtype)}
            return model(input_ids=ids, attention_mask=layers).last_hidden_state
        return model(input_ids=ids, attention_mask=seen, position_ids=other).last_hidden_state
