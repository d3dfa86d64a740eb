"""Rerankers: a checkpoint scores documents for a query, by a cross-encoder's logit or a language model's "yes"."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from verax import models
from verax._compat import enable_compilation_cache
from verax.checkpoint import Checkpoint
from verax.embed.buckets import (
    Job,
    PackedBuckets,
    Tokens,
    check_batch_size,
    check_texts,
    check_tokens,
    compiled,
    load_for_calls,
    run_jobs,
    tokens_per_call,
)
from verax.embed.modules import (
    SCORES,
    Modules,
    activation_function,
    check_finite,
    list_modules,
    load_modules,
    open_folder,
)
from verax.embed.settings import Prompts, read_max_length, read_model_file, read_transformer_file
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.fields import Count, Size, file_of, read_value
from verax.files import JsonObject, read_json
from verax.models import causal_lm, cross_encoder, encoder, hidden_states, is_causal
from verax.nn import Sentences
from verax.text.tokens.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Instruction that Qwen3-Reranker was published with."""

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
"""Beginning of every prompt of Qwen3-Reranker, as its model card has it."""

SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""End of every prompt of Qwen3-Reranker. The next token is the answer."""

_MESSAGE = {"method": "forward", "method_output_name": "logits"}
"""How a language model reads chats, in sentence_bert_config.json."""


def scorer_of(
    opened: Checkpoint,
    tokenizer: Tokenizer,
    max_length: int | None,
    model_file: JsonObject,
    score_file: JsonObject | None,
    *,
    pools: bool = False,
) -> tuple[CrossEncoder | LogitScore | YesOrNo, type[Any], Any]:
    """Scorer of a checkpoint, and its model's class and configuration.

    `max_length`: tokens that are read of a pair; the checkpoint's limit if None. `model_file`: content of
    config_sentence_transformers.json. `score_file`: config.json of the module `LogitScore`, if there is one. `pools`:
    True for an encoder with modules that make the scores.
    """
    if pools:
        model_class, config = encoder(opened.config)
        if not getattr(model_class, "takes_packed_sentences", True):
            raise UnsupportedModelError(
                f"{file_of(opened.config)}: {model_class.__name__} is not supported in rerankers"
            )
        limits = config.max_position_embeddings, max_length
        return PooledCrossEncoder(opened, tokenizer, *limits, model_file), model_class, config
    names = read_value(opened.config, "architectures", tuple[str, ...], ())
    generates = any(name.endswith("ForCausalLM") for name in names)
    if not generates and not any(name.endswith("ForSequenceClassification") for name in names):
        raise UnsupportedModelError(
            f"{file_of(opened.config)}: architectures {', '.join(names) or 'are missing'}: no reranker; expected "
            "...ForSequenceClassification or ...ForCausalLM"
        )
    kind = read_value(opened.config, "model_type", str, None)
    if score_file is not None and not generates:
        raise UnsupportedModelError(f"{score_file.where}: LogitScore is for language models (...ForCausalLM)")
    if generates and score_file is None and kind != "qwen3":
        # Others were trained with prompts and answers of their own: their scores would be wrong, and look right.
        raise UnsupportedModelError(
            f"{file_of(opened.config)}: model_type {kind!r}: the only language model that ranks here without "
            "sentence-transformers' LogitScore is Qwen3-Reranker"
        )
    if generates and opened.config.get("auto_map"):
        raise UnsupportedModelError(
            f"{file_of(opened.config)}: auto_map: a language model that ranks by its own code is not supported"
        )
    model_class, config = (causal_lm if generates else cross_encoder)(opened.config)
    limits = config.max_position_embeddings, max_length
    if score_file is not None:
        scorer = LogitScore(opened, tokenizer, *limits, model_file, score_file)
    elif generates:
        scorer = YesOrNo(opened, tokenizer, *limits)
    else:
        scorer = CrossEncoder(opened, tokenizer, *limits, model_file)
    return scorer, model_class, config


class CrossEncoder:
    """A classifier of one label reads both texts; its logit goes through an activation function."""

    takes_instruction = False
    _task = "sequence-classification"

    def __init__(
        self, opened: Checkpoint, tokenizer: Tokenizer, positions: int, max_length: int | None, model_file: JsonObject
    ):
        tokens = read_transformer_file(opened.folder, self._task)
        self.max_length = read_max_length(opened.folder, positions, max_length, tokens)
        lower_case = read_value(tokens, "do_lower_case", bool, False)
        self._tokenizer = tokenizer.with_lower_case() if lower_case else tokenizer
        self._activation = activation_function(*_activation_name(model_file, opened.config))

    def tokenize(
        self, query: str, documents: Sequence[str], prompt: str, instruction: str | None, max_length: int
    ) -> list[Tokens]:
        """Tokens of the prompt and the query with each document; the longer of the two loses its end first."""
        pairs = [(prompt + query, document) for document in documents]
        return [Tokens(*tokenized) for tokenized in self._tokenizer.encode_pairs(pairs, max_length=max_length)]

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Activation of each pair's logit."""
        return self._activation(model(tokens, sentences, types))


class PooledCrossEncoder(CrossEncoder):
    """An encoder reads both texts; the modules after it, a pooling and layers, make a logit of its states.

    sentence-transformers saves cross-encoders in this form that were not made of a classifier, such as Ettin's.
    """

    _task = "feature-extraction"

    def __init__(self, opened: Checkpoint, *arguments: Any):
        super().__init__(opened, *arguments)
        self._causal = is_causal(opened.config)

    def scores(
        self, model: tuple[Any, Modules], tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Activation of each pair's logit."""
        hidden = hidden_states(model[0], tokens, sentences, types, causal=self._causal)
        return self._activation(model[1](hidden, sentences, jnp.int32(0))[:, 0])


class LogitScore:
    """A language model reads both texts in its chat template; the score is a token's logit, or two's difference.

    It goes through an activation function. Follows sentence-transformers' module of this name: the texts are messages
    of the roles `query` and `document`, after one of the role `system` that has the instruction, if there is one.
    """

    takes_instruction = True

    def __init__(
        self,
        opened: Checkpoint,
        tokenizer: Tokenizer,
        positions: int,
        max_length: int | None,
        model_file: JsonObject,
        score_file: JsonObject,
    ):
        tokens = read_transformer_file(opened.folder, "text-generation")
        modes = read_value(tokens, "modality_config", dict, {})
        self._structured = modes.get("message") == {**_MESSAGE, "format": "structured"}
        if not self._structured and modes.get("message") != {**_MESSAGE, "format": "flat"}:
            raise UnsupportedModelError(
                f"{tokens.where}: modality_config.message {modes.get('message')!r} is not supported; with LogitScore, "
                f"{_MESSAGE} is, of the format flat or structured"
            )
        options = {name: value for name, value in read_value(tokens, "processing_kwargs", dict, {}).items() if value}
        chat = options.pop("chat_template", {})
        if options or not isinstance(chat, dict) or chat.keys() - {"add_generation_prompt"}:
            raise UnsupportedModelError(
                f"{tokens.where}: processing_kwargs {tokens['processing_kwargs']!r} is not supported; "
                "chat_template.add_generation_prompt is"
            )
        self._announces = read_value(chat, "add_generation_prompt", bool, False)
        self.max_length = read_max_length(opened.folder, positions, max_length, tokens)
        lower_case = read_value(tokens, "do_lower_case", bool, False)
        self._tokenizer = tokenizer.with_lower_case() if lower_case else tokenizer
        self._activation = activation_function(*_activation_name(model_file, opened.config))
        read_value(score_file, "module_input_name", Literal["causal_logits"], "causal_logits")
        self._true = read_value(score_file, "true_token_id", Count)
        self._false = read_value(score_file, "false_token_id", Count | None, None)
        rows = read_value(opened.config, "vocab_size", Size)
        if max(self._true, self._false or 0) >= rows:
            raise CheckpointError(f"{score_file.where}: its tokens are not of the model's {rows}")
        probe = self._text("", "query-0", "document-1")
        if "query-0" not in probe or "document-1" not in probe:
            raise UnsupportedModelError(
                f"{opened.folder}: its chat template does not show messages of the roles query and document"
            )

    def tokenize(
        self, query: str, documents: Sequence[str], prompt: str, instruction: str | None, max_length: int
    ) -> list[Tokens]:
        """Tokens of the chat for each document. One that is too long loses its end, but not what ends each chat."""
        system = prompt if instruction is None else instruction
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        # What two chats of other texts have in common at their ends is the template's.
        short, long = (encode(self._text(system, text, text)) for text in ("0", "1 2 3 4"))
        same = next((n for n in range(len(short)) if short[-1 - n] != long[-1 - n]), 0)
        if max_length <= len(short):
            raise InvalidParameterError(
                f"max_length: {max_length} tokens leave none for the document after the prompt's {len(short)}"
            )
        end = short[len(short) - same :]
        texts = [self._text(system, query, document) for document in documents]
        tokenized = self._tokenizer.encode_batch(texts, max_length=max_length, add_special_tokens=False)
        return [
            Tokens([*ids[: len(ids) - same], *end] if left_out else ids, left_out=left_out)
            for ids, left_out in tokenized
        ]

    def _text(self, system: str, query: str, document: str) -> str:
        """The chat that asks for the document's score; without an instruction if `system` is empty."""
        texts = {"system": system, "query": query, "document": document}
        if not system:
            del texts["system"]
        content = (lambda text: [{"type": "text", "text": text}]) if self._structured else lambda text: text
        messages = [{"role": role, "content": content(text)} for role, text in texts.items()]
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=self._announces)

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Activation of the logit of the token that stands for a fitting document, less the other's if there is one."""
        logits = model.logits(sentences.last(hidden_states(model, tokens, sentences)))
        score = logits[:, self._true]
        return self._activation(score if self._false is None else score - logits[:, self._false])


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

    def tokenize(
        self, query: str, documents: Sequence[str], prompt: str, instruction: str | None, max_length: int
    ) -> list[Tokens]:
        """Tokens of the prompt for each document, which loses its end if there are too many."""
        room = max_length - len(self._prefix) - len(self._suffix)
        if room < 1:
            raise InvalidParameterError(
                f"max_length: {max_length} tokens leave none for the document after the prompt's {max_length - room}"
            )
        task = INSTRUCTION if instruction is None else instruction
        before = f"<Instruct>: {task}\n<Query>: {prompt}{query}\n<Document>: "
        tokenized = self._tokenizer.encode_batch([before + document for document in documents], max_length=room)
        return [Tokens([*self._prefix, *ids, *self._suffix], left_out=left_out) for ids, left_out in tokenized]

    def scores(
        self, model: Any, tokens: Int[Array, "B T"], sentences: Sentences, types: Int[Array, "B T"]
    ) -> Float[Array, "S"]:
        """Probability of "yes" against "no" as the token after the prompt."""
        logits = model.logits(sentences.last(hidden_states(model, tokens, sentences)))
        return jax.nn.sigmoid(logits[:, self._yes] - logits[:, self._no])


def _activation_name(model_file: JsonObject, config: Mapping[str, Any]) -> tuple[str, str]:
    """torch's name of the function that a cross-encoder's logit goes through, and the file that has it.

    Versions of sentence-transformers wrote it to three places, the newest of which counts.
    """
    nested = read_value(config, "sentence_transformers", dict, {})
    for place, key in (
        (model_file, "activation_fn"),
        (JsonObject(nested, f"{file_of(config)}: sentence_transformers"), "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        if name := read_value(place, key, str, None):
            return name, file_of(place)
    return "torch.nn.modules.activation.Sigmoid", file_of(config)


@dataclass(frozen=True)
class RankedDocument:
    """Document in a ranking.

    Attributes:
        index: number of the document among the given ones, from 0.
        score: score of the document; a better answer has a higher one.
        text: the document.
    """

    index: int
    score: float
    text: str


def ranked(
    score: Callable[[list[str]], Float32[np.ndarray, "n"]], documents: Iterable[str], top_k: int | None
) -> list[RankedDocument]:
    """Documents with their scores, the best first; of equal scores, the earlier document."""
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InvalidParameterError(f"top_k: expected a whole number of at least 1, got {top_k!r}")
    texts = check_texts(documents, "documents")
    # A text that is there twice is scored once: at another place in a call its score would round otherwise.
    unique = list(dict.fromkeys(texts))
    score_of = dict(zip(unique, score(unique), strict=True))
    scores = np.asarray([score_of[text] for text in texts], np.float32)
    check_finite(scores)
    order = np.argsort(-scores, kind="stable")[:top_k].tolist()
    return [RankedDocument(i, float(scores[i]), texts[i]) for i in order]


class Reranker:
    """Pairs of a query and a document to scores: weights on the device, a program for each bucket of lengths.

    It takes cross-encoders of one label (BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ModernBERT, GTE, DeBERTa),
    encoders with sentence-transformers' modules that make a score, language models with a classifier or its
    `LogitScore`, and Qwen3-Reranker.
    What else is in the batch does not change a score beyond rounding.

    Examples:
        >>> reranker = Reranker("cross-encoder/ms-marco-MiniLM-L6-v2")
        >>> reranker.rank("Who wrote Faust?", ["Goethe wrote Faust.", "Faust is a glove."], top_k=1)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        quantization: str | None = None,
        max_length: int | None = None,
        revision: str | None = None,
        show_progress: bool = True,
    ):
        """Load a checkpoint.

        Args:
            model: a folder with config.json and safetensors, or a hub id.
            dtype: `"float32"`, or `"bfloat16"` for weights and matmul inputs: faster, and about three digits.
            quantization: `"int8"` for matrix products of 8-bit integers, as `Encoder` has them.
            max_length: tokens that are read of a query and a document together; the checkpoint's limit if None.
            revision: branch, tag or commit of a hub id.
            show_progress: a bar while loading, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
            UnsupportedModelError: if verax has no such architecture, or it is not a reranker.
            InvalidParameterError: if an argument makes no sense, with its name.
        """
        models.check_dtype(dtype)
        enable_compilation_cache()
        begin = time.perf_counter()
        folder, opened = open_folder(model, revision)
        entries = list_modules(folder)[1:]
        kinds = [entry.kind for entry in entries]
        pools = "Pooling" in kinds and not {"LogitScore", "SpladePooling"}.intersection(kinds)
        if not pools and kinds not in ([], ["LogitScore"]):
            raise UnsupportedModelError(
                f"{folder / 'modules.json'}: a reranker with {', '.join(kinds)} is not supported"
            )
        score_file = read_json(entries[0].folder / "config.json") if kinds == ["LogitScore"] else None
        model_file = read_model_file(folder, "CrossEncoder")
        self._prompts = Prompts.from_file(model_file)
        tokenizer = Tokenizer.from_folder(opened.folder, rows=read_value(opened.config, "vocab_size", Size, None))
        files = model_file, score_file
        self._scorer, model_class, self.model_config = scorer_of(opened, tokenizer, max_length, *files, pools=pools)
        given = dtype, quantization, self.max_length
        loaded = load_for_calls(
            opened, model_class, self.model_config, *given, keep_head=not pools, show_progress=show_progress
        )
        if pools:
            width, weights = self.model_config.hidden_size, models.DTYPES[dtype]
            modules = load_modules(folder, width, output=SCORES, dtype=weights)
            if modules.width != 1 or not modules.include_prompt:
                what = f"{modules.width} scores" if modules.width != 1 else "include_prompt false"
                raise UnsupportedModelError(f"{folder}: a reranker with {what} is not supported")
            loaded = loaded, modules
        scores = self._scorer.scores

        def score(
            module: Any, tokens: Int32[Array, "1 T"], lengths: Int32[Array, "S"], types: Int32[Array, "1 T"]
        ) -> Float[Array, "S"]:
            return scores(module, tokens, Sentences.packed(lengths, tokens.shape[1]), types)

        self._program, self._weights = compiled(score, loaded)
        self.truncated = 0
        """Pairs of the last call that were longer than `max_length` and lost an end."""
        self.load_seconds = time.perf_counter() - begin

    @property
    def max_length(self) -> int:
        """Tokens that are read of a query and a document together, special ones and the prompt's included."""
        return self._scorer.max_length

    @property
    def takes_instruction(self) -> bool:
        """True if the model reads an instruction."""
        return self._scorer.takes_instruction

    def score(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress: bool = True,
    ) -> Float32[np.ndarray, "n"]:
        """Scores of documents, in their order; a better answer to the query has a higher one.

        They are what sentence-transformers' `CrossEncoder.predict` gives: the logit through the checkpoint's activation
        function, a sigmoid if it names none. Qwen3-Reranker's, without sentence-transformers' files, are the
        probability of "yes" against "no".

        Args:
            instruction: task of a document, for models that read one; the published instruction if None.
            prompt_name: name of the checkpoint's prompt that goes before the query; its default if None.
            prompt: text that goes before the query, whatever `prompt_name` is; an instruction with `LogitScore`.
            batch_size: most pairs in one call of the device; as many as its tokens hold if None.
            show_progress: a bar, if stderr is a terminal and there are several documents.

        Raises:
            InvalidParameterError: if an argument is not a text, or the model reads no instruction; then nothing is
                computed.
        """
        check_batch_size(batch_size)
        texts = check_texts(documents, "documents")
        (query,) = check_texts([query], "query")
        before = self._prompts.text(prompt_name) if prompt is None else check_texts([prompt], "prompt")[0]
        self._check_instruction(instruction)
        self.truncated = 0

        def tokenize(chunk: Sequence[int]) -> list[Tokens]:
            chosen = [texts[i] for i in chunk]
            tokenized = self._scorer.tokenize(query, chosen, before, instruction, self.max_length)
            self.truncated += sum(pair.left_out > 0 for pair in tokenized)
            return tokenized

        jobs = self._buckets(batch_size).tokenized([len(text) for text in texts], tokenize)
        return self._run(jobs, len(texts), show_progress and len(texts) > 1)

    def rank(
        self, query: str, documents: Iterable[str], top_k: int | None = None, **options: Any
    ) -> list[RankedDocument]:
        """Documents with their scores, the best first; of equal scores, the earlier document.

        Args:
            query, documents: as in `score`.
            top_k: number of documents; all of them if None.
            options: further arguments of `score`.

        Raises:
            InvalidParameterError: as `score`, or if `top_k` is below 1.
        """
        return ranked(lambda texts: self.score(query, texts, **options), documents, top_k)

    def tokenize(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
    ) -> list[Tokens]:
        """Tokens of the query with each document, as the model reads them.

        Args:
            query, documents, instruction, prompt: as in `score`.
            max_length: tokens that are kept of a pair; at most, and by default, `Reranker.max_length`.

        Raises:
            InvalidParameterError: if `documents` are not texts, `max_length` leaves no token for a text, or the model
                reads no instruction.
        """
        documents = check_texts(documents, "documents")
        self._check_instruction(instruction)
        limit = self.max_length if max_length is None else min(max_length, self.max_length)
        before = self._prompts.text(None) if prompt is None else prompt
        return self._scorer.tokenize(query, documents, before, instruction, limit)

    def score_tokens(self, pairs: Sequence[Tokens], batch_size: int | None = None) -> Float32[np.ndarray, "n"]:
        """Scores of tokens that `tokenize` gave, in their order.

        Args:
            batch_size: as in `score`.

        Raises:
            InvalidParameterError: for a pair of no tokens, more than `max_length`, or one beyond the vocabulary.
        """
        check_batch_size(batch_size)
        limits = self.max_length, self.model_config.vocab_size
        for number, pair in enumerate(pairs):
            check_tokens(pair.ids, *limits, number, "pairs")
            if pair.types is not None and len(pair.types) != len(pair.ids):
                raise InvalidParameterError(f"pairs: expected a type for each of the tokens at {number}")
        jobs = self._buckets(batch_size).jobs(pairs)
        return self._run(jobs, len(pairs), show_progress=False)

    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return self._program._cache_size()

    def _buckets(self, batch_size: int | None) -> PackedBuckets:
        return PackedBuckets(batch_size, self.max_length, tokens_per_call())

    def _check_instruction(self, instruction: Any) -> None:
        if instruction is None:
            return
        if not self.takes_instruction:
            raise InvalidParameterError("instruction: this model reads none; Qwen3-Reranker does")
        check_texts([instruction], "instruction")

    def _run(self, jobs: Iterable[Job], count: int, show_progress: bool) -> Float32[np.ndarray, "n"]:
        scores = np.empty(count, np.float32)
        dispatch = lambda job: self._program(self._weights, job.tokens, job.lengths, job.types)

        def write(job: Job, rows: np.ndarray) -> None:
            scores[job.members] = rows[: len(job.members)]

        run_jobs(jobs, dispatch, write, count, label="scoring", unit="pairs", show_progress=show_progress)
        return scores
