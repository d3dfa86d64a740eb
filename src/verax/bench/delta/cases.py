"""Delta rules compared with PyTorch, with equal work on all sides, which are checked before they are timed."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from verax.bench.delta import gated, lam
from verax.bench.delta.baselines import find_baselines
from verax.bench.harness import UNTIMED, Benchmark, Case, Side, case_result, error_ratio, time_sides
from verax.bench.results import faster_by, number, outliers, rounds, side_rows, slug, spread, table
from verax.bench.settings import CONFIGURATIONS, SECTIONS, DeltaSettings
from verax.errors import VeraxError
from verax.machine import peak_growth, return_freed_memory
from verax.ops.cpu import library

__all__ = ["bench_delta", "check"]


def bench_delta(settings: DeltaSettings) -> dict[str, Any]:
    """Time the delta rules and PyTorch's, interleaved, on JAX's default device.

    Every side is checked first: its outputs' shapes, dtypes and device, and their error against float64.
    """
    sections, configurations = settings.only, {name: CONFIGURATIONS[name] for name in settings.configs}
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        baselines = find_baselines(settings, Path(folder))
        benchmark = Benchmark("delta")
        makers: dict[str, Callable[[], Iterable[Case]]] = {
            "rule": lambda: (lam.rule_case(*one, baselines) for one in configurations.items()),
            "layer": lambda: (lam.layer_case(*one, baselines) for one in configurations.items()),
            "gated": lambda: gated.sequence_cases("gated", configurations, baselines),
            "gradient": lambda: gated.sequence_cases("gradient", configurations, baselines),
            "decode": lambda: [gated.decode_case(baselines)],
            "encoder": lambda: lam.encoder_cases(baselines),
        }
        cases = [_measure(case, benchmark, settings) for section in sections for case in makers[section]()]
    level = library.level()
    asked = asdict(settings) | {"against": list(baselines.names), "untimed": UNTIMED, "cpu_level": level}
    notes = [f"- Left out: {name} ({why})." for name, why in baselines.skipped.items()]
    if baselines.cython_s:
        notes.append(f"- Cython and the C++ compiler took {baselines.cython_s:.1f} s, once for all.")
    some = [name.lower() for name in configurations if len(configurations) < len(CONFIGURATIONS)]
    timed = {f"{case['case']}, {name}": side for case in cases for name, side in case["sides"].items()}
    reasons = {f"- Left out: {name}: {why}" for case in cases for name, why in case["skipped"].items()}
    return benchmark.result(
        slug(*sections, *some),
        title=f"Delta rules compared with PyTorch, on {jax.default_backend()}",
        intro=f"{rounds(asked)}; the sides take turns in a round, and begin each turn with a call that does not "
        f"count. CPU kernels: {level or 'none'}. Every side's outputs were on that device, in the same "
        "shapes. Error is the root mean square of the difference from float64 over the root mean square of the result. "
        "GFLOP are products of the implementation that runs. The limit is the products at the measured rate, or what "
        "has to be moved at the measured bandwidth if that is longer. Peak is memory beyond the arguments. 'verax is' "
        "the factor by which it is faster: the median over the rounds of the ratio within a round.",
        settings=asked,
        versions=baselines.versions,
        tables=[_table(section, [case for case in cases if case["group"] == section]) for section in sections],
        notes=[*outliers(timed), *sorted(reasons), *notes],
        cases=cases,
        skipped=baselines.skipped,
        cython_s=baselines.cython_s,
    )


def _table(section: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = (f"{case['case']}: " + ", ".join(f"{name} {n}" for name, n in case["sizes"].items()) for case in cases)
    optional = lambda key, form, scale=1.0: lambda row: "" if row[2][key] is None else format(row[2][key] * scale, form)
    columns = {
        "case": lambda row: row[0]["case"],
        "side": lambda row: f"**{row[1]}**" if row[1] == row[0]["chosen"] else row[1],
        "median ms": lambda row: number(1e3 * row[2]["median_s"]),
        "P10-P90 ms": lambda row: spread(row[2]),
        "verax is": faster_by,
        "compile s": optional("compile_s", ".1f"),
        "peak MB": optional("peak_bytes", ".0f", 1e-6),
        "GFLOP": lambda row: number(row[2]["flops"] / 1e9),
        "GFLOP/s": lambda row: f"{row[2]['rate'] / 1e9:.0f}",
        "GB/s": lambda row: f"{row[2]['gb_per_s']:.1f}",
        "of the limit": lambda row: f"{100 * row[2]['fraction_of_limit']:.0f}%",
        "error": lambda row: f"{row[2]['error']:.0e}",
    }
    return table(side_rows(cases), columns, title=SECTIONS[section], note="; ".join(sizes) + "." if cases else "")


def _measure(case: Case, benchmark: Benchmark, settings: DeltaSettings) -> dict[str, Any]:
    """Check every side, then time them in turn; one of a result's cases."""
    platform, title = jax.default_backend(), f"{case.group}, {case.name}"
    errors = {name: check(case, name, platform) for name in case.sides}
    peaks = {name: _peak_bytes(side, platform) for name, side in case.sides.items()}
    calls = {name: side.call for name, side in case.sides.items()}
    samples = time_sides(calls, runs=settings.runs, warmup=settings.warmup, title=title, short=True)
    more = {"sizes": dict(case.sizes), "bytes_moved": case.bytes_moved, "tolerance": case.tolerance}
    more["skipped"] = dict(case.skipped)
    measured = {"group": case.group, **case_result(case.name, case.chosen, samples, 1.0, **more)}
    for name, side in case.sides.items():
        median, dtype = samples[name].median, side.dtypes[0]
        work = benchmark.against_limit(median, bytes_moved=case.bytes_moved, flops=side.flops, dtype=dtype)
        measured["sides"][name] |= {
            **{key: work[key] for key in ("flops", "gb_per_s", "limit_s", "fraction_of_limit")},
            "rate": side.flops / median,
            "dtype": dtype,
            "compile_s": side.compile_s,
            "peak_bytes": peaks[name],
            "error": errors[name],
            "platform": platform,
        }
    return measured


def check(case: Case, name: str, platform: str) -> float:
    """Largest error ratio of a side's outputs, after a check of their shapes, dtypes and devices.

    Raises:
        VeraxError: if a side computes something else, or elsewhere, than it claims.
    """
    side, errors = case.sides[name], []
    for i, (output, expected) in enumerate(zip(side.call(), case.expected, strict=True)):
        actual = tuple(output.shape), str(output.dtype).removeprefix("torch."), _platform(output)
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


def _platform(array: Any) -> str:
    if isinstance(array, jax.Array):
        return " and ".join(sorted({device.platform for device in array.devices()}))
    return "gpu" if array.device.type == "cuda" else array.device.type


def _peak_bytes(side: Side, platform: str) -> int | None:
    """Memory of one call beyond its arguments: measured on a CPU and for torch, XLA's plan on other devices."""
    if platform == "cpu":
        gc.collect()
        return_freed_memory()  # which would be used again, and not counted
        with peak_growth() as growth:
            side.call()
        return growth()
    if side.planned_bytes is not None:
        return side.planned_bytes
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    side.call()
    return cuda.max_memory_allocated() - before
