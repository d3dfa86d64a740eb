"""`verax bench reports`: the tables of the earlier ports, measured again on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from verax.bench.harness import Benchmark
from verax.bench.lines import noise_line
from verax.bench.reports.accuracy import frame_tables, layer_tables
from verax.bench.reports.tables import Table, not_run
from verax.bench.reports.text import delta_tables, generation_tables, paged_tables
from verax.bench.reports.video import memory_tables, speed_tables
from verax.bench.results import write_whole
from verax.errors import InvalidParameterError, VeraxError

__all__ = ["REPORTS", "bench_reports", "render", "write_reports"]

Tables = Callable[[bool], tuple[list[Table], dict[str, Any]]]
"""Function of `quick`; it returns tables, and the result that they were made from."""


@dataclass(frozen=True)
class Report:
    """One page: its title, the earlier port that its tables come from, and the functions that make them, by name."""

    title: str
    about: str
    sections: dict[str, Tables]


REPORTS: dict[str, Report] = {
    "video": Report(
        "Video beside PyTorch: memory and speed",
        "The earlier port made 57 frames of 544 x 960 in 5 steps on a GPU: PyTorch in 20 s, the port in 130 s.",
        {"memory": memory_tables, "speed": speed_tables},
    ),
    "accuracy": Report(
        "Accuracy beside PyTorch",
        "The earlier port's clip of 13 frames, in bfloat16, had 36.63 dB and an SSIM of 0.9937 against PyTorch's.",
        {"frames": frame_tables, "layers": layer_tables},
    ),
    "text": Report(
        "Text generation beside Hugging Face",
        "The earlier port ran Qwen3-0.6B on a GPU: 37.5 tokens/s prompt by prompt, 117.0 batched, 76.1 with its JAX "
        "engine.",
        {"generation": generation_tables, "paged attention": paged_tables},
    ),
    "delta-rule": Report(
        "The hierarchical delta rule beside PyTorch and Cython",
        "The earlier port reported 758x to 1958x; what remains of that is in "
        "[delta-comparison.md](../delta-comparison.md).",
        {"delta rule": delta_tables},
    ),
}
"""Reports by the name of their page."""

VERSIONS = ("torch", "transformers", "diffusers", "cython")
"""Names of the baselines' versions in a result's machine."""

MOST_WORDS = 300
"""Characters of an error that a page repeats."""


def bench_reports(
    *,
    quick: bool = False,
    only: Sequence[str] = tuple(REPORTS),
    report: Callable[[str], None] = lambda note: None,
) -> list[dict[str, Any]]:
    """Make the tables of the reports, one section after the other; each report as JSON holds it.

    A section that cannot run here (a library or a device that is missing, too little memory) is a table that says why.

    Args:
        quick: smaller and fewer cases: minutes on two cores.
        only: names out of `REPORTS`.
        report: called with the name of each section when it begins.

    Raises:
        InvalidParameterError: for an unknown report.
    """
    if unknown := [name for name in only if name not in REPORTS]:
        raise InvalidParameterError(f"only: expected {', '.join(REPORTS)}, got {unknown[0]!r}")
    results = []
    for name in only:
        benchmark = Benchmark("report")
        tables, measured, versions = [], {}, {}
        begin = time.perf_counter()
        for section, make in REPORTS[name].sections.items():
            report(f"{name}: {section}")
            try:
                made, result = make(quick)
            except (VeraxError, MemoryError, jax.errors.JaxRuntimeError) as error:
                made = [not_run(section.capitalize(), " ".join(str(error).split())[:MOST_WORDS])]
            else:
                measured[section] = result
                versions |= {key: result["machine"][key] for key in VERSIONS if key in result["machine"]}
            tables += [table.to_dict() for table in made]
        results.append(
            benchmark.result(
                {"report": name, "quick": quick},
                versions,
                seconds=time.perf_counter() - begin,
                tables=tables,
                results=measured,
            )
        )
    return results


def write_reports(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `NAME.md` and `NAME.json` for each report, and a `README.md` that lists all in the folder; their paths.

    Reports that are there from before, and not in `results`, stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now, paths = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), []
    for result in results:
        dated = {**result, "date": now}
        path = folder / f"{result['settings']['report']}.json"
        paths += [write_whole(path.with_suffix(".md"), render(dated))]
        paths += [write_whole(path, json.dumps(dated, indent=2) + "\n")]
    there = {name: folder / f"{name}.json" for name in REPORTS}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in there.items() if path.is_file()}
    return [*paths, write_whole(folder / "README.md", _index(found))]


def render(result: dict[str, Any]) -> str:
    """A report as Markdown."""
    report = REPORTS[result["settings"]["report"]]
    lines = [f"# {report.title}", "", report.about, "", f"Made by `{_command(result)}`. {_machine(result)}", ""]
    for table in result["tables"]:
        lines += Table(**table).lines()
    return "\n".join(lines)


def _index(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# The earlier ports, measured again",
        "",
        "verax began with reports on earlier ports, each with tables of speed, memory or accuracy. `verax bench "
        "reports` makes the same tables on any machine. A table that cannot be made there states the reason.",
        "",
        "| report | tables | not run | seconds | made by | date |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        missing = sum(table["why_not"] is not None for table in result["tables"])
        cells = [f"[{REPORTS[name].title}]({name}.md)", str(len(result["tables"]) - missing), str(missing)]
        cells += [f"{result['seconds']:.0f}", f"`{_command(result)}`", result["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _command(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return "verax bench reports" + (" --quick" if settings["quick"] else "") + f" --only {settings['report']}"


def _machine(result: dict[str, Any]) -> str:
    machine, limits = result["machine"], result["measured"]
    libraries = ", ".join(f"{name} {machine[name]}" for name in ("jax", *VERSIONS) if name in machine)
    where = machine["cpu"] if machine["platform"] == "cpu" else ", ".join(machine["devices"])
    return (
        f"{where}, {machine['cores']} cores, {machine['memory_gib']} GiB; {libraries}. Measured: "
        f"{limits['memory_bandwidth_gb_per_s']} GB/s, {limits['matmul_float32_gflop_per_s']} GFLOP/s in float32 and "
        f"{limits['matmul_bfloat16_gflop_per_s']} in bfloat16. {noise_line(result['noise'])} {result['date']}."
    )
