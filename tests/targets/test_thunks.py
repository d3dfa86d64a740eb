"""The decode step on an NVIDIA GPU: how much of it the host launches, and what its parts are."""

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.targets.compile import programs_of
from tests.targets.test_targets import skip_without_compiler
from tests.targets.topology import compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.plan.devices import find_device

LAYERS = 2

KERNEL, PRODUCT = "kCustomKernel", "kCublasLtMatmul"
"""Kinds of a kernel that XLA wrote, and of a product by cuBLAS."""

# `021: kWhile         [prev=000 (1) | ...] name grid: ...`; what a thunk holds is indented and follows.
_THUNK = re.compile(r"(?P<indent> *)\d+: (?P<kind>k\w+) +\[[^\]]*\] *(?P<name>\w*)")


class Thunk(NamedTuple):
    """A launch by the host, or what holds further ones: a command buffer, a loop, a choice.

    Attributes:
        kind: XLA's name of its kind.
        name: name of the kernel; empty for another kind.
        inner: thunks in it, at any depth.
    """

    kind: str
    name: str
    inner: list


def thunks(compile_with):
    """Thunks of a program in the order of their launch, after XLA has put kernels into command buffers.

    Args:
        compile_with: compilation of the program, with further XLA options.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_with({"xla_dump_to": folder})
        (path,) = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        text = path.read_text()
    result = []
    for line in text.splitlines():
        if one := _THUNK.match(line):
            place = result[-1].inner if one["indent"] else result
            place.append(Thunk(one["kind"], one["name"], []))
    return result


@pytest.fixture(scope="module")
def step():
    """Thunks of the decode step of two layers of Qwen3-0.6B on an H100."""
    skip_without_compiler("h100")
    device = find_device("h100")
    mesh, compiler = topology_mesh(device, 1), compiler_of(device)
    sizes = {"max_num_seqs": 16, "max_model_len": 2048}
    with ops.use_target(device.platform, device.kind, device.memory):
        decode, _ = programs_of("qwen3", device, mesh, depth=LAYERS, **sizes)
        lowered = decode.lower()
    with no_compilation_cache():
        return thunks(lambda options: lowered.compile(compiler_options={**compiler.options, **options}))


def test_the_host_launches_command_buffers_and_the_loops_of_attention_between_them(step):
    kinds = Counter(thunk.kind for thunk in step)
    assert kinds["kWhile"] == LAYERS
    assert kinds["kCommandBuffer"] == LAYERS + 1
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
    assert any(thunk.name.startswith("sort") for thunk in logprobs.inner)  # the names are those that XLA gives
