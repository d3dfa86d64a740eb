"""Texts of all lengths in calls of a few fixed shapes, so that a short list of programs serves everything; and the
models that these programs call.
"""

from __future__ import annotations

import abc
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from verax import ops, progress
from verax._buckets import at_least, eighths, powers
from verax._compat import begin_copy_to_host, compiler_options
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError
from verax.loading import load_model
from verax.models import DTYPES
from verax.nn import pack_linear_weights

SHORTEST = 16
"""Tokens of the smallest bucket."""

TOKENIZED_AT_ONCE = 512
"""Texts that are tokenised together: enough to sort like lengths together and to fill all cores."""

ROWS = 32

TOKENS_PER_SENTENCE = 4
"""Tokens that a sentence takes at least of a packed call: they bound the sentences of a call by its tokens."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text, or of a pair of texts."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    """Type of each token of a pair: 0 for the first text, 1 for the second."""
    left_out: int = 0
    """Tokens that were cut from the end."""


@dataclass(frozen=True)
class Job:
    """Input of one program call."""

    tokens: Int32[np.ndarray, "rows tokens"]
    """Tokens of the texts: end to end in one row, or each in a row of its own, followed by padding."""
    lengths: Int32[np.ndarray, "texts"]
    """Tokens of each text, in the order of their places; 0 past the last text."""
    types: Int32[np.ndarray, "rows tokens"]
    """Types of the tokens; 0 where they have none."""
    members: Int32[np.ndarray, "n"]


_Waiting = tuple[int, Tokens]
"""Index of a text that is in no call yet, and its tokens."""


class Buckets(abc.ABC):
    """Shapes of the compiled programs, and the division of texts into calls of these shapes."""

    batch_size: int
    """Most texts in a call."""

    @abc.abstractmethod
    def empty_jobs(self, longest: int) -> list[Job]:
        """A call without texts of every shape that texts of up to `longest` tokens take, small ones first."""

    @abc.abstractmethod
    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        """True if these texts fill a call."""

    @abc.abstractmethod
    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        """Remove the texts of a call from `waiting`, where short ones are first."""

    @abc.abstractmethod
    def _job(self, texts: Sequence[_Waiting]) -> Job:
        """The call of these texts."""

    def jobs(self, texts: Sequence[Tokens]) -> Iterator[Job]:
        """The texts as calls, those with the longest ones first."""
        return self.tokenized([len(text.ids) for text in texts], lambda chunk: [texts[i] for i in chunk])

    def tokenized(
        self, characters: Sequence[int], tokenize: Callable[[Sequence[int]], Sequence[Tokens]]
    ) -> Iterator[Job]:
        """Texts as calls, tokenised some batches ahead, roughly the longest first.

        They are sorted by characters over all texts, by tokens among those that are tokenised together.
        """
        order = sorted(range(len(characters)), key=lambda i: -characters[i])
        waiting: list[_Waiting] = []
        for begin in range(0, len(order), TOKENIZED_AT_ONCE):
            chunk = order[begin : begin + TOKENIZED_AT_ONCE]
            waiting += zip(chunk, tokenize(chunk), strict=True)
            waiting.sort(key=_length)
            while self._fill(waiting):
                yield self._job(self._take(waiting))
        while waiting:
            yield self._job(self._take(waiting))


class PackedBuckets(Buckets):
    """Calls of one row in which sentences lie end to end; the sizes of rows are eighths apart."""

    def __init__(self, batch_size: int | None, max_length: int, tokens: int):
        """Calls for texts of up to `max_length` tokens.

        `batch_size`: most texts in a call; as many as `tokens` hold if None. `tokens`: most tokens of several texts in
        a call.
        """
        self.tokens = tokens
        self.batch_size = batch_size or max(1, tokens // TOKENS_PER_SENTENCE)
        self.sizes = self._sizes(max_length)

    def _sizes(self, longest: int) -> list[int]:
        """Tokens of calls of texts of up to `longest` tokens."""
        longest = max(longest, TOKENS_PER_SENTENCE)
        return eighths(SHORTEST, max(longest, min(self.tokens, self.batch_size * longest)))

    def empty_jobs(self, longest: int) -> list[Job]:
        """A call without texts of every shape that texts of up to `longest` tokens take, small ones first."""
        return [_job(1, size, size // TOKENS_PER_SENTENCE, []) for size in self._sizes(longest)]

    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        return len(waiting) >= self.batch_size or sum(map(_room, waiting)) >= self.tokens

    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        # The longest text that there is room for, again and again: hardly any room is left.
        room, taken = max(self.tokens, _room(waiting[-1])), []
        while len(taken) < self.batch_size and (fitting := bisect_right(waiting, room, key=_room)):
            taken.append(waiting.pop(fitting - 1))
            room -= _room(taken[-1])
        return taken

    def _job(self, texts: Sequence[_Waiting]) -> Job:
        size = at_least(self.sizes, sum(map(_room, texts)))
        job, begin = _job(1, size, size // TOKENS_PER_SENTENCE, texts), 0
        for _, text in texts:
            _write(job, 0, begin, text)
            begin += len(text.ids)
        return job


class PaddedBuckets(Buckets):
    """A row for each sentence, for models whose sentences cannot share one.

    Lengths grow by a half or a third, rows fourfold.
    """

    def __init__(self, batch_size: int | None, max_length: int, *, padding: bool = True):
        """Calls of up to `batch_size` texts, or 32, of up to `max_length` tokens; without `padding`, of one text."""
        doubled = powers(SHORTEST, max_length, 2)
        self.lengths = sorted({min(n, max_length) for length in doubled for n in (length, length * 3 // 2)})
        self.rows = powers(1, batch_size or ROWS, 4)
        if not padding:
            self.lengths, self.rows = list(range(max_length + 1)), [1]
        self.batch_size = self.rows[-1]

    def empty_jobs(self, longest: int) -> list[Job]:
        """A call without texts of every shape that texts of up to `longest` tokens take, small ones first."""
        lengths = self.lengths[: bisect_left(self.lengths, longest) + 1]
        return [_job(rows, length, rows, []) for length in lengths for rows in self.rows]

    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        return len(waiting) >= self.batch_size

    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        taken = waiting[-self.batch_size :]
        del waiting[-self.batch_size :]
        return taken

    def _job(self, texts: Sequence[_Waiting]) -> Job:
        rows, length = at_least(self.rows, len(texts)), at_least(self.lengths, _length(texts[-1]))
        job = _job(rows, length, rows, texts)
        for row, (_, text) in enumerate(texts):
            _write(job, row, 0, text)
        return job


def _length(text: _Waiting) -> int:
    return len(text[1].ids)


def _room(text: _Waiting) -> int:
    """Tokens that a text takes of a packed call."""
    return max(_length(text), TOKENS_PER_SENTENCE)


def _job(rows: int, size: int, places: int, texts: Sequence[_Waiting]) -> Job:
    """A call with places for texts, before their tokens are written."""
    lengths = np.zeros(places, np.int32)
    lengths[: len(texts)] = [len(text.ids) for _, text in texts]
    members = np.asarray([index for index, _ in texts], np.int32)
    return Job(np.zeros((rows, size), np.int32), lengths, np.zeros((rows, size), np.int32), members)


def _write(job: Job, row: int, begin: int, text: Tokens) -> None:
    end = begin + len(text.ids)
    job.tokens[row, begin:end] = text.ids
    if text.types is not None:
        job.types[row, begin:end] = text.types


def _alone(job: Job) -> Iterator[Job]:
    """Each text of a call in a call of its own, of the same shape."""
    rows, size = job.tokens.shape
    begins = np.cumsum(job.lengths) - job.lengths if rows == 1 else np.zeros_like(job.lengths)
    for place, (index, begin, length) in enumerate(zip(job.members, begins, job.lengths, strict=False)):
        at = min(place, rows - 1), slice(begin, begin + length)
        text = Tokens(job.tokens[at].tolist(), job.types[at].tolist())
        one = _job(rows, size, len(job.lengths), [(index, text)])
        _write(one, 0, 0, text)
        yield one


IN_FLIGHT = 2
"""Calls that the device has before the oldest result is read: one runs, one waits."""


TOKENS_PER_CALL = {"cpu": 512}
"""Tokens of several texts in a packed call, by platform."""

ELSEWHERE = 2048
"""Tokens of several texts in a packed call on other platforms, where attention scores all pairs of tokens."""


def tokens_per_call() -> int:
    """Most tokens of several texts in a call on the target."""
    return TOKENS_PER_CALL.get(ops.target().platform, ELSEWHERE)


def compiled(function: Callable[..., Array], modules: Any) -> tuple[Any, tuple[Array, ...]]:
    """A program `program(weights, *arrays)` of `function(modules, *arrays)`, and its weights.

    The first arrays are a call's `tokens` and `lengths`. The modules are flattened once: a call passes a flat tuple of
    arrays, and modules exist only while tracing.
    """
    graph, state = nnx.split(modules)
    leaves, treedef = jax.tree.flatten(state)

    def call(weights: tuple[Array, ...], tokens: Array, lengths: Array, *others: Array) -> Array:
        modules = nnx.merge(graph, jax.tree.unflatten(treedef, weights))
        follows = len(tokens) == 1  # all texts come before padding
        with ops.skip_padding(tokens.shape, jnp.sum(lengths)) if follows else nullcontext():
            return function(modules, tokens, lengths, *others)

    return jax.jit(call, compiler_options=compiler_options(ops.target().platform)), tuple(leaves)


def run_jobs(
    jobs: Iterable[Job],
    dispatch: Callable[[Job], Array],
    write: Callable[[Job, Float32[np.ndarray, "rows ..."]], None],
    count: int,
    *,
    label: str,
    unit: str,
    show_progress: bool,
) -> None:
    """Run calls and write their results. While the device works on the calls that it has, the host makes the next.

    Texts of a call whose results are not all finite get another call each.

    Args:
        dispatch: function that begins a call and returns its result.
        write: function that takes a call and its result on the host, whose memory is free again afterwards.
        count: texts of all calls.
        unit: plural of what has one result each, for the progress bar.
    """
    done = 0
    pending: deque[tuple[Job, Array]] = deque()
    begin = time.perf_counter()
    with progress.bar(label, enabled=show_progress) as report:

        def collect() -> int:
            job, result = pending.popleft()
            if len(job.members) > 1 and not np.isfinite(result).all():
                # Attention multiplies what a token does not see by 0, and 0 times NaN is NaN: one text's reach others.
                for one in _alone(job):
                    write(one, np.asarray(dispatch(one)))
            else:
                write(job, np.asarray(result))
            rate = (done + len(job.members)) / (time.perf_counter() - begin)
            report(done + len(job.members), count, f"{rate:,.0f} {unit}/s")
            return len(job.members)

        for job in jobs:
            result = dispatch(job)
            begin_copy_to_host(result)
            pending.append((job, result))
            if len(pending) > IN_FLIGHT:
                done += collect()
        while pending:
            done += collect()


def check_batch_size(batch_size: Any) -> None:
    """Check the number of texts of a call, if one is given."""
    if batch_size is None:
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidParameterError(f"batch_size: expected a whole number of at least 1, got {batch_size!r}")


def check_texts(texts: Any, name: str) -> list[str]:
    """Texts as a list, if they are texts; `name` is the argument's, for messages."""
    if isinstance(texts, str):  # whose characters would each be one
        raise InvalidParameterError(f"{name}: expected a list of texts, got the text {texts!r}")
    # A mapping's keys would be read.
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InvalidParameterError(f"{name}: expected a text or texts, got {texts!r}")
    checked = list(texts)
    for number, text in enumerate(checked):
        if not isinstance(text, str):
            raise InvalidParameterError(f"{name}: expected texts, got {text!r} at {number}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: bytes of another encoding
            raise InvalidParameterError(f"{name}: not Unicode text at {number}: {text!r}") from error
    return checked


def check_tokens(ids: Any, most: int, vocabulary: int, number: int, name: str) -> list[int]:
    """Token ids of a text as a list, if they are 1 to `most` numbers below `vocabulary`; `number` is the text's."""
    if not isinstance(ids, Iterable):
        raise InvalidParameterError(f"{name}: expected a list of tokens for each sentence, got {ids!r} at {number}")
    given = list(ids)
    if not 0 < len(given) <= most:
        raise InvalidParameterError(f"{name}: expected 1 to {most} tokens (max_length), got {len(given)} at {number}")
    array = np.asarray(given)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocabulary:
        raise InvalidParameterError(f"{name}: expected numbers from 0 to {vocabulary - 1} at {number}")
    return given


QUANTIZATIONS = {"int8": "w8a8"}
"""Names that `Encoder` and `Reranker` take, and the loader's for them."""


def load_for_calls(
    opened: Checkpoint,
    model_class: Callable[..., Any],
    config: Any,
    dtype: str,
    quantization: str | None,
    max_length: int,
    *,
    keep_head: bool = False,
    show_progress: bool,
) -> Any:
    """Load a model, quantise it if asked for, and pack its weights for the processor.

    `max_length`: tokens of the longest text, which LongRoPE depends on. `keep_head`: keep a language model's own head,
    from which rerankers read the answer. Encoders do not call it. Heads and embeddings stay floats.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InvalidParameterError(
            f"quantization: expected {' or '.join(map(repr, QUANTIZATIONS))} or None, got {quantization!r}"
        )
    if hasattr(config, "for_context"):
        config = config.for_context(max_length)
    with progress.bar("loading weights", enabled=show_progress, count=False) as report:
        model = load_model(
            opened,
            model_class,
            config,
            dtype=DTYPES[dtype],
            quantization=quantization and QUANTIZATIONS[quantization],
            quantize_head=False,
            progress=report,
        )
    if not keep_head and hasattr(model, "lm_head"):
        model.lm_head = None
    pack_linear_weights(model)
    return model
