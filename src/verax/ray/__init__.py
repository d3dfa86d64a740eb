"""Actors and deployments for those who run Ray: `pip install 'verax[ray]'`. Nothing else imports this package.

Importing it starts neither Ray nor JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verax.ray.app import deployment
    from verax.ray.cluster import start_ray
    from verax.ray.data import Clips, Embed, Generate, actor_pool

__all__ = ["Clips", "Embed", "Generate", "actor_pool", "deployment", "start_ray"]

_HOMES = {
    **dict.fromkeys(("Clips", "Embed", "Generate", "actor_pool"), "verax.ray.data"),
    "deployment": "verax.ray.app",
    "start_ray": "verax.ray.cluster",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verax.ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
