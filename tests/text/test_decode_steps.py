"""Steps that decode several tokens of each sequence: tokens are those of single steps, whatever ends between them."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.engine import GREEDY, PROMPTS, RANDOM, add_slowly, few_blocks, generate, nothing_compiles, tokens
from tests.text.conftest import make_llm
from verax import ops
from verax.errors import InvalidParameterError
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.sizes import plan_sizes

PENALTIES = SamplingParams(temperature=0, max_tokens=21, frequency_penalty=2.0, repetition_penalty=1.3, ignore_eos=True)


FOLDERS = {"llm": "tiny_folder", "windowed_llm": "windowed_folder", "hybrid_llm": "hybrid_folder"}


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request):
    """An engine with single steps, and one of the same model whose steps decode three tokens."""
    folder = request.getfixturevalue(FOLDERS[request.param])
    return request.getfixturevalue(request.param), make_llm(folder, num_scheduler_steps=3)


def counted_steps(llm):
    """Number of dispatched steps by the tokens that they decode of a sequence."""
    counts, dispatch = Counter(), llm.engine.runner._dispatch

    def count(shape, packed):
        counts[shape.decode_steps if shape.decode else 0] += 1
        return dispatch(shape, packed)

    llm.engine.runner._dispatch = count
    return counts


@pytest.mark.parametrize("params", [GREEDY, RANDOM, PENALTIES], ids=["greedy", "sampled", "penalties"])
def test_the_tokens_are_those_of_single_steps(pair, params):
    single, several = pair
    expected = tokens(generate(single, PROMPTS, params))
    with nothing_compiles(several):
        assert tokens(generate(several, PROMPTS, params)) == expected
        assert add_slowly(several, PROMPTS, params) == expected
    assert several.engine.scheduler.blocks.usage == 0


def test_nobody_is_preempted_for_tokens_that_can_wait(pair):
    single, several = pair
    blocks = (26, 13) if len(single.engine.runner.config.groups) > 1 else (32,)
    with few_blocks(several, *blocks) as scheduler:
        assert tokens(generate(several, PROMPTS)) == tokens(generate(single, PROMPTS))
    several_preemptions = scheduler.num_preemptions
    with few_blocks(single, *blocks) as scheduler:
        generate(single, PROMPTS)
    assert several_preemptions <= scheduler.num_preemptions + 1


def test_an_answer_ends_within_a_step(llm, tiny_folder):
    several = make_llm(tiny_folder, num_scheduler_steps=4)
    (answer,) = tokens(generate(llm, PROMPTS[1:2], GREEDY))
    for place in range(2, 10):
        stop = replace(GREEDY, stop_token_ids=[answer[place]])
        expected = answer[: answer.index(answer[place]) + 1]
        (output,) = generate(several, PROMPTS[1:2], stop)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "stop"
    for most in range(1, 9):
        (output,) = generate(several, PROMPTS[1:2], replace(GREEDY, max_tokens=most))
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (answer[:most], "length")
    whole = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert tokens(generate(several, PROMPTS[4:5], whole)) == tokens(generate(llm, PROMPTS[4:5], whole))


def test_steps_decode_one_token_where_the_host_is_needed_between_two(tiny_folder):
    several = make_llm(tiny_folder, num_scheduler_steps=4)
    counts = counted_steps(several)
    generate(several, PROMPTS[:2], replace(GREEDY, max_tokens=9))
    assert (counts[1], counts[4]) == (0, 2)
    generate(several, PROMPTS[7:9], [replace(GREEDY, max_tokens=9, logprobs=2), replace(GREEDY, max_tokens=9)])
    assert (counts[1], counts[4]) == (8, 2)


def test_a_small_budget_of_tokens_and_grammars_leave_the_tokens_unchanged(llm, tiny_folder):
    # Steps of 8 sequences decode 64 tokens; the sampling of grammars has programs for as many rows as some of them.
    several = make_llm(tiny_folder, num_scheduler_steps=8, max_num_batched_tokens=8, structured_outputs=True)
    assert tokens(generate(several, PROMPTS)) == tokens(generate(llm, PROMPTS))


def test_a_step_that_reads_few_weights_decodes_several_tokens(llm):
    config, given = llm.engine.runner.abstract_model.config, EngineConfig(kv_cache_memory=1 << 24, max_num_seqs=256)

    def steps(platform, weights, config=config, given=given):
        with ops.use_target(platform, "NVIDIA H100 80GB HBM3" if platform == "gpu" else "cpu"):
            sizes = plan_sizes(config, "float32", given, weights=weights)
        return {shape.rows: shape.decode_steps for shape in sizes.repeated}

    assert steps("gpu", 1_200_000_000) == {1: 8, 4: 8, 16: 8, 64: 8, 256: 4}
    assert steps("gpu", 3_400_000_000) == {1: 2, 4: 2, 16: 2, 64: 2, 256: 2}
    assert steps("gpu", 16_000_000_000) == steps("cpu", 1_200_000_000) == {}
    assert steps("cpu", 100_000_000) == {1: 4, 4: 4}
    assert steps("cpu", 400_000_000) == {1: 2, 4: 2}
    assert steps("cpu", 1, given=replace(given, num_scheduler_steps=2))[256] == 2


def test_drafts_and_several_steps_are_refused_together(tiny_folder):
    with pytest.raises(InvalidParameterError, match=r"num_scheduler_steps: .*drafts"):
        make_llm(
            tiny_folder, num_scheduler_steps=2, speculative_config={"method": "ngram", "num_speculative_tokens": 2}
        )
