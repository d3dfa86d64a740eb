"""Parts that sides with an exported model share: padded batches, and the choice of the fastest way to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from verax.bench.harness import Side, time_sides
from verax.embed.settings import EncoderSettings
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["Batch", "Encode", "Exported", "Way", "cosine_distance", "fastest_way", "one_by_one", "padded_batches"]

TRIAL_TEXTS, TRIAL_RUNS = 128, 3
"""Most texts that each way of a side runs in a trial, and its rounds, after one that does not count."""

MOST_APART = 0.03
"""Cosine distance from the vectors of a side's first way, beyond which another way is wrong: some times int8's error.

OpenVINO 2026.4 in int8 returns vectors of another meaning for some texts that are alone in a call, as far as 0.12.
"""

Encode = Callable[[list[str]], Float32[np.ndarray, "n D"]]
"""Function from texts to their vectors, in order."""


class Batch(NamedTuple):
    """Texts of similar length, padded on the right to the longest of them."""

    rows: list[int]
    """Places of the texts among all."""
    ids: Int64[np.ndarray, "B T"]
    mask: Int64[np.ndarray, "B T"]
    """1 for a token, 0 for padding."""


Batches = Callable[[list[str], int], Iterator[Batch]]
"""Function from texts to batches of at most the given number of texts, the longest first."""


def padded_batches(folder: Path, settings: EncoderSettings, padding: int) -> Batches:
    """Batches of a checkpoint's tokenizer; `padding` is the token id after the end of a text."""
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.truncate(settings.max_length)

    def batches(texts: list[str], batch_size: int) -> Iterator[Batch]:
        tokens = [ids for ids, _ in tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            ids = np.full((len(rows), len(tokens[rows[0]])), padding, np.int64)
            mask = np.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = 1
            yield Batch(rows, ids, mask)

    return batches


@dataclass(frozen=True)
class Way:
    """Way to run an exported model: a number of texts in a call, under one setting of its library."""

    setting: str
    batch_size: int
    run: Callable[[Iterable[Batch]], Iterable[tuple[list[int], Float32[np.ndarray, "B D"]]]]
    """Function from batches to their rows and vectors, in any order."""

    def __str__(self) -> str:
        return f"{self.setting}, {f'batches of {self.batch_size}' if self.batch_size > 1 else 'one text a call'}"


@dataclass(frozen=True)
class Exported:
    """Model that a library took over, and the ways to run it."""

    name: str
    batches: Batches
    ways: Sequence[Way]
    versions: dict[str, Any]

    def encode(self, way: Way, texts: list[str]) -> Float32[np.ndarray, "n D"]:
        """Normalised vectors of texts, in order, by one of the ways."""
        parts = list(way.run(self.batches(texts, way.batch_size)))
        vectors = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
        for rows, part in parts:
            vectors[rows] = part
        return vectors


def fastest_way(exported: Exported, texts: list[str], *, latency: bool) -> tuple[Encode, dict[str, Any]]:
    """Time all ways in turn, and take the one of the smallest median, of those whose vectors are the first one's.

    Args:
        exported: the model.
        texts: what the benchmark encodes, of which the first are tried.
        latency: each text in a call of its own.

    Returns:
        The function, and the name of its way, sentences/s of each way in the trial, and the wrong ways' distances.
    """
    sample = texts[:TRIAL_TEXTS]
    call = partial(one_by_one, texts=sample) if latency else lambda encode: encode(sample)
    ways = {str(way): partial(exported.encode, way) for way in exported.ways}
    chosen, rates, wrong = next(iter(ways)), {}, {}
    if len(ways) > 1:
        first = ways[chosen](sample)
        apart = {name: cosine_distance(call(encode), first) for name, encode in ways.items()}
        wrong = {name: distance for name, distance in apart.items() if distance > MOST_APART}
        sides = {name: Side(partial(call, encode)) for name, encode in ways.items()}
        trials = time_sides(sides, runs=TRIAL_RUNS, warmup=1)
        rates = {name: len(sample) / side.median for name, side in trials.items()}
        chosen = max((name for name in ways if name not in wrong), key=lambda name: rates[name])
    return ways[chosen], {"way": chosen, "trials": rates, "wrong": wrong}


def one_by_one(encode: Encode, texts: list[str]) -> Float32[np.ndarray, "n D"]:
    """Vectors of texts, each encoded by a call of its own."""
    return np.concatenate([encode([text]) for text in texts])


def cosine_distance(vectors: Float32[np.ndarray, "n D"], reference: Float32[np.ndarray, "n D"]) -> float:
    """Largest 1 - cosine between a vector and its reference."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    return float(1 - ((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())
