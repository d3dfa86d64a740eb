"""Requests of a load test and their times of arrival, all drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verax.errors import InvalidParameterError

__all__ = ["Request", "Traffic", "arrival_times"]

FIRST_TOKEN = 3
"""Smallest id in a prompt: the ids below are end, padding and the like in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how its client behaves."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    slow: bool = False
    """True for a client that reads its answer slowly."""
    leave_after: int | None = None
    """Events of the answer after which the client disconnects; None for one that stays."""


@dataclass(frozen=True)
class Traffic:
    """Distribution of the requests of a load test. Lengths are those of vLLM's random data set.

    Raises:
        InvalidParameterError: for a value out of range; the message begins with the field's name.
    """

    vocab_size: int
    input_tokens: int = 32
    """Tokens of a prompt behind its shared prefix; the mean, if `range_ratio` is not 0."""
    output_tokens: int = 64
    """Tokens of an answer; the mean, if `range_ratio` is not 0."""
    range_ratio: float = 0.0
    """Lengths are uniform from `(1 - range_ratio)` to `(1 + range_ratio)` of their mean."""
    prefix_tokens: int = 0
    """Tokens of a prefix that many prompts share."""
    num_prefixes: int = 1
    """Number of different prefixes; each prompt has one of them at random."""
    slow_readers: float = 0.0
    """Share of clients that read slowly."""
    disconnect: float = 0.0
    """Share of clients that disconnect before the end of their answer, at a random one of its first events."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "num_prefixes"):
            if getattr(self, name) < 1:
                raise InvalidParameterError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.vocab_size <= FIRST_TOKEN:
            raise InvalidParameterError(f"vocab_size: expected more than {FIRST_TOKEN}, got {self.vocab_size}")
        if self.prefix_tokens < 0:
            raise InvalidParameterError(f"prefix_tokens: expected at least 0, got {self.prefix_tokens}")
        if not 0 <= self.range_ratio < 1:
            raise InvalidParameterError(f"range_ratio: expected from 0 to less than 1, got {self.range_ratio}")
        for name in ("slow_readers", "disconnect"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidParameterError(f"{name}: expected a share from 0 to 1, got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Length of the longest prompt with its answer, in tokens."""
        return self.prefix_tokens + sum(self._bounds(mean)[1] for mean in (self.input_tokens, self.output_tokens))

    def requests(self, run: int = 0) -> Iterator[Request]:
        """Endless requests of one run: another run has other prompts behind the same prefixes.

        Answers that a server kept of one run are then of no use in the next one.
        """
        prefixes = np.random.default_rng([self.seed, 0]).integers(
            FIRST_TOKEN, self.vocab_size, (self.num_prefixes, self.prefix_tokens)
        )
        rng = np.random.default_rng([self.seed, 1, run])
        number = 0
        while True:
            own = rng.integers(FIRST_TOKEN, self.vocab_size, self._length(rng, self.input_tokens))
            prefix = prefixes[rng.integers(self.num_prefixes)]
            max_tokens = self._length(rng, self.output_tokens)
            slow, leaves = rng.random() < self.slow_readers, rng.random() < self.disconnect
            # An event can carry several tokens: who waited for a late event might read the whole answer.
            leave_after = int(rng.integers(max(1, max_tokens // 4)))
            prompt = (*prefix.tolist(), *own.tolist())
            yield Request(number, prompt, max_tokens, slow, leave_after if leaves else None)
            number += 1

    def _bounds(self, mean: int) -> tuple[int, int]:
        return max(1, round(mean * (1 - self.range_ratio))), round(mean * (1 + self.range_ratio))

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        low, high = self._bounds(mean)
        return int(rng.integers(low, high + 1))


def arrival_times(rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Iterator[float]:
    """Endless seconds from the start at which requests arrive: vLLM's gamma process, Poisson at burstiness 1.

    Args:
        rate: requests per second.
        burstiness: shape of the gamma distribution of the intervals; less than 1 is burstier, more is more even.
        seed: of the intervals.

    Raises:
        InvalidParameterError: if rate or burstiness is not positive.
    """
    for name, value in (("request_rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise InvalidParameterError(f"{name}: expected more than 0, got {value}")
    return _arrivals(np.random.default_rng([seed, 2]), rate, burstiness)


def _arrivals(rng: np.random.Generator, rate: float, burstiness: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += float(rng.gamma(burstiness, 1 / (rate * burstiness)))
        yield now
