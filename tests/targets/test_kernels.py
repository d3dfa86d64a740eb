"""Kernels compiled for TPU and NVIDIA without either: they compile, fit on the chip, and a GPU's spill nothing."""

import json

import pytest

from tests.targets.compile import compile_model
from tests.targets.kernels import KERNELS, compiled_kernel
from tests.targets.test_targets import skip_without_compiler
from tests.targets.topology import GPU_SPECS, KIB
from verax import ops

VECTOR_MEMORY = 16 << 20
"""Bytes of vector memory that XLA gives to a kernel of a v5e."""


@pytest.fixture(params=KERNELS, ids=str)
def kernel(request):
    skip_without_compiler(request.param.device)
    return request.param


def test_a_kernel_compiles_and_fits_on_the_chip(kernel):
    result = compiled_kernel(kernel)
    spec = GPU_SPECS.get(kernel.device)
    assert 0 < result.memory <= (VECTOR_MEMORY if spec is None else spec.shared - KIB)
    if spec is not None:
        assert result.spills == 0
        assert result.registers <= 255


def test_predictions_are_shares_of_the_limit(kernel):
    assert 0 < kernel.predicted < 1
    assert kernel.limit > 0


@pytest.mark.parametrize(("device", "name"), [("v5e", "pallas"), ("h100", "triton")])
def test_the_steps_of_an_engine_run_the_kernels_and_update_the_cache_in_place(device, name):
    skip_without_compiler(device)
    named = {"paged_attention": name, "paged_decode_attention": name}
    with ops.use_implementations(**named):
        result = compile_model("qwen3", device, depth=2, max_num_seqs=16, max_model_len=2048)
    for row in result:
        assert row.refused is None, row.name
        assert row.findings.donated_copies == 0, row.name
    decode, _ = result
    assert decode.findings.loops_with_products == 0  # attention's are in the kernel


SMALL_HEADS = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""Two layers of Llama-3.2-1B, whose heads are of 64."""


@pytest.mark.parametrize("named", [{}, {"paged_attention": "pallas", "paged_decode_attention": "pallas"}])
def test_pages_of_small_heads_are_read_where_they_lie(named, tmp_path):
    """XLA would bring the 64 MiB of a layer's pages into another layout, and back: 326 MiB of a decode step."""
    skip_without_compiler("v5e")
    (tmp_path / "config.json").write_text(json.dumps(SMALL_HEADS))
    with ops.use_implementations(**named):
        result = compile_model(str(tmp_path), "v5e", max_num_seqs=16, max_model_len=2048)
    decode, mixed = result
    for row in (decode, mixed):
        assert row.refused is None, row.name
        assert row.findings.donated_copies == 0, row.name
    assert decode.temporaries < 32 << 20
