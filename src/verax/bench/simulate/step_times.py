"""Seconds of an engine's steps: least times of a device that need not be there, or times measured here."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from verax.errors import InvalidParameterError
from verax.plan.roofline import Bound
from verax.plan.stand_ins import Span
from verax.plan.text import TextPlan
from verax.text.engine.engine import Engine
from verax.text.engine.request import RequestInput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import Schedule
from verax.text.step.step import StepShape

__all__ = ["LeastTimes", "MeasuredTimes", "StepTimes", "measure_steps", "spans_of"]

SHORT_PROMPT = 16
"""Tokens of the prompts behind which decode steps are measured."""

LONG_PROMPT = 512
"""Tokens of the prompts that show how much longer a step takes for each token of the cache."""

LONG_ROWS = 4
"""Sequences with such a prompt."""

DECODE_STEPS = 12
"""Decode steps of each shape in one pass. The median counts."""

ENOUGH_SECONDS = 1.5
"""Seconds after which steps are measured no further. Those of a small model are, many times, until then."""


class StepTimes(Protocol):
    """Time of a step."""

    def seconds(self, shape: StepShape, spans: Sequence[Span]) -> float:
        """Seconds of a step of this shape over these sequences."""
        ...


def spans_of(schedule: Schedule) -> list[Span]:
    """The sequences of a step."""
    return [Span(chunk.start, chunk.count) for chunk in schedule.chunks]


def _scores(span: Span) -> int:
    """Pairs of a query and a key that it sees, without a window."""
    return span.count * span.before + span.count * (span.count + 1) // 2


class _Line(NamedTuple):
    """A number that grows with another one."""

    base: float
    slope: float

    @classmethod
    def through(cls, near: tuple[float, float], far: tuple[float, float]) -> _Line:
        """The line through two points; a constant if they lie above each other."""
        slope = (far[1] - near[1]) / (far[0] - near[0]) if far[0] > near[0] else 0.0
        return cls(near[1] - slope * near[0], slope)

    def at(self, x: float) -> float:
        return self.base + self.slope * x


@dataclass(frozen=True)
class _LeastOfShape:
    """Parts of the least time of one shape's steps."""

    compute: _Line  # by scores
    memory: _Line  # by tokens that are read of the cache
    links: float


class LeastTimes:
    """Least times of a plan's steps, `verax.plan.roofline`, over the share of them that is reached.

    Work is counted at two lengths for each shape. Between them it is a line, which it is exactly without windows.

    Args:
        plan: the model on its device.
        efficiency: least time over real time of a step, above 0 up to 1.

    Raises:
        InvalidParameterError: for a share out of range.
    """

    def __init__(self, plan: TextPlan, *, efficiency: float = 1.0):
        if not 0 < efficiency <= 1:
            raise InvalidParameterError(f"efficiency: expected above 0 up to 1, got {efficiency}")
        self._plan, self._efficiency = plan, efficiency
        self._shapes: dict[StepShape, _LeastOfShape] = {}

    def seconds(self, shape: StepShape, spans: Sequence[Span]) -> float:
        """Seconds of a step of this shape over these sequences."""
        least = self._shapes.get(shape)
        if least is None:
            least = self._shapes[shape] = self._count(shape)
        compute = least.compute.at(sum(map(_scores, spans)))
        memory = least.memory.at(sum(span.before for span in spans))
        return Bound(compute, memory, least.links).seconds / self._efficiency

    def _count(self, shape: StepShape) -> _LeastOfShape:
        longest = self._plan.context
        if shape.decode:
            batches = [[Span(before, 1)] * shape.rows for before in (0, longest - 1)]
        else:
            most = min(shape.tokens, longest)
            batches = [[Span(0, max(1, most // 2))], [Span(longest - most, most)]]
        near, far = self._plan.bounds(shape, batches)
        scores = [sum(map(_scores, batch)) for batch in batches]
        cached = [sum(span.before for span in batch) for batch in batches]
        return _LeastOfShape(
            _Line.through((scores[0], near.compute), (scores[1], far.compute)),
            _Line.through((cached[0], near.memory), (cached[1], far.memory)),
            near.links,
        )


class MeasuredTimes:
    """Times of an engine's steps as measured: seconds of each shape, and of each token that is read of the cache.

    Args:
        by_shape: seconds of steps of a shape, with nothing in the cache.
        per_cached_token: seconds by which a step takes longer for each token of the cache.
    """

    def __init__(self, by_shape: dict[StepShape, float], per_cached_token: float):
        self.by_shape, self.per_cached_token = by_shape, per_cached_token

    @classmethod
    def median(cls, measured: Sequence[MeasuredTimes]) -> MeasuredTimes:
        """Medians of several measurements of one engine."""
        by_shape = {
            shape: statistics.median(times.by_shape[shape] for times in measured) for shape in measured[0].by_shape
        }
        return cls(by_shape, statistics.median(times.per_cached_token for times in measured))

    def over(self, other: MeasuredTimes) -> float:
        """Times over those of another measurement of the engine: the median over the shapes."""
        return statistics.median(seconds / other.by_shape[shape] for shape, seconds in self.by_shape.items())

    def seconds(self, shape: StepShape, spans: Sequence[Span]) -> float:
        """Seconds of a step of this shape over these sequences.

        Raises:
            InvalidParameterError: for a shape that was not measured.
        """
        if shape not in self.by_shape:
            raise InvalidParameterError(f"step_times: {shape} was not measured; measure an engine of the same sizes")
        return self.by_shape[shape] + self.per_cached_token * sum(span.before for span in spans)


def measure_steps(engine: Engine, rng: np.random.Generator) -> MeasuredTimes:
    """Measure the steps of an engine that nothing else uses, each shape in the loop that serving runs.

    Args:
        engine: with nothing to do.
        rng: of the prompts. No prompt may come twice, because the engine's cache would have it.
    """
    begin, measured = time.perf_counter(), []
    while not measured or time.perf_counter() - begin < ENOUGH_SECONDS:
        measured.append(_measure_once(engine, rng))
    return MeasuredTimes.median(measured)


def _measure_once(engine: Engine, rng: np.random.Generator) -> MeasuredTimes:
    config = engine.runner.config
    longest = config.max_model_len - DECODE_STEPS - 1
    if longest < 1:
        raise InvalidParameterError(
            f"max_model_len: expected at least {DECODE_STEPS + 2} tokens, to measure steps, got {config.max_model_len}"
        )

    def timed(rows: int, tokens: int, answer: int) -> dict[StepShape, list[tuple[int, float]]]:
        for _ in range(rows):
            prompt = rng.integers(engine.vocab_size, size=min(tokens, longest)).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            engine.add_request(RequestInput(prompt, params))
        return _timed(engine)

    by_shape: dict[StepShape, float] = {}
    decode = [shape for shape in config.shapes if shape.decode and not shape.adapters]
    short = min(SHORT_PROMPT, longest)
    for shape in decode:
        steps = timed(shape.rows, short, DECODE_STEPS).get(shape, [])
        by_shape[shape] = statistics.median(seconds for _, seconds in steps)
    rows = at_most = min(LONG_ROWS, config.max_num_seqs)
    shape = max((shape for shape in decode if shape.rows <= at_most), key=lambda shape: shape.rows)
    rows, long = shape.rows, min(LONG_PROMPT, longest)
    far = timed(rows, long, DECODE_STEPS)[shape]
    more = statistics.median(cached for cached, _ in far) - rows * (short + DECODE_STEPS / 2)
    slower = statistics.median(seconds for _, seconds in far) - by_shape[shape]
    per_token = max(0.0, slower / more) if more > 0 else 0.0
    for shape in decode:
        by_shape[shape] -= min(per_token * shape.rows * (short + DECODE_STEPS / 2), 0.5 * by_shape[shape])
    for shape in config.shapes:
        if not (shape.decode or shape.verify or shape.adapters):
            each = max(1, min(shape.tokens // shape.rows, longest))
            if found := timed(max(1, shape.tokens // each), each, 1).get(shape):
                by_shape[shape] = statistics.median(seconds for _, seconds in found)
    return MeasuredTimes(_filled(by_shape, config.shapes), per_token)


def _timed(engine: Engine) -> dict[StepShape, list[tuple[int, float]]]:
    """Tokens of the cache and seconds of each step until the engine has nothing to do.

    The engine dispatches a step before it reads the one before. So the time between two reads is that of a step. The
    first one's begins when the engine begins to plan it.
    """
    times: dict[StepShape, list[tuple[int, float]]] = defaultdict(list)
    last = time.perf_counter()
    while engine.has_unfinished_requests:
        running = engine.in_flight
        engine.step()
        if running is not None:
            cached = sum(span.before for span in spans_of(running))
            times[engine.runner.shape_for(running)].append((cached, time.perf_counter() - last))
            last = time.perf_counter()
    return times


def _filled(by_shape: dict[StepShape, float], shapes: Sequence[StepShape]) -> dict[StepShape, float]:
    """The same with the shapes that no step of the measurement had: they take as long as the next larger ones."""
    found = dict(by_shape)
    mixed = sorted((shape for shape in found if not shape.decode), key=lambda shape: (shape.tokens, shape.rows))
    for shape in itertools.filterfalse(found.__contains__, shapes):
        if not (shape.decode or shape.verify or shape.adapters) and mixed:
            found[shape] = found[next((each for each in mixed if each.tokens >= shape.tokens), mixed[-1])]
    return found
