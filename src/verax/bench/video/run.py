"""Stages of a video pipeline beside other libraries: time of a call, of compiling, calls until it pays, and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from verax import progress
from verax._compat import empty_compilation_cache
from verax.bench.timing import interleave
from verax.bench.video.cases import STAGES, Work, products, work
from verax.errors import InvalidParameterError
from verax.machine import fingerprint, measure_machine
from verax.models.qwen3_5 import ATTENTION
from verax.ops.cpu import library
from verax.video.programs import Program

if TYPE_CHECKING:
    from verax.bench.video.diffusers import DiffusersSide
    from verax.bench.video.openvino import OpenVinoSide

__all__ = ["OTHERS", "bench_video", "break_even"]

OTHERS: Mapping[str, tuple[str, ...]] = {
    "diffusers": STAGES,
    "torch.compile": STAGES,
    "openvino": ("transformer", "text"),  # it has no operation for the nearest-exact upsampling of the VAE
}
"""Sides beside ours, with the stages that each can run: diffusers as it is, compiled by PyTorch, and on OpenVINO."""


def bench_video(
    *,
    size: str = "1.3b",
    stages: Sequence[str] = STAGES[:2],
    frames: Sequence[int] = (9,),
    height: int = 272,
    width: int = 480,
    dtype: str = "bfloat16",
    attention: str = "auto",
    also: Sequence[str] = (),
    memory: Sequence[str] = (),
    layers: int | None = None,
    runs: int = 3,
    warmup: int = 1,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Time stages with random weights in real sizes; a report as JSON holds it.

    Args:
        size, layers, dtype: of the models: see `cases.work`.
        stages: of `STAGES`; one forward pass of the transformer, of one row: a step with guidance is two.
        frames, height, width: of clips, a case for each number of frames.
        attention: the implementation that the transformer is timed with.
        also: more implementations that it is timed with, as sides called `verax, IMPLEMENTATION`.
        memory: implementations whose memory is asked of the compiler too, which runs nothing.
        runs: counted rounds, with `warmup` before them; 0 times nothing.
        against: sides of `OTHERS` that run interleaved with ours.

    Raises:
        InvalidParameterError: naming what is wrong.
    """
    implementations = tuple(ATTENTION)
    for name, given, known in (
        ("against", against, tuple(OTHERS)),
        ("also", also, implementations),
        ("memory", memory, implementations),
    ):
        if wrong := [one for one in given if one not in known]:
            raise InvalidParameterError(f"{name}: expected one of {', '.join(known)}, got {wrong[0]!r}")
    if attention not in ATTENTION:
        raise InvalidParameterError(f"attention: expected one of {', '.join(ATTENTION)}, got {attention!r}")
    sizes: dict[str, Any] = dict(height=height, width=width, dtype=dtype, layers=layers)
    works = [(stage, count) for stage in stages for count in frames if stage != "text" or count == frames[0]]
    measured = measure_machine() if runs else {}
    cases, versions = [], {}
    for stage, count in works if runs else ():
        options = {"attention": attention} if stage == "transformer" else {}
        todo = work(stage, size, frames=count, **sizes)
        case, found = _case(todo, dtype, options, also if options else (), runs, warmup, against)
        rate = measured[f"matmul_{dtype}_gflop_per_s"]
        case["fraction_of_limit"] = case["products"] / case["sides"]["verax"]["median_s"] / 1e9 / rate
        cases.append({"stage": stage, "frames": count, **case})
        versions |= found
    table = []
    for count in frames if memory else ():
        todo = work("transformer", size, frames=count, **sizes)
        table += [{"frames": count, "attention": impl, **_memory(todo, impl)} for impl in memory]
    return {
        "kind": "video",
        "machine": {**fingerprint(), **versions},
        "measured": measured,
        "settings": {
            "size": size,
            "layers": layers,
            "stages": list(stages),
            "frames": list(frames),
            "height": height,
            "width": width,
            "dtype": dtype,
            "attention": attention,
            "cpu_level": library.level() if jax.default_backend() == "cpu" else None,
            "runs": runs,
            "warmup": warmup,
        },
        "cases": cases,
        "attention_memory": table,
    }


def break_even(compile_s: float, ours_s: float, theirs_first_s: float, theirs_s: float) -> int | None:
    """Calls after which ours, compiled first, has taken less time than theirs; None if it never does.

    Args:
        compile_s: before our first call.
        ours_s, theirs_s: of a call.
        theirs_first_s: of their first, which may take longer.
    """
    behind = compile_s - (theirs_first_s - theirs_s)
    if ours_s >= theirs_s:
        return None
    return max(1, math.floor(behind / (theirs_s - ours_s)) + 1)


def _case(
    todo: Work,
    dtype: str,
    options: dict[str, Any],
    also: Sequence[str],
    runs: int,
    warmup: int,
    against: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stage timed on all sides, and the versions of the others."""
    component, prepare = todo.component, todo.prepare
    sides: dict[str, Callable[[], object]] = {}
    counted = products(todo)
    result: dict[str, Any] = {"products": float(counted.total_flops), "bytes_moved": counted.bytes_moved()}
    with component.weights() as weights:
        inputs = tuple(map(jax.numpy.asarray, todo.inputs))
        if prepare is not None:
            inputs = Program(lambda w, *arrays: prepare(component.module(w), *arrays))(weights, *inputs)
        with empty_compilation_cache():
            _, result["compile_s"] = _compiled(todo, weights, inputs, options)
            program, result["compile_cached_s"] = _compiled(todo, weights, inputs, options)
        ours = np.asarray(program(weights, *inputs, **options))
        sides["verax"] = lambda: jax.block_until_ready(program(weights, *inputs, **options))
        for impl in also:
            sides[f"verax, {impl}"] = lambda impl=impl: jax.block_until_ready(program(weights, *inputs, attention=impl))
        versions: dict[str, Any] = {}
        result["beside"] = {}
        for name in against:
            if todo.stage not in OTHERS[name]:
                continue
            other = _other(name, todo, dtype)
            versions |= other.versions
            begin = time.perf_counter()
            theirs = other.result()
            first = time.perf_counter() - begin
            apart = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
            result["beside"][name] = {"first_s": first, "difference": apart}
            sides[name] = other.run
        with progress.bar(f"measuring: {todo.stage}") as report:
            samples = interleave(sides, runs=runs, warmup=warmup, report=report)
    result["sides"] = {name: side.to_dict(result["products"]) for name, side in samples.items()}
    for name, found in result["beside"].items():
        found["ratio"] = samples["verax"].ratio_to(samples[name])
        medians = samples["verax"].median, samples[name].median
        found["break_even"] = break_even(result["compile_s"], medians[0], found["first_s"], medians[1])
    return result, versions


def _other(name: str, todo: Work, dtype: str) -> DiffusersSide | OpenVinoSide:
    from verax.bench.video.diffusers import DiffusersSide
    from verax.bench.video.openvino import OpenVinoSide

    if name == "openvino":
        return OpenVinoSide(todo, dtype)
    return DiffusersSide(todo, dtype, compiled=name == "torch.compile")


def _program(todo: Work) -> Program:
    return Program(
        lambda weights, *inputs, **options: todo.function(todo.component.module(weights), *inputs, **options),
        options=("attention",),
    )


def _compiled(todo: Work, weights: Any, inputs: Any, options: dict[str, Any]) -> tuple[Program, float]:
    """A program that is ready for a call, and the seconds that tracing and compiling took."""
    jax.clear_caches()  # what is traced already would not be traced again
    program = _program(todo)
    begin = time.perf_counter()
    program.memory(weights, *inputs, **options)
    return program, time.perf_counter() - begin


def _memory(todo: Work, attention: str) -> dict[str, Any]:
    """Memory of a forward pass with an implementation of attention, in GB; or the reason that it does not run."""
    component, prepare = todo.component, todo.prepare
    assert prepare is not None
    shapes: Any = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in todo.inputs)
    shapes = jax.eval_shape(lambda w, *arrays: prepare(component.module(w), *arrays), component.shapes, *shapes)
    try:
        found = _program(todo).memory(component.shapes, *shapes, attention=attention)
    except InvalidParameterError as error:
        return {"left_out": str(error)}
    return {
        "peak_gb": found.peak / 1e9,
        "weights_gb": component.size / 1e9,
        "temporary_gb": found.temporary / 1e9,
    }
