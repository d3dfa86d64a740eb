"""The description of a GPU for XLA's compiler."""

import pytest

from verax.ops._target import _compute_capability
from verax.plan.compiled.gpu_specs import CUDA, GPU_SPECS, target_config
from verax.plan.devices import DEVICES


@pytest.mark.parametrize("name", GPU_SPECS)
def test_capability_memory_and_name_are_those_of_the_device(name):
    device, text = DEVICES[name], target_config(DEVICES[name])
    major, minor = _compute_capability(device.kind).split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert f"device_memory_size: {device.memory}" in text
    assert f'device_description_str: "{device.kind}"' in text
    assert text.count(f'version: "{CUDA}"') == 3
    assert text.count("{") == text.count("}")
