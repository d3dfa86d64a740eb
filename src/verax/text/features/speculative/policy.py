"""Number of tokens to draft: as many as their expected gain pays for, none where drafts rarely hold.

The decision depends on what held before and on a cost model, never on a clock, so that it is the same in every run.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from verax._buckets import at_least

__all__ = ["Acceptance", "Policy", "StepCost"]

WAITING = 0.1
"""Part of a step for which the device waits for the host between steps that verify: the host must read the tokens
first. 0.3 ms of scheduling and packing beside steps of 5 to 40 ms on a CPU."""

PRIOR = 0.5
"""Share of drafts that are expected to hold, of a sequence that had none yet."""

WEIGHT = 0.2
"""Weight of the newest draft in the share of drafts that held."""

FIRST_REST = 16
"""Tokens without drafts after the first drafts that were not worth it. Each further rest is twice as long."""

LONGEST_REST = 512


@dataclass(frozen=True)
class StepCost:
    """Time of a step by its number of tokens, in steps of one token.

    A step reads all weights once; products are free beside that up to `free` tokens. After that `doubling` more tokens
    take as long as the weights.
    """

    free: int
    doubling: int

    def __call__(self, num_tokens: int) -> float:
        """Cost of a step of so many tokens."""
        return 1.0 + max(0, num_tokens - self.free) / self.doubling

    @classmethod
    def on(cls, platform: str, *, quantized: bool) -> StepCost:
        """Cost on a platform.

        On a CPU it is that of the linear operation by rows (`verax bench ops --only linear --rows 1,2,4,8,16,32`).
        bfloat16 takes as long with 8 rows as with one, 1.4 times as long with 16 and 2.4 times with 32; int4 takes 1.7
        times as long with 8. Accelerators compute some hundred rows while they read the weights.
        """
        if platform != "cpu":
            return cls(128, 128)
        return cls(4, 6) if quantized else cls(8, 18)


@dataclass
class Acceptance:
    """Share of a sequence's drafts that held, and its rest from drafts while too few do."""

    rate: float = PRIOR
    rest: int = 0
    """Tokens of the last rest; 0 if there was none since drafts held."""
    resumes_at: int = 0
    """Length of the sequence from which on drafts are made."""
    trying: bool = False
    """True for the first drafts after a rest."""


class Policy:
    """Choice of the number of drafts of each sequence.

    Args:
        cost: cost of a step.
        sizes: ascending numbers of tokens of steps that verify.
        num_drafts: most drafts of a sequence.
        draft_cost: cost of drafting one token for all sequences.
    """

    def __init__(self, cost: StepCost, sizes: abc.Sequence[int], num_drafts: int, draft_cost: float):
        self._cost = cost
        self._sizes = sizes
        self._num_drafts = num_drafts
        self._draft_cost = draft_cost
        self.largest = sizes[-1]
        """Most tokens of a step that verifies."""

    def choose(self, num_rows: int, rates: abc.Sequence[float], limits: abc.Sequence[int]) -> list[int]:
        """Number of drafts of each sequence that can have some, for the most tokens in a given time.

        A step gives a token for each row, and `rate ** i` more for the i-th draft, which counts only if those before it
        hold. All zeros if a step without drafts gives more.

        Args:
            num_rows: sequences of the step, those without drafts included.
            rates: share of drafts that held, of sequences that can have drafts.
            limits: most drafts of each of them.
        """
        gains = sorted(
            (-(rate**i), i, row)
            for row, (rate, limit) in enumerate(zip(rates, limits, strict=True))
            for i in range(1, min(limit, self._num_drafts) + 1)
        )
        best, number = num_rows / self._cost(num_rows), 0
        expected, longest = float(num_rows), 0
        for count, (gain, i, _) in enumerate(gains[: max(0, self.largest - num_rows)], start=1):
            expected, longest = expected - gain, max(longest, i)
            padded = at_least(self._sizes, num_rows + count)
            value = expected / (self._cost(padded) + WAITING + self._draft_cost * longest)
            if value > best:
                best, number = value, count
        chosen = [0] * len(rates)
        for _, _, row in gains[:number]:
            chosen[row] += 1
        return chosen

    def record(self, acceptance: Acceptance, drafted: int, accepted: int, length: int) -> None:
        """Count drafts of a sequence, which has `length` tokens now, and let it rest if they are not worth it."""
        for _ in range(accepted):
            acceptance.rate += WEIGHT * (1 - acceptance.rate)
        if accepted < drafted:
            acceptance.rate -= WEIGHT * acceptance.rate
        in_vain = acceptance.trying and accepted == 0
        acceptance.trying = False
        if in_vain or not any(self.choose(1, [acceptance.rate], [self._num_drafts])):
            acceptance.rest = min(2 * acceptance.rest or FIRST_REST, LONGEST_REST)
            acceptance.resumes_at = length + acceptance.rest
            acceptance.rate, acceptance.trying = PRIOR, True
        elif acceptance.rate > PRIOR:
            acceptance.rest = 0
