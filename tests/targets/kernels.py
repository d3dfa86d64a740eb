"""Kernels compiled for devices that are not attached: their work, their registers and memory, and a prediction.

A prediction is the share of the data sheet's limit that a kernel is expected to reach, written down before any device
has run it. `docs/accelerators.md` gives the reasons.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tests.targets.topology import compiler_of, topology_mesh
from verax import ops
from verax._compat import no_compilation_cache
from verax.ops.delta import DeltaInputs
from verax.ops.delta._scan import Chunk
from verax.ops.paged import QuantizedPages, is_quantized, page_bytes
from verax.plan.devices import find_device

__all__ = ["KERNELS", "Kernel", "compiled_kernel"]

HEADS, KV_HEADS, SIZE, PAGE = 16, 8, 128, 16
"""Heads of Qwen3-0.6B, over heads of keys and values; their size; tokens of a page."""


@dataclass(frozen=True)
class Kernel:
    """A call of an operation by one implementation on one device.

    Attributes:
        operation: name of the operation.
        implementation: name of the implementation.
        name: name of the kernel in the compiled program.
        device: name of the device.
        case: the call in words.
        args: arrays of the call, as shapes.
        flops: floating-point operations of the products, masked ones not counted.
        bytes_moved: bytes that have to be read and written, each once.
        predicted: share of the limit.
        options: options of the call.
        donated: places of the arguments that it may overwrite.
    """

    operation: str
    implementation: str
    name: str
    device: str
    case: str
    args: tuple[Any, ...] = field(hash=False)
    flops: int
    bytes_moved: int
    predicted: float
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    donated: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}-{self.device}-{self.case}"

    @property
    def limit(self) -> float:
        """Seconds of the work at the limits of the device's data sheet."""
        device = find_device(self.device)
        return max(self.flops / device.rate("bfloat16"), self.bytes_moved / device.bandwidth)


def _cache(rows: int, length: int, dtype: str) -> Any:
    shape = (1 + rows * length // PAGE, KV_HEADS, PAGE, SIZE)
    if is_quantized(dtype):
        return QuantizedPages(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    return jax.ShapeDtypeStruct(shape, dtype)


def _integers(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def _decode(
    implementation: str, device: str, dtype: str, predicted: float, rows: int = 64, length: int = 2048
) -> Kernel:
    pages = _cache(rows, length, dtype)
    q = jax.ShapeDtypeStruct((rows, HEADS, SIZE), jnp.float32)
    return Kernel(
        "paged_decode_attention",
        implementation,
        "paged_attention" if implementation == "pallas" else "paged_decode_attention",
        device,
        f"{rows} sequences of {length} tokens, {dtype}",
        (q, pages, pages, *_integers((rows, length // PAGE), (rows,))),
        4 * HEADS * SIZE * rows * length,
        2 * rows * length * page_bytes((KV_HEADS, 1, SIZE), dtype) + 8 * q.size,
        predicted,
    )


def _chunk(
    implementation: str, device: str, dtype: str, predicted: float, cached: int = 3584, tokens: int = 512
) -> Kernel:
    length = cached + tokens
    pages = _cache(1, length, dtype)
    q = jax.ShapeDtypeStruct((tokens, HEADS, SIZE), jnp.float32)
    return Kernel(
        "paged_attention",
        implementation,
        "paged_attention",
        device,
        f"{tokens} tokens after {cached}, {dtype}",
        (q, pages, pages, *_integers((1, length // PAGE), (1,), (2,))),
        4 * HEADS * SIZE * (tokens * cached + tokens * (tokens + 1) // 2),
        2 * length * page_bytes((KV_HEADS, 1, SIZE), dtype) + 8 * q.size,
        predicted,
    )


def _linear(
    device: str, rows: int, dtype: str, group: int | None, predicted: float, size_in: int = 4096, size_out: int = 12288
) -> Kernel:
    dense = jax.ShapeDtypeStruct((size_out, size_in), jnp.float32)
    weight = jax.eval_shape(lambda weight: ops.quantize(weight, 4 if dtype == "int4" else 8, group), dense)
    if is_float := dtype.startswith("float8"):
        weight = replace(weight, values=jax.ShapeDtypeStruct(weight.values.shape, dtype))
    kind = dtype if group is None else f"{dtype} in groups of {group}"
    return Kernel(
        "linear",
        "triton",
        "linear_float8" if is_float else f"linear_{dtype}",
        device,
        f"{'1 row' if rows == 1 else f'{rows} rows'}, {kind}, {size_in} to {size_out}",
        (jax.ShapeDtypeStruct((rows, size_in), jnp.float32), weight),
        2 * rows * size_in * size_out,
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weight)) + 4 * rows * (size_in + size_out),
        predicted,
    )


def _delta(implementation: str, device: str, predicted: float, tokens: int = 4096) -> Kernel:
    heads, C, K, V = 16, 64, 128, 128
    lead = (tokens // C, heads, 1)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    key, value, state = array(*lead, C, K), array(*lead, C, V), array(1, heads, 1, K, V)
    chunks = Chunk(value, key, key, array(*lead, 1), key, array(*lead, C, C))
    return Kernel(
        "delta_chunk_scan",
        implementation,
        "delta_chunk_scan",
        device,
        f"{tokens} tokens in chunks of {C}, {heads} heads of {K}, float32",
        (chunks, state, *_integers(lead[:1])),
        2 * tokens * heads * V * (3 * K + C),
        4 * (sum(x.size for x in chunks) + value.size + 2 * state.size),
        predicted,
    )


def _delta_backward(implementation: str, device: str, predicted: float) -> Kernel:
    """The gradient of `_delta`: as many products, states after chunks written in the place of outputs."""
    forward = _delta(implementation, device, predicted)
    chunks, state, owner = forward.args
    value, states_of_chunks = chunks.value, owner.size * state.size
    return replace(
        forward,
        operation="delta_chunk_scan_backward",
        name="delta_chunk_scan_backward",
        args=(chunks, state, owner, value),
        bytes_moved=4 * (sum(x.size for x in chunks) + states_of_chunks + 2 * state.size),
    )


def _delta_step(device: str, predicted: float, rows: int = 64, slots: int = 80) -> Kernel:
    heads, K, V = 16, 128, 128

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), jnp.float32)

    key, value, gate = array(1, heads, K), array(1, heads, V), array(1, heads)
    states = jax.ShapeDtypeStruct((slots, heads, K, V), jnp.float32)
    inputs = DeltaInputs(key, key, key, value, gate, gate)
    size = rows * heads * K * V
    where = ops.StateSlots(jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.bool_))
    return Kernel(
        "delta_slot_recurrence",
        "pallas" if find_device(device).platform == "tpu" else "triton",
        "delta_step",
        device,
        f"1 token of {rows} sequences, {heads} heads of {K}, float32",
        (inputs, states, where),
        7 * size,
        4 * (sum(x.size for x in inputs) - key.size + value.size + 2 * size),
        predicted,
        {"use_qk_l2norm": True},
        donated=(1,),
    )


def _kernels() -> Iterator[Kernel]:
    yield _decode("pallas", "v5e", "bfloat16", 0.8)
    yield _decode("pallas", "v5e", "int8", 0.55)
    yield _decode("pallas", "v5e", "float8_e4m3fn", 0.45)
    yield _decode("pallas", "v6e", "float8_e4m3fn", 0.25)
    yield _chunk("pallas", "v5e", "bfloat16", 0.2)
    yield _chunk("pallas", "v5e", "float8_e4m3fn", 0.17)
    yield _delta("pallas", "v5e", 0.5)
    yield _delta_backward("pallas", "v5e", 0.5)
    for device in ("v5e", "v6e"):
        yield _delta_step(device, 0.7)
    for device, predicted in (("h100", 0.6), ("b200", 0.4), ("rtx5090", 0.75)):
        yield _decode("triton", device, "bfloat16", predicted)
    yield _decode("triton", "h100", "int8", 0.4)
    yield _decode("triton", "h100", "float8_e4m3fn", 0.4)
    yield _chunk("triton", "h100", "bfloat16", 0.2)
    yield _linear("h100", 1, "int8", None, 0.55)
    yield _linear("h100", 64, "int8", None, 0.45)
    yield _linear("b200", 1, "int8", None, 0.35)
    yield _linear("b200", 64, "int8", None, 0.3)
    yield _linear("h100", 1, "int4", 128, 0.35)
    yield _linear("h100", 64, "int4", 128, 0.3)
    for rows, group, predicted in ((1, None, 0.55), (64, None, 0.45), (1, 128, 0.5), (64, 128, 0.35)):
        yield _linear("h100", rows, "float8_e4m3fn", group, predicted)
    yield _delta("triton", "h100", 0.15)
    yield _delta_backward("triton", "h100", 0.15)
    for device in ("h100", "a100", "l4", "rtx4090"):
        yield _delta_step(device, 0.7)


KERNELS = list(_kernels())


Compile = Callable[[Mapping[str, str]], Any]
"""Compilation of a program that calls one kernel, with further XLA options."""

LIBTPU = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
"""Options of libtpu, which it reads when it is loaded: its instructions after each pass go into a folder."""


class Resources(NamedTuple):
    """Resources of a kernel.

    Attributes:
        registers: registers of a thread; None on a TPU.
        memory: bytes of a block's shared memory, or of a TPU's vector memory.
        spills: bytes that a thread of a GPU moves out of its registers, or registers that a TPU does.
    """

    registers: int | None
    memory: int
    spills: int


def of_gpu(name: str, compile_with: Compile) -> Resources:
    """Resources of the kernel `name`, which Triton compiles to PTX and ptxas to instructions.

    Args:
        name: name of the kernel in the compiled program.
        compile_with: compilation of the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_with({"xla_dump_to": folder})
        (program,) = (path for path in Path(folder).glob("*.ptx") if f".entry {name}(" in path.read_text())
        (thunks,) = Path(folder).glob("*.thunk_sequence.txt")
        memory = _number(rf" {name} grid: .*shared_memory: (\d+) bytes", thunks.read_text())
        # PTX for one architecture alone (sm_90a, sm_100a) cannot be compiled for those like it (sm_90, sm_100).
        (arch,) = re.findall(r"^\.target (\w+)", program.read_text(), re.MULTILINE)
        command = [str(_ptxas()), "-v", f"-arch={arch}", str(program), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (_number(words, said) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return Resources(registers, memory, spills)


def _ptxas() -> Path:
    """The assembler of the package nvidia-cuda-nvcc."""
    package = find_spec("nvidia")
    places = [] if package is None else list(package.submodule_search_locations or ())
    return next(path for place in places for path in Path(place).glob("*/bin/ptxas"))


def of_tpu(name: str, command: Sequence[str]) -> Resources:
    """Resources of the kernel `name`: the vector memory that XLA sets aside for it, and libtpu's schedule of it.

    Args:
        name: name of the kernel in the compiled program.
        command: command that compiles the program and prints it.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIBTPU_INIT_ARGS": LIBTPU.format(folder=folder)}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        (schedule,) = Path(folder).glob(f"*-{name}.*-final_bundles.txt")
        bundles = schedule.read_text().splitlines()
    (call,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    memory = _number(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
    spills = sum("_spill]" in line and " vst " in line for line in bundles)
    return Resources(None, memory, spills)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[:2000]}"
    return int(match[1])


@cache
def compiled_kernel(kernel: Kernel) -> Resources:
    """Registers and memory of a kernel, compiled for its device."""
    if find_device(kernel.device).platform == "tpu":  # in a process of its own, whose libtpu writes down what it does
        command = [sys.executable, "-m", "tests.targets.kernels", str(KERNELS.index(kernel))]
        return of_tpu(kernel.name, command)
    return of_gpu(kernel.name, partial(_compile, kernel))


def _compile(kernel: Kernel, options: Mapping[str, str]) -> jax.stages.Compiled:
    device = find_device(kernel.device)
    compiler, mesh = compiler_of(device), topology_mesh(device, 1)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), kernel.args)
    operation = ops.operations()[kernel.operation]
    named = {kernel.operation: kernel.implementation}
    with ops.use_target(device.platform, device.kind, device.memory), ops.use_implementations(**named):
        assert operation.select(*kernel.args, **kernel.options).name == kernel.implementation
        call = partial(operation.__call__, **kernel.options)
        lowered = jax.jit(call, in_shardings=whole, donate_argnums=kernel.donated).lower(*kernel.args)
    with no_compilation_cache():
        return lowered.compile(compiler_options={**compiler.options, **options})


if __name__ == "__main__":
    print(_compile(KERNELS[int(sys.argv[1])], {}).as_text())
