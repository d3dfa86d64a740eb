"""Evaluation of a built-in encoder: how often it retrieves the other phrasing of a sentence among many."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np

from recipes.encoder.paraphrases import pairs
from verax.embed.encoder import Encoder


def evaluate(folder: Path) -> dict[str, float]:
    """Measure a trained folder on held-out meanings, with the engine that users run.

    Returns:
        Shares of sentences whose paraphrase is the nearest of 1,000 candidates: `retrieval`;
        `retrieval_unseen_patterns`, with candidates phrased by held-out patterns; `retrieval_near_misses` and
        `retrieval_near_misses_unseen_patterns`, with half of all meanings one fact away from another meaning.
    """
    encoder = Encoder(folder, show_progress=False)
    shares = {}
    for near, what in ((0.0, "retrieval"), (0.5, "retrieval_near_misses")):
        for unseen, how in ((False, ""), (True, "_unseen_patterns")):
            shares[what + how] = retrieval(encoder, count=1000, seed=0, near=near, unseen_patterns=unseen)
    return shares


def retrieval(encoder: Encoder, *, count: int, seed: int, near: float, unseen_patterns: bool) -> float:
    """Share of `count` first phrasings to which the nearest of all second phrasings is their own."""
    drawn = islice(pairs(seed, split="held_out", near=near, unseen_patterns=unseen_patterns), count)
    first, second = zip(*(pair for _, pair in drawn), strict=True)
    scores = encoder.encode(first, show_progress=False) @ encoder.encode(second, show_progress=False).T
    return float(np.mean(scores.argmax(axis=1) == np.arange(count)))
