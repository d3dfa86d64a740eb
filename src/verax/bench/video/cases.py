"""Stages of a video pipeline: time of a call, of compiling, calls until compiling pays, and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from verax._compat import empty_compilation_cache
from verax.bench.harness import Benchmark, case_result, count_products, time_sides
from verax.bench.results import faster_by, side_rows, slug, table
from verax.bench.settings import VideoSettings, check_names
from verax.bench.video.baselines import make_baseline
from verax.bench.video.work import Work, work
from verax.errors import InvalidParameterError
from verax.models.video_model import ATTENTION
from verax.ops.cpu import library
from verax.video.programs import Program

__all__ = ["bench_video", "break_even"]

TITLES = {"transformer": "transformer, a forward pass", "vae": "VAE, decoding", "text": "text encoder, 512 tokens"}

OPENVINO_STAGES = ("transformer", "text")
"""Stages that OpenVINO can run: it has no operation for the nearest-exact upsampling of the VAE."""


def bench_video(settings: VideoSettings) -> dict[str, Any]:
    """Time stages with random weights in real sizes.

    Raises:
        InvalidParameterError: naming what is wrong.
        MissingDependencyError: if a baseline is not installed.
    """
    for name, given in (("memory", settings.memory), ("attention", [settings.attention])):
        check_names(name, given, ATTENTION)
    frames, stages, dtype = settings.frames, settings.stage, settings.dtype
    works = [(stage, count) for stage in stages for count in frames if stage != "text" or count == frames[0]]
    benchmark = Benchmark("video")
    cases, versions = [], {}
    for stage, count in works if settings.runs else ():
        case, others = _case(work(stage, count, settings), count, settings)
        rate = benchmark.limits[f"matmul_{dtype}_gflop_per_s"]
        case["fraction_of_limit"] = case["flops"] / case["sides"]["verax"]["median_s"] / 1e9 / rate
        cases.append(case)
        versions |= others
    planned = [
        {"frames": count, "attention": name, **_memory(work("transformer", count, settings), name)}
        for count in (frames if settings.memory else ())
        for name in settings.memory
    ]
    level = library.level() if jax.default_backend() == "cpu" else None
    layers = f", {settings.layers} layers" if settings.layers else ""
    what = "text and image to video" if settings.size == "5b" else "image to video"
    clip = f"{'-'.join(map(str, frames))}x{settings.height}x{settings.width}"
    return benchmark.result(
        slug(settings.size, layers, *(stages if cases else ["memory"]), dtype, clip),
        title=f"Video: {settings.size} {what}{layers}, {settings.height} x {settings.width}, {dtype}",
        intro=f"Random weights, the same on all sides. {settings.runs} rounds after {settings.warmup} of "
        f"warm-up; the sides take turns in a round. Attention: {settings.attention}. CPU kernels: {level or 'none'}. "
        "A step with guidance is two forward passes. Compiling includes tracing. "
        "The limit is the measured rate of matmuls. In the rows of other sides: the factor by which verax is faster, "
        "their first call, the calls after which ours, compiling included, took less time, and the root mean square of "
        "the difference over the root mean square of their result.",
        settings=asdict(settings) | {"cpu_level": level},
        versions=versions,
        tables=([_times(cases)] if cases else []) + ([_memory_table(planned)] if planned else []),
        cases=cases,
        attention_memory=planned,
    )


def break_even(compile_s: float, ours_s: float, theirs_first_s: float, theirs_s: float) -> int | None:
    """Number of calls after which ours, compiled first, has taken less time than theirs; None if it never does.

    Args:
        compile_s: before our first call.
        ours_s, theirs_s: of a call.
        theirs_first_s: of their first, which may take longer.
    """
    if ours_s >= theirs_s:
        return None
    return max(1, math.floor((compile_s - (theirs_first_s - theirs_s)) / (theirs_s - ours_s)) + 1)


def _case(todo: Work, frames: int, settings: VideoSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stage timed on all sides, and the versions of the others."""
    options = {"attention": settings.attention} if todo.stage == "transformer" else {}
    component = todo.component
    products, moved = count_products(todo.run, component.shapes, *todo.shapes)
    versions: dict[str, Any] = {}
    others: dict[str, dict[str, Any]] = {}
    with component.weights() as weights:
        inputs = tuple(map(jnp.asarray, todo.inputs))
        if todo.prepare is not None:
            inputs = Program(todo.prepared)(weights, *inputs)
        with empty_compilation_cache():
            _, compile_s = _compiled(todo, weights, inputs, options)
            program, cached_s = _compiled(todo, weights, inputs, options)
        ours = np.asarray(program(weights, *inputs, **options))
        sides = {"verax": lambda: jax.block_until_ready(program(weights, *inputs, **options))}
        for name in settings.against:
            if name == "openvino" and todo.stage not in OPENVINO_STAGES:
                continue
            baseline = make_baseline(name, todo, settings.dtype)
            versions |= baseline.versions
            begin = time.perf_counter()
            theirs = baseline.to_numpy(baseline.run())
            first = time.perf_counter() - begin
            apart = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
            others[name] = {"first_s": first, "difference": apart}
            sides[name] = baseline.run
        samples = time_sides(sides, runs=settings.runs, warmup=settings.warmup, title=f"measuring: {todo.stage}")
    for name, other in others.items():
        other["break_even"] = break_even(compile_s, samples["verax"].median, other["first_s"], samples[name].median)
    more = {"flops": float(products), "bytes_moved": moved, "compile_s": compile_s, "compile_cached_s": cached_s}
    case = case_result(f"{TITLES[todo.stage]}, {frames} frames", "verax", samples, float(products), **more)
    for name, other in others.items():
        case["sides"][name] |= other
    return {"stage": todo.stage, "frames": frames, **case}, versions


def _compiled(todo: Work, weights: Any, inputs: Any, options: dict[str, Any]) -> tuple[Program, float]:
    """A program that is ready for a call, and the seconds that tracing and compiling took."""
    jax.clear_caches()  # what is traced already would not be traced again
    program = Program(todo.run)
    begin = time.perf_counter()
    program.memory(weights, *inputs, **options)
    return program, time.perf_counter() - begin


def _memory(todo: Work, attention: str) -> dict[str, Any]:
    """Memory of a forward pass with an implementation of attention, in GB; or the reason that it does not run."""
    try:
        plan = Program(todo.run).memory(todo.component.shapes, *todo.shapes, attention=attention)
    except InvalidParameterError as error:
        return {"left_out": str(error)}
    sizes = {"peak": plan.peak, "weights": todo.component.size, "temporary": plan.temporary}
    return {f"{name}_gb": size / 1e9 for name, size in sizes.items()}


def _memory_table(planned: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cell = lambda key: lambda row: "" if "left_out" in row else f"{row[key]:.1f}"
    columns = {
        "frames": lambda row: row["frames"],
        "attention": lambda row: row["attention"],
        "GB": lambda row: f"left out: {row['left_out']}" if "left_out" in row else f"{row['peak_gb']:.1f}",
        "weights": cell("weights_gb"),
        "temporary": cell("temporary_gb"),
    }
    note = "Memory of a forward pass by `memory_analysis()` of the compiled program, weights included."
    return table(planned, columns, note=note)


def _times(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def ours(text: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: text(row[0]) if row[1] == "verax" else ""

    def theirs(text: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: text(row[2]) if "first_s" in row[2] else ""

    return table(
        side_rows(cases),
        {
            "stage": lambda row: TITLES[row[0]["stage"]],
            "frames": lambda row: row[0]["frames"],
            "side": lambda row: row[1],
            "median s": lambda row: f"{row[2]['median_s']:.2f}",
            "P10-P90 s": lambda row: f"{row[2]['p10_s']:.2f}-{row[2]['p90_s']:.2f}",
            "GFLOP/s": lambda row: f"{row[2]['rate'] / 1e9:.0f}",
            "of the limit": ours(lambda case: f"{100 * case['fraction_of_limit']:.0f}%"),
            "compile s": ours(lambda case: f"{case['compile_s']:.1f}"),
            "from cache s": ours(lambda case: f"{case['compile_cached_s']:.1f}"),
            "verax is": faster_by,
            "first call s": theirs(lambda side: f"{side['first_s']:.1f}"),
            "pays": theirs(lambda side: "never" if side["break_even"] is None else f"after {side['break_even']}"),
            "apart": theirs(lambda side: f"{side['difference']:.1e}"),
        },
    )
