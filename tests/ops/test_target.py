"""Programs traced on this machine for devices that are not attached to it."""

from types import SimpleNamespace

import jax
import pytest

from verax import ops
from verax.errors import InvalidParameterError
from verax.ops import _target
from verax.ops._target import DeviceMemory

H100 = "gpu", "NVIDIA H100 80GB HBM3"
TPU = "tpu", "TPU v5 lite"


def test_without_a_choice_the_target_is_the_local_device():
    here = ops.target()
    assert (here.platform, here.num_devices) == (jax.default_backend(), jax.device_count())
    assert here.device_kind == jax.devices()[0].device_kind
    assert here.attached
    assert here is ops.target()  # dispatch reads it for every operation
    assert here.memory


def test_a_chosen_target_has_the_given_memory_and_devices():
    with ops.use_target(*TPU, memory=16 << 30, num_devices=8):
        chosen = ops.target()
    assert (chosen.platform, chosen.device_kind, chosen.num_devices) == (*TPU, 8)
    assert chosen.memory == (16 << 30, 16 << 30)
    assert not chosen.attached
    with ops.use_target(*TPU):
        assert ops.target().memory is None
    assert ops.target().attached


def test_the_device_with_the_least_free_memory_counts(monkeypatch):
    memory = {0: DeviceMemory(9, 10), 1: DeviceMemory(5, 10), 2: DeviceMemory(7, 20), 3: None}
    local = ops.target()
    monkeypatch.setattr(jax, "local_devices", lambda: list(memory))
    monkeypatch.setattr(_target, "_device_memory", memory.get)
    assert [local.least_memory(count) for count in (1, 2, 3, 4)] == [memory[0], memory[1], memory[1], None]
    assert local.memory == memory[0]


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        # Version 2: a container, whose group is the root that it sees; a service in a slice with a lower limit.
        (
            "0::/",
            {"memory.max": 8000, "memory.current": 5000, "memory.stat": "anon 2000\nactive_file 2500"},
            (5500, 8000),
        ),
        (
            "0::/a.slice/b.service",
            {
                **{"a.slice/memory.max": 4000, "a.slice/memory.current": 4100},
                **{"a.slice/memory.stat": "inactive_file 50", "a.slice/b.service/memory.max": "max"},
            },
            (0, 4000),
        ),
        # Version 1: the path is the host's, and the container sees its own group in the place of the root.
        (
            "9:name=systemd:/docker/c\n4:memory:/docker/c\n0::/",
            {
                **{"memory/memory.limit_in_bytes": 9000, "memory/memory.usage_in_bytes": 1000},
                "memory/memory.stat": "active_file 1\ntotal_active_file 100\ntotal_inactive_file 200",
            },
            (8300, 9000),
        ),
        ("0::/", {"memory.max": 1 << 62, "memory.current": 0, "memory.stat": ""}, (10_000, 20_000)),
        ("0::/", {}, (10_000, 20_000)),
        (None, {}, (10_000, 20_000)),
    ],
)
def test_a_container_has_the_memory_of_its_control_group(groups, files, memory, tmp_path, monkeypatch):
    for name, text in {"groups": groups, **{f"tree/{name}": text for name, text in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(f"{text}\n")
    monkeypatch.setattr(_target, "_GROUPS_OF_PROCESS", tmp_path / "groups")
    monkeypatch.setattr(_target, "_GROUPS", tmp_path / "tree")
    monkeypatch.setattr(_target.psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000, total=20_000))
    assert _target.host_memory() == memory


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("NVIDIA L4", "8.9"),
        ("NVIDIA A10G", "8.6"),
        ("Tesla T4", "7.5"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("AMD Instinct MI300X", ""),
    ],
)
def test_the_compute_capability_follows_from_the_devices_name(kind, capability):
    with ops.use_target("gpu", kind):
        assert ops.target().compute_capability == capability


def test_a_platform_of_another_name_is_refused_with_jaxs():
    with (
        pytest.raises(InvalidParameterError, match="expected one of cpu, gpu, tpu, got 'cuda'; 'gpu' covers it"),
        ops.use_target("cuda"),
    ):
        pass


@pytest.mark.parametrize("target", [H100, TPU, ("cpu", "", None, 4)])
def test_kernels_of_a_single_cpu_are_chosen_for_no_other_target(target):
    with ops.use_target(*target):
        for op in ops.operations().values():
            for example in op.examples:
                chosen = op.select(*example.args, **example.kwargs)
                assert not chosen.name.startswith("native"), op.name
