"""The simulation as a side of a load test, with steps and overheads that are measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from verax import machine, progress
from verax.bench.serve.load import Load, Run
from verax.bench.serve.sides import EngineOptions, Side
from verax.bench.serve.traffic import Traffic
from verax.bench.simulate.calibrate import calibration_loads, fit_overheads, request_times
from verax.bench.simulate.engines import Engines, measured_engines
from verax.bench.simulate.fleet import simulate
from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.step_times import MeasuredTimes, measure_steps
from verax.errors import InvalidParameterError

__all__ = ["SimulatedSide"]

CALIBRATION_ROUNDS = 3
"""Rounds of a calibration, in each of which the steps and both loads are measured. Medians count."""


class SimulatedSide:
    """One simulated replica, with the steps of our engine on this machine and the overheads of a server.

    Steps are measured anew before each run, because a machine's speed changes meanwhile. Where the host's cores compute
    the steps too, the overheads change with them.

    Raises:
        InvalidParameterError: for clients that read slowly or leave, which are not simulated.
    """

    def __init__(self, engine: EngineOptions, traffic: Traffic):
        if traffic.slow_readers or traffic.disconnect:
            raise InvalidParameterError("against: clients of a simulation neither read slowly nor leave")
        from verax.text.engine.llm import LLM

        self._traffic = traffic
        self._llm = LLM(engine.model, **engine.keywords())
        self._rng = np.random.default_rng(0)
        contention = 1 / machine.num_cores() if jax.default_backend() == "cpu" else 0.0
        self._overheads = Overheads(contention=contention)
        self._calibrated_at: list[int] = []
        self._calibrated_with: MeasuredTimes | None = None
        """Steps at the time of the calibration; None before it."""

    async def calibrate(self, server: Side, loads: Sequence[Load], *, first: int) -> None:
        """Fit the overheads to a server, at other loads than those that are to be predicted.

        Args:
            server: what is to be predicted.
            loads: those to predict.
            first: number of the first run, which decides on its prompts.

        Raises:
            VeraxError: if the server completes no request.
        """
        known = calibration_loads(loads, self._llm.engine.runner.config.max_num_seqs)
        steps: list[MeasuredTimes] = []
        taken: list[list[np.ndarray]] = [[] for _ in known]
        with progress.bar("calibration") as report:
            for number in range(CALIBRATION_ROUNDS):
                steps.append(measure_steps(self._llm.engine, self._rng))
                for i, load in enumerate(known):
                    run = await server.run(load, first + number * len(known) + i)
                    taken[i].append(request_times(run, load))
                report(number + 1, CALIBRATION_ROUNDS, "")
        times = MeasuredTimes.median(steps)

        def simulated(overheads: Overheads) -> list[np.ndarray]:
            engines = measured_engines(self._llm, times, overheads)
            return [request_times(self._simulated(engines, load, first + i), load) for i, load in enumerate(known)]

        measured = [np.median(found, axis=0) for found in taken]
        step = float(measured[0][-1]) / self._traffic.output_tokens
        self._overheads = fit_overheads(measured, simulated, step=step, contention=self._overheads.contention)
        self._calibrated_with = times
        self._calibrated_at = [load.concurrency or 0 for load in known]

    def report(self) -> dict[str, Any]:
        """Overheads and the streams at which they were fitted, as JSON holds them."""
        overheads = self._overheads
        return {
            "overhead_ms": 1e3 * overheads.per_step,
            "overhead_per_token_us": 1e6 * overheads.per_token,
            "overhead_per_request_ms": 1e3 * overheads.per_request,
            "contention": overheads.contention,
            "calibrated_at": self._calibrated_at,
        }

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Measure the steps, and put a load on the simulation."""
        times, overheads = measure_steps(self._llm.engine, self._rng), self._overheads
        if self._calibrated_with is not None and overheads.contention:
            overheads = overheads.scaled(times.over(self._calibrated_with))
        engines = measured_engines(self._llm, times, overheads)
        return self._simulated(engines, load, number, on_answer)

    def _simulated(self, engines: Engines, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        requests = self._traffic.requests(number)
        return simulate(engines.new(1), load, requests, number=number, on_answer=on_answer)[0]
