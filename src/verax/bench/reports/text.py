"""Tables of the earlier ports on text and on the delta rule, measured again by `verax bench reports`."""

from __future__ import annotations

from typing import Any

import jax

from verax.bench.delta.run import bench_delta
from verax.bench.delta.sizes import CONFIGURATIONS
from verax.bench.harness import Benchmark
from verax.bench.ops.attention import paged_decode_case
from verax.bench.ops.run import measure_case
from verax.bench.reports.tables import Table, deviation, milliseconds, not_run, times
from verax.bench.text.run import bench_text
from verax.bench.text.workload import short_prompts

__all__ = ["delta_tables", "generation_tables", "paged_tables"]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences of a decode step."""

CACHED = 512
"""Tokens of each."""

BASELINE_NAMES = {
    "transformers naive": "Hugging Face, one prompt at a time",
    "transformers batched": "Hugging Face, batched",
}


def generation_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """Hugging Face prompt by prompt and in one batch, and our engine: short prompts, fewer tokens if quick."""
    runs, tokens = (3, 16) if quick else (10, 100)
    result = bench_text(
        None,
        lambda vocab_size: short_prompts(vocab_size, max_tokens=tokens),
        runs=runs,
        warmup=1,
        against=("transformers",),
    )
    sides, settings = result["sides"], result["settings"]
    naive = sides["transformers naive"]["median_s"]
    rows = [
        [
            BASELINE_NAMES.get(name, f"**{name}**"),
            f"{side['median_s']:.2f}",
            f"{side['p10_s']:.2f}-{side['p90_s']:.2f}",
            f"{deviation(side):.3f}",
            f"{side['rate']:.1f}",
            times(naive / side["median_s"]),
        ]
        for name, side in sides.items()
    ]
    note = (
        f"Qwen3-0.6B's shapes, random weights, {settings['dtype']}; {settings['requests']} prompts x {tokens} new "
        f"tokens, temperature {settings['temperature']}, {runs} interleaved runs. Compiling took "
        f"{result['start_up']['compile_s']:.1f} s before them; nothing was compiled during them."
    )
    columns = ["method", "median s", "P10-P90 s", "deviation s", "tokens/s", "against one at a time"]
    return [Table("Text generation", columns, rows, note)], result


def paged_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """The decode step's attention, by sequences: the chosen implementation, chunks in XLA, and keys gathered first."""
    benchmark, cases = Benchmark("ops"), []
    runs = 5 if quick else 15
    for rows in BATCHES:
        cases.append(measure_case(paged_decode_case(rows, CACHED), benchmark, runs, 2))
    lines = []
    for rows, case in zip(BATCHES, cases, strict=True):
        sides = case["sides"]
        times_of = {name: milliseconds(side["median_s"]) for name, side in sides.items()}
        gathered = "reference" in sides and case["runs"] != "reference"
        lines.append(
            [
                str(rows),
                case["runs"],
                times_of[case["runs"]],
                times_of.get("chunked", ""),
                times_of.get("reference", ""),
                times(case["ratios"]["reference"]) if gathered else "",
                f"{case['gb_per_s']:.1f}",
                f"{100 * case['fraction_of_limit']:.0f}%",
            ]
        )
    note = (
        f"{CACHED} cached tokens a sequence in pages of 16, bfloat16, 16 query heads over 8 of 128, {runs} interleaved "
        "rounds. 'gathered' puts the keys of all pages together first and then attends, as in the earlier port. "
        "Keys of a small batch fit in the processor's cache, which is faster than the limit, its memory."
    )
    columns = [
        "batch",
        "implementation",
        "ms",
        "chunked ms",
        "gathered ms",
        "faster than gathered",
        "GB/s",
        "of the limit",
    ]
    result = benchmark.result({"operations": ["paged"], "runs": runs, "warmup": 2}, cases=cases)
    return [Table("Paged attention by batch", columns, lines, note)], result


def delta_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """The hierarchical rule and the layer around it, beside PyTorch eager and through Cython: equal work each time."""
    names = list(CONFIGURATIONS)[: 2 if quick else None]
    result = bench_delta(
        sections=("rule", "layer"),
        configurations=names,
        without=("torch.compile", "transformers", "fla"),
        runs=3 if quick else 10,
        warmup=1,
    )
    here = {"cpu": "CPU", "gpu": "GPU"}.get(jax.default_backend(), jax.default_backend().upper())
    tables = []
    for section, what in (("rule", "the rule by itself"), ("layer", "the whole layer")):
        rows = [_delta_row(case) for case in result["cases"] if case["section"] == section]
        columns = ["config", "batch", "chunks", "chunk size", "verax ms", "torch ms", "Cython ms", "against torch"]
        note = "12 heads; both sides do the same work on the same device, checked against float64 first" + (
            "; the earlier port set its rule against the other side's whole layer." if section == "rule" else "."
        )
        tables.append(Table(f"{here}: {what}", [*columns, "against Cython"], rows, note))
    if left := [name for name in CONFIGURATIONS if name not in names]:
        tables.append(not_run(f"{here}: {', '.join(left)}", "--quick leaves it out"))
    other = "GPU" if here == "CPU" else "CPU"
    how = "JAX finds no GPU on this machine" if other == "GPU" else "JAX_PLATFORMS=cpu runs it on this machine's CPU"
    tables.append(not_run(f"{other}: the rule and the layer", how))
    reasons = [f"{name}: {why}" for name, why in result["skipped"].items()]
    tables += [not_run("Other sides", "; ".join(reasons))] if reasons else []
    return tables, result


def _delta_row(case: dict[str, Any]) -> list[str]:
    batch, chunks, size = CONFIGURATIONS[case["case"]]
    sides, ratios = case["sides"], case["ratios"]
    shown = {name: milliseconds(side["median_s"]) for name, side in sides.items()}
    faster = {name: times(ratio) for name, ratio in ratios.items()}
    return [
        case["case"],
        str(batch),
        str(chunks),
        str(size),
        f"{shown[case['runs']]} ({case['runs']})",
        shown.get("torch", ""),
        shown.get("torch, Cython", "not run"),
        faster.get("torch", ""),
        faster.get("torch, Cython", ""),
    ]
