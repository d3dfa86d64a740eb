"""Baselines of `verax bench delta`: PyTorch, eager, through Cython or compiled, and the libraries built on it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from verax.bench.harness import Side, import_torch, launched, timed
from verax.bench.settings import DELTA_BASELINES, DeltaSettings
from verax.compare.cases.text import transformers
from verax.errors import InvalidParameterError, MissingDependencyError

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
