"""Delta rule part: long sequences forward, and forward and backward, beside flash-linear-attention."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from verax.bench.accelerator.row import Measured, Row
from verax.bench.case import Case
from verax.bench.delta.baselines import Baselines, find_baselines
from verax.bench.delta.case import measure
from verax.bench.delta.gated import GPU_SHAPE, gated_case
from verax.bench.delta.gradient import gradient_case
from verax.bench.harness import Benchmark
from verax.errors import VeraxError

__all__ = ["measure_delta"]

TINY_SHAPE = (1, 64, 2, 16)
"""Batch, tokens, heads and their size in a rehearsal."""

WITHIN = 1.5
"""Time over that of flash-linear-attention that the project wants to stay below."""

FLA = "fla chunk"

MAKERS: dict[str, Callable[..., Case]] = {"forward": gated_case, "forward and backward": gradient_case}


def measure_delta(*, rehearse: bool) -> Iterator[Measured]:
    """Milliseconds of the gated delta rule in bfloat16, beside transformers and flash-linear-attention where they run.

    Args:
        rehearse: a tiny batch.
    """
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        baselines, missing = _baselines(Path(folder))
        benchmark, found = Benchmark("delta"), []
        rows = []
        for name, make in MAKERS.items():
            case = f"delta rule, {name}"
            try:
                measured = measure(
                    make("Long", TINY_SHAPE if rehearse else GPU_SHAPE, "bfloat16", baselines),
                    benchmark.limits,
                    platform=jax.default_backend(),
                    runs=2 if rehearse else 10,
                    warmup=0 if rehearse else 1,
                )
            except (VeraxError, RuntimeError, MemoryError) as error:  # what does not fit with gradients may without
                rows.append(Row(case, error=f"{type(error).__name__}: {error}"))
                continue
            found.append(measured)
            rows.append(_row(case, measured, missing))
    versions = {} if baselines is None else baselines.versions
    settings = {
        "operations": [measured["section"] for measured in found],
        "configurations": ["Long"],
        "against": [] if baselines is None else list(baselines.names),
        "runs": 2 if rehearse else 10,
        "warmup": 0 if rehearse else 1,
        "cpu_level": None,
    }
    skipped = {} if baselines is None else baselines.skipped
    result = benchmark.result(settings, versions, skipped=skipped, cython_s=None, cases=found)
    yield Measured(rows, result if found else None)


def _baselines(folder: Path) -> tuple[Baselines | None, str]:
    """Baselines that run where JAX does, and the reason that flash-linear-attention is not among them."""
    try:
        baselines = find_baselines(None, folder, without=("torch", "cython", "torch.compile"))
    except (VeraxError, ImportError) as error:
        return None, str(error)
    return baselines, baselines.skipped.get("fla", "")


def _row(case: str, measured: dict[str, Any], missing: str) -> Row:
    side = measured["sides"][measured["runs"]]
    theirs = measured["sides"].get(FLA)
    return Row(
        case,
        value=1e3 * side["median_s"],
        unit="ms",
        target=None if theirs is None else 1e3 * WITHIN * theirs["median_s"],
        seconds=side["median_s"],
        flops=side["flops"],
        bytes_moved=measured["bytes_moved"],
        beside={name: ratio for name, ratio in measured["ratios"].items() if not name.startswith("verax")},
        note=f"no target without flash-linear-attention: {missing}" if theirs is None and missing else "",
    )
