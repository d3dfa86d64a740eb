"""Tunix's rollout interface on an engine: answers, their log-probabilities, new weights; Tunix itself is not needed."""

import abc
import dataclasses
import sys
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.tiny import tiny_checkpoint
from verax import LLM
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.loading import load_causal_lm
from verax.train import tunix

PAD, END = 0, 1
CONFIG = dict(max_tokens_to_generate=6, max_prompt_length=12, temperature=1.0, top_p=None, top_k=None, seed=3)
CONFIG |= dict(eos_tokens=None, return_logprobs=True)


METHODS = ("generate", "get_per_token_logps", "update_params", "pad_id", "eos_id", "model")
BaseRollout = abc.ABCMeta("BaseRollout", (), {name: abc.abstractmethod(lambda self: None) for name in METHODS})
"""The abstract methods of Tunix 0.1.7's interface."""

Output = dataclasses.make_dataclass("Output", ["text", "logits", "tokens", "left_padded_prompt_tokens", "logprobs"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    return folder, load_causal_lm(Checkpoint.open(folder), dtype=jnp.float32)


@pytest.fixture
def rollout(model, monkeypatch):
    interface = types.ModuleType("base_rollout")
    interface.BaseRollout, interface.RolloutOutput = BaseRollout, Output
    for name in ("tunix", "tunix.rl", "tunix.rl.rollout"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "tunix.rl.rollout.base_rollout", interface)
    tunix._rollout_class.cache_clear()
    llm = LLM(model[0], dtype="float32", max_model_len=64, max_num_seqs=4, kv_cache_memory=1 << 22, use_tqdm=False)
    tokenizer = SimpleNamespace(pad_id=lambda: PAD, eos_id=lambda: END)
    engine = tunix.tunix_rollout(llm, weights=lambda params: params["model"])
    actor = nnx.Dict(model=model[1])
    yield engine(rollout_actor=actor, tokenizer=tokenizer, mesh=None, rollout_config=None)
    tunix._rollout_class.cache_clear()


def log_probabilities(model, prompt, answer):
    scores = jax.nn.log_softmax(model.logits(model(jnp.asarray([[*prompt, *answer]])))[0])
    return [float(scores[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]


def test_answers_of_a_group_differ_and_bring_their_log_probabilities(rollout, model):
    output = rollout.generate(np.array(["the cat", "the cat", "a"]), SimpleNamespace(**CONFIG))
    assert output.tokens[0].tolist() != output.tokens[1].tolist()
    assert output.left_padded_prompt_tokens.shape == (3, 12)
    assert rollout.model() is None
    width = max(map(len, output.tokens))
    answers = np.stack([np.pad(tokens, (0, width - len(tokens))) for tokens in output.tokens])
    again = rollout.get_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(answers))
    for row, padded, tokens, logprobs in zip(
        again, output.left_padded_prompt_tokens, output.tokens, output.logprobs, strict=True
    ):
        prompt = padded[np.argmax(padded != PAD) :]
        expected = log_probabilities(model[1], prompt, tokens)
        np.testing.assert_allclose(row[: len(tokens)], expected, atol=1e-4)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert not row[len(tokens) :].any()
    with pytest.raises(InvalidParameterError, match="max_prompt_length: a prompt has"):
        rollout.generate(["the cat " * 10], SimpleNamespace(**CONFIG))


def test_log_probabilities_at_another_temperature_are_refused(rollout):
    """Tunix would divide the trainer's scores by the temperature, and not the engine's."""
    warm = CONFIG | {"temperature": 0.9}
    with pytest.raises(InvalidParameterError, match=r"return_logprobs: expected temperature 1, got 0\.9"):
        rollout.generate(["a"], SimpleNamespace(**warm))
    assert rollout.generate(["a"], SimpleNamespace(**warm | {"return_logprobs": False})).logprobs is None


def test_an_answer_counts_up_to_its_end(rollout, model):
    got = rollout.get_per_token_logps(jnp.asarray([[PAD, 5, 9]]), jnp.asarray([[7, END, 8, PAD]]))
    np.testing.assert_allclose(got[0], [*log_probabilities(model[1], [5, 9], [7, END]), 0, 0], atol=1e-4)


def test_an_answer_counts_up_to_the_end_of_its_mask(rollout, model):
    """An answer of several turns: the token that ends a text ends one of them."""
    mask = jnp.asarray([[1, 0, 1, 0]])
    got = rollout.get_per_token_logps(jnp.asarray([[PAD, 5, 9]]), jnp.asarray([[7, END, 8, PAD]]), completion_mask=mask)
    np.testing.assert_allclose(got[0], [*log_probabilities(model[1], [5, 9], [7, END, 8]), 0], atol=1e-4)


def test_prompts_may_be_token_ids(rollout):
    output = rollout.generate([[5, 9], np.array([7])], SimpleNamespace(**CONFIG))
    assert output.left_padded_prompt_tokens[:, -2:].tolist() == [[5, 9], [PAD, 7]]


def test_the_trainers_parameters_replace_the_engines(rollout, model):
    halved = jax.tree.map(lambda leaf: leaf * 0.5, nnx.state(model[1]))
    rollout.update_params({"model": halved}, (nnx.Param,))
    changed = nnx.merge(nnx.graphdef(model[1]), halved)
    got = rollout.get_per_token_logps(jnp.asarray([[5, 9]]), jnp.asarray([[7, 8]]))
    np.testing.assert_allclose(got[0], log_probabilities(changed, [5, 9], [7, 8]), atol=1e-4)
    with pytest.raises(InvalidParameterError, match="adapters alone are not supported"):
        rollout.update_params({}, (nnx.LoRAParam,))


def test_tunix_is_named_where_it_is_missing(monkeypatch):
    tunix._rollout_class.cache_clear()
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(MissingDependencyError, match="pip install google-tunix"):
        tunix.tunix_rollout(None)
