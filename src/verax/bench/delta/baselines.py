"""Baselines of `verax bench delta`: PyTorch, eager, through Cython or compiled, and the libraries built on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from verax.bench.harness import Side
from verax.bench.settings import DELTA_BASELINES, DeltaSettings
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.machine import num_cores
from verax.ops.cpu.build import compiler

__all__ = ["Baselines", "find_baselines", "jax_side", "naive_fla", "torch_side"]


@dataclass(frozen=True)
class Baselines:
    """Implementations to compare with, on the platform of JAX's default device.

    Attributes:
        device: torch's name of the platform.
        reference: LAM in PyTorch (`compare.references.lam`): a baseline, and in float64 the expected result.
        names: names of the baselines.
        cython: LAM in PyTorch through Cython, and `cython_s`, the seconds that building it took.
        gated: implementations of the gated rule by library and kind, chunk or recurrent.
        skipped: reason for each baseline that is not available.
    """

    torch: Any
    device: str
    reference: ModuleType
    names: tuple[str, ...]
    cython: ModuleType | None = None
    cython_s: float | None = None
    gated: dict[str, Callable[..., Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


def find_baselines(settings: DeltaSettings, folder: Path) -> Baselines:
    """Import and build the baselines that the settings name, or all that are installed, with reasons for the others.

    Args:
        settings: what to compare with.
        folder: gets the files of Cython; it has to last as long as the baselines do.
    """
    quick = ("torch.compile",) if settings.quick else ()
    names = settings.against or tuple(name for name in DELTA_BASELINES if name not in quick)
    reference = importlib.import_module("verax.compare.references.lam")
    torch, platform = reference.torch, jax.default_backend()
    if platform not in ("cpu", "gpu") or (platform == "gpu" and not torch.cuda.is_available()):
        raise InvalidParameterError(
            f"JAX runs on {platform}, where this torch ({torch.__version__}) does not: set JAX_PLATFORMS=cpu to "
            "compare on the CPU"
        )
    device = "cuda" if platform == "gpu" else "cpu"
    torch.set_num_threads(num_cores())
    cython: tuple[Any, Any] = (None, None)
    gated: dict[str, Any] = {}
    versions = {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    skipped = {}
    for name in names:
        try:
            if name == "cython":
                cython = _cythonized(Path(str(reference.__file__)), folder)
                versions["cython"] = importlib.metadata.version("cython")
            elif name == "transformers":
                gated |= _transformers_rules()
                versions["transformers"] = importlib.metadata.version("transformers")
            elif name == "fla":
                gated |= _fla_rules(device)
                versions[FLA] = importlib.metadata.version(FLA)
        except MissingDependencyError as error:
            if settings.against:
                raise
            skipped[name] = str(error)
    return Baselines(torch, device, reference, names, *cython, gated, skipped, versions)


def _transformers_rules() -> dict[str, Callable[..., Any]]:
    try:
        import transformers

        transformers.utils.logging.set_verbosity_error()  # that it has no faster implementation here
        modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError as error:
        raise MissingDependencyError("transformers is not installed: pip install 'verax[parity]'") from error
    # Unwrapped: where flash-linear-attention is installed, these names would run its kernels.
    rule = lambda kind: inspect.unwrap(getattr(modeling, f"torch_{kind}_gated_delta_rule"))
    return {f"transformers {kind}": rule(kind) for kind in ("chunk", "recurrent")}


def _fla_rules(device: str) -> dict[str, Callable[..., Any]]:
    """Its Triton kernels on a GPU; elsewhere they do not run."""
    if device != "cuda":
        naive = naive_fla("gated_delta_rule")
        return {
            f"fla naive {kind}": getattr(naive, f"naive_{kind}_gated_delta_rule") for kind in ("chunk", "recurrent")
        }
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        raise MissingDependencyError(f"fla cannot be imported ({error}): pip install {FLA}") from error
    return {"fla chunk": rule.chunk_gated_delta_rule, "fla recurrent": rule.fused_recurrent_gated_delta_rule}


FLA = "flash-linear-attention"


def naive_fla(family: str) -> ModuleType:
    """`fla/ops/FAMILY/naive.py` from its file: the package itself needs Triton to import."""
    spec = importlib.util.find_spec("fla")
    missing = [name for name, module in ((FLA, spec), ("einops", importlib.util.find_spec("einops"))) if module is None]
    if spec is None or missing:
        raise MissingDependencyError(f"{' and '.join(missing)} not installed: pip install {FLA}")
    path = Path((spec.submodule_search_locations or [""])[0], "ops", *family.split("."), "naive.py")
    return _load(f"fla_naive_{family.replace('.', '_')}", path)


def _cythonized(source: Path, folder: Path, *, flags: Sequence[str] = ("-O2",)) -> tuple[ModuleType, float]:
    """A Python file translated by Cython and compiled, and the seconds that this took."""
    if importlib.util.find_spec("Cython") is None:
        raise MissingDependencyError("Cython is not installed: pip install 'verax[bench]'")
    command = compiler()
    if command is None:
        raise MissingDependencyError("Cython needs a C++ compiler: install one, or name it in CXX")
    name = f"{source.stem}_cython"
    copy = folder / f"{name}.py"
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    extension = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    # Annotations are documentation here, as in Python: Cython would make C numbers of some.
    translate = ("-m", "cython", "-3", "--cplus", "-X", "annotation_typing=False", str(copy), "-o", f"{copy}.cc")
    link = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    include = sysconfig.get_paths()["include"]
    begin = time.perf_counter()
    _run([sys.executable, *translate])
    _run([*command, *flags, "-w", "-shared", "-fPIC", *link, f"-I{include}", f"{copy}.cc", "-o", str(extension)])
    seconds = time.perf_counter() - begin
    copy.unlink()  # what is imported is the extension
    return _load(name, extension), seconds


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingDependencyError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MissingDependencyError(f"{path}: no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jax_side(function: Callable[..., Any], *arguments: Any, flops: int, donated: Any = None) -> Side:
    """A function compiled for its arguments, which lie on JAX's default device.

    Args:
        function: of `arguments`, and of `donated` before them if there is some.
        arguments: trees of arrays.
        flops: operations of its products.
        donated: an array that the call may overwrite. The function's last output takes its place in the next call.
    """
    kept = jax.device_put(arguments)
    given = () if donated is None else (jnp.array(donated),)
    begin = time.perf_counter()
    # A new function for each side: JAX knows those that it has traced, whatever implementation an operation has by now.
    run = jax.jit(lambda *all: function(*all), donate_argnums=tuple(range(len(given)))).lower(*given, *kept).compile()
    seconds = time.perf_counter() - begin

    def call() -> list[jax.Array]:
        nonlocal given
        outputs = jax.tree.leaves(jax.block_until_ready(run(*given, *kept)))
        given = outputs[len(outputs) - len(given) :]
        return outputs

    plan = run.memory_analysis()
    planned = None if plan is None else plan.output_size_in_bytes + plan.temp_size_in_bytes
    return Side(call, flops, compile_s=seconds, planned_bytes=planned)


def torch_side(
    torch: Any,
    function: Callable[..., Any],
    *arguments: Any,
    flops: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    compiled: bool = False,
    gradients: bool = False,
) -> Side:
    """A PyTorch call, which may take gradients only with `gradients`.

    Args:
        function: of `arguments`.
        flops: operations of its products; torch counts them in a call if None.
        dtypes: of the outputs, as in `Side`.
        compiled: the first call compiles, and its time is the time of compiling.
    """

    def call() -> list[Any]:
        with torch.inference_mode(not gradients):
            outputs = [x for x in jax.tree.leaves(function(*arguments)) if isinstance(x, torch.Tensor)]
        if outputs[0].device.type == "cuda":
            torch.cuda.synchronize()
        return outputs

    seconds = None
    if compiled:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
    if flops is None:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            call()
        flops = int(counter.get_total_flops())
    return Side(call, flops, dtypes, compile_s=seconds)
