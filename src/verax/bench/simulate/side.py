"""The simulation as a side of a load test, with steps that are measured in this process."""

from __future__ import annotations

from collections.abc import Callable

from verax.bench.serve.load import Load, Run
from verax.bench.serve.sides import EngineOptions
from verax.bench.serve.traffic import Traffic
from verax.bench.simulate.engines import measured_engines
from verax.bench.simulate.fleet import simulate
from verax.errors import InvalidParameterError

__all__ = ["SimulatedSide"]


class SimulatedSide:
    """One simulated replica with the steps of our engine on this machine: what a load should give, without HTTP.

    Raises:
        InvalidParameterError: for clients that read slowly or leave, which are not simulated.
    """

    def __init__(self, engine: EngineOptions, traffic: Traffic):
        if traffic.slow_readers or traffic.disconnect:
            raise InvalidParameterError("against: clients of a simulation neither read slowly nor leave")
        from verax.text.llm import LLM

        self._traffic = traffic
        self._engines = measured_engines(LLM(engine.model, **engine.keywords()))

    async def run(self, load: Load, number: int, on_answer: Callable[[], None] | None = None) -> Run:
        """Put a load on the simulation, which has no time of this machine."""
        requests = self._traffic.requests(number)
        return simulate(self._engines.new(1), load, requests, number=number, on_answer=on_answer)[0]
