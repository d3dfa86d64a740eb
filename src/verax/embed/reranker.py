"""`Reranker`: a checkpoint that scores how well documents answer a query."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from verax import models, progress
from verax._compat import enable_compilation_cache
from verax.embed.buckets import Job, PackedBuckets, Tokens
from verax.embed.calls import check_batch_size, check_texts, compiled, run_jobs, tokens_per_call
from verax.embed.quantization import check_quantization, round_linear_inputs
from verax.embed.scorers import scorer_of
from verax.embed.settings import open_folder
from verax.errors import InvalidParameterError
from verax.loading import load_model
from verax.nn import Sentences, pack_linear_weights
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["RankedDocument", "Reranker"]


@dataclass(frozen=True)
class RankedDocument:
    """Document in a ranking.

    Attributes:
        index: its number among the documents given, from 0.
        score: its score; a better answer has a higher one.
        text: the document.
    """

    index: int
    score: float
    text: str


class Reranker:
    """Pairs of a query and a document to scores: weights on the device, a program for each bucket of lengths.

    It takes cross-encoders of one label (BERT, RoBERTa, XLM-RoBERTa, ModernBERT) and Qwen3-Reranker. What else is in
    the batch does not change a score beyond rounding.

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
            UnsupportedModelError: if verax has no such architecture, or it is no reranker.
            InvalidParameterError: if an argument makes no sense, with its name.
        """
        models.check_dtype(dtype)
        enable_compilation_cache()
        begin = time.perf_counter()
        opened = open_folder(model, revision)
        self._scorer, model_class, self.model_config = scorer_of(
            opened, Tokenizer.from_folder(opened.folder), max_length
        )
        check_quantization(quantization)
        with progress.bar("loading weights", enabled=show_progress, count=False) as report:
            loaded = load_model(
                opened,
                model_class,
                self.model_config,
                dtype=models.DTYPES[dtype],
                quantization=quantization,
                progress=report,
            )
        if quantization is not None:
            round_linear_inputs(loaded, keep_head=True)
        pack_linear_weights(loaded)
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
        batch_size: int | None = None,
        show_progress: bool = True,
    ) -> Float32[np.ndarray, "n"]:
        """Scores of documents, in their order; a better answer to the query has a higher one.

        They are what sentence-transformers' `CrossEncoder.predict` gives: the logit through the checkpoint's activation
        function, a sigmoid if it names none. Those of Qwen3-Reranker are the probability of "yes" against "no".

        Args:
            query: a text.
            documents: any number of texts.
            instruction: what a document has to do, for models that read it; the published one if None.
            batch_size: most pairs in one call of the device; as many as its tokens hold if None.
            show_progress: a bar, if stderr is a terminal and there are several documents.

        Raises:
            InvalidParameterError: if a text is none, or the model reads no instruction; then nothing is computed.
        """
        check_batch_size(batch_size)
        texts = check_texts(documents, "documents")
        (query,) = check_texts([query], "query")
        self._check_instruction(instruction)
        self.truncated = 0

        def tokenize(chunk: Sequence[int]) -> list[Tokens]:
            found = self.tokenize(query, [texts[i] for i in chunk], instruction=instruction)
            self.truncated += sum(pair.left_out > 0 for pair in found)
            return found

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
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise InvalidParameterError(f"top_k: expected a whole number of at least 1, got {top_k!r}")
        texts = check_texts(documents, "documents")
        # A text that is there twice is scored once: at another place in a call its score would round otherwise.
        unique = list(dict.fromkeys(texts))
        found = dict(zip(unique, self.score(query, unique, **options), strict=True))
        scores = np.asarray([found[text] for text in texts], np.float32)
        order = np.argsort(-scores, kind="stable")[:top_k].tolist()
        return [RankedDocument(i, float(scores[i]), texts[i]) for i in order]

    def tokenize(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None, max_length: int | None = None
    ) -> list[Tokens]:
        """Tokens of the query with each document, as the model reads them.

        Args:
            query, documents, instruction: as in `score`.
            max_length: tokens that are kept of a pair; at most, and by default, `Reranker.max_length`.

        Raises:
            InvalidParameterError: if `max_length` leaves no token for a text, or the model reads no instruction.
        """
        self._check_instruction(instruction)
        most = self.max_length if max_length is None else min(max_length, self.max_length)
        return self._scorer.tokenize(query, documents, instruction, most)

    def score_tokens(self, pairs: Sequence[Tokens], batch_size: int | None = None) -> Float32[np.ndarray, "n"]:
        """Scores of tokens that `tokenize` gave, in their order.

        Args:
            pairs: tokens of each pair.
            batch_size: as in `score`.
        """
        check_batch_size(batch_size)
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
        run_jobs(jobs, dispatch, scores, label="scoring", unit="pairs", show_progress=show_progress)
        return scores
