"""Delta rules compared with PyTorch, with equal work on all sides, which are checked before they are timed.

Work of the exact gated rule is counted by formula. An addition and a multiplication are two operations; products are
counted (matrices, and the decay of a state), norms, sigmoids and other sums are not. A masked product counts whole, as
every library computes it. What an implementation does beyond the formula, to build an inverse or to pad, is its own
loss. Letters: L tokens of all sequences together, H heads, K and V sizes of keys and values, C tokens of a chunk. Work
of LAM's published rule is counted by tracing our implementation, and by torch's own counter.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from verax import checkpoint, ops
from verax.bench.harness import (
    UNTIMED,
    Benchmark,
    Case,
    Side,
    count_products,
    error_ratio,
    import_torch,
    launched,
    timed,
)
from verax.bench.results import rounds, sides_table, slug
from verax.bench.settings import CONFIGURATIONS, DELTA_BASELINES, SECTIONS, DeltaSettings
from verax.compare.cases.text import transformers
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError
from verax.machine import peak_growth, return_freed_memory
from verax.models.lam import EnhancedHierarchicalDeltaNet, LamConfig, LamModel
from verax.nn import pack_linear_weights
from verax.ops.delta import DeltaInputs, delta_recurrence
from verax.ops.delta._chunk import CHUNK_SIZE, CHUNK_SIZES
from verax.ops.hierarchical import HierarchicalInputs, orthogonality_loss


def bench_delta(settings: DeltaSettings) -> dict[str, Any]:
    """Time the delta rules and PyTorch's, interleaved, on JAX's default device.

    Every side is checked first: its outputs' shapes, dtypes and device, and their error against float64.
    """
    sections, configurations = settings.only, {name: CONFIGURATIONS[name] for name in settings.configs}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        baselines = find_baselines(settings, Path(folder))
        benchmark = Benchmark("delta")
        gated = [("gated", name, (B, n * C, HEADS, SIZE), "float32") for name, (B, n, C) in configurations.items()]
        gated += [("gated", "Long", GPU_SHAPE, "bfloat16")] if baselines.device == "cuda" else []
        makers: dict[str, Callable[[], Iterable[Case]]] = {
            "rule": lambda: (_rule_case(*one, baselines) for one in configurations.items()),
            "layer": lambda: (_layer_case(*one, baselines) for one in configurations.items()),
            "gated": lambda: (_gated_case(*one, baselines) for one in gated),
            "decode": lambda: [_gated_case("decode", "Step", DECODE, "float32", baselines)],
            "encoder": lambda: (_encoder_case(*one, baselines) for one in itertools.product(VARIANTS, SENTENCES)),
        }
        cases = [_measure(case, benchmark, settings) for section in sections for case in makers[section]()]
    asked = asdict(settings) | {"against": list(baselines.names), "untimed": UNTIMED}
    notes = [f"- Left out: {name} ({why})." for name, why in baselines.skipped.items()]
    if seconds := baselines.versions.get("cython_s"):
        notes.append(f"- Cython and the C compiler took {seconds:.1f} s, once for all.")
    some = [name.lower() for name in configurations if len(configurations) < len(CONFIGURATIONS)]
    reasons = {f"- Left out: {name}: {why}" for case in cases for name, why in case["skipped"].items()}
    return benchmark.result(
        slug(*sections, *some),
        title=f"Delta rules compared with PyTorch, on {jax.default_backend()}",
        intro=f"{rounds(asked)}; the sides take turns in a round, and begin each turn with a call that does not "
        "count. Every side's outputs were on that device, in the same "
        "shapes. Error is the root mean square of the difference from float64 over the root mean square of the result. "
        "GFLOP are products of the implementation that runs. The limit is the products at the measured rate, or what "
        "has to be moved at the measured bandwidth if that is longer. Peak is memory beyond the arguments, on a CPU.",
        settings=asked,
        versions=baselines.versions,
        tables=[_table(section, [case for case in cases if case["group"] == section]) for section in sections],
        notes=[*sorted(reasons), *notes],
        cases=cases,
        skipped=baselines.skipped,
    )


def _table(section: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = (f"{case['case']}: " + ", ".join(f"{name} {n}" for name, n in case["sizes"].items()) for case in cases)
    return sides_table(cases, title=SECTIONS[section], note="; ".join(sizes) + "." if cases else "")


def _measure(case: Case, benchmark: Benchmark, settings: DeltaSettings) -> dict[str, Any]:
    """Check every side, then time them in turn; one of a result's cases."""
    platform = jax.default_backend()
    sides = {
        name: {"error": check(case, name, platform), "peak_bytes": _peak_bytes(side, platform)}
        for name, side in case.sides.items()
    }
    measured = benchmark.measure(case, runs=settings.runs, warmup=settings.warmup, trace=settings.trace)
    for name, checked in sides.items():
        measured["sides"][name] |= checked
    return measured | {"sizes": dict(case.sizes), "tolerance": case.tolerance, "skipped": dict(case.skipped)}


def check(case: Case, name: str, platform: str) -> float:
    """Largest error ratio of a side's outputs, after a check of their shapes, dtypes and devices.

    Raises:
        VeraxError: if a side computes something else, or elsewhere, than it claims.
    """
    side, errors = case.sides[name], []
    for i, (output, expected) in enumerate(zip(side.call(), case.expected, strict=True)):
        on = {x.platform for x in output.devices()} if isinstance(output, jax.Array) else {output.device.type}
        on = " and ".join(sorted(on)).replace("cuda", "gpu")
        actual = tuple(output.shape), str(output.dtype).removeprefix("torch."), on
        claimed = expected.shape, side.dtypes[min(i, len(side.dtypes) - 1)], platform
        if actual != claimed:
            raise VeraxError(f"{case.name}, {name}: output {i} is {actual}; it claims to be {claimed}")
        array = output if isinstance(output, jax.Array) else output.detach().cpu().double()
        errors.append(error_ratio(np.asarray(array, np.float64), expected))
    if not max(errors) <= case.tolerance:
        raise VeraxError(
            f"{case.name}, {name}: computes something else: its error against float64 is {max(errors):.2g} of the "
            f"result, more than {case.tolerance:.2g}"
        )
    return max(errors)


def _peak_bytes(side: Side, platform: str) -> int | None:
    """Memory of one call on a CPU, beyond its arguments."""
    if platform != "cpu":
        return None
    gc.collect()
    return_freed_memory()  # which would be used again, and not counted
    with peak_growth() as growth:
        side.call()
    return growth()


# Baselines: PyTorch, eager, through Cython or compiled, and the libraries built on it

FLA = "flash-linear-attention"

KINDS = ("chunk", "recurrent")
"""Kinds of implementations of the gated rule."""


@dataclass(frozen=True)
class Baselines:
    """Implementations to compare with, on the platform of JAX's default device.

    Attributes:
        device: torch's name of the platform.
        reference: LAM in PyTorch (`compare.references.lam`), in float64 the expected result.
        names: names of the baselines.
        lam: LAM in PyTorch by side: the reference, and the same through Cython.
        gated: implementations of the gated rule by library and kind.
        skipped: reason for each baseline that is not available.
        versions: of the libraries, and `cython_s`, the seconds that Cython and the C compiler took.
    """

    torch: Any
    device: str
    reference: ModuleType
    names: tuple[str, ...]
    lam: dict[str, ModuleType] = field(default_factory=dict)
    gated: dict[str, Callable[..., Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


def find_baselines(settings: DeltaSettings, folder: Path) -> Baselines:
    """Import and build the baselines that the settings name, or all that are installed, with reasons for the others.

    Args:
        settings: what to compare with.
        folder: gets the files of Cython; it has to last as long as the baselines do.
    """
    names = settings.against or DELTA_BASELINES
    torch, platform = import_torch(), jax.default_backend()
    if platform not in ("cpu", "gpu") or (platform == "gpu" and not torch.cuda.is_available()):
        raise InvalidParameterError(
            f"JAX runs on {platform}, where this torch ({torch.__version__}) does not: set JAX_PLATFORMS=cpu to "
            "compare on the CPU"
        )
    reference = importlib.import_module("verax.compare.references.lam")
    found = Baselines(torch, "cuda" if platform == "gpu" else "cpu", reference, names)
    for name in names:
        try:
            if name == "torch":
                found.lam[name] = reference
            elif name == "cython":
                module, found.versions["cython_s"] = timed(partial(cythonized, Path(str(reference.__file__)), folder))
                found.lam["torch, Cython"] = module
            elif name in ("transformers", "fla"):
                found.gated.update(_transformers_rules() if name == "transformers" else _fla_rules(found.device))
            if package := {"fla": FLA, "cython": name, "transformers": name}.get(name):
                found.versions[package] = importlib.metadata.version(package)
        except MissingDependencyError as error:
            if settings.against:
                raise
            found.skipped[name] = str(error)
    return found


def _transformers_rules() -> dict[str, Callable[..., Any]]:
    transformers()
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    # Unwrapped: where flash-linear-attention is installed, these names would run its kernels.
    rule = lambda kind: inspect.unwrap(getattr(modeling, f"torch_{kind}_gated_delta_rule"))
    return {f"transformers {kind}": rule(kind) for kind in KINDS}


def _fla_rules(device: str) -> dict[str, Callable[..., Any]]:
    """flash-linear-attention's Triton kernels on a GPU; elsewhere, where they do not run, its naive PyTorch code."""
    try:
        if device == "cuda":
            rule = importlib.import_module("fla.ops.gated_delta_rule")
            return {"fla chunk": rule.chunk_gated_delta_rule, "fla recurrent": rule.fused_recurrent_gated_delta_rule}
        # From its file: the package itself needs Triton to import.
        folder = Path(str(importlib.metadata.distribution(FLA).locate_file("fla")))
        naive = runpy.run_path(str(folder / "ops" / "gated_delta_rule" / "naive.py"))
    except ImportError as error:
        raise MissingDependencyError(f"fla cannot be imported ({error}): pip install {FLA}") from error
    return {f"fla naive {kind}": naive[f"naive_{kind}_gated_delta_rule"] for kind in KINDS}


def cythonized(source: Path, folder: Path) -> ModuleType:
    """Module of a Python file that Cython translates to C and the C compiler compiles."""
    copy = folder / f"{source.stem}_cython.py"
    copy.write_bytes(source.read_bytes())
    # Annotations are documentation here, as in Python: Cython would make C numbers of some.
    translate = ("Cython.Build.Cythonize", "--inplace", "-3", "-X", "annotation_typing=False", str(copy))
    done = subprocess.run([sys.executable, "-m", *translate], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2][-500:]
        raise MissingDependencyError(
            f"the baseline needs Cython, setuptools and a C compiler ({reason}): pip install 'verax[bench]'"
        )
    path = next(folder.glob(f"{copy.stem}*{importlib.machinery.EXTENSION_SUFFIXES[0]}"))
    loader = importlib.machinery.ExtensionFileLoader(copy.stem, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(copy.stem, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def jax_side(function: Callable[..., Any], *arguments: Any, flops: int, donated: Any = None) -> Side:
    """A function compiled for its arguments, which lie on JAX's default device.

    Args:
        function: of `arguments`, and of `donated` before them if there is some.
        arguments: trees of arrays, or modules.
        flops: operations of its products.
        donated: an array that the call may overwrite. The function's last output takes its place in the next call.
    """
    leaves, tree = jax.tree.flatten(jax.device_put(arguments))  # once, and not in every call
    given = () if donated is None else (jnp.array(donated),)
    # A new function for each side: JAX knows those that it has traced, whatever implementation an operation has by now.
    whole = lambda given, *leaves: function(*given, *jax.tree.unflatten(tree, leaves))
    run, seconds = timed(lambda: jax.jit(whole, donate_argnums=0).lower(given, *leaves).compile())

    def call() -> list[jax.Array]:
        nonlocal given
        outputs = jax.tree.leaves(launched(run(given, *leaves)))
        given = tuple(outputs[len(outputs) - len(given) :])
        return outputs

    return Side(call, flops, compile_s=seconds)


def torch_side(
    torch: Any,
    function: Callable[..., Any],
    *arguments: Any,
    flops: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    compiled: bool = False,
) -> Side:
    """A PyTorch call.

    Args:
        function: of `arguments`.
        flops: operations of its products; torch counts them in a call if None.
        dtypes: of the outputs, as in `Side`.
        compiled: the first call compiles, and its time is the time of compiling.
    """

    def call() -> list[Any]:
        with torch.inference_mode():
            return [x for x in jax.tree.leaves(function(*arguments)) if isinstance(x, torch.Tensor)]

    seconds = timed(call)[1] if compiled else None
    if flops is None:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            call()
        flops = int(counter.get_total_flops())
    return Side(call, flops, dtypes, compile_s=seconds)


# The exact gated rule

HEADS, SIZE = 12, 64
"""The report's heads, in the size that earlier measurements of the exact rule took."""

GPU_SHAPE = (4, 4096, 16, 128)
"""Batch, tokens, heads and their size of one case more on a GPU, in bfloat16."""

DECODE = (32, 1, 32, 128)
"""Sequences, tokens, heads and their size: Qwen3-Next's, a state of 64 MiB."""

NATIVE_CHUNK, BASELINE_CHUNK = 16, 64
"""Tokens that our CPU kernel takes at a time, and of the chunks of transformers and flash-linear-attention."""

TOLERANCE = {("cpu", "float32"): 1e-5, ("gpu", "float32"): 5e-3}
"""Error against float64, by platform and dtype: by default float32 products are TF32 in Triton."""

ROUNDED_TOLERANCE = 2e-2
"""Error against float64 in bfloat16."""

INPUTS = ("q", "k", "v", "g", "beta")
"""Inputs of the rule."""

Arrays = Mapping[str, Any]


def gated_rule_flops(L: int, H: int, K: int, V: int, C: int | None = None, *, solved: bool = False) -> int:
    """Operations of the gated delta rule token by token (C None), or with chunks of C.

    Token by token, the state decays (KV), is read twice (2KV each) and written (2KV). By chunks, a token has its rows
    of `k k^T`, `q k^T` and `T k` (2CK each), of `T v` and of the product with what is written (2CV each), its share of
    the inverse T (C^2/3), and three products with a state (2KV each). Where what is written is `solved` for by
    substitution, there is no T: CV in place of the share of T and of both products with it.
    """
    if C is None:
        return L * H * 7 * K * V
    inner = 4 * C * K + 3 * C * V if solved else 6 * C * K + 4 * C * V + C * C // 3
    return L * H * (inner + 6 * K * V)


def gated_rule_bytes(L: int, N: int, H: int, K: int, V: int, *, size: int = 4) -> int:
    """q, k, v, beta and g read, outputs written, the float32 states of N sequences read and written, each once."""
    return L * H * size * (2 * K + 2 * V + 2) + 2 * 4 * N * H * K * V


def _gated_case(section: str, name: str, shape: tuple[int, int, int, int], dtype: str, baselines: Baselines) -> Case:
    """Case of `shape`: batch, tokens, heads and their size.

    `decode` is one token of many sequences: reading and writing their states should be all of the time. Our state is
    donated there, as an engine's is: each call takes what the call before it left. The others make a new one.
    """
    B, T, H, D = shape
    decode, arrays = section == "decode", _inputs(*shape, dtype)
    state = np.random.default_rng(1).standard_normal((B, H, D, D), np.float32) * np.float32(decode)
    count = lambda C=None, **options: gated_rule_flops(B * T, H, D, D, C, **options)
    chunk = CHUNK_SIZES.get(jax.default_backend(), CHUNK_SIZE)
    flops = {} if decode else {"native": count(NATIVE_CHUNK, solved=True), "chunk": count(chunk)}
    given = {"donated": state} if decode else {}
    arguments = (arrays,) if decode else (state, arrays)
    q, k, v, g, beta = (jnp.asarray(arrays[key], jnp.float32) for key in INPUTS)
    inputs, sides = (DeltaInputs(q, k, k, v, beta, g), jnp.asarray(state)), {}
    for impl in reversed(delta_recurrence.supporting(*inputs)):
        with ops.use_implementations(delta_recurrence=impl.name):
            products = flops.get(impl.name, count())
            sides[f"verax {impl.name}"] = jax_side(_rule, *arguments, flops=products, **given)
    torch = baselines.torch
    tensor = lambda x, dtype: torch.from_numpy(np.asarray(x, np.float32)).to(baselines.device, getattr(torch, dtype))
    tensors = [*(tensor(x, dtype) for x in arrays.values()), tensor(state, "float32")]
    for key, impl in baselines.gated.items():
        chunked = key.endswith("chunk")
        if not (decode and chunked):
            run = lambda q, k, v, g, beta, initial, impl=impl: impl(
                q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True
            )
            products = count(BASELINE_CHUNK if chunked else None)
            sides[key] = torch_side(torch, run, *tensors, flops=products, dtypes=(dtype, "float32"))
    moved = gated_rule_bytes(B * T, B, H, D, D, size=arrays["q"].itemsize)
    chosen, sizes = delta_recurrence.select(*inputs).name, {"batch": B, "tokens": T, "heads": H, "size": D}
    tolerance = TOLERANCE.get((jax.default_backend(), dtype), ROUNDED_TOLERANCE)
    return Case(section, name, moved, f"verax {chosen}", sides, sizes, _exact(arrays, state), tolerance)


def _exact(arrays: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `S^T q K^-1/2` and final states in float64, by token: `S <- e^g (I - beta k k^T) S + beta k v^T`."""

    def step(S: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = inputs
        S = S * jnp.exp(g)[..., None, None]
        read = jnp.sum(k[..., None] * S, axis=-2)
        S = S + k[..., None] * (beta[..., None] * (v - read))[..., None, :]
        return S, jnp.sum(q[..., None] * S, axis=-2) * q.shape[-1] ** -0.5

    with jax.enable_x64(True):
        by_token = [jnp.moveaxis(jnp.asarray(arrays[name], jnp.float64), 1, 0) for name in INPUTS]
        final, out = jax.jit(partial(jax.lax.scan, step))(jnp.asarray(state, jnp.float64), tuple(by_token))
    return np.moveaxis(np.asarray(out), 0, 1), np.asarray(final)


def _rule(state: jax.Array, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    return ops.gated_delta_rule(**arrays, initial_state=state, output_final_state=True)


def _inputs(B: int, T: int, H: int, D: int, dtype: str) -> dict[str, np.ndarray]:
    """Keys and queries of length one, gates as in trained models: no side has to normalise or to squash anything."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, H, D), np.float32) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta, g = rng.uniform(0, 1, (B, T, H)), -np.exp(rng.uniform(np.log(1e-3), np.log(1), (B, T, H)))
    return {name: x.astype(jnp.dtype(dtype)) for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}


# LAM

LAM = LamConfig(vocab_size=30522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
"""The published sizes: the report's 12 heads are 32 wide each."""

SENTENCES = {"Short": (32, 32), "Long": (8, 256)}
"""Sentences and tokens of each, in a batch."""

VARIANTS: dict[str, Literal["hierarchical", "local"]] = {"B": "hierarchical", "C": "local"}
"""The published variants, two states from chunk to chunk and what the published package computes at inference, by their
names in `LamConfig.rule`."""

LAM_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
"""Largest relative error of float32 against float64, by device."""

Theirs = Callable[[ModuleType], Sequence[Any]]
"""Function of LAM's PyTorch module, plain or through Cython; it returns a function and its arguments."""


def _rule_case(name: str, shape: tuple[int, int, int], baselines: Baselines) -> Case:
    """From queries, keys, values, decays and gates to outputs and states; each side in the layout of its own layer.

    `shape` is batch, chunks and tokens of a chunk.
    """
    B, n, C = shape
    with baselines.torch.inference_mode():
        inputs = _layer(baselines, baselines.reference, C).rule_inputs(_hidden(baselines, B, n * C))[:-1]

    def theirs(library: ModuleType) -> Sequence[Any]:
        def run(*inputs: Any) -> Any:
            out, states = library.hierarchical_delta_rule(*inputs, chunk_size=C)
            return out.transpose(1, 2), states

        return run, *inputs, _layer(baselines, library, C).resonance_flux

    q, k, v, beta, decays, gates = jax.tree.map(lambda x: _array(x.transpose(1, 2)), inputs)
    arrays = q, k, v, beta[..., 0], decays, tuple(gate[..., 0] for gate in gates)
    H, K = q.shape[2:]
    layer = _loaded(EnhancedHierarchicalDeltaNet, LAM, _layer(baselines, baselines.reference, C))
    rule = HierarchicalInputs(*arrays, layer.resonance_flux.weights())
    operation, ours = ops.operations()["hierarchical_rule"], {}
    run = lambda *inputs: ops.hierarchical_delta_rule(*inputs, chunk_size=C)
    for impl in reversed(operation.supporting(rule, chunk_size=C)):
        with ops.use_implementations(hierarchical_rule=impl.name):
            ours[impl.name] = _side(impl.name, run, *rule)
    moved = _nbytes(arrays) + q.nbytes + 2 * 4 * B * H * K * K
    return _lam_case("rule", name, _sizes(shape), moved, ours, theirs, baselines)


def _layer_case(name: str, shape: tuple[int, int, int], baselines: Baselines) -> Case:
    """The layer, with its projections, convolutions, gates and norm: what the report's other side ran."""
    B, n, C = shape
    x = _hidden(baselines, B, n * C)

    def theirs(library: ModuleType) -> Sequence[Any]:
        return lambda layer, x: layer(x)[::3], _layer(baselines, library, C), x

    def run(layer: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, states = layer(x)
        return y, orthogonality_loss(states)

    config = replace(LAM, rule=VARIANTS["B"], chunk_size=C)
    layer = _loaded(EnhancedHierarchicalDeltaNet, config, _layer(baselines, baselines.reference, C))
    ours, weights = _chosen_side("B", run, layer, _array(x))
    return _lam_case("layer", name, _sizes(shape), weights + 2 * x.nbytes, ours, theirs, baselines)


def _encoder_case(variant: str, name: str, baselines: Baselines) -> Case:
    """The sentence encoder, from token numbers to vectors of length one."""
    rng, (B, T) = np.random.default_rng(0), SENTENCES[name]
    tokens = rng.integers(0, LAM.vocab_size, (B, T))
    lengths = rng.integers(T // 2, T, (B,), endpoint=True)
    mask = (np.arange(T) < lengths[:, None]).astype(np.int64)
    sizes = {"d_model": LAM.hidden_size, "num_heads": LAM.num_attention_heads, "num_layers": LAM.num_hidden_layers}
    sizes |= {"vocab_size": LAM.vocab_size, "intermediate_size": LAM.intermediate_size}

    def encoder(library: ModuleType) -> Any:
        baselines.torch.manual_seed(0)
        return library.LamSentenceEncoder(**sizes, variant=variant).eval().to(baselines.device)

    def theirs(library: ModuleType) -> Sequence[Any]:
        inputs = (baselines.torch.from_numpy(x).to(baselines.device) for x in (tokens, mask))
        return lambda encoder, *inputs: (encoder(*inputs),), encoder(library), *inputs

    config = replace(LAM, rule=VARIANTS[variant])
    model = _loaded(LamModel, config, encoder(baselines.reference))
    pack_linear_weights(model)  # as `verax.Encoder` does

    def run(model: LamModel, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        total = jnp.sum(model(tokens, jnp.sum(mask, axis=1)) * mask[..., None], axis=1)
        return total / jnp.linalg.norm(total, axis=-1, keepdims=True)

    ours, weights = _chosen_side(variant, run, model, jnp.asarray(tokens), jnp.asarray(mask))
    # Only these tokens' rows of the embeddings.
    moved = weights - 4 * LAM.hidden_size * (LAM.vocab_size - tokens.size)
    return _lam_case(
        "encoder", f"{name}, variant {variant}", {"sentences": B, "tokens": T}, moved, ours, theirs, baselines
    )


def _side(impl: str, function: Callable[..., Any], *arguments: Any) -> Side:
    """Our side with an implementation of the published rule, whose operations are counted.

    Every implementation but the reference factors the products of whole chunks (docs/lam.md).
    """
    shown = impl if impl == "reference" else "factored"
    flops = count_products(function, *arguments, hierarchical_rule=shown, local_rule=shown)
    return jax_side(function, *arguments, flops=flops)


def _chosen_side(
    variant: str, function: Callable[..., Any], model: Any, *arguments: jax.Array
) -> tuple[dict[str, Side], int]:
    """Side of a function of our model, by the implementation of the rule that runs inside; bytes of the weights."""
    operation = ops.operations()[f"{VARIANTS[variant]}_rule"]
    (example,) = operation.examples  # it has LAM's heads and dtype
    impl = operation.select(*example.args, **example.kwargs).name
    return {impl: _side(impl, function, model, *arguments)}, _nbytes(model)


def _lam_case(
    section: str,
    name: str,
    sizes: Mapping[str, int],
    moved: int,
    ours: Mapping[str, Side],
    theirs: Theirs,
    baselines: Baselines,
) -> Case:
    """Case of our implementations, the chosen one last, and every way to run PyTorch's, whose float64 is expected."""
    torch, skipped = baselines.torch, {}
    sides = {f"verax {impl}": side for impl, side in ours.items()}
    chosen = list(sides)[-1]
    sides |= {name: torch_side(torch, *theirs(library)) for name, library in baselines.lam.items()}
    function, *inputs = theirs(baselines.reference)
    if "torch.compile" in baselines.names:
        flops = sides["torch"].flops if "torch" in sides else 0
        try:
            compiled = torch.compile(function, dynamic=False)
            sides["torch.compile"] = torch_side(torch, compiled, *inputs, flops=flops, compiled=True)
        except Exception as error:  # whatever goes wrong inside its compiler
            skipped["torch.compile"] = str(error).strip().partition("\n")[0]
    # Modules and floating-point tensors in float64.
    doubled = lambda x: x.double() if not hasattr(x, "dtype") or x.dtype.is_floating_point else x
    exact = torch_side(torch, function, *jax.tree.map(doubled, theirs(baselines.reference)[1:]), flops=0)
    expected, tolerance = [x.cpu().numpy() for x in exact.call()], LAM_TOLERANCE[baselines.device]
    return Case(section, name, moved, chosen, sides, sizes, expected, tolerance, skipped)


def _layer(baselines: Baselines, library: ModuleType, chunk_size: int) -> Any:
    """A layer of the published sizes, always with the same weights."""
    baselines.torch.manual_seed(0)
    layer = library.EnhancedHierarchicalDeltaNet(LAM.hidden_size, LAM.num_attention_heads, chunk_size=chunk_size)
    return layer.eval().to(baselines.device)


def _loaded(kind: Callable[..., Any], config: LamConfig, module: Any) -> Any:
    """Our module with the weights of a PyTorch one, through a checkpoint."""
    weights = {name: x.cpu().numpy() for name, x in module.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        saved = checkpoint.Checkpoint.open(checkpoint.save(weights, folder, config={}))
        return checkpoint.load_module(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))), saved, dtype=None)


def _array(tensor: Any) -> jax.Array:
    return jnp.asarray(tensor.detach().cpu().numpy())


def _hidden(baselines: Baselines, batch: int, length: int) -> Any:
    noise = np.random.default_rng(0).standard_normal((batch, length, LAM.hidden_size), np.float32)
    return baselines.torch.from_numpy(noise).to(baselines.device)


def _nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _sizes(shape: tuple[int, int, int]) -> dict[str, int]:
    batch, chunks, chunk = shape
    return {"batch": batch, "heads": LAM.num_attention_heads, "chunks": chunks, "chunk": chunk}
