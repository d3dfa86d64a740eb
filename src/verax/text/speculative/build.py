"""The speculator of an engine, by its configuration."""

from __future__ import annotations

import jax.numpy as jnp

from verax import ops
from verax.text.runner import ModelRunner
from verax.text.speculative.config import SpeculativeConfig
from verax.text.speculative.ngram import NgramDrafter
from verax.text.speculative.policy import Policy, StepCost
from verax.text.speculative.speculator import Speculator

__all__ = ["new_speculator"]


def new_speculator(config: SpeculativeConfig, runner: ModelRunner) -> Speculator:
    """The speculator that a configuration describes, for steps of `runner`."""
    count = config.num_speculative_tokens
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, count)
    quantized = any(not jnp.issubdtype(weight.dtype, jnp.floating) for weight in runner.abstract_model.weights)
    cost = StepCost.on(ops.target().platform, quantized=quantized)
    return Speculator(drafter, Policy(cost, runner.config.verify_tokens, count, drafter.step_cost), count)
