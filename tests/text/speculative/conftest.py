"""Engines with drafts, and their answers with and without them."""

import contextlib

import numpy as np
import pytest

from tests.support.engine import few_blocks, generate
from tests.support.invariants import check_engine
from tests.support.tiny import WINDOWED, tiny_checkpoint
from tests.text.conftest import make_llm as make_large_llm
from verax.text.engine.sampling_params import SamplingParams

MTP = {"method": "mtp", "num_speculative_tokens": 3, "disable_by_batch_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

RNG = np.random.default_rng(0)
UNIQUE = [RNG.permutation(np.arange(3, 200))[:n].tolist() for n in (1, 5, 16, 33, 7, 12)]
REPEATED = [RNG.integers(3, 200, n).tolist() * 4 for n in (3, 5, 11)]
PROMPTS = [*UNIQUE[:3], REPEATED[0], *UNIQUE[3:], *REPEATED[1:]]

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LOOPING = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logit_bias": {20: 9.0, 21: 9.0}}
"""Two tokens are far ahead of all others, so that the answer repeats itself."""

SAMPLING = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 0.8, "seed": 7},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": dict(temperature=0.7, presence_penalty=0.4, frequency_penalty=0.9, repetition_penalty=1.2, seed=1),
    "min tokens": {"temperature": 0, "ignore_eos": False, "min_tokens": 9, "stop_token_ids": [20]},
    "stop token": {"temperature": 0, "ignore_eos": False, "stop_token_ids": [21]},
    "several": {"temperature": 1.0, "n": 3, "seed": 5},
}


def make_llm(folder, **options):
    """An engine of three sequences at once, which has few programs to compile."""
    return make_large_llm(folder, **{"max_num_seqs": 3, **options})


def draft_config(folder):
    return {"model": str(folder), "num_speculative_tokens": 4}


def outputs(llm, prompts, params, **options):
    made = generate(llm, prompts, params, **options)
    check_engine(llm.engine)
    assert llm.engine.scheduler.blocks.usage == 0
    return made


def samples(llm, prompts, params, **options):
    return [
        [(s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs]
        for output in outputs(llm, prompts, params, **options)
    ]


@contextlib.contextmanager
def without_drafts(llm):
    """The engine without `speculative_config`."""
    speculator, llm.engine.speculator = llm.engine.speculator, None
    try:
        yield llm
    finally:
        llm.engine.speculator = speculator


def expected(llm, prompts, params, **options):
    with without_drafts(llm):
        return samples(llm, prompts, params, **options)


def totals(llm):
    """Numbers of tokens that were drafted and that held, so far."""
    numbers = llm.engine.speculator.totals
    return numbers.num_draft_tokens, numbers.num_accepted_tokens


def assert_unchanged(llm, prompts, params, blocks=None, **options):
    """Assert that drafts change no answer; the numbers that were drafted meanwhile, and that held.

    With a number of blocks, too few for all prompts, sequences preempt each other.
    """
    before, alone = totals(llm), expected(llm, prompts, params, **options)
    with contextlib.nullcontext() if blocks is None else few_blocks(llm, blocks) as scheduler:
        assert samples(llm, prompts, params, **options) == alone
    assert blocks is None or scheduler.num_preemptions > 0
    return tuple(now - then for now, then in zip(totals(llm), before, strict=True))


def free_drafts(llm, monkeypatch):
    """Let drafts cost nothing and never be given up: these models are as large as the ones that draft for them."""
    monkeypatch.setattr("verax.text.features.speculative.WAITING", -0.9)
    for name in ("_draft_cost", "_fixed_cost"):
        monkeypatch.setattr(llm.engine.speculator._policy, name, 0.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("speculative") / "qwen3")


@pytest.fixture(scope="session")
def ngram(folder):
    return make_llm(folder, structured_outputs=True, speculative_config=NGRAM)


@pytest.fixture(scope="session")
def hybrid(hybrid_folder):
    return make_llm(hybrid_folder, structured_outputs=True, speculative_config=NGRAM)


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "qwen3"
    return tiny_checkpoint(folder, prediction_head=True, num_nextn_predict_layers=1)


@pytest.fixture(scope="session")
def mtp(head_folder):
    """Drafts by a random prediction head, which is hardly ever right but for biased requests."""
    return make_llm(head_folder, structured_outputs=True, speculative_config=MTP)


@pytest.fixture(scope="session")
def windows(tmp_path_factory):
    """A model with other weights, the same vocabulary, and layers that see ten tokens."""
    return tiny_checkpoint(tmp_path_factory.mktemp("windowed") / "model", seed=1, **WINDOWED)


@pytest.fixture(scope="session")
def draft_model(folder, windows):
    """Drafts by another model, which is hardly ever right but for biased requests."""
    return make_llm(folder, speculative_config=draft_config(windows))
