"""Kernels compiled for devices that are not attached: their work, their registers and memory, and a prediction.

A prediction is the share of the data sheet's limit that a kernel is expected to reach, written down before any device
has run it; of `multi_linear` and `swiglu`, the share that an H100 reached. `docs/accelerators.md` gives the reasons.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

HEADS, KV_HEADS, SIZE, PAGE = 16, 8, 128, 16
"""Heads of Qwen3-0.6B, over heads of keys and values; their size; tokens of a page."""


@dataclass(frozen=True)
class Kernel:
    """A call of an operation by one implementation on one device.

    Attributes:
        name: name of the kernel in the compiled program.
        case: the call in words.
        args: arrays of the call, as shapes; `donated` has the places of those that it may overwrite.
        flops: floating-point operations of the products, masked ones not counted.
        bytes_moved: bytes that have to be read and written, each once.
        predicted: share of the limit.
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


def _array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _cache(rows: int, length: int, dtype: str) -> Any:
    shape = (1 + rows * length // PAGE, KV_HEADS, PAGE, SIZE)
    values = _array(*shape, dtype=dtype)
    return QuantizedPages(values, _array(*shape[:3])) if is_quantized(dtype) else values


def _attention(implementation: str, device: str, dtype: str, predicted: float, *, decode: bool) -> Kernel:
    """A decode step of 64 sequences of 2,048 tokens, or a chunk of 512 tokens after 3,584."""
    rows, length, tokens = (64, 2048, 64) if decode else (1, 4096, 512)
    visible = rows * length if decode else tokens * (length - tokens) + tokens * (tokens + 1) // 2
    operation = "paged_decode_attention" if decode else "paged_attention"
    pages, q = _cache(rows, length, dtype), _array(tokens, HEADS, SIZE)
    call = f"{rows} sequences of {length} tokens" if decode else f"{tokens} tokens after {length - tokens}"
    numbers = [(rows, length // PAGE), (rows,), *([] if decode else [(rows + 1,)])]
    return Kernel(
        operation,
        implementation,
        "paged_attention" if implementation == "pallas" else operation,
        device,
        f"{call}, {dtype}",
        (q, pages, pages, *(_array(*shape, dtype=jnp.int32) for shape in numbers)),
        4 * HEADS * SIZE * visible,
        2 * rows * length * page_bytes((KV_HEADS, 1, SIZE), dtype) + 8 * q.size,
        predicted,
    )


def _several_weights(device: str, operation: str, sizes: Sequence[int], predicted: float) -> Kernel:
    """Products of 4 rows with weights of Qwen3-0.6B: for queries, keys and values, or of SwiGLU."""
    rows, size_in, total = 4, 1024, sum(sizes)
    weights = [_array(size, size_in, dtype="bfloat16") for size in sizes]
    return Kernel(
        operation,
        "triton",
        operation,
        device,
        f"{rows} rows, bfloat16, {size_in} to {', '.join(map(str, sizes))}",
        (_array(rows, size_in), *([weights] if operation == "multi_linear" else weights)),
        2 * rows * size_in * total,
        2 * size_in * total + 4 * rows * (size_in + total),
        predicted,
    )


DELTA_HEADS, K, V = 16, 128, 128
"""Heads of the delta rule, and sizes of their keys and values."""


def _delta(implementation: str, device: str, predicted: float, *, backward: bool = False) -> Kernel:
    """The scan over chunks, or its gradient: as many products, states after chunks written in the place of outputs."""
    C, tokens = 64, 4096
    lead = (tokens // C, DELTA_HEADS, 1)
    key, value, state = _array(*lead, C, K), _array(*lead, C, V), _array(1, DELTA_HEADS, 1, K, V)
    chunks, owner = Chunk(value, key, key, _array(*lead, 1), key, _array(*lead, C, C)), _array(lead[0], dtype=jnp.int32)
    operation = "delta_chunk_scan_backward" if backward else "delta_chunk_scan"
    written = owner.size * state.size if backward else value.size
    return Kernel(
        operation,
        implementation,
        operation,
        device,
        f"{tokens} tokens in chunks of {C}, {DELTA_HEADS} heads of {K}, float32",
        (chunks, state, owner, *([value] if backward else [])),
        2 * tokens * DELTA_HEADS * V * (3 * K + C),
        4 * (sum(x.size for x in chunks) + written + 2 * state.size),
        predicted,
    )


def _delta_step(device: str, predicted: float) -> Kernel:
    rows, slots = 64, 80
    key, value, gate = (_array(rows, 1, DELTA_HEADS, *more) for more in ((K,), (V,), ()))
    inputs = DeltaInputs(key, key, key, value, gate, gate)
    size = rows * DELTA_HEADS * K * V
    where = ops.StateSlots(_array(rows, dtype=jnp.int32), _array(rows, dtype=jnp.bool_))
    return Kernel(
        "delta_slot_recurrence",
        "pallas" if find_device(device).platform == "tpu" else "triton",
        "delta_step",
        device,
        f"1 token of {rows} sequences, {DELTA_HEADS} heads of {K}, float32",
        (inputs, _array(slots, DELTA_HEADS, K, V), where),
        7 * size,
        4 * (sum(x.size for x in inputs) - key.size + value.size + 2 * size),
        predicted,
        {"use_qk_l2norm": True},
        donated=(1,),
    )


def _kernels() -> Iterator[Kernel]:
    for device, dtype, predicted in (
        ("v5e", "bfloat16", 0.8),
        ("v5e", "int8", 0.55),
        ("v5e", "float8_e4m3fn", 0.45),
        ("v6e", "float8_e4m3fn", 0.25),
    ):
        yield _attention("pallas", device, dtype, predicted, decode=True)
    for dtype, predicted in (("bfloat16", 0.2), ("float8_e4m3fn", 0.17)):
        yield _attention("pallas", "v5e", dtype, predicted, decode=False)
    yield _delta("pallas", "v5e", 0.5)
    yield _delta("pallas", "v5e", 0.5, backward=True)
    for device in ("v5e", "v6e"):
        yield _delta_step(device, 0.7)
    for device, dtype, predicted in (
        ("h100", "bfloat16", 0.6),
        ("b200", "bfloat16", 0.4),
        ("rtx5090", "bfloat16", 0.75),
        ("h100", "int8", 0.4),
        ("h100", "float8_e4m3fn", 0.4),
    ):
        yield _attention("triton", device, dtype, predicted, decode=True)
    yield _attention("triton", "h100", "bfloat16", 0.2, decode=False)
    yield _several_weights("h100", "multi_linear", (2048, 1024, 1024), 0.45)
    yield _several_weights("h100", "swiglu", (3072, 3072), 0.57)
    yield _delta("triton", "h100", 0.15)
    yield _delta("triton", "h100", 0.15, backward=True)
    for device in ("h100", "a100", "l4", "rtx4090"):
        yield _delta_step(device, 0.7)


KERNELS = list(_kernels())

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


def _of_gpu(kernel: Kernel) -> Resources:
    """Resources of a kernel, which Triton compiles to PTX and the assembler of nvidia-cuda-nvcc to instructions."""
    package = find_spec("nvidia")
    places = [] if package is None else list(package.submodule_search_locations or ())
    assembler = next(path for place in places for path in Path(place).glob("*/bin/ptxas"))
    with tempfile.TemporaryDirectory() as folder:
        _compile(kernel, {"xla_dump_to": folder})
        (program,) = (path for path in Path(folder).glob("*.ptx") if f".entry {kernel.name}(" in path.read_text())
        (thunks,) = Path(folder).glob("*.thunk_sequence.txt")
        memory = _number(rf" {kernel.name} grid: .*shared_memory: (\d+) bytes", thunks.read_text())
        # PTX for one architecture alone (sm_90a, sm_100a) cannot be compiled for those like it (sm_90, sm_100).
        (arch,) = re.findall(r"^\.target (\w+)", program.read_text(), re.MULTILINE)
        command = [str(assembler), "-v", f"-arch={arch}", str(program), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Resources(_number(r"Used (\d+) registers", said), memory, _number(r"(\d+) bytes spill stores", said))


def _of_tpu(kernel: Kernel) -> Resources:
    """Resources of a kernel: the vector memory that XLA sets aside for it, and libtpu's schedule of it.

    It is compiled in a process of its own, whose libtpu writes down what it does.
    """
    command = [sys.executable, "-m", "tests.targets.kernels", str(KERNELS.index(kernel))]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIBTPU_INIT_ARGS": LIBTPU.format(folder=folder)}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        (schedule,) = Path(folder).glob(f"*-{kernel.name}.*-final_bundles.txt")
        bundles = schedule.read_text().splitlines()
    (call,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    memory = _number(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
    return Resources(None, memory, sum("_spill]" in line and " vst " in line for line in bundles))


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text[:2000]}"
    return int(match[1])


@cache
def compiled_kernel(kernel: Kernel) -> Resources:
    """Registers and memory of a kernel, compiled for its device."""
    return _of_tpu(kernel) if find_device(kernel.device).platform == "tpu" else _of_gpu(kernel)


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
