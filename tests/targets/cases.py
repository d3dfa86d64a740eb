"""Models compiled for devices that are not attached, with a few layers: more of them take minutes, and show no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax

from tests.targets.compile import Compiled, compile_model

jax.config.update("jax_platforms", "cpu")  # the plugins are compilers here; JAX must not look for their devices

__all__ = ["CASES", "Case", "compiled"]


@dataclass(frozen=True)
class Case:
    """A model on devices.

    Attributes:
        model: name of its shapes.
        device: name of the device.
        devices: number of devices.
        depth: layers.
        options: options of its plan.
    """

    model: str
    device: str
    devices: int
    depth: int
    options: dict[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.model}-{self.device}x{self.devices}"


_TEXT = {"max_num_seqs": 16, "max_model_len": 2048}
_CLIP = {"num_frames": 81, "height": 480, "width": 832}

CASES = [
    Case(model, device, devices, depth, options)
    for device in ("v5e", "h100")
    for model, depth, options, counts in (
        ("qwen3", 2, _TEXT, (1, 4)),
        ("hybrid", 4, _TEXT, (1,)),
        ("t2v-1.3b", 8, _CLIP, (1,)),
        ("minilm", 2, {"batch_size": 32}, (1,)),
    )
    for devices in counts
]
"""Qwen3-0.6B; three delta layers and one of attention as wide as Qwen3.5-0.8B's; Wan 1.3B; all-MiniLM-L6-v2."""


@cache
def compiled(case: Case) -> list[Compiled]:
    """The programs of a case, compiled."""
    return compile_model(case.model, case.device, devices=case.devices, depth=case.depth, **case.options)
