"""`build`: the builder that a configuration of Ray Serve names as `verax.ray.app:build`."""

from __future__ import annotations

from typing import Any

from verax.ray.application import deployment

__all__ = ["build"]


def build(arguments: dict[str, Any]) -> Any:
    """The application of `verax.ray.deployment`, with the arguments of the configuration's `args`.

    Args:
        arguments: of `deployment`; a pair of `replicas` comes as a list.
    """
    given = dict(arguments)
    if isinstance(given.get("replicas"), list):
        given["replicas"] = tuple(given["replicas"])
    return deployment(**given)
