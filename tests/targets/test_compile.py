"""Compilation without the device, by this machine's own compiler in the place of another's."""

import jax
import jax.numpy as jnp
import pytest

from tests.targets import compile
from tests.targets.compile import compile_lowered, compile_model, programs_of
from tests.targets.topology import GPU_SPECS, Compiler, target_config
from verax._compat import make_mesh
from verax.ops._target import _compute_capability
from verax.plan.devices import DEVICES, find_device

LOCAL = Compiler("jaxlib", "jaxlib", {})
HERE = find_device("cpu", memory=4e9, bandwidth=1e10, flops=1e12)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def lowered(size=64):
    x = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jax.jit(lambda x, y: (x @ y, y + 1), donate_argnums=1).trace(x, x).lower()


def test_bytes_are_of_arguments_and_results_and_donated_buffers_count_once():
    result = compile_lowered("a product", lowered(), LOCAL, "here")
    size = 64 * 64 * 4
    assert (result.name, result.refused, result.arguments, result.aliased) == ("a product", None, 2 * size, size)
    assert result.needed == result.arguments + result.results - result.aliased + result.temporaries + result.code
    assert result.findings.collectives == {}


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        ("text-builtin", {"max_num_seqs": 2, "max_model_len": 32}, ["decode step", "mixed step"]),
        ("encoder-builtin", {"batch_size": 2, "max_length": 16}, ["2 sentences of 16 tokens"]),
        ("video-builtin", {"num_frames": 5, "height": 32, "width": 32}, ["denoising step, prompt and negative prompt"]),
    ],
)
def test_each_kind_of_model_has_its_programs(model, options, names, monkeypatch):
    monkeypatch.setattr(compile, "find_device", lambda name: HERE)
    monkeypatch.setattr(compile, "compiler_of", lambda device: LOCAL)
    monkeypatch.setattr(compile, "topology_mesh", lambda device, count: make_mesh((count,), ("tensor",)))
    programs = compile_model(model, "here", depth=1, **options)
    assert [one.name.partition(":")[0] for one in programs] == names
    assert all(one.findings.host_transfers == 0 for one in programs)


def test_a_depth_cuts_layers_and_the_lists_that_have_an_entry_for_each():
    mesh = make_mesh((1,), ("tensor",))
    one, two = (programs_of("hybrid", HERE, mesh, depth=depth)[0].arguments[0] for depth in (1, 2))
    assert len(one) < len(two)


@pytest.mark.parametrize("name", GPU_SPECS)
def test_a_gpu_is_described_as_in_the_table_of_devices(name):
    device, text = DEVICES[name], target_config(DEVICES[name])
    major, minor = _compute_capability(device.kind).split(".")
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert f"device_memory_size: {device.memory}" in text
    assert text.count("{") == text.count("}")
