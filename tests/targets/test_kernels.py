"""Kernels compiled for TPU and NVIDIA without either: they compile, fit on the chip, and a GPU's spill nothing."""

import pytest

from tests.targets.kernels import KERNELS, compiled_kernel
from tests.targets.test_targets import skip_without_compiler
from verax import ops
from verax.plan.compiled.gpu_specs import GPU_SPECS, KIB
from verax.plan.compiled.run import compile_model
from verax.plan.devices import find_device
from verax.plan.model import describe

VECTOR_MEMORY = 16 << 20
"""Bytes of vector memory that XLA gives to a kernel of a v5e."""


@pytest.fixture(params=KERNELS, ids=str)
def kernel(request):
    skip_without_compiler(request.param.device)
    return request.param


def test_a_kernel_compiles_and_fits_on_the_chip(kernel):
    found = compiled_kernel(kernel)
    spec = GPU_SPECS.get(kernel.device)
    assert 0 < found.memory <= (VECTOR_MEMORY if spec is None else spec.shared - KIB)
    if spec is not None:
        assert found.spills == 0
        assert found.registers <= 255


def test_predictions_are_shares_of_the_limit(kernel):
    assert 0 < kernel.predicted < 1
    assert kernel.limit > 0


@pytest.mark.parametrize(("device", "name"), [("v5e", "pallas"), ("h100", "triton")])
def test_the_steps_of_an_engine_run_the_kernels_and_update_the_cache_in_place(device, name):
    skip_without_compiler(device)
    named = {"paged_attention": name, "paged_decode_attention": name}
    with ops.use_implementations(**named):
        found = compile_model(describe("qwen3"), find_device(device), devices=1, depth=2, max_num_seqs=16, context=2048)
    for row in found["programs"]:
        assert row["refused"] is None, row["name"]
        assert row["findings"]["donated_copies"] == 0, row["name"]
    decode, _ = found["programs"]
    assert decode["findings"]["loops_with_products"] == 0  # those of attention are in the kernel
