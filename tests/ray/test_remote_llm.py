"""Answers from replicas that die equal the answers of one engine that lives."""

import asyncio
import functools
import subprocess
import sys
import time

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.errors import ContextLengthError, EngineDeadError, QueueFullError
from verax.serve.http.server import Server
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

ray = pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray installs it")
pytest.importorskip("ray.serve", reason="needs the extra `ray`: make test-ray installs it")

PROMPT = "abc def"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("remote") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint):
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4}
    return LLM(checkpoint, dtype="float32", use_tqdm=False, structured_outputs=True, **options)


@pytest.fixture
def replica(llm, monkeypatch, tmp_path):
    """A replica in this process, which sends each token by itself."""
    from verax.ray import replica as module

    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "set_threads", lambda: None)
    monkeypatch.setattr(module, "keep_off_the_network", lambda: None)
    monkeypatch.setattr(module, "JOIN", 0)
    engine = AsyncLLM.from_llm(llm)
    _pace(engine._replicas.threads[0], engine._replicas.outbox)
    yield module.Replica(functools.partial(Server, llm=engine, served_names=("tiny",)))
    asyncio.run(engine.shutdown())


def _pace(thread, outbox):
    """Let an engine step only when its callers have taken what the steps before gave: a part has one token then."""
    step = thread._step

    def paced():
        while thread._inbox.empty() and (
            outbox._calls or any(live._fresh and not live.closed for live in list(outbox.live.values()))
        ):
            time.sleep(0.0005)
        step()

    thread._step = paced


class Handle:
    """A deployment's handle whose streams break after the given numbers of parts, one a stream, and then hold."""

    def __init__(self, replica, breaks):
        self._replica = replica
        self._breaks = list(breaks)
        self.answers = []

    def options(self, **options):
        return self

    @property
    def generate(self):
        return self

    def remote(self, inputs):
        self.answers.append(inputs.output_token_ids)
        return Response(self._replica.generate(inputs), self._breaks.pop(0) if self._breaks else None)


class Response:
    def __init__(self, parts, breaks_after):
        self._parts = parts
        self._breaks_after = breaks_after

    async def __aiter__(self):
        count = 0
        async for part in self._parts:
            if count == self._breaks_after:
                await self._parts.aclose()
                raise ray.exceptions.ActorDiedError()
            count += 1
            yield part

    def cancel(self):
        pass


@pytest.fixture
def remote(replica, checkpoint, monkeypatch):
    """An engine of replicas, with the numbers of parts after which they die."""
    from verax.ray import remote_llm

    monkeypatch.setattr(remote_llm, "PAUSE", 0)

    def make(*breaks, **options):
        return remote_llm.RemoteLLM(Handle(replica, breaks), replica.sizes(), checkpoint, **options)

    return make


async def joined(engine, params, prompt=PROMPT):
    """Text, tokens, log-probabilities and end of each sample of a stream."""
    samples = {}
    async for output in engine.generate(prompt, params):
        for part in output.outputs:
            text, tokens, logprobs, *_ = samples.get(part.index, ("", (), []))
            logprobs = logprobs + (part.logprobs or [])
            ends = part.cumulative_logprob, part.finish_reason, part.stop_reason
            samples[part.index] = text + part.text, tokens + part.token_ids, logprobs, *ends
    return samples


CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 1},
    "penalties": {"seed": 2, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"seed": 3, "logprobs": 3},
    "several samples": {"seed": 4, "n": 3},
    "grammar": {"seed": 5, "structured_outputs": {"regex": "[a-f]{8}[0-3]{6}"}},
    "least tokens": {"seed": 6, "min_tokens": 12},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
async def test_an_answer_continues_exactly_where_a_replica_left_it(remote, replica, fields):
    params = SamplingParams(max_tokens=24, **fields)
    whole = await joined(replica._server.engine, params)
    moved = remote(1, 2, 3)
    samples = await joined(moved, params)
    assert moved.num_moved == 3
    assert samples.keys() == whole.keys()
    for index, (text, tokens, logprobs, cumulative, *ends) in samples.items():
        assert (text, tokens, *ends) == (*whole[index][:2], *whole[index][4:])
        assert [list(entry) for entry in logprobs] == [list(entry) for entry in whole[index][2]]
        assert cumulative == pytest.approx(whole[index][3])


async def test_a_stop_string_that_two_replicas_share_is_found(remote, replica):
    text = (await joined(replica._server.engine, SamplingParams(max_tokens=24, seed=7)))[0][0]
    params = SamplingParams(max_tokens=24, seed=7, stop=[text[8:13]])
    whole = await joined(replica._server.engine, params)
    for cut in range(1, 14):
        assert await joined(remote(cut), params) == whole


async def test_an_answer_without_a_seed_gets_one_which_it_keeps(remote):
    moved = remote(1)
    samples = await joined(moved, SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True))
    assert len(samples[0][1]) == 12
    assert 1 <= len(moved._handle.answers[1][0]) < 12


async def test_a_request_that_kills_every_replica_fails_itself(remote):
    moved = remote(*[0] * 10)
    with pytest.raises(EngineDeadError, match="4 replicas were lost in a row"):
        await joined(moved, SamplingParams())
    assert moved.stats().num_requests_running == moved.stats().num_requests_waiting == 0


async def test_a_refusal_is_the_engines_own(remote):
    with pytest.raises(ContextLengthError, match="max_model_len") as refused:
        await joined(remote(), SamplingParams(), "abc " * 200)
    assert refused.value.max_model_len == 64


async def test_observers_get_the_whole_answer_and_replicas_that_are_gone_count_without_being_kept(remote, monkeypatch):
    from verax.ray import remote_llm

    monkeypatch.setattr(remote_llm, "MOST_REPLICAS", 1)
    params, moved, seen = SamplingParams(max_tokens=8, temperature=0, logprobs=1), remote(2), []
    moved.add_observer(lambda replica, output: seen.append(output))
    samples = await joined(moved, params)
    (output,) = seen
    assert (output.outputs[0].text, output.outputs[0].token_ids) == samples[0][:2]
    assert len(output.outputs[0].logprobs) == 8
    assert output.metrics.total_time > output.metrics.time_to_first_token > 0
    before = moved.stats().generation_tokens
    assert before >= 8
    (name,) = moved._replicas
    moved._replicas["another"] = moved._replicas.pop(name)  # that replica has been replaced since
    await joined(moved, params)
    assert list(moved._replicas) == [name]
    assert moved.stats().generation_tokens > 2 * before


def test_a_dead_engine_ends_its_replica(replica, monkeypatch):
    from verax.ray import replica as module

    ended = []
    monkeypatch.setattr(module, "end_actor", ended.append)
    replica.check_health()
    assert ended == []
    monkeypatch.setattr(
        replica._server.engine._replicas.threads[0], "error", error := RuntimeError("the device is lost")
    )
    replica.check_health()
    assert ended == [error]


def test_the_front_starts_no_device(checkpoint):
    script = f"""
from types import SimpleNamespace
from verax.ray.remote_llm import RemoteLLM
from jax._src.xla_bridge import backends_are_initialized
RemoteLLM(SimpleNamespace(options=lambda **options: None), (8, 1), {str(checkpoint)!r})
print(backends_are_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


async def test_a_full_queue_refuses(remote):
    engine = remote(max_queued_requests=1)
    first = engine.generate(PROMPT, SamplingParams())
    waiting = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        await anext(engine.generate(PROMPT, SamplingParams()))
    await waiting
    await first.aclose()
