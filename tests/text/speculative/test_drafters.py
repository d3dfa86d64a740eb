"""Drafters: prompt lookup, a draft model, and drafts of hybrids, whose states go back to before what does not hold."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import HYBRID, tiny_checkpoint
from tests.text.speculative.conftest import (
    GREEDY,
    LOOPING,
    NGRAM,
    PROMPTS,
    REPEATED,
    SAMPLING,
    assert_unchanged,
    draft_config,
    expected,
    free_drafts,
    make_llm,
    outputs,
    samples,
    totals,
)
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models.qwen3_5 import DecoderLayer
from verax.text.engine.engine_config import EngineConfig, SpeculativeConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.speculative import NgramIndex, new_speculator
from verax.text.step.sizes import block_bytes, plan_sizes


@pytest.fixture(scope="module")
def twin_llm(folder):
    return make_llm(folder, speculative_config=draft_config(folder))


@pytest.fixture
def twin(twin_llm, monkeypatch):
    """Drafts by the model itself."""
    free_drafts(twin_llm, monkeypatch)
    return twin_llm


@pytest.mark.parametrize("kind", ["greedy", "seed", "truncated", "penalties"])
def test_all_drafts_of_the_model_itself_are_accepted(twin, kind):
    params = SamplingParams(**{"max_tokens": 41, "ignore_eos": True} | SAMPLING[kind])
    for prompt in PROMPTS[1:4]:
        (output,) = outputs(twin, [prompt], params)
        assert output.outputs[0].token_ids == expected(twin, [prompt], params)[0][0][0]
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens == 32  # of 8 steps


def test_all_are_accepted_in_a_batch_of_prompts_that_come_and_go(twin):
    mixed = [dataclasses.replace(GREEDY, max_tokens=3 + 4 * i) for i in range(len(PROMPTS))]
    drafted, accepted = assert_unchanged(twin, PROMPTS, mixed)
    assert accepted == drafted > 50


def test_sliding_windows_change_no_token(folder, windows, monkeypatch):
    llm = make_llm(windows, speculative_config=draft_config(folder))
    ngram = SpeculativeConfig(4, method="ngram", prompt_lookup_max=3, prompt_lookup_min=1)
    long = [*PROMPTS[::2], np.random.default_rng(5).integers(3, 200, 60).tolist()]
    for speculator in (llm.engine.speculator, new_speculator(ngram, llm.engine.runner, None)):
        llm.engine.speculator = speculator
        free_drafts(llm, monkeypatch)
        assert_unchanged(llm, long, GREEDY)
        _, accepted = assert_unchanged(llm, long, SamplingParams(**LOOPING))
        assert accepted > 0


def test_the_cache_of_the_draft_model_is_part_of_the_memory(twin):
    memory = 2 * 32 * block_bytes(twin.model_config, 4, "float32")
    sizes = EngineConfig(max_model_len=96, max_num_seqs=3, block_size=4, kv_cache_memory=memory)
    planned = plan_sizes(twin.model_config, "float32", sizes, draft=twin.model_config)
    assert planned.groups[0].num_blocks == 32


def test_a_draft_that_does_not_fit_is_refused(folder, tmp_path):
    smaller = tiny_checkpoint(tmp_path / "smaller", vocab_size=319)
    with pytest.raises(InvalidParameterError, match="has a vocabulary of 319 tokens, the model of 320"):
        make_llm(folder, speculative_config=draft_config(smaller))
    renamed = tiny_checkpoint(tmp_path / "renamed")
    spelled = (renamed / "tokenizer.json").read_text(encoding="utf-8")
    (renamed / "tokenizer.json").write_text(spelled.replace("<|im_end|>", "<|other|>"), encoding="utf-8")
    with pytest.raises(InvalidParameterError, match=r"token 1 of .* is '<.other.>', of the model '<.im_end.>'"):
        make_llm(folder, speculative_config=draft_config(renamed))
    hybrid = tiny_checkpoint(tmp_path / "hybrid", family="qwen3_5_text", **HYBRID)
    with pytest.raises(UnsupportedModelError, match="hybrid has recurrent layers"):
        make_llm(folder, speculative_config=draft_config(hybrid))


def by_definition(text, smallest, largest, length):
    """Continuation after the latest of the longest matches, by trying all of them."""
    for size in range(largest, smallest - 1, -1):
        for at in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[at - size : at] == text[len(text) - size :]:
                extended = list(text)
                for i in range(length):
                    extended.append(extended[at + i])
                return extended[len(text) :]
    return []


@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@settings(deadline=None, derandomize=True)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60), step=st.integers(1, 3))
def test_the_longest_match_is_continued_from_its_latest_place(smallest, largest, text, step):
    index = NgramIndex(smallest, largest)
    for end in range(1, len(text) + 1, step):
        assert index.continuation(text[:end], 6) == by_definition(text[:end], smallest, largest, 6)


# Hybrids.


class Oracle:
    """Drafter that knows the answers, and is wrong from a given draft on."""

    step_cost = 0.0

    def __init__(self, answers, right):
        self._answers = answers
        self._right = right

    def can_draft(self, sequence):
        return True

    def draft(self, schedule, num_drafts):
        drafts = {}
        for sequence, count in num_drafts.items():
            done = len(sequence.output_tokens)
            coming = self._answers[tuple(sequence.request.prompt_token_ids)][done : done + count]
            right = self._right()
            drafts[sequence] = [token if i < right else (token + 1) % 300 for i, token in enumerate(coming)]
        return drafts


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4, None], ids="{} right".format)
def test_any_number_of_right_drafts_gives_the_same_tokens(hybrid, monkeypatch, right):
    answers = {tuple(p): made[0][0] for p, made in zip(PROMPTS, expected(hybrid, PROMPTS, GREEDY), strict=True)}
    drawn = random.Random(0)
    oracle = Oracle(answers, lambda: drawn.randrange(5) if right is None else right)
    speculator = hybrid.engine.speculator
    monkeypatch.setattr(speculator, "drafter", oracle)
    monkeypatch.setattr(speculator._policy, "record", lambda *_: None)  # drafts that fail do not rest
    drafted, accepted = assert_unchanged(hybrid, PROMPTS, GREEDY)
    assert drafted > 50
    if right is not None:
        assert (accepted > 0) == (right > 0)
    assert_unchanged(hybrid, PROMPTS[:3], GREEDY)


def test_a_draft_model_changes_no_token(hybrid_folder, folder, monkeypatch):
    llm = make_llm(hybrid_folder, speculative_config=draft_config(folder))
    policy = llm.engine.speculator._policy
    monkeypatch.setattr(policy, "_draft_cost", 0.0)  # this one is as large as the model, so that no draft would pay
    monkeypatch.setattr(policy, "record", lambda *_: None)
    drafted, _ = assert_unchanged(llm, PROMPTS, GREEDY)
    assert drafted > 0


def test_an_abort_within_drafts_leaves_the_other_sequences(hybrid):
    params = SamplingParams(**LOOPING)
    (alone,) = expected(hybrid, [REPEATED[2]], params)
    for steps in (2, 4, 5):
        leaving = hybrid.add_request(REPEATED[1], params)
        hybrid.add_request(REPEATED[2], params)
        for _ in range(steps):
            hybrid.step()
        hybrid.abort(leaving)
        assert samples(hybrid, [REPEATED[2]], params) == [alone]


def test_drafts_continue_a_state_that_was_kept(hybrid, monkeypatch):
    monkeypatch.setattr("verax.text.engine.blocks.LEAST_KEPT", 8)
    params = SamplingParams(**LOOPING)
    alone = expected(hybrid, REPEATED[2:], params)
    hybrid.engine.scheduler.blocks.reset_prefix_cache()
    assert samples(hybrid, REPEATED[2:], params) == alone
    _, before = totals(hybrid)
    (again,) = outputs(hybrid, REPEATED[2:], params)
    assert again.num_cached_tokens == 40
    assert again.outputs[0].token_ids == alone[0][0][0]
    assert totals(hybrid)[1] > before


def test_a_layer_that_cannot_go_back_is_refused_by_name(hybrid_folder, monkeypatch):
    own = DecoderLayer.__call__

    def call(self, x, rotary, layer, attend, run_recurrent):
        def run_whole(layer, normed, recurrence):
            return run_recurrent(layer, normed, lambda *arguments: recurrence(*arguments))

        return own(self, x, rotary, layer, attend, run_whole)

    monkeypatch.setattr(DecoderLayer, "__call__", call)
    with pytest.raises(UnsupportedModelError, match="speculative_config: function cannot go back to the state before"):
        make_llm(hybrid_folder, speculative_config={**NGRAM, "num_speculative_tokens": 2})
