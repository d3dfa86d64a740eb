"""The two ways by which a model scores a pair of texts: a cross-encoder's logit, and a language model's "yes"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Int

from verax.checkpoint import Checkpoint
from verax.embed.buckets import Tokens
from verax.embed.dense import activation_function
from verax.embed.settings import read_max_length
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.fields import file_of, read_value
from verax.files import JsonObject, read_json
from verax.models import causal_lm, cross_encoder, hidden_states
from verax.nn import Sentences
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["Scorer", "scorer_of"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction that Qwen3-Reranker was published with."""

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
"""Beginning of every prompt of Qwen3-Reranker, as its model card has it."""

SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""End of every prompt of Qwen3-Reranker. The next token is the answer."""


class Scorer(Protocol):
    """Way to make tokens of a pair, and a score of the model's states."""

    max_length: int
    """Tokens that are read of a pair."""
    takes_instruction: bool

    def tokenize(self, query: str, documents: Sequence[str], instruction: str | None, max_length: int) -> list[Tokens]:
        """Tokens of the query with each document, at most `max_length`."""
        ...

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Score of each pair, float32."""
        ...


def scorer_of(opened: Checkpoint, tokenizer: Tokenizer, max_length: int | None) -> tuple[Scorer, type[Any], Any]:
    """Scorer of a checkpoint, and its model's class and configuration.

    Args:
        opened: the checkpoint.
        tokenizer: its tokenizer.
        max_length: tokens that are read of a pair; the checkpoint's limit if None.

    Raises:
        CheckpointError: if a file is damaged.
        UnsupportedModelError: if it is neither a cross-encoder of one label nor Qwen3-Reranker.
        InvalidParameterError: for a `max_length` that makes no sense.
    """
    names = read_value(opened.config, "architectures", tuple[str, ...], ())
    generates = any(name.endswith("ForCausalLM") for name in names)
    if not generates and not any(name.endswith("ForSequenceClassification") for name in names):
        raise UnsupportedModelError(
            f"{file_of(opened.config)}: architectures {', '.join(names) or 'are missing'}: no reranker; expected "
            "...ForSequenceClassification or ...ForCausalLM"
        )
    kind = read_value(opened.config, "model_type", str, None)
    if generates and kind != "qwen3":
        # Others were trained with prompts and answers of their own: their scores would be wrong, and look right.
        raise UnsupportedModelError(
            f"{file_of(opened.config)}: model_type {kind!r}: the only language model that ranks here is Qwen3-Reranker"
        )
    model_class, config = (causal_lm if generates else cross_encoder)(opened.config)
    make = YesOrNo if generates else CrossEncoder
    return make(opened, tokenizer, config.max_position_embeddings, max_length), model_class, config


class CrossEncoder:
    """A classifier of one label reads both texts; its logit goes through an activation function."""

    takes_instruction = False

    def __init__(self, opened: Checkpoint, tokenizer: Tokenizer, positions: int, max_length: int | None):
        folder: Path = opened.folder
        tokens = read_json(folder / "sentence_bert_config.json", optional=True)
        self.max_length = read_max_length(folder, positions, max_length, tokens)
        self._tokenizer = tokenizer
        self._activation = activation_function(_activation_name(opened.config), file_of(opened.config))

    def tokenize(self, query: str, documents: Sequence[str], instruction: str | None, max_length: int) -> list[Tokens]:
        """Tokens of the query with each document; the longer of the two loses its end first."""
        pairs = [(query, document) for document in documents]
        return [Tokens(*found) for found in self._tokenizer.encode_pairs(pairs, max_length=max_length)]

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Activation of each pair's logit."""
        return self._activation(model(tokens, sentences, types))


class YesOrNo:
    """A language model is asked whether the document fits; the score is its probability of "yes" against "no".

    Follows the model card of Qwen3-Reranker (Zhang et al., 2025, arXiv:2506.05176), prompt included.
    """

    takes_instruction = True

    def __init__(self, opened: Checkpoint, tokenizer: Tokenizer, positions: int, max_length: int | None):
        answers = [tokenizer.token_id(word) for word in ("no", "yes", "<|im_start|>", "<|im_end|>")]
        if None in answers:
            raise UnsupportedModelError(
                f"{opened.folder}: no reranker: its tokenizer lacks one of the tokens yes, no, <|im_start|>, <|im_end|>"
            )
        self.max_length = read_max_length(opened.folder, positions, max_length, {})
        self._tokenizer = tokenizer
        self._no, self._yes = answers[:2]
        self._prefix, self._suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))

    def tokenize(self, query: str, documents: Sequence[str], instruction: str | None, max_length: int) -> list[Tokens]:
        """Tokens of the prompt for each document, which loses its end if there are too many."""
        room = max_length - len(self._prefix) - len(self._suffix)
        if room < 1:
            raise InvalidParameterError(
                f"max_length: {max_length} tokens leave none beside the prompt's {max_length - room}"
            )
        before = f"<Instruct>: {INSTRUCTION if instruction is None else instruction}\n<Query>: {query}\n<Document>: "
        found = self._tokenizer.encode_batch([before + document for document in documents], max_length=room)
        return [Tokens([*self._prefix, *ids, *self._suffix], left_out=left_out) for ids, left_out in found]

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Softmax over the logits of "yes" and "no" behind the last token: its part of "yes"."""
        logits = model.logits(sentences.last(hidden_states(model, tokens, sentences)))
        return jax.nn.sigmoid(logits[:, self._yes] - logits[:, self._no])


def _activation_name(config: Mapping[str, Any]) -> str:
    """torch's name of the function that a cross-encoder's logit goes through; sentence-transformers' rules."""
    told = JsonObject(
        read_value(config, "sentence_transformers", dict, {}), f"{file_of(config)}: sentence_transformers"
    )
    name = read_value(told, "activation_fn", str, None)
    return name or read_value(
        config, "sbert_ce_default_activation_function", str, "torch.nn.modules.activation.Sigmoid"
    )
