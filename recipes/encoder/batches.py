"""Batches of token pairs for contrastive training. A batch depends on the seed and its step only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from recipes.encoder.paraphrases import Split, pairs

__all__ = ["batch", "batches", "padded"]

Batch = dict[str, Int32[np.ndarray, "B ..."]]


def padded(tokenizer: Tokenizer, sentences: Sequence[str], length: int) -> Batch:
    """Batch of sentences: `tokens [B, length]` and `lengths [B]`. Padding is token 0; longer sentences are cut."""
    ids = [encoding.ids[:length] for encoding in tokenizer.encode_batch_fast(list(sentences))]
    tokens = np.zeros((len(ids), length), np.int32)
    for row, sentence in zip(tokens, ids, strict=True):
        row[: len(sentence)] = sentence
    return {"tokens": tokens, "lengths": np.asarray([len(sentence) for sentence in ids], np.int32)}


def batch(step: int, tokenizer: Tokenizer, *, seed: int, size: int, length: int, split: Split = "train") -> Batch:
    """Batch of a step: `size` first phrasings, then the second phrasings in the same order."""
    drawn = [pair for _, pair in islice(pairs(f"{seed}/{step}", split=split), size)]
    return padded(tokenizer, [*(pair.first for pair in drawn), *(pair.second for pair in drawn)], length)


def batches(tokenizer: Tokenizer, *, seed: int, size: int, length: int, start: int = 0) -> Iterator[Batch]:
    """Endless training batches from step `start` on."""
    for step in count(start):
        yield batch(step, tokenizer, seed=seed, size=size, length=length)
