"""Programs of the engines compiled for TPU and NVIDIA without either: they fit, and do nothing that they need not.

`make test-targets` installs the compilers and runs this file. Results are kept in verax's folder of caches, so that an
unchanged program is not compiled again.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tests.targets.cases import CASES, compiled
from tests.targets.compile import compile_lowered, compile_model
from tests.targets.topology import GPU_SPECS, compiler_of, topology_mesh
from verax import ops
from verax.errors import MissingDependencyError
from verax.plan.devices import find_device
from verax.text.step.program import StepProgram

ATTENTION_LAYERS = {"qwen3": 2, "hybrid": 1}
"""Layers with a cache of pages in each language model of the cases."""

TEXT_CASES = [case for case in CASES if case.model in ATTENTION_LAYERS]

WAN_STREAM = 2 * 21 * 30 * 52 * 1536 * 4
"""Bytes of the residual stream of Wan 1.3B for a clip of the cases, with its prompt and its negative prompt."""


def skip_without_compiler(name):
    try:
        compiler_of(find_device(name))
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(params=CASES, ids=str)
def case(request):
    skip_without_compiler(request.param.device)
    return request.param


@pytest.fixture(params=TEXT_CASES, ids=str)
def text_case(request):
    skip_without_compiler(request.param.device)
    return request.param


def programs(case, name=""):
    """Programs of a case by the beginning of their names."""
    rows = [row for row in compiled(case) if row.name.startswith(name)]
    assert rows
    return rows


def test_programs_fit(case):
    for row in programs(case):
        assert row.refused is None, row.name
        assert 0 < row.needed <= find_device(case.device).memory, row.name


def test_programs_move_nothing_to_or_from_the_host(case):
    assert [row.findings.host_transfers for row in programs(case)] == [0] * len(programs(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.devices == 1], ids=str)
def test_programs_of_one_device_have_no_collectives(case):
    skip_without_compiler(case.device)
    assert [row.findings.collectives for row in programs(case)] == [{}] * len(programs(case))


def test_the_cache_is_updated_in_place(text_case):
    """All of it is aliased, and no page is copied."""
    for row in programs(text_case):
        assert row.aliased > 0.99 * row.results, row.name
        assert row.findings.donated_copies == 0, row.name


def test_no_step_copies_a_weight(text_case):
    """None is copied next to another for one product of both, or moved to another layout: it is read only once."""
    for row in programs(text_case):
        assert row.findings.argument_copies == 0, row.name


def test_a_decode_step_multiplies_in_loops_for_attention_only(text_case):
    """Weights are multiplied outside of loops; attention reads its pages in one loop a layer."""
    (decode,) = programs(text_case, "decode step")
    assert decode.findings.loops_with_products <= ATTENTION_LAYERS[text_case.model]


@pytest.mark.parametrize("case", [case for case in TEXT_CASES if case.devices > 1], ids=str)
def test_a_decode_step_adds_up_over_devices_twice_a_layer(case):
    """After attention and after the feed-forward; once more for the embedding. The scores are gathered."""
    skip_without_compiler(case.device)
    (decode,) = programs(case, "decode step")
    assert decode.findings.collectives == {"all-reduce": 2 * case.depth + 1, "all-gather": 1}


@pytest.mark.parametrize("case", [case for case in CASES if case.model == "t2v-1.3b"], ids=str)
def test_the_blocks_of_a_video_model_keep_one_residual_stream(case):
    """Temporaries are a block's own, some twelve times the stream, and no sums of earlier blocks: two more for each."""
    skip_without_compiler(case.device)
    (step,) = programs(case, "denoising step")
    assert step.temporaries < 16 * WAN_STREAM


def test_a_video_model_with_splash_attention_writes_out_no_tables_of_cos_and_sin_for_all_heads():
    """They and the layouts of pairs made 13 streams with two layers. One layer keeps nothing for the next."""
    skip_without_compiler("v5e")
    case = next(case for case in CASES if case.model == "t2v-1.3b")
    with ops.use_implementations(attention="splash"):
        result = compile_model(case.model, "v5e", depth=2, **case.options)
    (step,) = result
    assert step.refused is None
    assert step.temporaries < 9 * WAN_STREAM  # heads come first in three of them


@pytest.mark.parametrize("name", GPU_SPECS)
def test_one_layer_of_an_encoder_compiles_for_each_gpu(name):
    skip_without_compiler(name)
    (program,) = compile_model("minilm", name, depth=1, batch_size=32)
    assert program.refused is None


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_one_delta_layer_compiles_and_its_temporaries_are_a_few_inputs(name):
    skip_without_compiler(name)
    device = find_device(name)
    mesh = topology_mesh(device, 1)
    q, k, v = (jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.float32) for _ in range(3))
    gate, beta = (jax.ShapeDtypeStruct((1, 4096, 16), jnp.float32) for _ in range(2))
    arguments = (q, k, v, gate, beta)
    whole = PartitionSpec()
    partitions = jax.tree.map(lambda _: whole, arguments)
    with ops.use_target(device.platform, device.kind, device.memory):
        program = StepProgram("delta layer", ops.gated_delta_rule, arguments, partitions, whole, mesh, donated=())
        row = compile_lowered(program.name, program.lower(), compiler_of(device), f"1 x {name}")
    assert row.refused is None
    assert row.temporaries < 20 * q.size * q.dtype.itemsize
    assert (row.findings.host_transfers, row.findings.collectives) == (0, {})
