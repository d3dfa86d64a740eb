"""Adapters on the device: what rank 0 of several hosts writes, a follower writes too."""

import jax.numpy as jnp
import numpy as np
import pytest

from verax.text.features.lora import AdaptedLayers, LoadedAdapter, LoRARequest
from verax.text.hosts import Dispatch, Group
from verax.text.step.runner import DeviceAdapters


class Leader(Group):
    """The group of rank 0, which keeps what is sent."""

    def __init__(self):
        super().__init__(0, 2)
        self.sent = []

    def send(self, dispatch):
        self.sent.append(dispatch.encode())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_follower_writes_the_adapters_that_rank_0_sends(dtype):
    sizes = {"up": (7, 5), "down": (5, 7)}  # odd: in bfloat16 they are no whole number of int32
    layers = AdaptedLayers(sizes, {}, max_loras=2, max_rank=3, dtype=dtype)
    leader, follower = DeviceAdapters(layers, group=Leader()), DeviceAdapters(layers)
    rng = np.random.default_rng(0)
    matrices = {"down": (rng.standard_normal((2, 7)).astype(dtype), rng.standard_normal((5, 2)).astype(dtype))}
    leader.warm_up()
    adapter = LoadedAdapter(LoRARequest("fox", 1, "adapters/fox"), matrices)
    leader.place(adapter, 1)
    leader.place(adapter, 1)  # it is there already
    dispatches = [Dispatch.decode(message) for message in leader._group.sent]
    assert [dispatch.program for dispatch in dispatches] == ["adapt", "adapt"]
    for dispatch in dispatches:
        follower.repeat(*dispatch.unpack())
    for ours, theirs in zip(leader.arrays, follower.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.any(np.asarray(follower.arrays[2], np.float32))
