"""Devices that are not attached: which there are, what is refused, what is missing."""

import sys
import types

import pytest

from verax._compat import compiler_options
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.plan.compiled.gpu_specs import GPU_SPECS, target_config
from verax.plan.compiled.topology import TPUS, compiler_of, topology_mesh
from verax.plan.devices import DEVICES, find_device


def test_every_device_with_a_compiler_is_in_the_table_of_devices():
    assert {*TPUS, *GPU_SPECS} <= {*DEVICES}


@pytest.mark.parametrize("name", ["l40s", "cpu"])
def test_a_device_without_a_compiler_is_refused_with_those_that_have_one(name):
    device = find_device(name, memory=1e9, bandwidth=1e9, flops=1e12)
    with pytest.raises(InvalidParameterError, match=f"compile: there is no compiler for '{name}'.*v5e.*h100"):
        compiler_of(device)


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("v5e", "libtpu", "plan-tpu"), ("h100", "jax_plugins.xla_cuda13", "plan-cuda")]
)
def test_a_missing_compiler_is_named_with_the_extra_that_has_it(name, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'verax\[{extra}\]'"):
        topology_mesh(find_device(name), 1)


def test_a_compiler_has_the_options_of_an_engines_programs_and_the_gpus_description(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", types.ModuleType("jax_plugins.xla_cuda13"))
    device = find_device("h100")
    compiler = compiler_of(device)
    assert compiler_options("gpu").items() <= compiler.options.items()
    assert compiler.description == target_config(device)


def test_more_devices_than_the_largest_topology_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    with pytest.raises(InvalidParameterError, match="devices: programs are compiled for up to 16 of v5e, got 17"):
        topology_mesh(find_device("v5e"), 17)
