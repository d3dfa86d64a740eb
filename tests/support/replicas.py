"""Replicas without devices of their own: engines that share the one of this process, and its compiled programs."""

import copy


def as_replicas(*llms):
    """One LLM whose replicas are the engines of several LLMs of a model."""
    together = copy.copy(llms[0])
    together._use([llm.engine for llm in llms])
    return together
