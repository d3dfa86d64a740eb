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

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.sampling import sampling_shapes
from tests.targets.compile import CASES, compile_model, compiled, programs_of
from tests.targets.hlo import labels, parse_module
from tests.targets.kernels import KERNELS, compiled_kernel
from tests.targets.topology import GPU_SPECS, KIB, compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.errors import MissingDependencyError
from verax.plan.devices import find_device

ATTENTION_LAYERS = {"qwen3": 2, "hybrid": 1}
"""Layers with a cache of pages in each language model of the cases."""

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


def lowered_steps(device, model, depth, **implementations):
    """The decode step and the mixed step of an engine of 16 sequences, lowered for a device."""
    with ops.use_target(device.platform, device.kind, device.memory), ops.use_implementations(**implementations):
        programs = programs_of(model, device, topology_mesh(device, 1), depth=depth, **ENGINE)
        return [program.lower() for program in programs]


def programs(case):
    """Programs of a case by the first word of their names."""
    skip_without_compiler(case.device)
    return {row.name.partition(" ")[0]: row for row in compiled(case)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_programs_fit_and_move_nothing_to_or_from_the_host_or_other_devices(case):
    for row in programs(case).values():
        assert 0 < row.needed <= find_device(case.device).memory, row.name
        assert row.host_transfers == 0, row.name
        assert bool(row.collectives) == (case.devices > 1), row.name


@pytest.mark.parametrize("case", [case for case in CASES if case.model in ATTENTION_LAYERS], ids=str)
def test_a_step_updates_the_cache_in_place_copies_no_weight_and_loops_for_attention_only(case):
    """No page is copied. No weight is copied next to another or to another layout: it is read only once."""
    rows = programs(case)
    for row in rows.values():
        assert row.aliased > 0.99 * row.results, row.name
        assert (row.donated_copies, row.argument_copies) == (0, 0), row.name
    assert rows["decode"].loops_with_products <= ATTENTION_LAYERS[case.model]
    if case.devices > 1:
        # After attention and after the feed-forward; once more for the embedding. The scores are gathered.
        assert rows["decode"].collectives == {"all-reduce": 2 * case.depth + 1, "all-gather": 1}


@pytest.mark.parametrize("case", [case for case in CASES if case.model == "t2v-1.3b"], ids=str)
def test_the_blocks_of_a_video_model_keep_one_residual_stream(case):
    """Temporaries are a block's own, some twelve times the stream, and no sums of earlier blocks: two more for each."""
    assert programs(case)["denoising"].temporaries < 16 * WAN_STREAM


def test_a_video_model_with_splash_attention_writes_out_no_tables_of_cos_and_sin_for_all_heads():
    """They and the layouts of pairs made 13 streams with two layers. One layer keeps nothing for the next."""
    skip_without_compiler("v5e")
    case = next(case for case in CASES if case.model == "t2v-1.3b")
    with ops.use_implementations(attention="splash"):
        (step,) = compile_model(case.model, "v5e", depth=2, **case.options)
    assert step.temporaries < 9 * WAN_STREAM  # heads come first in three of them


@pytest.mark.parametrize("name", GPU_SPECS)
def test_one_layer_of_an_encoder_compiles_for_each_gpu(name):
    skip_without_compiler(name)
    assert len(compile_model("minilm", name, depth=1, batch_size=32)) == 1


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_one_delta_layer_compiles_and_its_temporaries_are_a_few_inputs(name):
    device = skip_without_compiler(name)
    q, gate = (jax.ShapeDtypeStruct((1, 4096, 16, *more), jnp.float32) for more in ((128,), ()))
    program = compile_for(device, lowered_call(device, ops.gated_delta_rule, q, q, q, gate, gate))
    assert program.memory_analysis().temp_size_in_bytes < 20 * q.size * q.dtype.itemsize


VECTOR_MEMORY = 16 << 20
"""Bytes of vector memory that XLA gives to a kernel of a v5e."""


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_kernel_compiles_and_fits_on_the_chip(kernel):
    skip_without_compiler(kernel.device)
    result = compiled_kernel(kernel)
    spec = GPU_SPECS.get(kernel.device)
    assert 0 < result.memory <= (VECTOR_MEMORY if spec is None else spec.shared - KIB)
    assert spec is None or result.spills == 0


@pytest.mark.parametrize(("device", "name"), [("v5e", "pallas"), ("h100", "triton")])
def test_the_steps_of_an_engine_run_the_kernels_and_update_the_cache_in_place(device, name):
    skip_without_compiler(device)
    named = {"paged_attention": name, "paged_decode_attention": name}
    with ops.use_implementations(**named):
        decode, mixed = compile_model("qwen3", device, depth=2, **ENGINE)
    assert (decode.donated_copies, mixed.donated_copies) == (0, 0)
    assert decode.loops_with_products == 0  # attention's are in the kernel


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
        decode, mixed = compile_model(str(tmp_path), "v5e", **ENGINE)
    assert (decode.donated_copies, mixed.donated_copies) == (0, 0)
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


# XLA gathers the states, reads them twice, and scatters them into the states of all slots, which it also takes.
@pytest.mark.parametrize(
    ("device", "implementation", "reads", "writes"),
    [("h100", "reference", 4, 2), ("h100", "triton", 1, 1), ("v5e", "pallas", 1, 1)],
)
def test_a_kernel_reads_the_states_of_a_delta_layer_once_and_writes_them_in_their_slots(
    device, implementation, reads, writes
):
    device = skip_without_compiler(device)
    lowered, _ = lowered_steps(device, "hybrid", DELTA_LAYERS + 1, delta_slot_recurrence=implementation)
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


def branches(instructions):
    """Names of the two computations of the only choice: where its condition holds, and where not."""
    (choice,) = (one.rest for one in instructions if one.name == "conditional")
    return [re.search(rf"{side}_computation=%([\w.\-]+)", choice)[1] for side in ("true", "false")]


def passes_over_scores(instructions):
    """Kernels that read all scores, and those that write them."""
    held = {one.label for one in instructions if f"f32[{ROWS},{VOCAB}]" in one.type.partition(" ")[0]}
    kernels = [one for one in instructions if one.name in ("fusion", "copy", "custom-call")]
    return sum(not held.isdisjoint(labels(one)) for one in kernels), sum(one.label in held for one in kernels)


def test_a_greedy_step_reads_the_scores_once_and_a_plain_draw_writes_them_once():
    device = skip_without_compiler("h100")
    lowered = lowered_call(device, ops.sampling.sample.__call__, *sampling_shapes(ROWS, VOCAB, 2048))
    sampler, entry = parse_module(compile_for(device, lowered).as_text())
    _, plain = branches(sampler[entry])
    drawn, greedy = branches(sampler[plain])
    assert [passes_over_scores(sampler[name]) for name in (entry, plain, greedy)] == [(0, 0), (1, 0), (0, 0)]
    assert passes_over_scores(sampler[drawn]) == (2, 1)  # the maximum reads them, and the differences from it
    _, all_kept = branches(sampler[drawn])
    assert passes_over_scores(sampler[all_kept]) == (2, 0)  # sums of weights, and those around the token


KERNEL, PRODUCT = "kCustomKernel", "kCublasLtMatmul"
"""Kinds of a kernel that XLA wrote, and of a product by cuBLAS."""

JOINED = "multi_linear", "norm_rotary", "write_pages", "paged_decode_attention", "swiglu"
"""Kernels of verax's own in a layer."""

# `021: kWhile         [prev=000 (1) | ...] name grid: ...`; what a thunk holds is indented and follows.
_THUNK = re.compile(r"( *)\d+: (k\w+) +\[[^\]]*\] *(\w*)")


def launches(lowered):
    """Launches of a program on an H100 by the host: the kind of each, and the kinds and names of those that it holds.

    A command buffer, a loop and a choice hold others, at any depth.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_for(find_device("h100"), lowered, xla_dump_to=folder)
        (path,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        lines = path.read_text().splitlines()
    result = []
    for indent, kind, name in (line.groups() for line in map(_THUNK.match, lines) if line):
        if indent:
            result[-1][1].append((kind, name))
        else:
            result.append((kind, []))
    return result


def test_the_host_launches_a_step_as_one_command_buffer_and_never_waits_for_the_device():
    """Queries, keys and values are one product, gate and up another; norms and rotation of heads are one launch, writes
    of pages another. Besides: two norms of the hidden state, what makes the next product's inputs bfloat16, twice, and
    three launches for tables that all layers share."""
    layers = ATTENTION_LAYERS["qwen3"]
    decode, mixed = map(launches, lowered_steps(skip_without_compiler("h100"), "qwen3", layers))
    assert [[kind for kind, _ in step] for step in (decode, mixed)] == [["kCommandBuffer"]] * 2
    ((_, inner),) = decode
    ends = [i for i, (_, name) in enumerate(inner) if name == "multi_linear"]
    assert len(ends) == layers
    layer = Counter(name if name in JOINED else kind for kind, name in inner[slice(*ends[:2])])
    assert {name: layer[name] for name in (*JOINED, PRODUCT)} == dict.fromkeys(JOINED, 1) | {PRODUCT: 2}
    assert layer[KERNEL] <= 7
