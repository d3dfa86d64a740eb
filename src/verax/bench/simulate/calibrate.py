"""Calibration of a simulation: the overheads with which its requests take as long as those of a server.

They are fitted at two loads. What a simulation says of other loads is then a prediction, which a measurement can
refute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from verax.bench.serve.load import Load, Run
from verax.bench.simulate.overheads import Overheads
from verax.errors import VeraxError

__all__ = ["calibration_loads", "fit_overheads", "request_times"]

MOST_STREAMS = 16
"""Streams of the larger load. With many more of them, a step's time hides what a single token takes."""

SECONDS = 2.0
"""Seconds of a run of the server: hundreds of requests of a small model, a few of one that takes seconds for each."""

ITERATIONS = 5
"""Linearisations of the simulation. The second already moves the overheads by a few percent only."""


def calibration_loads(loads: Sequence[Load], max_num_seqs: int) -> list[Load]:
    """Two closed loops, with few streams and with many, that are none of the loads to predict.

    Args:
        loads: those to predict.
        max_num_seqs: most sequences in one step, which the streams do not exceed where they need not.
    """
    taken = {load.concurrency for load in loads}
    few = next(n for n in itertools.count(1) if n not in taken)
    fitting = (n for n in range(min(MOST_STREAMS, max_num_seqs), few, -1) if n not in taken)
    many = next(itertools.chain(fitting, (n for n in itertools.count(few + 1) if n not in taken)))
    return [Load(f"calibration at concurrency {n}", concurrency=n, duration=SECONDS) for n in (few, many)]


def request_times(run: Run, load: Load) -> np.ndarray:
    """Mean seconds of a request of a closed loop: to its first token, from there to the last, and to the next request.

    Raises:
        VeraxError: if no request was completed.
    """
    answers = [answer for answer in run.answers if answer.completed and answer.events]
    if not answers:
        raise VeraxError(f"against: the server has completed no request of the simulation's {load.name}")
    assert load.concurrency is not None
    first = np.mean([answer.events[0] - answer.sent for answer in answers])
    rest = np.mean([answer.events[-1] - answer.events[0] for answer in answers])
    return np.array([first, rest, load.concurrency * run.seconds / len(answers)])


def fit_overheads(
    measured: Sequence[np.ndarray],
    simulated: Callable[[Overheads], Sequence[np.ndarray]],
    *,
    step: float,
    contention: float,
) -> Overheads:
    """Overheads, none of them negative, with which simulated requests take the measured times: least squares.

    Differences count in proportion to the time of a whole request at their load (Gauss-Newton).

    Args:
        measured: `request_times` of the server at each load.
        simulated: the same of a simulation with some overheads.
        step: seconds of a step, of which a tenth is a small change.
        contention: as in `Overheads`, not fitted.
    """
    from scipy.optimize import nnls  # JAX depends on it

    whole = np.concatenate([np.full(len(times), times[-1]) for times in measured])
    target = np.concatenate(measured) / whole
    # A token's change is that of a step with `MOST_STREAMS` of them. A request's change shows beside whole steps only.
    changes = np.array([0.1 * step, 0.1 * step / MOST_STREAMS, step])

    def of(seconds: np.ndarray) -> Overheads:
        return Overheads(*map(float, seconds), contention=contention)

    def times(seconds: np.ndarray) -> np.ndarray:
        return np.concatenate(simulated(of(seconds))) / whole

    seconds, tried = np.zeros(3), []
    for _ in range(ITERATIONS):
        found = times(seconds)
        tried.append((float(np.sum((target - found) ** 2)), seconds))
        # Columns of the Jacobian, in units of the changes.
        columns = [times(seconds + change) - found for change in np.diag(changes)]
        jacobian = np.stack(columns, axis=1)
        seconds = nnls(jacobian, target - found + jacobian @ (seconds / changes))[0] * changes
    # Requests join whole steps, so that the simulation is no smooth function and a later iterate may be worse.
    return of(min(tried, key=lambda each: each[0])[1])
