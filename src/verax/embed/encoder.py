"""`Encoder`: a checkpoint that turns sentences into vectors, with sentence-transformers' habits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from verax import builtin, checkpoint, models, ops, progress
from verax._compat import compiler_options, enable_compilation_cache
from verax.embed.buckets import Buckets, Job
from verax.embed.pooling import normalized, pool
from verax.embed.settings import EncoderSettings
from verax.errors import InvalidParameterError
from verax.loading import load_model
from verax.text.tokenizer import Tokenizer

__all__ = ["Encoder"]

TOKENIZED_AT_ONCE = 16
"""Batches whose sentences are tokenised together: enough to sort like lengths together and to fill all cores."""

IN_FLIGHT = 2
"""Calls that the device has before the oldest result is read: one runs, one waits."""


class Encoder:
    """Sentences to vectors: weights on the device, a program for each bucket of lengths.

    A program is compiled when its bucket is first met and kept on disk; `warm_up` compiles all of them. What else is in
    the batch, and how it is padded, does not change a sentence's vector beyond rounding.

    Examples:
        >>> encoder = Encoder()  # the built-in model; or a Hugging Face folder or hub id
        >>> a, b = encoder.encode(["A cat is asleep.", "The cat sleeps."])
        >>> float(a @ b)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "float32",
        max_length: int | None = None,
        pooling: str | None = None,
        revision: str | None = None,
        show_progress: bool = True,
    ):
        """Load a checkpoint.

        Args:
            model: a folder with config.json and safetensors, a hub id, or None for the built-in model.
            dtype: `"float32"`, or `"bfloat16"` for weights and matmul inputs: faster, and about three digits.
            max_length: tokens that are read of a sentence; the checkpoint's limit if None.
            pooling: `"mean"` or `"cls"`; the checkpoint's if None, the mean if it has none.
            revision: branch, tag or commit of a hub id.
            show_progress: a bar while loading, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
            UnsupportedModelError: if verax has no such architecture or pooling.
            InvalidParameterError: if an argument makes no sense, with its name.
        """
        if dtype not in models.DTYPES:
            raise InvalidParameterError(f"dtype: expected one of {', '.join(models.DTYPES)}, got {dtype!r}")
        enable_compilation_cache()
        begin = time.perf_counter()
        opened = checkpoint.Checkpoint.open(builtin.encoder() if model is None else model, revision=revision)
        model_class, config = models.encoder(opened.config)
        self.model_config = config
        self.settings = EncoderSettings.from_folder(
            opened.folder, positions=config.max_position_embeddings, pooling=pooling, max_length=max_length
        )
        self._tokenizer = Tokenizer.from_folder(opened.folder)
        self._tokenizer.truncate(self.settings.max_length)
        with progress.bar("loading weights", enabled=show_progress, count=False) as report:
            loaded = load_model(opened, model_class, config, dtype=models.DTYPES[dtype], progress=report)
        graph, state = nnx.split(loaded)
        leaves, treedef = jax.tree.flatten(state)
        # Flattened once: a call passes a flat tuple of arrays, and the module exists only while tracing.
        self._weights = tuple(leaves)
        pooling = self.settings.pooling

        def encode(
            weights: tuple[Array, ...], packed: Int32[Array, "B T_and_1"], normalize: Bool[Array, ""]
        ) -> Float[Array, "B D"]:
            tokens, lengths = packed[:, 1:], packed[:, 0]
            hidden = nnx.merge(graph, jax.tree.unflatten(treedef, weights))(tokens, lengths)
            vectors = pool(hidden, lengths, pooling)
            return jnp.where(normalize, normalized(vectors), vectors)

        self._program = jax.jit(encode, compiler_options=compiler_options(ops.target().platform))
        self._padding = not loaded.depends_on_padding
        self.truncated = 0
        """Sentences of the last `encode` that were longer than `max_length` and lost their end."""
        self.load_seconds = time.perf_counter() - begin

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self.model_config.hidden_size

    @property
    def max_length(self) -> int:
        """Tokens that are read of a sentence, special ones included."""
        return self.settings.max_length

    @overload
    def encode(
        self, sentences: str, normalize: bool = ..., batch_size: int = ..., show_progress: bool = ...
    ) -> Float32[np.ndarray, "D"]: ...

    @overload
    def encode(
        self, sentences: Iterable[str], normalize: bool = ..., batch_size: int = ..., show_progress: bool = ...
    ) -> Float32[np.ndarray, "n D"]: ...

    def encode(
        self,
        sentences: str | Iterable[str],
        normalize: bool = True,
        batch_size: int = 32,
        show_progress: bool = True,
    ) -> Float32[np.ndarray, "..."]:
        """Vectors of sentences, in their order; of one sentence that is given as a string, one vector.

        Args:
            sentences: any number of texts.
            normalize: vectors of length 1, whose dot products are cosines. False leaves them as they were pooled, also
                where the checkpoint lists a step that normalises.
            batch_size: most sentences in one call of the device.
            show_progress: a bar, if stderr is a terminal and there are several batches.

        Raises:
            InvalidParameterError: if a sentence is no text, or `batch_size` is below 1; then nothing is computed.
        """
        _check_batch_size(batch_size)
        texts = [sentences] if isinstance(sentences, str) else _texts(sentences)
        _check(texts)
        self.truncated = 0
        jobs = self._jobs(texts, self._buckets(batch_size))
        vectors = self._run(jobs, len(texts), normalize, show_progress and len(texts) > batch_size)
        return vectors[0] if isinstance(sentences, str) else vectors

    def encode_tokens(
        self, token_ids: Iterable[Sequence[int]], normalize: bool = True, batch_size: int = 32
    ) -> Float32[np.ndarray, "n D"]:
        """Vectors of token ids, in their order: of those of `tokenize`, the vectors of `encode`.

        Args:
            token_ids: tokens of each sentence, special ones included.
            normalize, batch_size: as in `encode`.

        Raises:
            InvalidParameterError: as `check_tokens`.
        """
        _check_batch_size(batch_size)
        ids = self.check_tokens(token_ids)
        jobs = self._buckets(batch_size).jobs(range(len(ids)), ids)
        return self._run(jobs, len(ids), normalize, show_progress=False)

    def check_tokens(self, token_ids: Iterable[Sequence[int]]) -> list[list[int]]:
        """Token ids of each sentence as lists, if the model takes them.

        Raises:
            InvalidParameterError: for no tokens, more than `max_length`, or one that is not in the vocabulary.
        """
        found = [list(ids) for ids in token_ids]
        size = self.model_config.vocab_size
        for number, ids in enumerate(found):
            if not 0 < len(ids) <= self.max_length:
                raise InvalidParameterError(
                    f"token_ids: expected 1 to {self.max_length} tokens (max_length), got {len(ids)} at {number}"
                )
            array = np.asarray(ids)
            if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= size:
                raise InvalidParameterError(f"token_ids: expected numbers from 0 to {size - 1} at {number}")
        return found

    def tokenize(self, sentences: Iterable[str], max_length: int | None = None) -> list[tuple[list[int], int]]:
        """Token ids of each sentence, special ones included, and the number of tokens that were cut from its end.

        Args:
            sentences: any number of texts.
            max_length: tokens that are kept of a sentence; at most, and by default, `Encoder.max_length`.

        Raises:
            InvalidParameterError: if a sentence is no text, or `max_length` leaves no token for it.
        """
        texts = _texts(sentences)
        _check(texts)
        chosen = [text.lower() for text in texts] if self.settings.lower_case else texts
        return self._tokenizer.encode_batch(chosen, max_length=max_length)

    def _run(self, jobs: Iterable[Job], count: int, normalize: bool, show_progress: bool) -> Float32[np.ndarray, "n D"]:
        """Results of calls that hold `count` sentences."""
        vectors = np.empty((count, self.dimension), np.float32)
        done = 0
        pending: deque[tuple[Job, Array]] = deque()
        begin = time.perf_counter()
        with progress.bar("encoding", enabled=show_progress) as report:

            def collect() -> int:
                job, result = pending.popleft()
                vectors[job.members] = np.asarray(result)[: len(job.members)]
                rate = (done + len(job.members)) / (time.perf_counter() - begin)
                report(done + len(job.members), count, f"{rate:,.0f} sentences/s")
                return len(job.members)

            # While the device works on the calls that it has, the host makes the next ones.
            for job in jobs:
                pending.append((job, self._dispatch(job.packed, normalize)))
                if len(pending) > IN_FLIGHT:
                    done += collect()
            while pending:
                done += collect()
        return vectors

    def token_counts(self, sentences: Iterable[str]) -> list[int]:
        """Tokens that are read of each sentence, special ones included."""
        return [len(ids) for ids, _ in self.tokenize(sentences)]

    def warm_up(self, batch_size: int = 32, max_length: int | None = None, show_progress: bool = True) -> float:
        """Compile the program of every bucket of up to `batch_size` sentences and `max_length` tokens; seconds taken.

        `encode` with the same `batch_size` compiles nothing afterwards.
        """
        begin = time.perf_counter()
        longest = min(max_length or self.max_length, self.max_length)
        shapes = [s for s in self._buckets(batch_size).shapes if s[1] <= longest]
        with progress.bar("compiling programs", enabled=show_progress) as report:
            for done, (rows, length) in enumerate(shapes, start=1):
                jax.block_until_ready(self._dispatch(np.zeros((rows, 1 + length), np.int32), True))
                report(done, len(shapes))
        return time.perf_counter() - begin

    def num_compiled(self) -> int:
        """Programs compiled so far: after `warm_up` this stays as it is."""
        return self._program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def _buckets(self, batch_size: int) -> Buckets:
        return Buckets(batch_size, self.max_length, padding=self._padding)

    def _jobs(self, texts: Sequence[str], buckets: Buckets) -> Iterator[Job]:
        """Calls for all texts, roughly the longest first: by letters over all texts, by tokens within a chunk."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        at_once = TOKENIZED_AT_ONCE * buckets.rows[-1]
        for begin in range(0, len(order), at_once):
            chunk = order[begin : begin + at_once]
            encoded = self.tokenize([texts[i] for i in chunk])
            self.truncated += sum(cut > 0 for _, cut in encoded)
            yield from buckets.jobs(chunk, [ids for ids, _ in encoded])

    def _dispatch(self, packed: np.ndarray, normalize: bool) -> Any:
        vectors = self._program(self._weights, packed, np.bool_(normalize))
        vectors.copy_to_host_async()
        return vectors


def _check_batch_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidParameterError(f"batch_size: expected a whole number of at least 1, got {batch_size!r}")


def _texts(sentences: Any) -> list[str]:
    if isinstance(sentences, bytes) or not isinstance(sentences, Iterable):
        raise InvalidParameterError(f"sentences: expected a text or texts, got {sentences!r}")
    return list(sentences)


def _check(texts: Sequence[Any]) -> None:
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidParameterError(f"sentences: expected texts, got {text!r} at {number}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: bytes of another encoding
            raise InvalidParameterError(f"sentences: not Unicode text at {number}: {text!r}") from error
