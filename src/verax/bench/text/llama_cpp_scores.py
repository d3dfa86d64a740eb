"""Perplexity of a GGUF file in llama.cpp, on the token ids that verax was measured on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verax.bench.text.llama_cpp import LlamaCpp
from verax.bench.text.scoring import Batch

__all__ = ["llama_cpp_perplexity"]

_TOKENS_AT_ONCE = 64
"""Tokens in one call: llama.cpp keeps the logits of all of them, a megabyte each for a vocabulary of 262,144."""


def llama_cpp_perplexity(path: Path, batches: Sequence[Batch]) -> dict[str, float]:
    """Nats of each next token on average, their exponential, and the seconds that it took.

    Raises:
        MissingDependencyError: if llama-cpp-python is not installed.
        VeraxError: if llama.cpp cannot load the file.
    """
    begin = time.perf_counter()
    texts = [text for batch in batches for text in _texts(batch)]
    side = LlamaCpp(path, context=max(map(len, texts)), batch=_TOKENS_AT_ONCE)
    try:
        nats = [score for text in texts for score in _nats(side, text)]
    finally:
        side.close()
    mean = float(np.mean(nats))
    return {"nats_per_token": mean, "perplexity": float(np.exp(mean)), "seconds": time.perf_counter() - begin}


def _texts(batch: Batch) -> Iterator[list[int]]:
    ends = np.cumsum(batch.lengths)
    for end, length in zip(ends, batch.lengths, strict=True):
        if length > 1:
            yield batch.tokens[end - length : end].tolist()


def _nats(side: LlamaCpp, text: list[int]) -> Iterator[float]:
    """Negative log-probability of each token after the first."""
    side.clear()
    inputs, following = text[:-1], text[1:]
    for at in range(0, len(inputs), _TOKENS_AT_ONCE):
        rows: Any = side.logits(inputs[at : at + _TOKENS_AT_ONCE], position=at)
        rows = rows.astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        after = following[at : at + _TOKENS_AT_ONCE]
        yield from np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(after)), after]
