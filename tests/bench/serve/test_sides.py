"""Our engine as a side: the same requests offline and through AsyncLLM give the same answers."""

import asyncio

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.serve.load import Load
from verax.bench.serve.sides import AsyncSide, EngineOptions, OfflineSide
from verax.bench.serve.traffic import Traffic
from verax.errors import InvalidParameterError
from verax.text.async_llm import AsyncLLM

TRAFFIC = Traffic(90, input_tokens=5, output_tokens=6)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineOptions(str(folder), dtype="float32", max_num_seqs=4, max_model_len=32)


@pytest.fixture(scope="module")
def offline(engine):
    return OfflineSide(engine, TRAFFIC)


def test_offline_and_async_answer_alike(engine, offline):
    load = Load("4 streams", concurrency=4, num_requests=10)

    async def main():
        llm = AsyncLLM.from_llm(OfflineSide(engine, TRAFFIC)._llm)
        try:
            return await AsyncSide(llm, TRAFFIC).run(load, 0), await offline.run(load, 0)
        finally:
            await llm.shutdown()

    ours, theirs = asyncio.run(main())
    assert [answer.text for answer in ours.answers] == [answer.text for answer in theirs.answers]
    assert [answer.completion_tokens for answer in ours.answers] == [6] * 10
    assert all(answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended for answer in ours.answers)
    assert all(answer.events == [] and answer.completed for answer in theirs.answers)


def test_a_client_of_the_engine_that_leaves_aborts(engine):
    leaving = Traffic(90, input_tokens=5, output_tokens=6, disconnect=1.0)

    async def main():
        llm = AsyncLLM(engine.model, **engine.keywords())
        try:
            done = await AsyncSide(llm, leaving).run(Load("a", concurrency=4, num_requests=8), 0)
            return done, llm.stats()
        finally:
            await llm.shutdown()

    done, stats = asyncio.run(main())
    assert all(answer.left for answer in done.answers)
    assert stats.num_requests_running + stats.num_requests_waiting == 0


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
        "--host 127.0.0.1 --port 8123"
    )
    assert EngineOptions().command(1)[4] == "--dtype"
