"""Distances between texts and between vectors: logits, log-probabilities, the first difference, cosines, rankings.

The first argument is the reference throughout. Arrays are NumPy's, or convertible to them, of any float dtype.
Distances are computed in float64. Distances between clips are in `verax.compare.videos`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verax.errors import InvalidParameterError

TOP = 5
"""Number of candidates of a position: a token among them counts as close, as in vLLM's tests of log-probabilities."""


@dataclass(frozen=True)
class Difference:
    """First position at which two texts, or the likeliest tokens of two models, differ."""

    position: int
    """Position of the token, from 0."""
    tokens: tuple[int | None, int | None]
    """Token of each side at that position; None past the end of the shorter text."""
    candidates: tuple[dict[int, float], dict[int, float]]
    """Likeliest tokens of each side at that position with log-probabilities (nats), best first; empty if unknown."""

    @property
    def close(self) -> bool:
        """True if each side's token is among the other's candidates, which vLLM's tests count as rounding."""
        (first, second), (of_first, of_second) = self.tokens, self.candidates
        return first in of_second and second in of_first

    def to_dict(self) -> dict[str, Any]:
        """Fields of the difference and `close`, ready for JSON."""
        return {**dataclasses.asdict(self), "close": self.close}


@dataclass(frozen=True)
class LogitsComparison:
    """Two models' logits for the same tokens."""

    positions: int
    max_error: float
    """Largest absolute difference of two logits."""
    relative_error: float
    """Largest error divided by the mean absolute logit of the reference."""
    relative_l2: float
    """||second - first|| / ||first||, over all logits."""
    mean_logprob_distance: float
    """Nats; |log p - log q| of the tokens of the text, or of the reference's best tokens."""
    max_logprob_distance: float
    mean_kl: float
    """Nats; KL(first || second) over the vocabulary."""
    max_kl: float
    same_best: float
    """Share of positions whose likeliest token is the same, 0 to 1."""
    difference: Difference | None
    """The first position whose likeliest tokens differ."""

    def to_dict(self) -> dict[str, Any]:
        """Fields of the comparison, ready for JSON."""
        return {**dataclasses.asdict(self), "difference": self.difference and self.difference.to_dict()}

    def lines(self) -> list[str]:
        """Summary for the terminal, two or three lines."""
        summary = [
            f"logits of {self.positions} positions: largest error {self.max_error:.1e}; log-probabilities apart by "
            f"{self.mean_logprob_distance:.1e} nats (largest {self.max_logprob_distance:.1e}); "
            f"KL divergence {self.mean_kl:.1e} nats (largest {self.max_kl:.1e})",
            f"the likeliest token is the same at {self.same_best:.1%} of positions",
        ]
        if (parted := self.difference) is not None:
            sides = (
                ", ".join(f"{token} ({logprob:.3f})" for token, logprob in side.items()) for side in parted.candidates
            )
            summary.append(f"first other token, at position {parted.position}: " + " against ".join(sides))
        return summary


@dataclass(frozen=True)
class VectorsComparison:
    """Two encoders' vectors for the same sentences."""

    sentences: int
    max_error: float
    """Largest absolute difference of two numbers."""
    mean_cosine: float
    """Mean cosine of the two vectors of a sentence."""
    min_cosine: float
    same_nearest: float | None
    """Share of sentences whose nearest other one (by cosine) is the same; None for fewer than three."""
    rank_correlation: float | None
    """Spearman's correlation of the cosines of all pairs of sentences.

    None for fewer than three sentences, or if all cosines of a side are equal."""

    def to_dict(self) -> dict[str, Any]:
        """Fields of the comparison, ready for JSON."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Summary for the terminal, one line."""
        summary = f"vectors of {self.sentences} texts: cosine {self.mean_cosine:.7f} (least {self.min_cosine:.7f})"
        if self.same_nearest is not None:
            summary += f"; the nearest other text is the same for {self.same_nearest:.1%}"
        if self.rank_correlation is not None:
            summary += f"; rank correlation of similarities {self.rank_correlation:.6f}"
        return [summary]


def compare_logits(first: Any, second: Any, tokens: Sequence[int] | None = None, *, top: int = TOP) -> LogitsComparison:
    """Compare logits `[T, V]` of two models that read the same tokens.

    Args:
        first: `[T, V]`; row t is about the token after position t.
        second: the same shape. Cut off padding of the vocabulary before.
        tokens: T tokens whose log-probabilities are compared; the reference's likeliest if None.
        top: number of candidates that are reported at the first difference.
    """
    a, b = _pair(first, second, "[positions, vocabulary]")
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    best, other_best = a.argmax(-1), b.argmax(-1)
    targets = best if tokens is None else np.asarray(tokens)
    if targets.shape != (len(a),) or (targets < 0).any() or (targets >= a.shape[1]).any():
        raise InvalidParameterError(f"tokens: expected {len(a)} tokens from 0 to {a.shape[1] - 1}")
    rows = np.arange(len(a))
    distance = np.abs(log_p[rows, targets] - log_q[rows, targets])
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    error = np.abs(a - b)
    parted = np.flatnonzero(best != other_best)
    difference = None
    if len(parted):
        t = int(parted[0])
        sides = candidates(a[t : t + 1], top)[0], candidates(b[t : t + 1], top)[0]
        difference = Difference(t, (int(best[t]), int(other_best[t])), sides)
    return LogitsComparison(
        positions=len(a),
        max_error=float(error.max()),
        relative_error=ratio(error.max(), np.abs(a).mean()),
        relative_l2=ratio(np.linalg.norm(a - b), np.linalg.norm(a)),
        mean_logprob_distance=float(distance.mean()),
        max_logprob_distance=float(distance.max()),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        same_best=float((best == other_best).mean()),
        difference=difference,
    )


def candidates(logits: Any, top: int = TOP) -> list[dict[int, float]]:
    """Likeliest tokens of each row of logits `[T, V]` with their log-probabilities (nats), best first."""
    rows = _log_softmax(np.asarray(logits, np.float64))
    best = np.argsort(-rows, axis=-1, kind="stable")[:, :top]
    return [{int(token): float(row[token]) for token in tokens} for row, tokens in zip(rows, best, strict=True)]


def first_difference(
    first: Sequence[int],
    second: Sequence[int],
    first_candidates: Sequence[Mapping[int, Any]] = (),
    second_candidates: Sequence[Mapping[int, Any]] = (),
) -> Difference | None:
    """First difference of two generated texts, with the candidates of both sides; None if the texts are the same.

    `first_candidates`: likeliest tokens of each position and their log-probabilities, from `candidates` or
    `CompletionOutput.logprobs`.
    """
    shorter, longer = sorted((len(first), len(second)))
    parted = (t for t in range(shorter) if first[t] != second[t])
    position = next(parted, shorter)
    if position == longer:
        return None
    tokens = tuple(int(side[position]) if position < len(side) else None for side in (first, second))
    sides = tuple(
        {int(token): float(getattr(value, "logprob", value)) for token, value in side[position].items()}
        if position < len(side)
        else {}
        for side in (first_candidates, second_candidates)
    )
    return Difference(position, (tokens[0], tokens[1]), (sides[0], sides[1]))


def compare_vectors(first: Any, second: Any) -> VectorsComparison:
    """Compare vectors `[n, D]` of the same n sentences by two encoders."""
    from scipy import stats  # JAX depends on it

    a, b = _pair(first, second, "[sentences, size]")
    lengths = [np.linalg.norm(side, axis=-1, keepdims=True) for side in (a, b)]
    for name, length in zip(("first", "second"), lengths, strict=True):
        if not length.all():
            raise InvalidParameterError(f"{name}: vector {int(length.argmin())} is zero, which has no direction")
    unit_a, unit_b = a / lengths[0], b / lengths[1]
    cosine = (unit_a * unit_b).sum(-1)
    nearest = correlation = None
    if len(a) >= 3:
        alike = unit_a @ unit_a.T, unit_b @ unit_b.T
        pairs = [side[np.triu_indices(len(a), k=1)] for side in alike]
        if all(np.ptp(side) for side in pairs):
            correlations: Any = stats.spearmanr(*pairs)
            correlation = float(correlations.statistic)
        for side in alike:
            np.fill_diagonal(side, -np.inf)
        nearest = float((alike[0].argmax(-1) == alike[1].argmax(-1)).mean())
    return VectorsComparison(
        sentences=len(a),
        max_error=float(np.abs(a - b).max()),
        mean_cosine=float(cosine.mean()),
        min_cosine=float(cosine.min()),
        same_nearest=nearest,
        rank_correlation=correlation,
    )


def _pair(first: Any, second: Any, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays in float64."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or 0 in a.shape:
        raise InvalidParameterError(f"first: expected an array {layout}, got one of shape {list(a.shape)}")
    if a.shape != b.shape:
        raise InvalidParameterError(f"second: it has shape {list(b.shape)}, the first {list(a.shape)}")
    for name, side in (("first", a), ("second", b)):
        if not np.isfinite(side).all():
            where = np.argwhere(~np.isfinite(side))[0].tolist()
            raise InvalidParameterError(f"{name}: not a finite number at {where}")
    return a, b


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def ratio(part: Any, whole: Any) -> float:
    """Quotient of two numbers; 0 / 0 is 0, and any other number over 0 is infinite."""
    return float(part / whole) if whole else float(part and np.inf)
