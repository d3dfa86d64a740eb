"""Many callers of one engine: their joined parts equal whole outputs, whatever ends them early ends nothing else."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import aclosing

import pytest

from tests.support.engine import GREEDY, LONG, PROMPTS, RNG, generate, until_idle
from tests.text.conftest import make_llm
from verax import AsyncLLM
from verax.errors import EngineDeadError, InvalidParameterError, QueueFullError
from verax.text.engine.outputs import RequestOutput, StepStats
from verax.text.engine.sampling_params import SamplingParams

ENDING = dict(n=2, temperature=1.4, seed=8, max_tokens=60, stop_token_ids=list(range(60, 110)))
CASES = {
    "greedy": GREEDY,
    "several": SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=25),
    "stop strings": SamplingParams(temperature=1.3, seed=5, max_tokens=40, stop=["e", "o ", "r"], min_tokens=4),
    "stop kept": SamplingParams(n=2, temperature=1.3, seed=6, stop=["a", "or"], include_stop_str_in_output=True),
    "stop tokens": SamplingParams(**ENDING),
    "stop token kept": SamplingParams(**ENDING, include_stop_str_in_output=True),
    "stop token kept with stop strings": SamplingParams(**ENDING, stop=["zz"], include_stop_str_in_output=True),
    "special tokens": SamplingParams(n=2, temperature=2.0, seed=9, skip_special_tokens=False, logit_bias={2: 5.0}),
    "log-probabilities": SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=9, logprobs=2, prompt_logprobs=1),
    "penalties": SamplingParams(temperature=0, max_tokens=30, frequency_penalty=1.5, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def served(tiny_folder, llm):
    """An engine of its own for the asynchronous one: a synchronous one gives the whole outputs to compare with."""
    served = AsyncLLM.from_llm(make_llm(tiny_folder))
    yield served
    asyncio.run(served.shutdown())


def join(outputs: list[RequestOutput]) -> dict[int, dict]:
    """Parts of each sample joined."""
    samples: dict[int, dict] = {}
    for output in outputs:
        for part in output.outputs:
            sample = samples.setdefault(part.index, {"text": "", "token_ids": (), "logprobs": []})
            assert "finish_reason" not in sample or sample["finish_reason"] is None
            sample["text"] += part.text
            sample["token_ids"] += part.token_ids
            sample["logprobs"] += part.logprobs or []
            sample["finish_reason"], sample["stop_reason"] = part.finish_reason, part.stop_reason
    return samples


async def drain(stream) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
async def test_joined_parts_and_a_collected_output_are_the_whole_one(llm, served, params):
    num_compiled = served.llm.engine.runner.num_compiled()
    streams = await asyncio.gather(*(drain(served.generate(prompt, params)) for prompt in PROMPTS))
    assert served.llm.engine.runner.num_compiled() == num_compiled
    expected = generate(llm, PROMPTS, params)
    for parts, output in zip(streams, expected, strict=True):
        assert join(parts) == join([output])
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].prompt_logprobs == output.prompt_logprobs
        assert parts[0].prompt_token_ids == output.prompt_token_ids
    (expected,) = generate(llm, [PROMPTS[3]], params)
    output = await served.collect(PROMPTS[3], params)
    assert (output.outputs, output.prompt_token_ids) == (expected.outputs, expected.prompt_token_ids)
    assert output.finished


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
async def test_a_request_continues_after_an_answer_so_far(served, params):
    """A stream is cut after each of its outputs; what was given until then and the rest are the whole answer."""
    parts = await drain(served.generate(PROMPTS[2], params))
    expected = join(parts)
    for cut in range(len(parts) + 1):
        before = join(parts[:cut])
        given = [before[i]["token_ids"] if i in before else () for i in range(params.n)]
        rest = join(await drain(served.generate(PROMPTS[2], params, continue_from=given)))
        assert join([await served.collect(PROMPTS[2], params, continue_from=given)]) == rest
        assert sorted(rest) == sorted(expected)
        for i, sample in rest.items():
            start = before.get(i, {"text": "", "token_ids": (), "logprobs": []})
            whole = {key: start[key] + sample[key] for key in ("text", "token_ids")}
            assert {**sample, **whole, "logprobs": expected[i]["logprobs"]} == expected[i]
            assert len(start["logprobs"]) + len(sample["logprobs"]) == len(expected[i]["logprobs"])


async def test_texts_and_conversations_are_tokenised_as_by_the_synchronous_engine(llm, served):
    messages = [{"role": "user", "content": "once upon a time"}]
    text, ids = generate(llm, ["once upon a time", [5, 6, 7]])
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    for prompt, output in (("once upon a time", text), ({"prompt_token_ids": [5, 6, 7]}, ids), (messages, chat)):
        ours = await served.collect(prompt, GREEDY)
        assert (ours.prompt, ours.prompt_token_ids) == (output.prompt, output.prompt_token_ids)
        assert ours.outputs == output.outputs
    prompt = await served.render(messages)
    assert await served.encode(prompt, add_special_tokens=False) == list(chat.prompt_token_ids)


async def test_a_slow_consumer_gets_its_parts_joined_and_holds_nobody_up(served):
    slow = served.generate(PROMPTS[1], GREEDY)
    first = await anext(slow)
    quick = await drain(served.generate(PROMPTS[2], GREEDY))
    await until_idle(served)
    rest = await drain(slow)
    assert len(rest) <= 2
    assert len(join([first, *rest])[0]["token_ids"]) == len(join(quick)[0]["token_ids"]) == 20


@pytest.mark.parametrize("prompt", [PROMPTS[1], "once upon a time"], ids=["tokens", "text"])
async def test_a_closed_dropped_or_cancelled_request_is_aborted_and_the_others_continue(served, prompt):
    expected = await served.collect(PROMPTS[4], GREEDY)
    other = asyncio.create_task(served.collect(PROMPTS[4], GREEDY))
    never_begun = served.generate(prompt, LONG)
    await never_begun.aclose()
    assert [output async for output in never_begun] == []
    async with aclosing(served.generate(prompt, LONG)) as closed:
        await anext(closed)
    dropped = served.generate(prompt, LONG)
    await anext(dropped)
    del dropped
    served.generate(prompt, LONG)  # and one that nobody ever asked for anything
    cancelled = asyncio.create_task(drain(served.generate(prompt, LONG)))
    collected = asyncio.create_task(served.collect(prompt, LONG))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    collected.cancel()
    for task in (cancelled, collected):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await other).outputs == expected.outputs
    await until_idle(served)
    blocks = served.llm.engine.scheduler.blocks
    assert blocks.usage == 0
    assert not served.llm.engine.has_unfinished_requests


async def test_an_aborted_request_ends_with_the_reason_abort(served):
    begun = served.generate(PROMPTS[1], LONG, request_id="begun")
    await anext(begun)
    served.abort("begun")
    assert join(await drain(begun))[0]["finish_reason"] == "abort"
    on_its_way = served.generate("a text", SamplingParams(n=2), request_id="on its way")
    served.abort("on its way")
    reasons = {i: sample["finish_reason"] for i, sample in join(await drain(on_its_way)).items()}
    assert set(reasons.values()) <= {"abort"}
    assert len(reasons) == 2
    served.abort("unknown")


async def test_an_id_can_be_used_again_once_its_request_has_ended_or_was_closed(served):
    first = served.generate(PROMPTS[1], LONG, request_id="mine")
    with pytest.raises(InvalidParameterError, match="request_id: 'mine' is in use"):
        served.generate(PROMPTS[1], LONG, request_id="mine")
    await first.aclose()
    for _ in range(2):
        output = await served.collect(PROMPTS[1], GREEDY, request_id="mine")
        assert (output.request_id, len(output.outputs[0].token_ids)) == ("mine", 20)


async def test_the_queue_is_bounded_by_requests_and_by_prompt_tokens(served, monkeypatch):
    queues, slots = served._replicas, served.llm.engine.scheduler.max_num_seqs
    monkeypatch.setattr(queues, "max_queued_requests", 3)
    running = [served.generate(PROMPTS[0], LONG) for _ in range(slots)]
    waiting = [served.generate(PROMPTS[1], GREEDY), served.generate(PROMPTS[1], GREEDY)]
    with pytest.raises(QueueFullError, match=r"max_queued_requests: .* try again"):
        served.generate("a text", SamplingParams(n=2))
    waiting.append(served.generate(PROMPTS[1], GREEDY))
    with pytest.raises(QueueFullError, match="max_queued_requests"):
        served.generate(PROMPTS[1], GREEDY)
    await waiting.pop().aclose()  # its place is free as soon as the engine thread has seen that
    while served.stats().num_requests_waiting > 2:
        await asyncio.sleep(0.001)
    monkeypatch.setattr(queues, "max_queued_requests", 100)
    monkeypatch.setattr(queues, "max_queued_tokens", 15)
    while queues.num_waiting_tokens != 10 and served.stats().num_requests_running == slots:
        await asyncio.sleep(0.001)
    with pytest.raises(QueueFullError, match=r"max_queued_tokens: 10 .* 16 more exceed 15"):
        served.generate(PROMPTS[2], GREEDY)
    with pytest.raises(QueueFullError, match="max_queued_tokens"):
        await served.collect("once upon a time there was a small fox", GREEDY)
    for stream in running:
        await stream.aclose()
    for stream in waiting:
        assert len(join(await drain(stream))[0]["token_ids"]) == 20
    await served.collect(PROMPTS[4], GREEDY)  # alone, a longer prompt may wait
    await until_idle(served)


async def test_a_second_task_that_waits_for_an_answer_is_refused_and_the_first_gets_it(served):
    stream = served.generate(PROMPTS[1], GREEDY)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task waits"):
        await anext(stream)
    parts = [await first, *await drain(stream)]
    assert len(join(parts)[0]["token_ids"]) == 20


async def test_prompts_that_find_free_slots_together_do_not_wait(served, monkeypatch):
    monkeypatch.setattr(served._replicas, "max_queued_tokens", 1)
    slots = served.llm.engine.scheduler.max_num_seqs
    for prompt in (PROMPTS[1], "once upon a time"):
        outputs = await asyncio.gather(*(served.collect(prompt, GREEDY) for _ in range(slots)))
        assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    "bounds", [{"max_queued_requests": -1}, {"max_queued_requests": None}, {"max_queued_tokens": 1.5}]
)
def test_a_bound_that_is_not_a_whole_number_is_refused(llm, bounds):
    with pytest.raises(InvalidParameterError, match=f"{next(iter(bounds))}: expected a whole number"):
        AsyncLLM.from_llm(llm, **bounds)


async def test_observers_see_each_step_and_each_request_that_ended(served, monkeypatch):
    def broken(replica, event):
        raise ValueError("an observer's error is its own")

    seen, before = [], served.stats()
    monkeypatch.setattr(served._replicas.outbox, "observers", [])
    served.add_observer(lambda replica, event: seen.append(event))
    served.add_observer(broken)
    prompt = RNG.integers(3, 200, 33).tolist()
    await served.collect(prompt, GREEDY)
    again = await served.collect(prompt, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, n=2))
    assert again.num_cached_tokens == 32
    advance = served.llm.engine.advance  # slowly: the answer does not end before it is aborted
    monkeypatch.setattr(served.llm.engine, "advance", lambda: time.sleep(0.01) or advance())
    stream = served.generate(PROMPTS[1], LONG)
    await anext(stream)
    await stream.aclose()
    await until_idle(served)
    await asyncio.sleep(0.01)
    after = served.stats()
    steps = [event for event in seen if isinstance(event, StepStats)]
    outputs = [event for event in seen if isinstance(event, RequestOutput)]
    assert sum(step.num_generated for step in steps) == after.generation_tokens - before.generation_tokens
    assert after.prompt_tokens - before.prompt_tokens == 33 + 33 + 5
    assert after.prefix_cache_queries - before.prefix_cache_queries == 33 * 3 + 5
    assert after.prefix_cache_hits - before.prefix_cache_hits >= 32 * 2
    assert max(step.num_tokens for step in steps) >= 32
    assert max(step.kv_cache_usage for step in steps) > 0
    assert {step.num_running for step in steps} >= {0, 1, 2}
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length", "abort"]
    assert [len(output.outputs[0].token_ids) for output in outputs[:2]] == [20, 7]
    metrics = outputs[0].metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert (after.num_requests_running, after.num_requests_waiting, after.kv_cache_usage) == (0, 0, 0)


def test_one_event_loop_at_a_time_is_served(served):
    async def main():
        async with aclosing(served.generate(PROMPTS[1], LONG)) as mine:
            await anext(mine)
            with pytest.raises(InvalidParameterError, match="another event loop"):
                await asyncio.to_thread(asyncio.run, served.collect(PROMPTS[1], GREEDY))

    asyncio.run(main())
    assert len(asyncio.run(served.collect(PROMPTS[1], GREEDY)).outputs[0].token_ids) == 20


def test_requests_of_a_loop_that_was_closed_end_with_it(served):
    loop = asyncio.new_event_loop()

    async def begin():
        stream = served.generate(PROMPTS[1], LONG)
        await anext(stream)
        return stream

    left = loop.run_until_complete(begin())
    loop.close()
    asyncio.run(until_idle(served))
    assert not left._live.loop.is_running()
    assert len(asyncio.run(served.collect(PROMPTS[1], GREEDY)).outputs[0].token_ids) == 20


def test_a_loop_takes_the_place_of_one_that_was_closed_while_a_task_waited(served):
    loop, errors, before = asyncio.new_event_loop(), [], served.stats().generation_tokens

    async def begin():
        stream = served.generate(PROMPTS[1], LONG)
        task = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        return stream, task

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        parts = await drain(served.generate(PROMPTS[1], GREEDY))
        await until_idle(served)
        return join(parts)[0]["token_ids"]

    stream, task = loop.run_until_complete(begin())
    loop.close()
    assert len(asyncio.run(main())) == 20
    assert not errors
    assert served.stats().generation_tokens - before < 20 + 90  # the other one was aborted
    task._log_destroy_pending = False
    assert stream._live.closed


def test_a_shutdown_waits_for_running_requests_and_ends_the_threads(llm):
    before = threading.active_count()

    async def main():
        async with AsyncLLM.from_llm(llm) as served:
            stream = served.generate(PROMPTS[1], GREEDY)
            await anext(stream)
            end = asyncio.create_task(served.shutdown(timeout=60))
            await asyncio.sleep(0)
            assert not served.is_running
            with pytest.raises(EngineDeadError, match="shut down"):
                served.generate(PROMPTS[1], GREEDY)
            await end
            assert join(await drain(stream))[0]["finish_reason"] == "length"
        assert served.error is None

    asyncio.run(main())
    assert threading.active_count() <= before
    assert len(generate(llm, [PROMPTS[1]])[0].outputs[0].token_ids) == 20


async def test_a_shutdown_without_time_aborts_what_runs(llm):
    served = AsyncLLM.from_llm(llm)
    running = served.generate(PROMPTS[1], LONG)
    await anext(running)
    on_its_way = served.generate("a text", LONG)
    await served.shutdown()
    assert join(await drain(running))[0]["finish_reason"] == "abort"
    try:
        assert join(await drain(on_its_way))[0]["finish_reason"] == "abort"
    except EngineDeadError as error:
        assert "shut down" in str(error)  # noqa: PT017
    for late in (served.encode("a text"), served.render([{"role": "user", "content": "a text"}])):
        with pytest.raises(EngineDeadError, match="shut down"):
            await late
    assert not llm.has_unfinished_requests


def test_dropping_the_engine_ends_its_thread(llm):
    served = AsyncLLM.from_llm(llm)
    thread, gone = served._replicas.threads[0]._thread, weakref.ref(served)
    del served
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def test_an_llm_with_unfinished_requests_is_refused(llm):
    name = llm.add_request(PROMPTS[1], GREEDY)
    with pytest.raises(InvalidParameterError, match="llm: it has unfinished requests"):
        AsyncLLM.from_llm(llm)
    llm.abort(name)


def test_a_program_that_leaves_streams_unfinished_ends_cleanly(tiny_folder):
    program = f"""
import asyncio
from verax import LLM, AsyncLLM, SamplingParams
sizes = dict(max_num_seqs=1, max_model_len=64, max_num_batched_tokens=16, use_tqdm=False)
pieces = LLM({str(tiny_folder)!r}, **sizes).stream("abc")
next(pieces)
llm = AsyncLLM({str(tiny_folder)!r}, **sizes)
async def main():
    stream = llm.generate("abc", SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    return stream
kept = asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
