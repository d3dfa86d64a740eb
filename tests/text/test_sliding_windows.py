"""Engine on a model with sliding windows: blocks before them go to other sequences, and no token changes."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.engine import (
    GREEDY,
    PROMPTS,
    few_blocks,
    finish,
    generate,
    greedy_answer,
    plain_scores,
    tokens,
)
from tests.support.tiny import WINDOWED, tiny_checkpoint
from tests.text.conftest import make_llm
from verax.errors import InvalidParameterError
from verax.text.engine.blocks import most_blocks
from verax.text.engine.sampling_params import SamplingParams

WINDOW = WINDOWED["sliding_window"]
TEXT = np.random.default_rng(1).integers(3, 200, 70).tolist()
TEXTS = [TEXT, *PROMPTS]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine with blocks of 4 tokens, steps of 32 and layers that see 10, 96 and 10 tokens."""
    return make_llm(tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "windowed", **WINDOWED))


@pytest.fixture(scope="module")
def expected(llm):
    """The greedy answers of the model by itself."""
    scores = plain_scores(llm)
    return [greedy_answer(scores, prompt) for prompt in TEXTS]


@pytest.mark.parametrize("counts", [(26, 39), (100, 13)], ids=["full attention is short", "windows are short"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preemption_changes_no_token(llm, expected, counts, caching):
    order = sorted(range(len(TEXTS)), key=lambda i: len(TEXTS[i]))  # short ones are admitted, and grow
    with few_blocks(llm, *counts, caching=caching) as scheduler:
        assert tokens(generate(llm, [TEXTS[i] for i in order])) == [expected[i] for i in order]
    assert scheduler.num_preemptions > 0


def test_a_long_sequence_owns_no_more_blocks_than_its_window_and_a_chunk_need(llm):
    llm.engine.scheduler.blocks.reset_prefix_cache()
    llm.add_request(TEXT, GREEDY)
    (sequence,) = llm.engine.scheduler.waiting
    owned = []
    while llm.has_unfinished_requests:
        llm.step()
        owned.append([sum(map(bool, table)) for table in sequence.tables])
    prompt, answer = owned[1:3], owned[5:-1]
    assert max(windowed for _, windowed in prompt) <= most_blocks(96, WINDOW, 32, 4) == 11
    assert max(windowed for _, windowed in answer) <= most_blocks(96, WINDOW, 1, 4) == 4
    assert answer[-1][0] == 23  # 89 or 90 tokens, whose blocks full attention keeps


def test_pages_before_the_window_are_never_read(llm, expected):
    runner = llm.engine.runner
    windowed = runner.config.groups[1]
    run, poisoned, reusing = runner.run, set(), set()

    def poison_and_run(schedule):
        # Blocks that the plan has given back are another sequence's from this step on.
        free = set(llm.engine.scheduler.blocks._pools[1]._free)
        reused = [page[1] for chunk in schedule.chunks for page in chunk.new_blocks]
        for layer in windowed.layers:
            pages = (x.at[np.asarray(reused, int)].set(0.0) for x in runner._cache[layer])
            pages = tuple(x.at[np.asarray(sorted(free))].set(jnp.nan) for x in pages)
            runner._cache = (*runner._cache[:layer], pages, *runner._cache[layer + 1 :])
        poisoned.update(free)
        reusing.update(poisoned.intersection(reused))
        return run(schedule)

    runner.run = poison_and_run
    try:
        with few_blocks(llm, 100, 25, caching=False):
            assert tokens(generate(llm, TEXTS)) == expected
    finally:
        del runner.run
        for layer in windowed.layers:
            pages = tuple(jnp.zeros_like(x) for x in runner._cache[layer])
            runner._cache = (*runner._cache[:layer], pages, *runner._cache[layer + 1 :])
    assert len(poisoned) == 24
    assert len(reusing) > 10


def test_a_prefix_hit_changes_no_token(llm, expected):
    llm.engine.scheduler.blocks.reset_prefix_cache()
    for cached in (0, 68):  # all whole blocks before the last token
        (output,) = generate(llm, [TEXT])
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (cached, expected[0])
    (again,) = generate(llm, [[*TEXT, *expected[0][:5]]], SamplingParams(temperature=0, max_tokens=15))
    assert again.num_cached_tokens == 72
    assert again.outputs[0].token_ids == expected[0][5:]


def test_a_prefix_is_used_only_where_its_last_window_is_cached(llm, expected):
    short = SamplingParams(temperature=0, max_tokens=4)
    beginnings = [TEXT[:length] for length in (65, 41, 21)]
    alone = [tokens(generate(llm, [beginning], short)) for beginning in beginnings]
    with few_blocks(llm, 100, 15):  # 14 blocks for windows: the text itself takes the blocks of its beginning again
        assert tokens(generate(llm, [TEXT])) == expected[:1]
        outputs = [generate(llm, [beginning], short) for beginning in beginnings]
        # The blocks of tokens 0 to 19 and 36 to 51 are taken; the blocks of 20 to 35 hold the last window of 32 tokens.
        assert [output[0].num_cached_tokens for output in outputs] == [64, 32, 0]
        assert [tokens(output) for output in outputs] == alone
        assert tokens(generate(llm, [TEXT])) == expected[:1]


def test_prefixes_are_shared_while_their_first_owner_runs(llm, expected):
    params = SamplingParams(n=3, temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = generate(llm, [TEXT], params)
    assert [sample.token_ids for sample in output.outputs] == [expected[0]] * 3


def test_a_request_continues_after_a_long_answer_so_far(llm, expected):
    llm.add_request(TEXT, GREEDY, output_token_ids=[expected[0][:13]])
    assert tokens(finish(llm)) == expected[:1]


def test_the_cache_is_described_by_group(llm):
    assert "768 tokens and 156 tokens of windows of 10 in" in llm.kv_cache


def test_a_window_of_the_whole_context_is_full_attention(tmp_path):
    folder = tiny_checkpoint(tmp_path / "wide", **{**WINDOWED, "sliding_window": 20})
    wide = make_llm(folder, max_model_len=20, max_num_seqs=1, max_num_batched_tokens=8)
    assert [(group.layers, group.window) for group in wide.engine.runner.config.groups] == [((0, 1, 2), None)]


def test_a_model_that_attends_to_another_window_than_it_declares_is_refused(llm, monkeypatch):
    runner = llm.engine.runner
    monkeypatch.setattr(
        type(runner.abstract_model.config), "sliding_windows", property(lambda self: (None, None, None))
    )
    with pytest.raises(InvalidParameterError, match=r"layer 0 attends to a window of None, but .* has 10"):
        runner.program(runner.config.shapes[0]).lower()
