"""Fast implementations for GPUs: cuDNN, and kernels in Pallas, chosen by name until a device has shown them faster.

Modules of Pallas are imported when a kernel is traced: they take half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax._optional import Deferred

pl: Any = Deferred("jax.experimental.pallas")
plgpu: Any = Deferred("jax.experimental.pallas.triton")

KERNEL: Mapping[str, Any] = {"platforms": ("gpu",), "single_device": True}
"""Properties of the implementations in Pallas: they take one device's arrays."""
