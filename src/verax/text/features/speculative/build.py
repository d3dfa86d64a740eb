"""The speculator of an engine, by its configuration."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from verax import checkpoint, ops, progress
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm
from verax.models import CausalLM
from verax.models.causal_lm import has_recurrent_layers, sliding_windows
from verax.nn import pack_linear_weights
from verax.text.features.speculative.config import SpeculativeConfig
from verax.text.features.speculative.draft_model import DraftModel
from verax.text.features.speculative.ngram import NgramDrafter
from verax.text.features.speculative.policy import Policy, StepCost
from verax.text.features.speculative.speculator import Drafter, Speculator
from verax.text.step.runner import ModelRunner
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["load_draft_model", "new_speculator"]


def new_speculator(config: SpeculativeConfig, runner: ModelRunner, draft_model: CausalLM | None) -> Speculator:
    """The speculator that a configuration describes, for steps of `runner`.

    Args:
        config: options of speculative decoding.
        runner: the runner of the model that verifies.
        draft_model: the draft model, if the method has one.
    """
    count = config.num_speculative_tokens
    drafter: Drafter
    if draft_model is not None:
        drafter = DraftModel(draft_model, runner, count)
    else:
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, count)
    quantized = any(not jnp.issubdtype(weight.dtype, jnp.floating) for weight in runner.abstract_model.weights)
    cost = StepCost.on(ops.target().platform, quantized=quantized)
    return Speculator(drafter, Policy(cost, runner.config.verify_tokens, count, drafter.step_cost), count)


def load_draft_model(
    config: SpeculativeConfig, model: CausalLM, tokenizer: Tokenizer | None, *, mesh: Mesh | None, use_tqdm: bool
) -> CausalLM:
    """The draft model of a configuration, in the dtype of the model that verifies, and over the same devices.

    Args:
        config: options of speculative decoding, with a model.
        model: the model that verifies.
        tokenizer: its tokenizer; None if prompts are token ids, and vocabularies are compared by size only.
        mesh: devices to divide it over; the default device if None.
        use_tqdm: a progress bar while loading, if stderr is a terminal.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
        UnsupportedModelError: if verax has no such architecture, or it has recurrent layers; or if all layers of the
            model that verifies have sliding windows.
        InvalidParameterError: if the vocabularies differ, or if it does not divide over the devices.
    """
    assert config.model is not None
    if all(window is not None for window in sliding_windows(model.config)):
        raise UnsupportedModelError(
            "speculative_config: all layers of this model have sliding windows, and a draft model needs blocks of the "
            'whole text; use the method "ngram"'
        )
    opened = checkpoint.Checkpoint.open(config.model)
    with progress.bar("loading the draft model", enabled=use_tqdm, count=False) as report:
        draft = load_causal_lm(opened, dtype=model.dtype, mesh=mesh, progress=report)
    if mesh is None:
        pack_linear_weights(draft, few_rows=True)
    if has_recurrent_layers(draft.config):
        raise UnsupportedModelError(
            f"speculative_config: model: {config.model} has recurrent layers, whose state cannot go back behind a "
            "draft that did not hold"
        )
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise InvalidParameterError(
            f"speculative_config: model: {config.model} has a vocabulary of {theirs} tokens, the model of {ours}; the "
            "two must have the same"
        )
    if tokenizer is not None:
        other = Tokenizer.from_checkpoint(opened)
        token = next((token for token in range(ours) if tokenizer.token(token) != other.token(token)), None)
        if token is not None:
            raise InvalidParameterError(
                f"speculative_config: model: token {token} of {config.model} is {other.token(token)!r}, of the model "
                f"{tokenizer.token(token)!r}; the two must have the same vocabulary"
            )
    return draft
