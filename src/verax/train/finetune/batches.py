"""Examples in padded batches. A batch depends on the examples, the seed and its step only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from verax._buckets import at_least, powers
from verax.train.finetune.data import Example

__all__ = ["Batch", "shuffled_batches", "validation_batches"]

Batch = dict[str, np.ndarray]
"""`tokens [B, T]`, `targets [B, T]` (the token behind each), `weights [B, T]` and `lengths [B]`.

The weight is that of a target in the loss: equal for all that are trained, which add up to 1 in a step, and otherwise
zero. Behind its tokens a row has zeros."""

SHORTEST = 32
"""Tokens of the shortest rows. Longer ones have powers of two, so that few programs are compiled."""


def shuffled_batches(
    examples: Sequence[Example], *, seed: int, rows: int, parts: int, max_length: int, start: int
) -> Iterator[Batch]:
    """Endless batches from step `start` on: all examples in a random order, then all in another one, and so on.

    Args:
        examples: the examples.
        seed: seed of the orders.
        rows: examples that are computed at once, B.
        parts: groups of so many rows that make a step; entries have them as a first axis if there are more than one.
        max_length: tokens of the longest example.
        start: the step.
    """
    order = _order(len(examples), seed, start * rows * parts)
    while True:
        chosen = [examples[i] for i in islice(order, rows * parts)]
        batch = _padded(chosen, rows * parts, max_length, total=_targets(chosen))
        if parts > 1:
            batch = {name: array.reshape(parts, rows, *array.shape[1:]) for name, array in batch.items()}
        yield batch


def validation_batches(examples: Sequence[Example], *, rows: int, max_length: int) -> Iterator[Batch]:
    """Batches of all examples once, of similar lengths; the weights of all of them add up to 1."""
    ordered = sorted(examples, key=lambda example: len(example.tokens))
    total = _targets(ordered)
    for i in range(0, len(ordered), rows):
        yield _padded(ordered[i : i + rows], rows, max_length, total=total)


def _order(count: int, seed: int, start: int) -> Iterator[int]:
    epoch, offset = divmod(start, count)
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count)[offset:].tolist()
        epoch, offset = epoch + 1, 0


def _targets(examples: Sequence[Example]) -> int:
    """Number of trained tokens. The first token of an example has none before it that could predict it."""
    return max(1, sum(int(example.trained[1:].sum()) for example in examples))


def _padded(examples: Sequence[Example], rows: int, max_length: int, *, total: int) -> Batch:
    """A batch of so many rows, the last of which are empty if there are fewer examples."""
    longest = max(len(example.tokens) for example in examples) - 1
    length = at_least(powers(min(SHORTEST, max_length), max_length, 2), longest)
    batch = {
        "tokens": np.zeros((rows, length), np.int32),
        "targets": np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
        "lengths": np.zeros(rows, np.int32),
    }
    for row, (tokens, trained) in enumerate(examples):
        T = len(tokens) - 1
        batch["tokens"][row, :T] = tokens[:-1]
        batch["targets"][row, :T] = tokens[1:]
        batch["weights"][row, :T] = trained[1:] / np.float32(total)
        batch["lengths"][row] = T
    return batch
