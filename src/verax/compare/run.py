"""Run of a comparison: the reference runs, then ours, then errors are measured."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from verax import progress
from verax.checkpoint.video.parts import Renaming
from verax.compare.align import Alignment, Layout, Names, Pair, align, find_layout, translator, unused_names
from verax.compare.case import Case, Side, pair_case
from verax.compare.comparison import Comparison, Origin, Row, kind_of, measure, measure_rows, not_finite, some
from verax.compare.jax_side import gradients_jax, run_compiled, trace_jax
from verax.compare.origin import origin_jax, origin_torch
from verax.compare.torch_side import gradients_torch, round_like, trace_torch
from verax.compare.trace import OUTPUT, Trace
from verax.errors import InvalidParameterError
from verax.machine import peak_memory

VANISHING = 1e-4
"""Fraction of the median of all gradients below which a gradient is measured against that median."""


def compare(
    reference: Any,
    ours: Any,
    *args: Any,
    names: Names | None = None,
    title: str = "comparison",
    guess: bool = True,
    **options: Any,
) -> Comparison:
    """Compare a PyTorch model with a JAX one, layer by layer.

    Args:
        reference: an `nn.Module`, a function of tensors with taps, or a `Side`.
        ours: a Flax NNX module, a function of arrays with taps, or a `Side`.
        args: arrays, or structures of them, that both are called with, where a model is not a `Side` with its own.
        names: table between our names and the reference's, where they differ: a dict of beginnings, `{i}` for a number.
        guess: match what names do not by shape and order; `result.guessed` are these pairs, to be looked at.
        options: of `compare_case`, such as `inject` or `backward`.

    Raises:
        InvalidParameterError: if there is nothing to compare, or no modules to take gradients of.
        MissingDependencyError: where torch is not installed.

    Examples:
        >>> result = compare(torch_mlp, nnx_mlp, x, names={"layers.{i}": "net.{i}"})
        >>> result.passed, result.first
    """
    case = pair_case(reference, ours, *args, names=names, title=title)
    return compare_case(case, dtype="float32", guess=guess, **options)


def compare_case(
    case: Case,
    *,
    dtype: str = "float32",
    inject: bool = False,
    backward: bool = False,
    fused: bool = False,
    repeat: bool = True,
    guess: bool = False,
    max_rel: float | None = None,
    confirm: Callable[[Alignment], None] = lambda alignment: None,
) -> Comparison:
    """Run a case. One model is in memory at a time (two while weights are rounded), and one array of the traces.

    Args:
        dtype: dtype of the weights and matmul inputs. Below float32 the reference also runs in float32, with weights
            rounded to `dtype`: the truth about both sides.
        inject: run ours a second time with each layer on the reference's activations, so that errors are located.
        backward: compare gradients of a weighted sum of the output by each parameter too. Below float32 with `max_rel`
            only, as nothing else says how large their errors may be.
        fused: run ours also as engines do, as one compiled program with fused operations, and compare its output.
        repeat: run each side a second time, to say whether it is deterministic.
        guess: as in `compare`.
        max_rel: bound on each layer's relative L2 error; 1e-4 if None. Each row and channel may have 8 times as much.
        confirm: called with the alignment before anything is measured; it may show `guessed`, and raise.

    Raises:
        InvalidParameterError: as in `compare`.
    """
    low = dtype != "float32"
    if low and backward and max_rel is None:
        raise InvalidParameterError(f"max_rel: gradients in {dtype} need a bound; give one, or compare them in float32")
    with tempfile.TemporaryDirectory() as scratch, progress.bar("comparing") as report:
        home = Path(scratch)
        stages = 2 + low + inject + fused + 2 * backward + 2 * repeat
        done = iter(range(stages + 1))
        runs: dict[str, str | None] = {}
        origins: dict[str, Origin] = {}

        def stage(what: str) -> None:
            report(next(done), stages, what)

        def run(name: str, side: Side) -> Trace:
            stage(name)
            trace, origin = _SIDES[name]
            first = trace(side, folder=home / name)
            if repeat:
                stage(f"{name}, again")
                runs[name] = first.first_difference(trace(side, folder=home / "again"))
                shutil.rmtree(home / "again")
            if (arose := _origin(origin, side, first)) is not None:
                origins[name] = arose
            return first

        side = case.reference(dtype)
        reference = run("reference", side)
        theirs: dict[str, np.ndarray] = {}
        cotangents = _cotangents(reference)
        if backward and not cotangents:
            raise InvalidParameterError("backward: the reference has no output of floats to take gradients of")
        if backward:
            stage("PyTorch, backwards")
            theirs = _gradients(gradients_torch, side, cotangents)
        truth = None
        if low:
            stage("PyTorch in float32")
            exact = case.reference("float32")
            round_like(exact.model, side.model)
            side = exact
            del exact
            truth = trace_torch(side, folder=home / "truth")
        del side
        side = case.ours(dtype)
        ours = run("ours", side)
        alignment = align(ours, reference, case.names, guess=guess)
        if not alignment.pairs and not alignment.mismatched:
            raise InvalidParameterError(
                "names: nothing on one side has a name of the other's: ours has "
                f"{some([*ours], 3) or 'nothing'}, the reference {some([*reference], 3) or 'nothing'}; "
                "give a table of names, or match by shape"
            )
        with progress.paused():
            confirm(alignment)
        own = None
        if inject:
            stage("JAX on PyTorch's activations")
            own = trace_jax(side, folder=home / "own", replace=_injection(alignment.pairs, reference))
        rows = measure_rows(alignment.pairs, ours, reference, truth, own)
        result = Comparison(case.title, rows, alignment, dtype, max_rel, about=dict(case.about))
        result.runs, result.origins = runs, origins
        result.left_out = [*ours.left_out, *reference.left_out]
        outputs = [pair for pair in alignment.pairs if pair.ours[0].startswith(OUTPUT)]
        if fused and outputs:
            stage("JAX, one program")
            compiled = run_compiled(side, folder=home / "fused")
            compiled_pairs = [pair for pair in outputs if pair.ours[0] in compiled]
            result.fused = measure_rows(compiled_pairs, compiled, reference, truth)
        if case.judge is not None and result.output is not None and result.output.problem is None:
            mine, other = outputs[0].load(ours, reference)
            result.judged = case.judge(other, mine)
        if backward:
            stage("JAX, backwards")
            floats = [pair for pair in outputs if pair.reference[0] in cotangents]
            weights = {pair.ours[0]: pair.layout.invert(cotangents[pair.reference[0]]) for pair in floats}
            if len(weights) != len(cotangents):
                raise InvalidParameterError("backward: the outputs of the two sides could not be matched")
            own_gradients = _gradients(gradients_jax, side, weights)
            names = _with_guessed(case.names, alignment)
            result.gradients, result.gradients_only = _gradient_rows(own_gradients, theirs, names)
            paths = [*own_gradients, *map(_torch_name, own_gradients)]
            of_parameters = unused_names(case.names, paths, theirs)
            alignment.unused = [entry for entry in alignment.unused if entry in of_parameters]
        result.peak_memory = peak_memory()
        return result


_SIDES: Mapping[str, Any] = {"reference": (trace_torch, origin_torch), "ours": (trace_jax, origin_jax)}
"""By side, the functions that record a run and that find where its first NaN or infinity arises."""


def _origin(find: Callable[[Side, Trace], Origin | None], side: Side, trace: Trace) -> Origin | None:
    """Where the first NaN or infinity of a trace arose; None if all of it is finite."""
    layer = next((name for name in trace if not_finite(trace[name])), None)
    if layer is None:
        return None
    try:
        return find(side, trace)
    except Exception as error:  # whatever a model cannot do in such a run, the report is worth more
        reason, _, _ = str(error).partition("\n")
        return Origin(layer, f"an operation that could not be traced: {reason}")


def _injection(pairs: list[Pair], reference: Trace) -> Callable[[str, tuple[int, ...]], np.ndarray | None]:
    """The reference's arrays in our arrangement, by our names."""
    single = {pair.ours[0]: pair for pair in pairs if len(pair.ours) == 1}

    def replace(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        pair = single.get(name)
        if pair is None or pair.layout.source != shape:
            return None
        return pair.layout.invert(pair.load_reference(reference))

    return replace


def _cotangents(reference: Trace) -> dict[str, np.ndarray]:
    """Weights of the numbers of each output of floats, by name.

    They are random, or an error of one sign would cancel one of the other.
    """
    rng = np.random.default_rng(0)
    outputs = {n: e for n, e in reference.entries.items() if n.startswith(OUTPUT) and kind_of(e.dtype) == "float"}
    return {name: rng.standard_normal(entry.shape, np.float32) for name, entry in outputs.items()}


def _gradients(function: Callable[..., dict[str, np.ndarray]], side: Side, weights: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(side.model, nnx.Module) and not hasattr(side.model, "named_parameters"):
        raise InvalidParameterError("backward: gradients need modules with parameters on both sides, not functions")
    return function(side, weights)


def _gradient_rows(
    ours: dict[str, np.ndarray], reference: dict[str, np.ndarray], names: Names | None
) -> tuple[list[Row], tuple[list[str], list[str]]]:
    translate = translator(names, reference)
    rows, used, alone = [], set(), []
    usual = statistics.median(map(_size, reference.values())) if reference else 0.0
    for name, mine in ours.items():
        translated = translate(name) or translate(_torch_name(name))
        if translated is None:
            # Nothing depends on it, and PyTorch then has none.
            if np.any(mine):
                alone.append(name)
            continue
        paths, by = translated
        used |= set(paths)
        other = reference[paths[0]] if len(paths) == 1 else np.concatenate([reference[path] for path in paths])
        layout = _kernel_layout(name, mine.shape, other.shape) or find_layout(mine.shape, other.shape)
        if layout is None or layout.broadcast:
            raise InvalidParameterError(
                f"names: {name} of shape {list(mine.shape)} is not {' + '.join(paths)} of shape {list(other.shape)}"
            )
        arranged = layout.apply(mine)
        errors = measure(arranged, other)
        if _size(other) < VANISHING * usual:
            # Rounding is all that there is of it: the bias of attention's keys has a gradient of zero.
            apart = _size(np.subtract(arranged, other, dtype=np.float64))
            errors = errors._replace(l2=apart / usual, max_rel=errors.max_abs / usual, worst=0.0)
        dtypes = mine.dtype.name, other.dtype.name
        rows.append(Row(name, " + ".join(paths), *dtypes, errors, layout=str(layout), by=by))
    shared = {id(reference[name]) for name in used}  # one array of tied weights
    rest = [name for name, array in reference.items() if id(array) not in shared and np.any(array)]
    return rows, (alone, rest)


def _with_guessed(names: Names | None, alignment: Alignment) -> Names | None:
    """Tables that also match the parameters of modules which shape and order matched."""
    if not alignment.guessed:
        return names
    own = () if names is None else names if isinstance(names, Sequence) else (names,)
    tables = [Renaming(list(table.items())) if isinstance(table, Mapping) else table for table in own]
    return (*tables, Renaming([(pair.ours[0], pair.reference) for pair in alignment.guessed]))


def _size(x: np.ndarray) -> float:
    """Root mean square."""
    return math.sqrt(np.mean(np.square(x, dtype=np.float64)))


_FLAX = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
"""Parameter names of Flax's own layers, and PyTorch's."""


def _torch_name(path: str) -> str:
    module, _, last = path.rpartition(".")
    return f"{module}.{_FLAX.get(last, last)}" if module else _FLAX.get(last, last)


def _kernel_layout(name: str, source: tuple[int, ...], target: tuple[int, ...]) -> Layout | None:
    """Flax's kernels are `[*window, in, out]`, PyTorch's weights `[out, in, *window]`: also where both are square."""
    if name.rpartition(".")[2] != "kernel" or len(source) < 2:
        return None
    n = len(source)
    axes = (n - 1, n - 2, *range(n - 2))
    return Layout(source, target, axes) if tuple(source[axis] for axis in axes) == target else None
