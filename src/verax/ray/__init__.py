"""Actors and deployments for those who run Ray: `pip install 'verax[ray]'`. Nothing else imports this package.

Importing it starts neither Ray nor JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verax.ray.application import deployment
    from verax.ray.clips import Clips
    from verax.ray.cluster import start_ray
    from verax.ray.embed import Embed
    from verax.ray.generate import Generate
    from verax.ray.pool import actor_pool

__all__ = ["Clips", "Embed", "Generate", "actor_pool", "deployment", "start_ray"]

_HOMES = {
    "Clips": "verax.ray.clips",
    "Embed": "verax.ray.embed",
    "Generate": "verax.ray.generate",
    "actor_pool": "verax.ray.pool",
    "deployment": "verax.ray.application",
    "start_ray": "verax.ray.cluster",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verax.ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
