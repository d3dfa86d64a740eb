"""Replicas without devices of their own: engines that share the one of this process, and its compiled programs."""

import copy

from verax.text.engine.replicas import EngineGroup


def as_replicas(*llms):
    """One LLM whose replicas are the engines of several LLMs of a model."""
    together = copy.copy(llms[0])
    together._group = EngineGroup([llm.engine for llm in llms])
    return together
