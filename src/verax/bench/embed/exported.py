"""Parts that sides with an exported model share: padded batches, and the choice of the fastest way to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from verax.bench.timing import interleave
from verax.embed.settings import EncoderSettings
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["Batch", "Batches", "Encode", "ExportedSide", "Way", "cosine_distance", "one_by_one"]

TRIAL_TEXTS = 128
"""Most texts that each way of a side runs in a trial."""

TRIAL_RUNS = 3
"""Rounds of a trial, after one that does not count."""

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


class Batches:
    """Tokenizer that makes batches of texts, the longest first."""

    def __init__(self, folder: Path, settings: EncoderSettings, padding: int):
        """Read the tokenizer.

        Args:
            folder: the checkpoint's.
            settings: with the most tokens of a text.
            padding: token id behind the end of a text.
        """
        self._tokenizer = Tokenizer.from_folder(folder)
        self._tokenizer.truncate(settings.max_length)
        self._padding = padding

    def __call__(self, texts: list[str], batch_size: int) -> Iterator[Batch]:
        """Batches of at most so many texts."""
        tokens = [ids for ids, _ in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda i: -len(tokens[i]))
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            ids = np.full((len(rows), len(tokens[rows[0]])), self._padding, np.int64)
            mask = np.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = 1
            yield Batch(rows, ids, mask)


@dataclass(frozen=True)
class Way:
    """Way to run an exported model: so many texts in a call, under one setting of its library."""

    setting: str
    """Names of options and their values, for the report."""
    batch_size: int
    run: Callable[[Iterable[Batch]], Iterable[tuple[list[int], Float32[np.ndarray, "B D"]]]]
    """Function from batches to their rows and vectors, in any order."""

    def __str__(self) -> str:
        return f"{self.setting}, {f'batches of {self.batch_size}' if self.batch_size > 1 else 'one text a call'}"


class ExportedSide:
    """Exported model as a side of the benchmark. It is run in the first of its ways, until `choose` finds a faster."""

    def __init__(self, name: str, batches: Batches, ways: list[Way], versions: Mapping[str, Any]):
        """Take what a library made of the model.

        Args:
            name: of the side, with its precision.
            batches: tokenizer of the checkpoint.
            ways: how the model can be run.
            versions: versions and threads of the library.
        """
        self.name = name
        self._batches, self._ways, self._versions = batches, ways, versions

    def versions(self) -> dict[str, Any]:
        """Versions and threads of this side."""
        return dict(self._versions)

    def choose(self, texts: list[str], *, latency: bool) -> dict[str, Any]:
        """Time all ways in turn, and keep the one of the smallest median: its name, and sentences/s of each.

        A way whose vectors are not those of the first one is left out.

        Args:
            texts: what the benchmark encodes, of which the first are tried.
            latency: each text in a call of its own.
        """
        sample = texts[:TRIAL_TEXTS]
        call = partial(one_by_one, texts=sample) if latency else lambda encode: encode(sample)
        trials: dict[str, float] = {}
        wrong: dict[str, float] = {}
        if len(self._ways) > 1:
            sides = {str(way): partial(call, partial(self._encode, way)) for way in self._ways}
            first = self.encode(sample)
            apart = {name: cosine_distance(run(), first) for name, run in sides.items()}
            wrong = {name: distance for name, distance in apart.items() if distance > MOST_APART}
            trials = {name: side.median for name, side in interleave(sides, runs=TRIAL_RUNS).items()}
            self._ways = [min((w for w in self._ways if str(w) not in wrong), key=lambda way: trials[str(way)])]
        rates = {name: len(sample) / seconds for name, seconds in trials.items()}
        return {"way": str(self._ways[0]), "trials": rates, "wrong": wrong}

    def encode(self, texts: list[str]) -> Float32[np.ndarray, "n D"]:
        """Normalised vectors, in order."""
        return self._encode(self._ways[0], texts)

    def _encode(self, way: Way, texts: list[str]) -> Float32[np.ndarray, "n D"]:
        found = list(way.run(self._batches(texts, way.batch_size)))
        vectors = np.empty((len(texts), found[0][1].shape[1]), np.float32)
        for rows, part in found:
            vectors[rows] = part
        return vectors


def one_by_one(encode: Encode, texts: list[str]) -> Float32[np.ndarray, "n D"]:
    """Vectors of texts, each encoded by a call of its own."""
    return np.concatenate([encode([text]) for text in texts])


def cosine_distance(vectors: Float32[np.ndarray, "n D"], reference: Float32[np.ndarray, "n D"]) -> float:
    """The largest 1 - cosine between a vector and its reference."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    return float(1 - ((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())
