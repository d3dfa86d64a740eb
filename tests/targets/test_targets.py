"""Programs and kernels compiled for TPU and NVIDIA without either: they fit, and do nothing that they need not.

`make test-targets` installs the compilers and runs this file. Results of whole programs are kept in verax's folder of
caches, so that an unchanged program is not compiled again.
"""

import json
import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.sampling import sampling_shapes
from tests.targets.compile import CASES, compile_lowered, compile_model, compiled, programs_of
from tests.targets.hlo import parse_module
from tests.targets.kernels import KERNELS, compiled_kernel
from tests.targets.topology import GPU_SPECS, KIB, compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.errors import MissingDependencyError
from verax.plan.devices import find_device
from verax.text.step.program import StepProgram

ATTENTION_LAYERS = {"qwen3": 2, "hybrid": 1}
"""Layers with a cache of pages in each language model of the cases."""

TEXT_CASES = [case for case in CASES if case.model in ATTENTION_LAYERS]

ENGINE = {"max_num_seqs": 16, "max_model_len": 2048}

WAN_STREAM = 2 * 21 * 30 * 52 * 1536 * 4
"""Bytes of the residual stream of Wan 1.3B for a clip of the cases, with its prompt and its negative prompt."""


def skip_without_compiler(name):
    """The device of a name; skips the test without its compiler."""
    device = find_device(name)
    try:
        compiler_of(device)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return device


def compile_for(device, lowered, **options):
    """A lowered program, compiled for a device."""
    with no_compilation_cache():
        return lowered.compile(compiler_options={**compiler_of(device).options, **options})


def lowered_call(device, function, *arguments):
    """A function of arrays on one device, lowered for it."""
    on_device = NamedSharding(topology_mesh(device, 1), PartitionSpec())
    with ops.use_target(device.platform, device.kind, device.memory):
        return jax.jit(function, in_shardings=on_device).lower(*arguments)


def lowered_decode_step(device, model, depth, **implementations):
    """The decode step of an engine of 16 sequences, lowered for a device."""
    with ops.use_target(device.platform, device.kind, device.memory), ops.use_implementations(**implementations):
        decode, _ = programs_of(model, device, topology_mesh(device, 1), depth=depth, **ENGINE)
        return decode.lower()


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


@pytest.mark.parametrize(("device", "name"), [("v5e", "pallas"), ("h100", "triton")])
def test_the_steps_of_an_engine_run_the_kernels_and_update_the_cache_in_place(device, name):
    skip_without_compiler(device)
    named = {"paged_attention": name, "paged_decode_attention": name}
    with ops.use_implementations(**named):
        result = compile_model("qwen3", device, depth=2, **ENGINE)
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
        result = compile_model(str(tmp_path), "v5e", **ENGINE)
    decode, mixed = result
    for row in (decode, mixed):
        assert row.refused is None, row.name
        assert row.findings.donated_copies == 0, row.name
    assert decode.temporaries < 32 << 20


SIZE_IN, SIZE_OUT = 4096, 12288


def product(rows, dtype):
    """`ops.linear` of a weight of Qwen3-8B's feed-forward layer, compiled for a TPU."""
    weight = jax.ShapeDtypeStruct((SIZE_OUT, SIZE_IN), jnp.bfloat16)
    if dtype == "int8":
        weight = jax.eval_shape(lambda dense: ops.quantize(dense, 8), weight)
    device = skip_without_compiler("v5e")
    x = jax.ShapeDtypeStruct((rows, SIZE_IN), jnp.float32)
    return compile_for(device, lowered_call(device, ops.linear.__call__, x, weight))


@pytest.mark.parametrize("rows", [1, 16, 512])
def test_int8_weights_are_widened_within_the_product(rows):
    program = product(rows, "int8")
    assert program.memory_analysis().temp_size_in_bytes == 0
    _, _, entry = program.as_text().partition("\nENTRY ")
    assert set(re.findall(rf"(\w+)\[{SIZE_OUT},{SIZE_IN}\]", entry)) == {"s8"}  # its own is the only such array


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_single_row_is_multiplied_in_the_matrix_unit(dtype):
    assert "convolution(" in product(1, dtype).as_text()
    with ops.use_implementations(linear="reference"):
        assert "convolution(" not in product(1, "bfloat16").as_text()


STATES = 16 * 16 * 128 * 128
"""Numbers of the states of all slots, and of all rows: 16 sequences, 16 value heads of 128."""

DELTA_LAYERS = 3


def labels(one):
    """Labels of an instruction's operands."""
    return re.findall(r"%([\w.\-]+)", one.rest.partition(")")[0])


# XLA gathers the states, reads them twice, and scatters them into the states of all slots, which it also takes.
@pytest.mark.parametrize(
    ("device", "implementation", "reads", "writes"),
    [("h100", "reference", 4, 2), ("h100", "triton", 1, 1), ("v5e", "pallas", 1, 1)],
)
def test_a_kernel_reads_the_states_of_a_delta_layer_once_and_writes_them_in_their_slots(
    device, implementation, reads, writes
):
    device = skip_without_compiler(device)
    lowered = lowered_decode_step(device, "hybrid", DELTA_LAYERS + 1, delta_slot_recurrence=implementation)
    parsed, entry = parse_module(compile_for(device, lowered).as_text())
    states, passes = set(), Counter()
    for one in parsed[entry]:
        shapes = re.findall(r"f32\[([\d,]+)\]", one.type)
        large = sum(math.prod(map(int, shape.split(","))) == STATES for shape in shapes)
        if large:
            states.add(one.label)
        if one.name not in ("parameter", "bitcast", "get-tuple-element", "tuple"):
            passes.update(reads=len(states.intersection(labels(one))), writes=large)
    assert passes == {"reads": reads * DELTA_LAYERS, "writes": writes * DELTA_LAYERS}


ROWS, VOCAB = 16, 151936
"""Sequences and tokens of Qwen3-0.6B's decode step in the cases."""


@pytest.fixture(scope="module")
def sampler():
    """Instructions of each computation of `ops.sampling.sample`, compiled for an H100; `""` is the entry."""
    device = skip_without_compiler("h100")
    lowered = lowered_call(device, ops.sampling.sample.__call__, *sampling_shapes(ROWS, VOCAB, 2048))
    parsed, entry = parse_module(compile_for(device, lowered).as_text())
    return {**parsed, "": parsed[entry]}


def branches(instructions):
    """Names of the two computations of the only choice: where its condition holds, and where not."""
    (choice,) = (one.rest for one in instructions if one.name == "conditional")
    return [re.search(rf"{side}_computation=%([\w.\-]+)", choice)[1] for side in ("true", "false")]


def passes_over_scores(instructions):
    """Kernels that read all scores, and those that write them."""
    held = {one.label for one in instructions if f"f32[{ROWS},{VOCAB}]" in one.type.partition(" ")[0]}
    kernels = [one for one in instructions if one.name in ("fusion", "copy", "custom-call")]
    return sum(not held.isdisjoint(labels(one)) for one in kernels), sum(one.label in held for one in kernels)


def test_a_greedy_step_reads_the_scores_once_and_a_plain_draw_writes_them_once(sampler):
    _, plain = branches(sampler[""])
    drawn, greedy = branches(sampler[plain])
    assert [passes_over_scores(sampler[name]) for name in ("", plain, greedy)] == [(0, 0), (1, 0), (0, 0)]
    assert passes_over_scores(sampler[drawn]) == (2, 1)  # the maximum reads them, and the differences from it
    _, all_kept = branches(sampler[drawn])
    assert passes_over_scores(sampler[all_kept]) == (2, 0)  # sums of weights, and those around the token


KERNEL, PRODUCT = "kCustomKernel", "kCublasLtMatmul"
"""Kinds of a kernel that XLA wrote, and of a product by cuBLAS."""

# `021: kWhile         [prev=000 (1) | ...] name grid: ...`; what a thunk holds is indented and follows.
_THUNK = re.compile(r"(?P<indent> *)\d+: (?P<kind>k\w+) +\[[^\]]*\] *(?P<name>\w*)")


class Thunk(NamedTuple):
    """A launch by the host, or what holds further ones at any depth: a command buffer, a loop, a choice."""

    kind: str
    name: str
    inner: list


@pytest.fixture(scope="module")
def step():
    """Thunks of the decode step of two layers of Qwen3-0.6B on an H100, in the order of their launch."""
    device = skip_without_compiler("h100")
    with tempfile.TemporaryDirectory() as folder:
        compile_for(device, lowered_decode_step(device, "qwen3", ATTENTION_LAYERS["qwen3"]), xla_dump_to=folder)
        (path,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        lines = path.read_text().splitlines()
    result = []
    for line in filter(None, map(_THUNK.match, lines)):
        place = result[-1].inner if line["indent"] else result
        place.append(Thunk(line["kind"], line["name"], []))
    return result


def test_the_host_launches_command_buffers_and_the_loops_of_attention_between_them(step):
    kinds = Counter(thunk.kind for thunk in step)
    assert kinds["kWhile"] == ATTENTION_LAYERS["qwen3"]
    assert kinds["kCommandBuffer"] == ATTENTION_LAYERS["qwen3"] + 1
    assert kinds[KERNEL] <= 1
    assert kinds[PRODUCT] == 0


def test_a_turn_of_attentions_loop_is_one_command_buffer(step):
    for loop in (thunk for thunk in step if thunk.kind == "kWhile"):
        assert [thunk.kind for thunk in loop.inner].count("kCommandBuffer") == 1


def test_a_layer_is_seven_products_and_one_kernel_for_a_norm_with_its_residual(step):
    """Two norms of the hidden state, two of heads; rotary positions, two writes of pages, a gate, an average."""
    _, between, _ = (thunk for thunk in step if thunk.kind == "kCommandBuffer")
    kinds = Counter(thunk.kind for thunk in between.inner)
    assert kinds == {PRODUCT: 7, KERNEL: 9}


def test_a_token_is_sampled_without_sorting_the_vocabulary(step):
    sampling, logprobs = (thunk for thunk in step if thunk.kind == "kConditional")
    assert not any(thunk.name.startswith("sort") for thunk in sampling.inner)
    assert any(thunk.name.startswith("sort") for thunk in logprobs.inner)  # names that XLA gives
