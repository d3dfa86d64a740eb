"""The simulation beside a server: measured steps, the same requests, and clients that it does not have."""

import asyncio

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.serve.load import Load
from verax.bench.serve.sides import EngineOptions
from verax.bench.serve.traffic import Traffic
from verax.bench.simulate.side import SimulatedSide
from verax.errors import InvalidParameterError


def test_a_load_is_answered_in_simulated_time(tmp_path):
    folder = tiny_checkpoint(tmp_path / "qwen3")
    traffic = Traffic(96, input_tokens=8, output_tokens=6, range_ratio=0.5)
    side = SimulatedSide(EngineOptions(str(folder), dtype="float32", max_num_seqs=2, max_model_len=64), traffic)
    load = Load("2 streams", concurrency=2, num_requests=10)
    answered = []
    run = asyncio.run(side.run(load, 0, lambda: answered.append(1)))
    assert len(run.answers) == len(answered) == 10
    assert all(answer.completion_tokens == answer.request.max_tokens for answer in run.answers)
    assert run.seconds == max(answer.ended for answer in run.answers) > 0
    again = asyncio.run(side.run(load, 0))
    assert again.seconds == run.seconds, "the same requests on the same steps take the same time"


@pytest.mark.parametrize("clients", [{"slow_readers": 0.1}, {"disconnect": 0.1}])
def test_clients_that_are_not_simulated_are_refused(clients):
    with pytest.raises(InvalidParameterError, match=r"^against: "):
        SimulatedSide(EngineOptions("nowhere"), Traffic(96, **clients))
