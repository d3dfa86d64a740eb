"""Drafts in models with recurrent layers, whose states go back to before the first draft that does not hold."""

import random

import pytest

from tests.text.speculative.conftest import (
    GREEDY,
    LOOPING,
    NGRAM,
    PROMPTS,
    REPEATED,
    assert_unchanged,
    draft_config,
    expected,
    make_llm,
    outputs,
    samples,
    totals,
)
from verax.errors import UnsupportedModelError
from verax.models.qwen3_5 import DecoderLayer
from verax.text.engine.sampling_params import SamplingParams


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
