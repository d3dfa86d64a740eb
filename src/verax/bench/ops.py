"""Operations by themselves: every implementation, torch, and the machine's measured limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from verax import machine, ops
from verax._compat import compiler_options
from verax.bench.harness import Benchmark, Case, Side, import_torch, launched, torch_device
from verax.bench.results import rounds, sides_table, slug
from verax.bench.settings import OpsSettings, check_names
from verax.errors import InvalidParameterError
from verax.ops.cpu import library
from verax.ops.memory import HostMemory
from verax.ops.paged import QuantizedPages, page_bytes, quantize_tokens

WEIGHTS: dict[str, tuple[int, int | None] | str | None] = {
    "float32": None,
    "bfloat16": None,
    "int8": (8, None),
    "int8-32": (8, 32),
    "int8-128": (8, 128),
    "int4-32": (4, 32),
    "int4-128": (4, 128),
    "int4-128-zeros": (4, 128),
    "float8-128": (8, 128),
    **{kind: kind for kind in ops.BLOCK_KINDS},
}
"""Kinds of weight by name; of quantised ones, bits and inputs that share a scale, or the format of blocks. With zero
points, as AWQ has them, or of 8-bit floats, as FP8 checkpoints have them, where the name says so."""

PACKED = "packed"
"""Side of a packed weight: the layout in models where `ops.pack_weight` makes one."""

FEW_ROWS = 16
"""Rows below which a product is a decode step's; models pack a weight only if decode steps get no slower."""

COLD, MOST_COPIES = 256 << 20, 1024
"""Bytes of weights that the calls of `linear` take in turn, so that no cache holds what the next one reads, and copies
of a small weight at most: the system limits how many pieces of memory a process maps."""

EXPERT_SIZES = {"experts": 128, "chosen": 8, "size_in": 2048, "size_out": 1536}
"""Qwen3-30B-A3B's experts of a layer, and of a token, and the gate and up projection of each."""

TOKENS, EXPERT_CHOICES = (1, 4, 8, 512), 16
"""Tokens of the cases with experts, and random choices of experts that the calls take in turn, against caches."""

PLAIN_LIMIT = 2**29
"""Scores that the reference may hold; it is left out of longer cases."""

PAGE = 16
"""Tokens of a page: the engine's block size."""

Calls = dict[str, Callable[[], object]]
"""Sides by name, as calls whose outputs are `launched` when they return."""


def bench_ops(settings: OpsSettings) -> dict[str, Any]:
    """Time operations in each of their implementations, interleaved.

    torch runs its operation in the same dtype; quantised weights are compared with bfloat16.
    """
    size_in, size_out, weights = settings.size_in, settings.size_out, settings.weights or tuple(WEIGHTS)
    check_names("weights", weights, WEIGHTS)
    torch = import_torch() if settings.against else None
    groups = {
        "linear": lambda: linear_cases(size_in, size_out, settings.rows, weights, torch),
        "grouped": lambda: grouped_cases(weights, torch),
        "kernels": lambda: linear_cases(4096, 12288, (1, 16, 64), ("int8", "int4-128", "float8-128")),
    }
    benchmark, read, cases = Benchmark("ops"), machine.streaming_read(), []
    for group in settings.only:
        # One by one, so that a case's arrays are freed before the next one's are made.
        with_weights = groups[group]() if group in groups else ()
        without = (make(torch=torch) for make in CASES.get(group, ()))
        for case in itertools.chain(without, with_weights):
            for side in case.sides.values():
                side.call()  # compiles
            counts = {"runs": settings.runs, "warmup": settings.warmup}
            cases.append(benchmark.measure(case, **counts, read=read, trace=settings.trace))
    asked = asdict(settings) | {"operations": list(settings.only)}
    return benchmark.result(
        slug(*settings.only, str(size_in) if settings.only == ("linear",) and size_in != 4096 else ""),
        title="Operations",
        intro=f"The weight of linear is {size_out} x {size_in}. "
        f"{rounds(asked)}; the implementations take turns in a round, each called repeatedly for 20 ms, the first "
        "call not counted, weights of linear never from a cache. GB/s counts what has to be moved once, as it is "
        "stored. The limit is a read of 512 MiB that takes its turn with the implementations, or the products at the "
        "measured rate.",
        settings=asked,
        tables=[sides_table(cases)],
        cases=cases,
    )


def _case(group: str, name: str, dtype: str, moved: int, flops: int, chosen: str, calls: Calls) -> Case:
    """Case of an operation, of which every side does the same products in the same dtype."""
    return Case(group, name, moved, chosen, {side: Side(call, flops, (dtype,)) for side, call in calls.items()})


def _case_of(
    operation: ops.Operation[Any, Any],
    name: str,
    moved: int,
    flops: int,
    *args: Any,
    others: Calls | None = None,
    reference: bool = True,
    dtype: str = "bfloat16",
    **kwargs: Any,
) -> Case:
    """Case of a call of an operation: all implementations that take it here, but for a reference that does not fit."""
    calls = {
        impl.name: partial(_jit(partial(impl.function, **kwargs)), *args)
        for impl in operation.implementations.values()
        if impl.supports(*args, **kwargs) and (reference or not impl.is_reference)
    }
    chosen = operation.select(*args, **kwargs).name
    return _case(operation.name, name, dtype, moved, flops, chosen, calls | (others or {}))


def _random(shape: Sequence[int], dtype: str, seed: int) -> jax.Array:
    """Normally distributed numbers of this shape and dtype."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def _jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function compiled, as a side calls it."""
    run = jax.jit(function, compiler_options=compiler_options(ops.target().platform), **options)
    return lambda *arguments: launched(run(*arguments))


def _tensor(torch: Any, array: jax.Array, dtype: str) -> Any:
    """Tensor with the array's numbers in a dtype of torch, by its name."""
    tensor = torch.from_numpy(np.array(array.astype(jnp.float32)))
    return tensor.to(torch_device(torch), getattr(torch, dtype))


def _in_turn(run: Callable[[Any], object], arguments: Sequence[Any]) -> Callable[[], object]:
    """A call with the next of the arguments, round and round."""
    turn = itertools.cycle(arguments)
    return lambda: run(next(turn))


# Products with a weight


def linear_cases(
    size_in: int, size_out: int, rows: Sequence[int], weights: Sequence[str], torch: Any = None
) -> Iterator[Case]:
    """Cases one by one: each kind of weight with each number of rows; with torch's side if it is given."""
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((size_out, size_in), np.float32)).astype(jnp.bfloat16)
    num_copies = lambda nbytes: min(MOST_COPIES, math.ceil(COLD / nbytes))
    for kind in weights:
        weight = _quantized_as(dense, kind)
        copies = [_as_loaded(weight) for _ in range(num_copies(weight.nbytes))]
        packed = {few: _packed(copies, few) for few in {count < FEW_ROWS for count in rows}}
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = [] if torch is None else [_tensor(torch, dense, dtype)]
        theirs = [tensor.clone() for tensor in theirs for _ in range(num_copies(tensor.nbytes))]
        for count in rows:
            x = jnp.asarray(rng.standard_normal((count, size_in), np.float32))
            sides: Calls = {}
            for name, impl in ops.linear.implementations.items():
                forced = impl.is_reference or (name == "native" and impl.runs_on(ops.target()) and library.available())
                if forced or impl.supports(x, weight):
                    sides[name] = _in_turn(partial(_jit(impl.function), x), copies)
            chosen = ops.linear.select(x, weight).name
            if layouts := packed[count < FEW_ROWS]:
                chosen, sides[PACKED] = PACKED, _in_turn(partial(_jit(ops.linear), x), layouts)
            if torch is not None:
                sides["torch"] = _in_turn(partial(torch.nn.functional.linear, _tensor(torch, x, dtype)), theirs)
            products = 2 * count * size_out * size_in
            yield _case("linear", f"{kind}, {count} rows", dtype, weight.nbytes, products, chosen, sides)


def _as_loaded(weight: Any) -> Any:
    """A copy that lies in memory as a checkpoint's weights do."""
    memory = HostMemory()
    return jax.tree.map(lambda array: jax.device_put(memory.copy(array, np.dtype(array.dtype))), weight)


def _packed(weights: Sequence[Any], few_rows: bool) -> list[ops.PackedWeight]:
    """The weights as `ops.pack_weight` lays them out; none if it leaves them unchanged."""
    pack = jax.jit(ops.pack_weight, static_argnames="few_rows")
    if not isinstance(jax.eval_shape(partial(pack, few_rows=few_rows), weights[0]), ops.PackedWeight):
        return []
    return [pack(weight, few_rows=few_rows) for weight in weights]


def _quantized_as(dense: jax.Array, kind: str) -> Any:
    """A weight as a kind out of `WEIGHTS`; blocks are arbitrary, of bytes below 64, so that their scales are finite."""
    scheme = WEIGHTS[kind]
    if scheme is None:
        return dense.astype(kind)
    if isinstance(scheme, str):
        size_out, size_in = dense.shape
        size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[scheme]]
        if size_in % size:
            raise InvalidParameterError(f"size_in: expected a multiple of {size} for {scheme}, got {size_in}")
        blocks = np.random.default_rng(0).integers(0, 64, (size_out, size_in // size * size_bytes), np.uint8)
        return ops.BlockQuantizedWeight.from_blocks(scheme, blocks)
    weight = jax.jit(ops.quantize, static_argnums=(1, 2))(dense, *scheme)
    if kind.endswith("zeros"):
        return replace(weight, zeros=jnp.ones(weight.scales.shape, jnp.int8))
    return replace(weight, values=dense.astype(jnp.float8_e4m3fn)) if kind.startswith("float8") else weight


def grouped_cases(kinds: Sequence[str], torch: Any = None) -> Iterator[Case]:
    """Cases one by one: each kind of weight with each number of tokens; with torch's side if it is given.

    The reference, which reads all experts, takes part only where it is chosen.
    """
    E, k, D, F = EXPERT_SIZES.values()
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((F, D), np.float32), jnp.bfloat16)
    shift = jnp.arange(E)[:, None, None].astype(jnp.bfloat16) / E
    for kind in kinds:
        weights = jax.lax.map(lambda one, kind=kind: _quantized_as(dense + one, kind), shift)
        dtype = "float32" if kind == "float32" else "bfloat16"
        theirs = None if torch is None else _tensor(torch, jax.lax.map(lambda one: dense + one, shift), dtype)
        for count in TOKENS:
            x = _random((count, 1, D), "float32", 0)
            choices = [rng.permuted(np.tile(np.arange(E), (count, 1)), axis=1)[:, :k] for _ in range(EXPERT_CHOICES)]
            groups = [jnp.asarray(choice, jnp.int32) for choice in choices]
            supporting = ops.grouped_linear.supporting(x, weights, groups[0])
            fast = [impl for impl in supporting if not impl.is_reference]
            sides: Calls = {}
            for impl in supporting if supporting[0].is_reference else fast:
                sides[impl.name] = _in_turn(partial(_jit(impl.function), x, weights), groups)
            if torch is not None:
                run = partial(_loop, torch, _tensor(torch, x[:, 0], dtype), theirs)
                sides["torch"] = _in_turn(run, [torch.from_numpy(choice).to(torch_device(torch)) for choice in choices])
            moved = int(weights.nbytes / E * np.mean([len(np.unique(choice)) for choice in choices]))
            chosen, products = supporting[0].name, 2 * count * k * D * F
            yield _case("grouped_linear", f"{kind}, {count} tokens", dtype, moved, products, chosen, sides)


def _loop(torch: Any, x: Any, weights: Any, choice: Any) -> Any:
    """Products of the chosen experts one by one, as transformers computes them."""
    y = x.new_empty(*choice.shape, weights.shape[1])  # on its device
    for expert in choice.unique():
        token, place = torch.where(choice == expert)
        y[token, place] = torch.nn.functional.linear(x[token], weights[expert])
    return y


def several_weights(rows: int, *, gated: bool = False, torch: Any = None) -> Case:
    """Qwen3-0.6B's products for queries, keys and values; if `gated`, its SwiGLU. Calls take other weights in turn."""
    operation, sizes = (ops.swiglu, (3072, 3072)) if gated else (ops.multi_linear, (2048, 1024, 1024))
    D, moved = 1024, 2 * 1024 * sum(sizes)
    noise = _random((sum(sizes), D), "bfloat16", 0)
    ends = np.cumsum(sizes)[:-1].tolist()
    copies = [tuple(jnp.split(noise + i, ends)) for i in range(math.ceil(COLD / moved))]
    copies = copies if gated else [(one,) for one in copies]
    x = _random((rows, D), "float32", 1)
    sides: Calls = {}
    for impl in operation.supporting(x, *copies[0]):
        run = _jit(impl.function)
        sides[impl.name] = _in_turn(lambda weights, run=run: run(x, *weights), copies)
    name = f"bfloat16, {rows} rows, {D} to {', '.join(map(str, sizes))}"
    chosen = operation.select(x, *copies[0]).name
    return _case(operation.name, name, "bfloat16", moved, 2 * rows * D * sum(sizes), chosen, sides)


# Attention and the cache


Heads = tuple[int, int, int]
"""Heads of queries, heads of keys and values, and their size."""

WAN_HEADS: Heads = (12, 12, 128)
"""Wan 1.3B's, of whole sequences."""

QWEN_HEADS: Heads = (16, 8, 128)
"""Qwen3-0.6B's, of the cache."""


def whole_sequence(
    length: int, *, dtype: str = "bfloat16", heads: Heads = WAN_HEADS, window: int | None = None, torch: Any = None
) -> Case:
    """Attention over a whole sequence: of all keys, or of a window before each query, which torch does not have."""
    N, K, H = heads
    q, k, v = (_random((1, length, n, H), dtype, seed) for seed, n in enumerate((N, K, K)))
    others: Calls = {}
    if torch is not None and window is None:
        others["torch"] = _torch_attention(torch, *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)))
    over, shown = "" if K == N else f" over {K}", "" if window is None else f", window {window}"
    products = length**2 if window is None else int(np.minimum(np.arange(1, length + 1), window).sum())
    return _case_of(
        ops.attention,
        f"{dtype}, {length} tokens, {N} heads{over} of {H}{shown}",
        q.nbytes + k.nbytes + v.nbytes + 4 * q.size,
        4 * N * products * H,
        *(q, k, v),
        others=others,
        reference=N * length**2 <= PLAIN_LIMIT,
        dtype=dtype,
        causal=window is not None,
        window=window,
    )


def paged_decode(
    rows: int, length: int, *, cache_dtype: str = "bfloat16", heads: Heads = QWEN_HEADS, torch: Any = None
) -> Case:
    """The paged decode step of `rows` sequences with `length` cached tokens each."""
    N, K, H = heads
    caches, pages = _cache(rows, length, K, H)
    if cache_dtype == "int8":
        caches = QuantizedPages(*quantize_tokens(caches[0])), QuantizedPages(*quantize_tokens(caches[1]))
    q = _random((rows, N, H), "float32", 2)
    others: Calls = {}
    if torch is not None and cache_dtype == "bfloat16":  # over keys that lie together: it has no pages
        dense = (_random((rows, K, length, H), "bfloat16", seed) for seed in (3, 4))
        others["torch"] = _torch_attention(torch, q[:, :, None].astype(jnp.bfloat16), *dense, enable_gqa=True)
    return _case_of(
        ops.paged_decode_attention,
        f"{cache_dtype}, {rows} rows, {length} cached, {N} heads over {K} of {H}",
        2 * rows * length * page_bytes((K, 1, H), cache_dtype) + 2 * q.nbytes,
        4 * N * rows * length * H,
        *(q, *caches, pages, jnp.full(rows, length, jnp.int32)),
        others=others,
        reference=rows * N * length <= PLAIN_LIMIT // 1024,
    )


def ragged(lengths: Sequence[int], counts: Sequence[int], *, heads: Heads = QWEN_HEADS, torch: Any = None) -> Case:
    """A mixed step: each sequence's cached tokens, the step's included (`lengths`), and its tokens in the step.

    torch does not have it.
    """
    N, K, H = heads
    caches, pages = _cache(len(lengths), max(lengths), K, H)
    q = _random((sum(counts), N, H), "float32", 2)
    starts = np.concatenate([[0], np.cumsum(counts)])
    pairs = zip(lengths, counts, strict=True)
    products = sum(count * (length - count) + count * (count + 1) // 2 for length, count in pairs)
    decodes = f" next to {len(lengths) - 1} of {lengths[0]} cached" if len(lengths) > 1 else ""
    return _case_of(
        ops.paged_attention,
        f"bfloat16, {counts[-1]} tokens after {lengths[-1] - counts[-1]}{decodes}, {N} heads over {K} of {H}",
        2 * 2 * K * sum(lengths) * H + 2 * q.nbytes,
        4 * N * H * products,
        *(q, *caches, pages, *(jnp.asarray(x, jnp.int32) for x in (lengths, starts))),
        reference=False,  # it holds the keys once for each token
    )


def cache_write(tokens: int, *, heads: Heads = QWEN_HEADS, torch: Any = None) -> Case:
    """Writes to a cache that is donated and comes back, as in the engine's step; torch does not have them."""
    _, K, H = heads
    caches, _ = _cache(1, 32768, K, H)
    k, v = (_random((tokens, K, H), "float32", seed) for seed in (2, 3))
    places = jnp.asarray(np.random.default_rng(5).permutation(32768)[:tokens], jnp.int32)
    arguments = k, v, places // PAGE, places % PAGE

    def donating(run: Callable[..., Any]) -> Callable[[], None]:
        kept = [jax.tree.map(jnp.copy, caches)]
        return lambda: kept.append(run(*kept.pop(), *arguments))

    sides: Calls = {
        impl.name: donating(_jit(impl.function, donate_argnums=(0, 1)))
        for impl in ops.write_pages.supporting(*caches, *arguments)
    }
    name = f"bfloat16, {tokens} tokens, {K} heads of {H}"
    chosen = ops.write_pages.select(*caches, *arguments).name
    return _case("write_pages", name, "bfloat16", 6 * (k.size + v.size), 0, chosen, sides)


def _cache(rows: int, length: int, kv_heads: int, size: int) -> tuple[tuple[Any, Any], jax.Array]:
    """Pages of keys and values in a shuffled order, and the table that lists them."""
    width = math.ceil(length / PAGE)
    k, v = (_random((1 + rows * width, kv_heads, PAGE, size), "bfloat16", seed) for seed in range(2))
    order = 1 + np.random.default_rng(2).permutation(rows * width)
    return (k, v), jnp.asarray(order.reshape(rows, width), jnp.int32)


def _torch_attention(torch: Any, *arrays: jax.Array, **options: Any) -> Callable[[], object]:
    """torch's `scaled_dot_product_attention` on `[B, N, T, H]`."""
    tensors = [_tensor(torch, x, str(arrays[-1].dtype)) for x in arrays]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


# Convolutions


def conv(
    size: Sequence[int],
    channels: int,
    out: int,
    *,
    kernel: Sequence[int] = (3, 3, 3),
    dtype: str = "bfloat16",
    cached: bool = True,
    stride: int = 1,
    torch: Any = None,
) -> Case:
    """Frames in the middle of a video, after a cache of earlier ones, or the first, after zeros; or an image.

    Args:
        size: frames, height and width, or height and width.
        channels, out: of the input and the output.
        kernel: sizes of the kernel, as many as `size` has.
        dtype: of all arrays.
        cached: of frames, if they follow earlier ones.
        stride: of an image, 1 or 2.
        torch: the module, which runs it in its two memory layouts, or None.
    """
    x, weight = _random((1, *size, channels), dtype, 0), _random((out, channels, *kernel), dtype, 1)
    bias, pixels = _random((out,), dtype, 2), math.prod(size) // stride**2
    moved, flops = x.nbytes + weight.nbytes + x.itemsize * pixels * out, 2 * pixels * out * channels * math.prod(kernel)
    words = f"{dtype}, {channels} to {out}, {'x'.join(map(str, kernel))}, {'x'.join(map(str, size))}"
    if len(size) == 3:
        operation, before, sides = ops.conv3d, kernel[0] - 1, kernel[1] // 2
        cache = _random((1, before, *size[1:], channels), dtype, 3)
        options: dict[str, Any] = {"padding": sides} | ({"cache": cache} if cached and before else {})
        padded = jnp.concatenate([cache if cached else jnp.zeros_like(cache), x], axis=1)
        theirs = {"padding": (0, sides, sides)}
        if cached:
            moved += cache.nbytes
        else:  # zeros before the first frame need not be multiplied
            flops -= flops * sum(range(kernel[0])) // (size[0] * kernel[0])
            words += ", first frames"
    else:
        padding = ((1, 1), (1, 1)) if stride == 1 else ((0, 1), (0, 1))
        operation, options = ops.conv2d, dict(stride=stride, padding=padding)
        padded, theirs = jnp.pad(x, ((0, 0), *padding, (0, 0))), {"stride": stride}
        words += f", stride {stride}" if stride > 1 else ""
    others: Calls = {}
    if torch is not None:
        function = torch.nn.functional.conv3d if len(size) == 3 else torch.nn.functional.conv2d
        layout = torch.channels_last_3d if len(size) == 3 else torch.channels_last
        first = [_tensor(torch, array, dtype) for array in (jnp.moveaxis(padded, -1, 1), weight)]
        last, offset = [array.to(memory_format=layout) for array in first], _tensor(torch, bias, dtype)
        others["torch"] = lambda: function(*first, offset, **theirs)
        others["torch channels_last"] = lambda: function(*last, offset, **theirs)
    return _case_of(operation, words, moved, flops, x, weight, bias, others=others, dtype=dtype, **options)


CASES: Mapping[str, Sequence[Callable[..., Case]]] = {
    "attention": (
        partial(whole_sequence, 2048),
        partial(whole_sequence, 2048, dtype="float32"),
        partial(whole_sequence, 8192),
        *(partial(paged_decode, *sizes) for sizes in ((4, 150), (4, 2048), (1, 8192), (16, 1024))),
        *(partial(paged_decode, *sizes, cache_dtype="int8") for sizes in ((4, 2048), (1, 8192))),
        *(partial(ragged, [cached + 512], [512]) for cached in (0, 3584)),
        *(partial(cache_write, tokens) for tokens in (4, 512)),
    ),
    # Wan's video VAE: the decoder at its highest and its lowest resolution, a shortcut, an upsampler, a downsampler.
    "conv": (
        partial(conv, (4, 128, 128), 96, 96),
        partial(conv, (4, 128, 128), 96, 96, cached=False),
        partial(conv, (4, 128, 128), 96, 96, dtype="float32"),
        partial(conv, (4, 16, 16), 384, 384),
        partial(conv, (4, 64, 64), 192, 384, kernel=(1, 1, 1)),
        partial(conv, (128, 128), 192, 96, kernel=(3, 3)),
        partial(conv, (128, 128), 96, 96, kernel=(3, 3), stride=2),
    ),
    # Decode steps of Qwen3-0.6B and 8B, prompts, whole sequences of Wan 1.3B at 81 frames of 480 x 832 and of Gemma 3
    # 270M with a sliding window. `kernels` has a feed-forward layer of 8B too.
    "kernels": (
        *(partial(paged_decode, *sizes) for sizes in ((1, 8192), (16, 1024), (64, 2048), (256, 512))),
        partial(paged_decode, 64, 2048, cache_dtype="int8"),
        partial(paged_decode, 64, 2048, heads=(32, 8, 128)),
        partial(ragged, [4096], [512]),
        partial(ragged, [1024] * 33, [1] * 32 + [480]),
        *(partial(several_weights, rows, gated=gated) for gated in (False, True) for rows in (1, 16)),
        partial(whole_sequence, 32760),
        partial(whole_sequence, 8192, heads=(4, 1, 256), window=512),
    ),
}
"""Cases by group: calls that make one each, with the module torch or None as `torch`."""
