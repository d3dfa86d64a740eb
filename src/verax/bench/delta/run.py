"""Delta rules beside PyTorch, with equal work on both sides: `verax bench delta`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from verax import progress
from verax.bench.delta.baselines import find_baselines
from verax.bench.delta.case import measure
from verax.bench.delta.gated import decode_cases, gated_cases
from verax.bench.delta.gradient import gradient_cases
from verax.bench.delta.lam import encoder_cases, layer_cases, rule_cases
from verax.bench.delta.sizes import CONFIGURATIONS, SECTIONS
from verax.bench.harness import Benchmark
from verax.bench.timing import UNTIMED
from verax.errors import InvalidParameterError
from verax.ops.cpu import library

__all__ = ["bench_delta"]


def bench_delta(
    *,
    sections: Sequence[str] = SECTIONS,
    configurations: Sequence[str] = tuple(CONFIGURATIONS),
    against: Sequence[str] | None = None,
    without: Sequence[str] = (),
    runs: int,
    warmup: int,
) -> dict[str, Any]:
    """Time the delta rules beside PyTorch, interleaved, on JAX's default device; a report as JSON holds it.

    Every side is checked first: the shapes, dtypes and device of its outputs, and their error against float64.

    Args:
        sections: names out of `SECTIONS`.
        configurations: names out of `CONFIGURATIONS`, for rule, layer, gated and gradient.
        against: names out of `BASELINES`; all that can be had if None, but those in `without`.
        runs: counted rounds. With `warmup` rounds before them.

    Raises:
        InvalidParameterError: for an unknown name, or if JAX runs where torch does not.
        MissingDependencyError: without torch, or without something that `against` names.
        VeraxError: if two sides do not compute the same thing where they claim to.
    """
    for what, given, known in (
        ("sections", sections, SECTIONS),
        ("configurations", configurations, CONFIGURATIONS),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise InvalidParameterError(f"{what}: expected {', '.join(known)}, got {unknown[0]!r}")
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder, progress.bar("measuring") as report:
        baselines = find_baselines(against, Path(folder), without=without)
        benchmark, cases = Benchmark("delta"), []
        chosen = {name: CONFIGURATIONS[name] for name in configurations}
        makers = {
            "rule": lambda: rule_cases(chosen, baselines),
            "layer": lambda: layer_cases(chosen, baselines),
            "gated": lambda: gated_cases(chosen, baselines),
            "gradient": lambda: gradient_cases(chosen, baselines),
            "decode": lambda: decode_cases(baselines),
            "encoder": lambda: encoder_cases(baselines),
        }
        for section in sections:
            for case in makers[section]():
                cases.append(
                    measure(
                        case,
                        benchmark.limits,
                        platform=jax.default_backend(),
                        runs=runs,
                        warmup=warmup,
                        report=lambda done, total, note, case=case: report(
                            done, total, f"{case.group}, {case.name}: {note}"
                        ),
                    )
                )
    settings = {
        "operations": list(sections),
        "configurations": list(configurations),
        "against": list(baselines.names),
        "runs": runs,
        "warmup": warmup,
        "untimed": UNTIMED,
        "cpu_level": library.level(),
    }
    return benchmark.result(
        settings, baselines.versions, skipped=baselines.skipped, cython_s=baselines.cython_s, cases=cases
    )
