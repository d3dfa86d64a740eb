"""Requests with adapters: each gets the tokens of the model that has its adapter merged, whatever else runs."""

import asyncio
import threading
from collections import OrderedDict

import numpy as np
import pytest

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.engine import alone, finish, generate, nothing_compiles, tokens
from tests.support.invariants import check_engine
from tests.support.tiny import HYBRID, random_weights, tiny_config
from tests.text.conftest import make_llm
from tests.text.speculative.conftest import LOOPING, NGRAM, REPEATED, UNIQUE, assert_unchanged
from verax import AsyncLLM, LoRARequest
from verax.checkpoint import Checkpoint, save
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_causal_lm
from verax.text.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 40, 12)]
ALL = (0, 1, 2, 3)
MIXED = (0, 1, 2, 1, 3, 2)
"""Adapter of each prompt, 0 for none: three adapters for two slots."""


RANKS = (4, 3, 1)
"""Ranks of the adapters: the rank of the slots, and smaller ones."""


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Adapters 1, 2 of all linear layers and 3 of the attention alone, each with its weights."""
    root, made = tmp_path_factory.mktemp("adapters"), []
    sizes = linear_sizes(random_weights(tiny_config()))
    for number, rank in enumerate(RANKS, start=1):
        some = sizes if number < 3 else {module: size for module, size in sizes.items() if "self_attn" in module}
        weights = adapter_weights(some, seed=number, rank=rank, spread=0.5)
        folder = save_adapter(root / f"a{number}", weights, rank=rank, lora_alpha=2 * rank)
        made.append((LoRARequest(f"a{number}", number, str(folder)), weights))
    return made


@pytest.fixture(scope="session")
def lora_llm(tiny_folder):
    return make_llm(tiny_folder, max_num_seqs=4, enable_lora=True, max_loras=2, max_lora_rank=4)


@pytest.fixture(scope="module")
def requests(adapters):
    return [None, *(request for request, _ in adapters)]


@pytest.fixture(scope="module")
def expected(lora_llm, adapters):
    """Greedy tokens of each prompt, of the base model and with each adapter merged."""
    base, result = random_weights(tiny_config()), []
    for weights in ({}, *(weights for _, weights in adapters), {}):
        lora_llm.update_weights(changed(base, weights, scale=2.0))
        result.append(tokens(generate(lora_llm, PROMPTS, GREEDY)))
    assert result.pop() == result[0]
    assert all(a != b for prompt in zip(*result, strict=True) for i, a in enumerate(prompt) for b in prompt[:i])
    return result


@pytest.mark.parametrize("numbers", [MIXED, *([number] * len(PROMPTS) for number in ALL)])
def test_base_and_adapters_in_one_batch_give_the_tokens_of_merged_models(lora_llm, requests, expected, numbers):
    chosen = [requests[number] for number in numbers]
    outputs = generate(lora_llm, PROMPTS, GREEDY, lora_request=chosen if numbers is MIXED else chosen[0])
    assert tokens(outputs) == [expected[number][at] for at, number in enumerate(numbers)]
    check_engine(lora_llm.engine)


def test_blocks_of_one_adapter_serve_no_other(lora_llm, requests):
    lora_llm.engine.scheduler.blocks.reset_prefix_cache()
    prompt = PROMPTS[3]
    for cached in (0, 32):
        for request in requests:
            output = generate(lora_llm, prompt, GREEDY, lora_request=request)[0]
            assert output.num_cached_tokens == cached


def test_nothing_compiles_after_the_start_whatever_adapters_come(lora_llm, requests, tmp_path):
    sizes = linear_sizes(random_weights(tiny_config()))
    folder = save_adapter(tmp_path, adapter_weights(sizes, seed=9, rank=2), rank=2)
    fourth = LoRARequest("fourth", 4, folder)
    with nothing_compiles(lora_llm):
        generate(lora_llm, PROMPTS[:5], GREEDY, lora_request=[*requests, fourth])


def test_streams_chats_and_queued_requests_take_an_adapter(lora_llm, requests, expected):
    messages = [{"role": "user", "content": "abc"}]
    texts = {number: lora_llm.chat(messages, GREEDY, False, requests[number])[0].outputs[0].text for number in (0, 1)}
    assert texts[0] != texts[1]
    assert "".join(lora_llm.stream(messages, GREEDY, requests[1])) == texts[1]
    lora_llm.add_request(PROMPTS[2], GREEDY, lora_request=requests[2])
    assert tokens(finish(lora_llm)) == [expected[2][2]]


async def test_the_asynchronous_engine_takes_adapters_and_refuses_bad_ones(lora_llm, requests, expected, tmp_path):
    async with AsyncLLM.from_llm(lora_llm) as llm:
        calls = [llm.collect(PROMPTS[at], GREEDY, lora_request=requests[i]) for at, i in enumerate(MIXED)]
        calls.append(llm.collect(PROMPTS[0], GREEDY, lora_request=LoRARequest("none", 8, tmp_path)))
        *outputs, error = await asyncio.gather(*calls, return_exceptions=True)
    assert tokens(outputs) == [expected[number][at] for at, number in enumerate(MIXED)]
    assert isinstance(error, CheckpointError)
    assert "adapter_config.json" in str(error)


async def test_no_other_prompt_waits_for_adapters_that_are_read(lora_llm, requests, monkeypatch):
    read, disk = lora_llm.engine._adapters._read, threading.Event()
    monkeypatch.setattr(lora_llm.engine._adapters, "_loaded", OrderedDict())
    monkeypatch.setattr(lora_llm.engine._adapters, "_read", lambda request: disk.wait() and read(request))
    async with AsyncLLM.from_llm(lora_llm) as llm:
        waiting = [asyncio.ensure_future(llm.collect(PROMPTS[1], GREEDY, lora_request=requests[i])) for i in (1, 1, 2)]
        try:
            assert (await asyncio.wait_for(llm.collect("once upon a time", GREEDY), 10)).finished
        finally:
            disk.set()
        assert all(output.finished for output in await asyncio.gather(*waiting))


def test_arguments_that_make_no_sense_are_refused_before_anything_runs(llm, lora_llm, requests):
    for engine, adapter, says in (
        (lora_llm, [requests[1]], "lora_request: 1 given for 2 prompts"),
        (lora_llm, ["a1", None], "lora_request: expected a LoRARequest, got 'a1'"),
        (llm, requests[1], "enable_lora=True"),
    ):
        with pytest.raises(InvalidParameterError, match=says):
            engine.generate(PROMPTS[:2], GREEDY, lora_request=adapter)
        assert not engine.has_unfinished_requests


def test_recurrent_layers_take_adapters_too(hybrid_folder, tmp_path):
    base = random_weights(tiny_config("qwen3_5_text", **HYBRID))
    modules = linear_sizes(base, ("in_proj_qkv", "out_proj", "q_proj", "up_proj"))
    assert any("linear_attn.in_proj_qkv" in module for module in modules)
    weights = adapter_weights(modules, spread=0.5)
    adapter = LoRARequest("a", 1, save_adapter(tmp_path / "adapter", weights))
    save(changed(base, weights), tmp_path / "merged", config=tiny_config("qwen3_5_text", **HYBRID))
    llm = make_llm(hybrid_folder, max_num_seqs=1, enable_lora=True)
    plain = alone(llm, PROMPTS[2], GREEDY)
    adapted = tokens(generate(llm, PROMPTS[2], GREEDY, lora_request=adapter))
    llm.update_weights(load_causal_lm(Checkpoint.open(tmp_path / "merged"), dtype="float32"))
    assert adapted == [alone(llm, PROMPTS[2], GREEDY)] != [plain]


DRAFTED = [REPEATED[0], UNIQUE[1], REPEATED[1], UNIQUE[3], REPEATED[2]]
DRAFTED_FOR = (0, 1, 2, 0, 1)
"""Adapter of each prompt, 0 for none."""


def test_adapters_answer_as_without_drafts(tiny_folder, adapters):
    lora = dict(enable_lora=True, max_loras=2, max_lora_rank=4)
    llm = make_llm(tiny_folder, max_num_seqs=2, speculative_config=NGRAM, **lora)
    compiled = llm.engine.runner.num_compiled()
    requests = [None, *(request for request, _ in adapters)]
    chosen = [requests[number] for number in DRAFTED_FOR]
    for params in (SamplingParams(**LOOPING), SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)):
        assert_unchanged(llm, DRAFTED, params, lora_request=chosen)
    assert llm.spec_decode.num_accepted_tokens > 0
    assert llm.engine.runner.num_compiled() == compiled
