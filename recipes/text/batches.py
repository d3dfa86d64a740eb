"""Documents packed into rows of fixed length, and batches of rows. A batch depends on the seed and its step only."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from recipes.text.arithmetic import Split
from recipes.text.data import Document, documents
from verax.errors import InvalidParameterError

_ENCODED_AT_ONCE = 64
"""Documents per call of the tokenizer: enough to hide the call's cost, few enough to waste little per batch."""


class Row(NamedTuple):
    """Packed row of T tokens.

    `segments` number the documents of the row from 1; padding is 0. `positions` count from 0 in each segment. A
    document that crosses the end of a row continues in the next row as a new segment.
    """

    tokens: Int32[np.ndarray, "T"]
    segments: Int32[np.ndarray, "T"]
    positions: Int32[np.ndarray, "T"]


def _row(pieces: list[list[int]], length: int) -> Row:
    tokens = np.zeros(length, np.int32)
    segments = np.zeros(length, np.int32)
    positions = np.zeros(length, np.int32)
    start = 0
    for number, piece in enumerate(pieces, 1):
        stop = start + len(piece)
        tokens[start:stop] = piece
        segments[start:stop] = number
        positions[start:stop] = np.arange(len(piece))
        start = stop
    return Row(tokens, segments, positions)


def _encoded(texts: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    stream = iter(texts)
    while chunk := [document.text for document in islice(stream, _ENCODED_AT_ONCE)]:
        for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
            yield encoding.ids


def pack(texts: Iterable[Document], tokenizer: Tokenizer, length: int) -> Iterator[Row]:
    """Rows of `length` tokens, cut from the concatenated documents; only the last row may end in padding."""
    if length < 1:
        raise InvalidParameterError(f"length: a row needs at least one token, got {length}")
    pieces: list[list[int]] = []
    free = length
    for ids in _encoded(texts, tokenizer):
        start = 0
        while start < len(ids):
            piece = ids[start : start + free]
            pieces.append(piece)
            start += len(piece)
            free -= len(piece)
            if free == 0:
                yield _row(pieces, length)
                pieces, free = [], length
    if pieces:
        yield _row(pieces, length)


def batch(
    step: int, tokenizer: Tokenizer, *, seed: int, batch_size: int, length: int, split: Split = "train"
) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Batch of a step: `tokens`, `segments` and `positions`. It does not depend on other steps."""
    rows = islice(pack(documents(f"{seed}/{step}", split=split), tokenizer, length), batch_size)
    columns = zip(*rows, strict=True)
    return {name: np.stack(column) for name, column in zip(Row._fields, columns, strict=True)}
