"""The table of devices, and devices that the user describes."""

import pytest

from verax import ops
from verax.errors import InvalidParameterError
from verax.ops._target import use_target
from verax.plan.devices import DEVICES, find_device


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_a_device_of_the_table_is_plausible_and_has_a_source(device):
    assert 10e9 < device.memory < 1e12
    assert 100e9 < device.bandwidth < 20e12
    assert 50e12 < device.flops["bfloat16"] < 5e15
    assert device.flops["int8"] >= device.flops["bfloat16"] > device.flops.get("float32", 0)
    assert device.source
    with use_target(device.platform, device.kind):
        assert device.platform == "tpu" or ops.target().compute_capability


def test_numbers_of_the_sheets():
    h100, v5e = find_device("h100"), find_device("v5e")
    assert (h100.memory, h100.bandwidth, h100.flops["bfloat16"]) == (80e9, 3.35e12, 989.5e12)
    assert (v5e.memory, v5e.bandwidth, v5e.flops["bfloat16"]) == (16e9, 819e9, 197e12)


@pytest.mark.parametrize(
    ("alias", "name"), [("TPU v5 lite", "v5e"), ("tpu-v6e", "v6e"), ("NVIDIA GeForce RTX 4090", "rtx4090")]
)
def test_a_device_has_other_names(alias, name):
    assert find_device(alias) is DEVICES[name]


def test_numbers_on_the_command_line_replace_those_of_the_table():
    device = find_device("h100", memory=94e9, flops=500e12)
    assert (device.memory, device.bandwidth) == (94_000_000_000, 3.35e12)
    assert device.flops["int8"] == pytest.approx(1000e12, rel=1e-3)
    assert "changed" in device.source


def test_an_unknown_device_is_described_by_its_numbers():
    device = find_device("mychip", memory=48e9, bandwidth=1e12, flops=200e12)
    assert (device.rate("bfloat16"), device.rate("float32")) == (200e12, 200e12)
    with pytest.raises(InvalidParameterError, match=r"'mychip' is not in the table, .*v5e.*--bandwidth, --flops"):
        find_device("mychip", memory=48e9)
    with pytest.raises(InvalidParameterError, match="bandwidth: expected more than 0"):
        find_device("h100", bandwidth=-1.0)


def test_this_machine_is_not_measured_where_its_numbers_are_given(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: pytest.fail("measured"))
    device = find_device("cpu", bandwidth=40e9, flops=1e12)
    assert (device.platform, device.bandwidth, device.rate("float32")) == ("cpu", 40e9, 1e12)
    monkeypatch.setattr(
        "verax.machine.measure_machine",
        lambda: {
            "memory_bandwidth_gb_per_s": 20.0,
            "matmul_float32_gflop_per_s": 100,
            "matmul_bfloat16_gflop_per_s": 300,
        },
    )
    device = find_device("cpu", memory=8e9)
    assert (device.memory, device.bandwidth) == (8e9, 20e9)
    assert dict(device.flops) == {"bfloat16": 300e9, "float32": 100e9}
