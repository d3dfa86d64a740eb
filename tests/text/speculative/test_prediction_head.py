"""Drafts of a prediction head (MTP): answers as without drafts, what holds of them, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiny import HYBRID, tiny_checkpoint
from tests.text.speculative.conftest import GREEDY, LOOPING, MTP, PROMPTS, assert_unchanged, free_drafts, make_llm
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm
from verax.models import causal_attention
from verax.models.causal_lm import predicted_hidden_states
from verax.text.engine.engine_config import EngineConfig, SpeculativeConfig
from verax.text.engine.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def free(mtp, monkeypatch):
    free_drafts(mtp, monkeypatch)


@pytest.mark.parametrize("gap", [0, 6], ids=["from the prompt", "after decode steps"])
def test_drafts_are_those_of_the_head_applied_to_whole_texts(mtp, head_folder, gap):
    """As many drafts hold at each place as of a head without cache, in a text of few tokens, where some hold by chance.

    After decode steps the head continues with the tokens that it has read.
    """
    model = load_causal_lm(Checkpoint.open(head_folder), prediction_head=True, dtype="float32")
    bias = dict.fromkeys((20, 21, 22, 23), 50.0)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias=bias)
    prompt, speculator = PROMPTS[3], mtp.engine.speculator
    before = np.asarray(speculator.totals.num_accepted_tokens_per_pos)
    drafted = speculator.totals.num_draft_tokens
    mtp.add_request(prompt, params)
    mtp.engine.speculator = None if gap else speculator
    answer = []
    while mtp.has_unfinished_requests:
        answer = next((output.outputs[0].token_ids for output in mtp.step()), answer)
        if len(answer) >= gap:
            mtp.engine.speculator = speculator
    held, count = held_drafts(model, [*prompt, *answer], len(prompt), gap, bias)
    assert speculator.totals.num_draft_tokens - drafted == count
    assert (np.asarray(speculator.totals.num_accepted_tokens_per_pos) - before).tolist() == held
    assert held[0] > 0


def held_drafts(model, text, num_prompt, skipped, bias):
    """Number of drafts that hold at each place, and of all."""
    size, held, count = 96, [0, 0, 0], 0
    positions, attend = jnp.arange(size)[None], causal_attention(jnp.float32)
    hidden = np.asarray(model(jnp.asarray([text + [0] * (size - len(text))]))[0])
    predict = jax.jit(lambda *given: predicted_hidden_states(model, *(x[None] for x in given), positions, attend)[0])
    read = [at for at in range(len(text)) if not num_prompt <= at < num_prompt + skipped]
    newest = num_prompt + (skipped and skipped + 1)  # the first step with the head after others has no drafts
    while (wanted := min(3, len(text) - newest - 2)) > 0:
        known, drafts = [at for at in read if at < newest], []
        states, tokens = np.zeros_like(hidden), np.zeros(size, np.int32)
        states[: len(known)], tokens[: len(known)] = hidden[known], [text[at + 1] for at in known]
        for last in range(len(known) - 1, len(known) - 1 + wanted):
            predicted = np.asarray(predict(states, tokens))[last]
            scores = np.asarray(model.logits(jnp.asarray(predicted)))
            drafts.append(max(bias, key=lambda token: scores[token] + bias[token]))
            states[last + 1], tokens[last + 1] = predicted, drafts[-1]
        follows = text[newest + 1 : newest + 1 + wanted]
        hold = next((i for i in range(wanted) if drafts[i] != follows[i]), wanted)
        for place in range(hold):
            held[place] += 1
        count += wanted
        newest += hold + 1
    return held, count


def test_more_sequences_than_the_limit_have_no_drafts(mtp):
    drafted, _ = assert_unchanged(mtp, PROMPTS[:3], dataclasses.replace(GREEDY, max_tokens=20))
    assert drafted == 0


def test_blocks_of_drafts_that_are_not_made_find_room_in_the_step(head_folder, monkeypatch):
    """The first step after decode steps drafts nothing, and has blocks for the drafts that were wanted."""
    llm = make_llm(head_folder, speculative_config=MTP, block_size=1)
    free_drafts(llm, monkeypatch)
    drafted, _ = assert_unchanged(llm, PROMPTS[:3], [dataclasses.replace(GREEDY, max_tokens=n) for n in (6, 12, 20)])
    assert drafted > 0


def test_what_cannot_be_served_is_refused(folder, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"expected a head of multi-token prediction .* got none"):
        make_llm(folder, speculative_config=MTP)
    named = tiny_checkpoint(tmp_path / "named", num_nextn_predict_layers=1)
    with pytest.raises(CheckpointError, match=r"no weights of a head of multi-token prediction \(mtp.fc.weight\)"):
        make_llm(named, speculative_config=MTP)
    deep = tiny_checkpoint(tmp_path / "deep", num_nextn_predict_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"with one layer .* got 2"):
        make_llm(deep, speculative_config=MTP)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {**MTP, "num_speculative_tokens": 9}}, "num_speculative_tokens: .* at most 8 .* got 9"),
        ({"speculative_config": {**MTP, "model": "x"}}, 'model: the method "mtp" has none'),
        ({"speculative_config": {**MTP, "method": "ngram"}}, "disable_by_batch_size belongs to"),
        ({"speculative_config": MTP, "enable_lora": True}, "not implemented with adapters"),
        ({"speculative_config": MTP, "nnodes": 2}, r"not implemented with several hosts \(nnodes\)"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(InvalidParameterError, match=f"^speculative_config: .*{message}"):
        EngineConfig(**options)


def test_names_of_vllm_are_taken():
    assert SpeculativeConfig.from_value({"method": "qwen3_next_mtp"}) == SpeculativeConfig(3, method="mtp")


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}
HYBRIDS = {
    "qwen3_5_text": {**HYBRID, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {**HYBRID, **MOE, "mtp_num_hidden_layers": 1},
    "qwen3_next": {**HYBRID, **MOE},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_and_their_experts_answer_as_without_drafts(family, tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "model", family=family, prediction_head=True, **HYBRIDS[family])
    llm = make_llm(folder, speculative_config=MTP)
    free_drafts(llm, monkeypatch)
    for params, least in ((GREEDY, 0), (SamplingParams(**LOOPING), 5)):
        for prompts in (PROMPTS[3:4], PROMPTS[2:6]):
            drafted, accepted = assert_unchanged(llm, prompts, params)
            assert drafted > 0
            assert accepted >= least
