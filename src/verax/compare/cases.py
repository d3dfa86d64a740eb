"""What `verax compare text` and `embed` compare: a checkpoint in transformers, or LAM in its PyTorch form, and in
verax."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import builtin, checkpoint, ops
from verax.checkpoint import Checkpoint
from verax.checkpoint.random_weights import random_weights
from verax.compare.outputs import LogitsComparison, VectorsComparison, compare_logits, compare_vectors
from verax.compare.recorder import Watch
from verax.compare.run import Case, Side
from verax.compare.torch_side import torch
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.models import DTYPES, causal_lm, encoder
from verax.text.llm import load_model
from verax.text.tokenizer import Tokenizer

__all__ = ["embed_case", "text_case", "transformers"]

TOKENS = 40
"""Of each row. No number of heads, so that no axes are mistaken for each other."""

VECTORS = 4
"""Rows of BERT's tokens: from three texts on there is a nearest one."""

LAM_TOKENS = 192
"""Of one row: three chunks of the published layer, and few enough rows that its projections run one by one."""

RANDOM_TEXT = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
RANDOM_BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
VARIANTS = {"hierarchical": "B", "local": "C"}
"""The published rules of LAM, and what its PyTorch form calls them."""


def text_case(model: str | Path | None, scratch: Path, *, prompt: str | None = None, tokens: int | None = None) -> Case:
    """A language model in transformers and in verax: logits of every position.

    Args:
        model: a folder or hub id; `"random"` for a small one of random weights; None for the built-in model.
        scratch: a folder for random weights.
        prompt: a text; random tokens if None.
        tokens: how many of them, in each of two rows.

    Raises:
        CheckpointError: if the model cannot be read.
        MissingDependencyError: without torch or transformers.
    """
    lib = transformers()
    if model == "random":
        model = _random_folder(RANDOM_TEXT, scratch, causal_lm)
    opened = Checkpoint.open(builtin.text_model() if model is None else model)
    if opened.folder.is_file():
        raise InvalidParameterError(f"model: transformers reads folders, not {opened.folder.name}")
    architecture, config = causal_lm(opened.config)
    given = (_tokens(opened.folder, config.vocab_size, prompt, tokens or TOKENS, rows=2),)

    def reference(dtype: str) -> Side:
        loaded: Any = lib.AutoModelForCausalLM.from_pretrained(
            opened.folder, dtype=getattr(torch(), dtype), attn_implementation="eager"
        )
        code = sys.modules[type(loaded).__module__]
        names = ("rotary_q", "rotary_k")
        rotary = Watch(code, "apply_rotary_pos_emb", outputs=names, axes=(0, 2, 1, 3))
        return Side(loaded.eval(), given, call=_logits, watch=(rotary,), inputs=(r"self_attn\.o_proj$",))

    def ours(dtype: str) -> Side:
        rotary = Watch(ops, "apply_rotary", outputs=("rotary_q", "rotary_k"))
        loaded = load_model(opened, dtype=dtype)
        call = lambda model, tokens: model.logits(model(tokens))  # noqa: E731
        return Side(loaded, given, call=call, watch=(rotary,), inputs=(r"self_attn\.o_proj$",))

    about = {"model": _name(model, opened), "architecture": architecture.__name__, "tokens": list(given[0].shape)}

    def judge(theirs: np.ndarray, mine: np.ndarray) -> LogitsComparison:
        first, second = (logits.reshape(-1, logits.shape[-1]) for logits in (theirs, mine))
        # Each position is about the token after it; the last one's is not there, and any will do.
        return compare_logits(first, second, np.roll(given[0], -1, axis=1).ravel().tolist())

    return Case(f"{architecture.__name__} and transformers", reference, ours, judge=judge, about=about)


def _logits(model: Any, tokens: Any) -> Any:
    return model(input_ids=tokens, use_cache=False)


def embed_case(
    model: str | Path | None, scratch: Path, *, prompt: str | None = None, tokens: int | None = None
) -> Case:
    """A text encoder, BERT in transformers or LAM in its PyTorch form, and in verax: hidden states.

    Of LAM's rule `gated`, which is verax's own and the built-in model's, there is no PyTorch form: its weights are
    compared under the published rule `hierarchical`.

    Args:
        model: a folder or hub id; `"random"` for a small BERT of random weights; None for the built-in LAM.
        scratch, prompt, tokens: as for `text_case`.

    Raises:
        CheckpointError: if the model cannot be read.
        MissingDependencyError: without torch or transformers.
    """
    if model == "random":
        model = _random_folder(RANDOM_BERT, scratch, encoder)
    opened = Checkpoint.open(builtin.encoder() if model is None else model)
    name = _name(model, opened)
    if opened.config.get("model_type") == "lam":
        return _lam_case(opened, name, prompt, tokens)
    lib = transformers()
    _, config = encoder(opened.config)
    ids = _tokens(opened.folder, config.vocab_size, prompt, tokens or TOKENS, rows=VECTORS)

    def reference(dtype: str) -> Side:
        loaded: Any = lib.AutoModel.from_pretrained(
            opened.folder, dtype=getattr(torch(), dtype), attn_implementation="eager", add_pooling_layer=False
        )
        return Side(loaded.eval(), (ids,), inputs=(r"attention\.output\.dense$",))

    def ours(dtype: str) -> Side:
        lengths = np.full(len(ids), ids.shape[1], np.int32)
        return Side(_encoder(opened, dtype), (ids, lengths), inputs=(r"attention\.output\.dense$",))

    about = {"model": name, "architecture": "BertModel", "tokens": list(ids.shape)}
    return Case("BertModel and transformers", reference, ours, judge=_pooled, about=about)


def _lam_case(opened: Checkpoint, name: str, prompt: str | None, tokens: int | None) -> Case:
    torch()
    from verax.bench.lam_torch import LamSentenceEncoder

    config: Any = encoder(opened.config)[1]
    rule = config.rule if config.rule in VARIANTS else "hierarchical"
    most = min(LAM_TOKENS, config.max_position_embeddings)
    ids = _tokens(opened.folder, config.vocab_size, prompt, tokens or most, rows=1)
    layer = {**(opened.config.get("lam_config") or {}), "rule": rule}
    as_published = {**opened.config, "lam_config": layer}
    inputs = (r"\.o_norm$",)

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
        return Side(loaded, (ids,), call=lambda model, tokens: model.hidden(tokens), inputs=inputs)

    def ours(dtype: str) -> Side:
        return Side(_encoder(opened, dtype, as_published), (ids,), inputs=inputs)

    about = {"model": name, "architecture": "LamModel", "rule": rule, "tokens": list(ids.shape)}
    if rule != config.rule:
        about["note"] = (
            f"the model's own rule, {config.rule}, has no PyTorch form: "
            f"its weights are compared under the published rule {rule}"
        )
    return Case("LAM and its PyTorch form", reference, ours, judge=_pooled, about=about)


def _pooled(theirs: np.ndarray, mine: np.ndarray) -> VectorsComparison:
    """Of the mean of each row's hidden states, which is what an encoder gives before it normalises."""
    return compare_vectors(theirs.mean(axis=-2), mine.mean(axis=-2))


def transformers() -> Any:
    """The package, and torch.

    Raises:
        MissingDependencyError: where it is not installed.
    """
    torch()
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError("the reference needs transformers: pip install 'verax[parity]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _random_folder(config: Mapping[str, Any], folder: Path, find: Any) -> Path:
    architecture, sizes = find(config)
    abstract = nnx.eval_shape(lambda: architecture(sizes, rngs=nnx.Rngs(0)))
    return checkpoint.save(random_weights(abstract), folder, config=config)


def _encoder(opened: Checkpoint, dtype: str, config: Mapping[str, Any] | None = None) -> nnx.Module:
    architecture, sizes = encoder(config or opened.config)
    make: Any = architecture
    abstract = nnx.eval_shape(lambda: make(sizes, dtype=DTYPES[dtype], rngs=nnx.Rngs(0)))
    wanted = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(abstract))]
    return checkpoint.load_module(
        abstract,
        opened,
        dtype=jnp.dtype(DTYPES[dtype]),
        ignore=architecture.ignored_weights,
        aliases=architecture.aliases(wanted, opened.names()),
    )


def _tokens(folder: Path, vocab_size: int, prompt: str | None, count: int, *, rows: int) -> np.ndarray:
    if prompt is None:
        # Not 0, padding in many models, whose embedding PyTorch gives no gradient.
        return np.random.default_rng(0).integers(1, vocab_size, (rows, count))
    ids = Tokenizer.from_folder(folder).encode(prompt)
    if not ids:
        raise InvalidParameterError("prompt: it has no tokens")
    return np.asarray(ids)[None]


def _name(model: str | Path | None, opened: Checkpoint) -> str:
    return "built-in" if model is None else "random" if opened.folder == model else str(model)
