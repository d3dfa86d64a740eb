"""`verax bench reports`: tables of the earlier ports, measured again by commands of the other benchmarks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verax.bench.accelerator import bench_command, run_command
from verax.bench.harness import check_names
from verax.bench.results import markdown, not_run, table, to_json
from verax.files import write_text

__all__ = ["REPORTS", "bench_reports", "write_reports"]

LONGEST_SECONDS = 7200.0
"""Time limit of a command."""


@dataclass(frozen=True)
class Report:
    """One page: its title, a sentence on the earlier port, and the commands that measure it, by section.

    A section's second words are the options that `--quick` adds.
    """

    title: str
    about: str
    sections: Mapping[str, tuple[str, str]]


REPORTS: Mapping[str, Report] = {
    "video": Report(
        "Video compared with PyTorch: memory and speed",
        "The earlier port made 57 frames of 544 x 960 in 5 steps on a GPU: PyTorch in 20 s, the port in 130 s.",
        {
            "memory": (
                "video --runs 0 --memory standard,chunked,auto --frames 9,17,57 --height 544 --width 960",
                "--layers 1",
            ),
            "speed": (
                "video --frames 9,17,57 --against diffusers --runs 10",
                "--frames 9,17 --height 64 --width 112 --layers 4 --runs 3",
            ),
        },
    ),
    "text": Report(
        "Text generation compared with Hugging Face",
        "The earlier port ran Qwen3-0.6B on a GPU: 37.5 tokens/s prompt by prompt, 117.0 batched, 76.1 with its JAX "
        "engine.",
        {
            "generation": ("text --against transformers", "--max-tokens 16 --runs 3"),
            "paged attention": ("ops --only paged --runs 15", "--runs 5"),
        },
    ),
    "delta-rule": Report(
        "The hierarchical delta rule compared with PyTorch and Cython",
        "The earlier port reported 758x to 1958x; what remains of that is in "
        "[delta-comparison.md](../delta-comparison.md).",
        {"delta rule": ("delta --only rule,layer --against torch,cython", "--configs Small,Medium --runs 3")},
    ),
}
"""Reports by the name of their page."""


def bench_reports(
    *,
    quick: bool = False,
    only: Sequence[str] = tuple(REPORTS),
    report: Callable[[str], None] = lambda note: None,
) -> list[dict[str, Any]]:
    """Make the tables of the reports, one section after the other; a result for each report.

    A section that cannot run here (a library or a device that is missing, too little memory) is a table that states the
    reason.

    Args:
        quick: smaller and fewer cases: minutes on two cores.
        only: names out of `REPORTS`.
        report: called with the name of each section when it begins.

    Raises:
        InvalidParameterError: for an unknown report.
    """
    check_names("only", only, REPORTS)
    results = []
    for name in only:
        page, tables, seconds, machine = REPORTS[name], [], 0.0, {}
        for section, (words, fewer) in page.sections.items():
            report(f"{name}: {section}")
            command = bench_command(*words.split(), *(fewer.split() if quick else ()))
            with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
                record = run_command(command, Path(folder) / "log", LONGEST_SECONDS)
            seconds += record["seconds"]
            if record["error"] or record["result"] is None:
                tables.append(not_run(section.capitalize(), record["error"] or record["note"]))
                continue
            result = record["result"]
            heading = {"title": section.capitalize(), "note": result["intro"]}
            tables += [heading | {key: value for key, value in one.items() if value} for one in result["tables"]]
            machine |= {key: result[key] for key in ("machine", "measured", "noise")}
        asked = f"verax bench reports{' --quick' if quick else ''} --only {name}"
        results.append(
            {
                "subject": "report",
                "name": name,
                "title": page.title,
                "intro": f"{page.about} Made by `{asked}`.",
                "settings": {"quick": quick, "command": asked},
                **machine,
                "tables": tables,
                "notes": [],
                "seconds": seconds,
            }
        )
    return results


def write_reports(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `NAME.md` and `NAME.json` for each report, and a `README.md` that lists all in the folder; their paths.

    Earlier reports in the folder that are not in `results` stay unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, now = [], datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for result in results:
        dated = {**result, "date": now}
        for suffix, text in ((".md", markdown(dated)), (".json", to_json(dated))):
            paths.append(folder / f"{result['name']}{suffix}")
            write_text(paths[-1], text)
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    missing = lambda result: sum("why_not" in one for one in result["tables"])
    columns = {
        "report": lambda result: f"[{result['title']}]({result['name']}.md)",
        "tables": lambda result: len(result["tables"]) - missing(result),
        "not run": missing,
        "seconds": lambda result: f"{result['seconds']:.0f}",
        "made by": lambda result: f"`{result['settings']['command']}`",
        "date": lambda result: result["date"],
    }
    index = {
        "title": "The earlier ports, measured again",
        "intro": "verax began with reports on earlier ports, each with tables of speed, memory or accuracy. `verax "
        "bench reports` makes the tables of speed and memory on any machine. A table that cannot be made there states "
        "the reason.",
        "tables": [table(stored, columns)],
        "notes": [],
    }
    write_text(folder / "README.md", markdown(index))
    return [*paths, folder / "README.md"]
