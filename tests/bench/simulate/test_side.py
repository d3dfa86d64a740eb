"""The simulation beside a server: measured steps and overheads, the same requests, and clients that it has not."""

import asyncio

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import machine
from verax.bench.serve.load import Load
from verax.bench.serve.sides import EngineOptions
from verax.bench.serve.traffic import Traffic
from verax.bench.simulate import side as module
from verax.bench.simulate.calibrate import calibration_loads
from verax.bench.simulate.engines import measured_engines
from verax.bench.simulate.fleet import simulate
from verax.bench.simulate.overheads import Overheads
from verax.bench.simulate.side import SimulatedSide
from verax.bench.simulate.step_times import MeasuredTimes
from verax.errors import InvalidParameterError

TRAFFIC = Traffic(96, input_tokens=8, output_tokens=6)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3")
    return EngineOptions(str(folder), dtype="float32", max_num_seqs=2, max_model_len=64)


def times_of(engine, slower=1.0):
    """A hundredth of a second for each step and a thousandth for each of its tokens, on a machine of some speed."""
    shapes = engine.runner.config.shapes
    return MeasuredTimes({shape: slower * (0.01 + 0.001 * shape.tokens) for shape in shapes}, 0.0)


def test_a_load_is_answered_in_simulated_time(options, monkeypatch):
    monkeypatch.setattr(module, "measure_steps", lambda engine, rng: times_of(engine))
    side = SimulatedSide(options, TRAFFIC)
    load = Load("2 streams", concurrency=2, num_requests=10)
    answered = []
    run = asyncio.run(side.run(load, 0, lambda: answered.append(1)))
    assert len(run.answers) == len(answered) == 10
    assert all(answer.completion_tokens == answer.request.max_tokens for answer in run.answers)
    assert run.seconds == max(answer.ended for answer in run.answers) > 0
    again = asyncio.run(side.run(load, 0))
    assert again.seconds == run.seconds, "the same requests on the same steps take the same time"


class KnownServer:
    """Server with known overheads, and the numbers of its runs."""

    def __init__(self, llm, overheads):
        self._engines = measured_engines(llm, times_of(llm.engine), overheads)
        self.numbers = []
        self.streams = []

    async def run(self, load, number, on_answer=None):
        self.numbers.append(number)
        self.streams.append(load.concurrency)
        return simulate(self._engines.new(1), load, TRAFFIC.requests(number), number=number)[0]


def test_a_calibrated_simulation_predicts_the_server_at_other_loads(options, monkeypatch):
    monkeypatch.setattr(module, "measure_steps", lambda engine, rng: times_of(engine))
    side = SimulatedSide(options, TRAFFIC)
    overheads = Overheads(0.002, 0.001, 0.004, contention=1 / machine.num_cores())
    server = KnownServer(side._llm, overheads)
    load = Load("2 streams", concurrency=2, num_requests=20)
    before = asyncio.run(side.run(load, 0)).seconds
    asyncio.run(side.calibrate(server, [load], first=1000))
    known = [each.concurrency for each in calibration_loads([load], 2)]
    assert side.report()["calibrated_at"] == known
    assert set(server.streams) == set(known)
    assert 2 not in known
    assert len(server.numbers) == len(set(server.numbers)), "no two runs have the same prompts"
    assert min(server.numbers) == 1000
    true = asyncio.run(server.run(load, 0)).seconds
    assert asyncio.run(side.run(load, 0)).seconds == pytest.approx(true, rel=0.02)
    assert before < 0.9 * true
    # A machine that has become slower since the calibration is so for the host's work too.
    monkeypatch.setattr(module, "measure_steps", lambda engine, rng: times_of(engine, slower=3.0))
    assert asyncio.run(side.run(load, 0)).seconds == pytest.approx(3 * true, rel=0.02)


@pytest.mark.parametrize("clients", [{"slow_readers": 0.1}, {"disconnect": 0.1}])
def test_clients_that_are_not_simulated_are_refused(clients):
    with pytest.raises(InvalidParameterError, match=r"^against: "):
        SimulatedSide(EngineOptions("nowhere"), Traffic(96, **clients))
