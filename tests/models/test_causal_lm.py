"""Registering a language model: names, and the members that are checked."""

from dataclasses import dataclass

import pytest

import verax
from verax import models
from verax.errors import InvalidParameterError
from verax.models.causal_lm import check_causal_lm, sliding_windows


@dataclass(frozen=True)
class Sizes:
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, config):
        return cls(8, 1, 1, 4, 16)


class Complete:
    ignored_weights = ()
    key_aliases = ()
    dtype = "float32"

    def __init__(self, config):
        self.config = config

    def __call__(self, tokens, positions=None, attend=None):
        return tokens

    def logits(self, hidden):
        return hidden


class Recurrent(Sizes):
    def new_state(self, layer, num_seqs):
        return None


class WithoutAttend(Complete):
    def __call__(self, tokens, positions=None):
        return tokens


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(models, "_CAUSAL_LM", dict(models._CAUSAL_LM))


def test_a_registered_model_is_found_by_its_name():
    verax.register_causal_lm("mine", Complete, Sizes)
    assert models.causal_lm({"model_type": "mine"}) == (Complete, Sizes(8, 1, 1, 4, 16))


def test_a_taken_name_is_refused_but_the_same_pair_may_come_again():
    verax.register_causal_lm("mine", Complete, Sizes)
    verax.register_causal_lm("mine", Complete, Sizes)
    with pytest.raises(InvalidParameterError, match="model_type: 'qwen3' is the name of Qwen3ForCausalLM"):
        verax.register_causal_lm("qwen3", Complete, Sizes)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (WithoutAttend, Sizes, r"model: WithoutAttend lacks __call__\(..., attend\)"),
        (Complete, Recurrent, r"model: Complete lacks __call__\(..., run_recurrent\)"),
        (type("Bare", (), {"__call__": Complete.__call__}), Sizes, "model: Bare lacks ignored_weights, .*logits"),
        (Complete, type("NoSizes", (), {"from_hf": None}), "config: NoSizes lacks vocab_size, num_hidden_layers"),
        (Complete, "Sizes", "config: expected a class, got 'Sizes'"),
    ],
)
def test_what_does_not_satisfy_the_protocol_is_refused_with_the_missing_member(model, config, message):
    with pytest.raises(InvalidParameterError, match=message):
        verax.register_causal_lm("mine", model, config)


def test_a_model_in_memory_is_checked_too():
    check_causal_lm(Complete(Sizes.from_hf({})))
    with pytest.raises(InvalidParameterError, match="model: str lacks vocab_size"):
        check_causal_lm(Complete("no sizes"))


def test_windows_are_optional_and_one_for_each_layer():
    sizes = Sizes(8, 2, 1, 4, 16)
    assert sliding_windows(sizes) == (None, None)
    windowed = type("Windowed", (Sizes,), {"sliding_windows": (4, None)})
    assert sliding_windows(windowed(8, 2, 1, 4, 16)) == (4, None)
    with pytest.raises(InvalidParameterError, match="model: Windowed has 2 sliding_windows for 3 layers"):
        sliding_windows(windowed(8, 3, 1, 4, 16))
