"""Our engine as a side: the same requests offline and through AsyncLLM give the same answers."""

import asyncio

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.serve.load import Load
from verax.bench.serve.sides import AsyncSide, EngineOptions, OfflineSide
from verax.bench.serve.traffic import Traffic
from verax.errors import InvalidParameterError
from verax.text.engine.async_llm import AsyncLLM

TRAFFIC = Traffic(90, input_tokens=5, output_tokens=6)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return OfflineSide(EngineOptions(str(folder), dtype="float32", max_num_seqs=2, max_model_len=32), TRAFFIC)


@pytest.mark.parametrize(
    "load",
    [Load("a", concurrency=1, duration=1.0), Load("a", arrivals=lambda run: iter([0.0]), num_requests=1)],
    ids=["duration", "arrivals"],
)
def test_offline_has_no_clock_and_no_arrivals(offline, load):
    with pytest.raises(InvalidParameterError, match="against: offline has no arrivals and no clock"):
        asyncio.run(offline.run(load, 0))


def test_the_command_line_of_the_server_has_the_options_of_the_engine():
    words = EngineOptions("folder", quantization="int8", max_num_seqs=8, max_model_len=96).command(8123)
    assert words[1:5] == ["-m", "verax", "serve", "folder"]
    assert " ".join(words[5:]) == (
        "--dtype bfloat16 --quantization int8 --kv-cache-dtype auto --max-num-seqs 8 --max-model-len 96 "
        "--log-format json --host 127.0.0.1 --port 8123"
    )
    assert EngineOptions().command(1)[4] == "--dtype"


def test_offline_and_async_answer_alike_and_clients_that_leave_abort(offline):
    load = Load("2 streams", concurrency=2, num_requests=6)
    theirs = asyncio.run(offline.run(load, 0))
    leaving = Traffic(90, input_tokens=5, output_tokens=20, disconnect=1.0)

    async def main():
        llm = AsyncLLM.from_llm(offline._llm)  # the last test that uses it
        try:
            whole = await AsyncSide(llm, TRAFFIC).run(load, 0)
            left = await AsyncSide(llm, leaving).run(load, 0)
            while (stats := llm.stats()).num_requests_running + stats.num_requests_waiting:
                await asyncio.sleep(0.01)
            return whole, left
        finally:
            await llm.shutdown()

    ours, left = asyncio.run(main())
    assert [answer.text for answer in ours.answers] == [answer.text for answer in theirs.answers]
    assert [answer.completion_tokens for answer in ours.answers] == [6] * 6
    assert all(answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended for answer in ours.answers)
    assert all(answer.events == [] and answer.completed for answer in theirs.answers)
    assert any(answer.left for answer in left.answers)
    assert all(answer.completion_tokens < 20 for answer in left.answers if answer.left)
