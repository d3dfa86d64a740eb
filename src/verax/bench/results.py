"""The one format of results: JSON that can be compared later, Markdown that is read now, and comparisons of two files.

A result is a dictionary that JSON holds. Its keys:

- `subject` (`"text"`, `"serve"`, ...) and `name`, which separates the subject's results: `"short-prompts-int8"`;
- `title` and `intro` of its page, `tables` (see `table`) and `notes` below them;
- `settings`, `machine` (the fingerprint with the versions of all baselines), `measured` (the machine's limits),
  `noise`, `memory` (peaks), and `date`;
- `cases`: a list of `case`, `sides` (each with `median_s`, `p10_s`, `p90_s`, `rate`, `seconds`, ...), `chosen` (our
  side) and `ratios` (how many times faster it is than each other side). Where runs do not all do the same work, `rates`
  has each run's;
- further numbers of the subject.

A file holds the latest result of each name, of one subject on one processor.

Of two files, a side's change is the ratio of the medians, new over old. Its interval is the percentile bootstrap (Efron
and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13): the stored runs of each result are drawn again,
with replacement.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from verax.errors import InvalidParameterError
from verax.files import json_value, write_text

ENOUGH_RUNS = 10
"""Counted rounds of a result to be relied upon; where one round is long there are fewer, and pages say so."""

MACHINE_FACTS = (
    *("cpu", "cores", "memory_gib", "platform", "devices", "cpu_kernels", "python", "jax", "jaxlib", "torch"),
    *("diffusers", "transformers", "openvino", "nncf", "onnxruntime", "llama_cpp_python", "llama_server", "vllm"),
    "openvino_genai",
)
"""Facts of the machine that a page repeats. If they differ between two results, the change may be theirs."""


Columns = Mapping[str, Callable[[Any], object]]
"""Functions that make a cell of a row, by their columns' headings."""


def table(rows: Iterable[Any], columns: Columns, *, title: str = "", note: str = "") -> dict[str, Any]:
    """Table of a page, with formatted cells.

    Args:
        rows: what the functions of `columns` take.
        columns: headings and cells.
        title: heading above the table.
        note: sentences between heading and table.
    """
    cells = [[str(cell(row)) for cell in columns.values()] for row in rows]
    return {"title": title, "note": note, "columns": list(columns), "rows": cells}


def optional(key: str, form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Cell of a number in the last part of a row, formatted; empty where it is missing."""
    return lambda row: "" if row[-1].get(key) is None else form(row[-1][key])


def _latency(name: str) -> Callable[[Any], str]:
    """Cell of a kind of latency of a server; empty where there is none."""
    form = "{mean:.1f}, {p50:.1f} / {p90:.1f} / {p99:.1f}"
    return lambda row: form.format(**numbers) if (numbers := row[2].get("latency_ms", {}).get(name)) else ""


SIDE_COLUMNS: Columns = {
    "requests": optional("completed", str),
    "req/s": optional("requests_per_s", "{:.2f}".format),
    **{
        f"{name} ms": _latency(key)
        for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
    },
    "disconnected": optional("disconnected", str),
    "failed": optional("errors", lambda errors: ", ".join(f"{count} x {kind}" for kind, count in errors.items())),
    "compile s": optional("compile_s", "{:.1f}".format),
    "from cache s": optional("compile_cached_s", "{:.1f}".format),
    "first call s": optional("first_s", "{:.1f}".format),
    "first start s": optional("start_s", "{:.1f}".format),
    "pays after": lambda row: "" if "break_even" not in row[2] else row[2]["break_even"] or "never",
    "apart": optional("difference", "{:.1e}".format),
    "text s": optional("text_s", "{:.1f}".format),
    "denoise s": optional("denoise_s", "{:.1f}".format),
    "decode s": optional("decode_s", "{:.1f}".format),
    "decoder's buffers MB": optional("decode_bytes", lambda size: f"{size / 1e6:.0f}"),
    "steps computed": optional("computed", str),
    "PSNR dB": optional("psnr", "{:.1f}".format),
    "worst": optional("worst_psnr", "{:.1f}".format),
    "worst SSIM": optional("worst_ssim", "{:.3f}".format),
    "peak MB": optional("peak_bytes", lambda peak: f"{peak / 1e6:.0f}"),
    "verax's tokens": optional("same_tokens", str),
    "GFLOP": optional("flops", lambda flops: number(flops / 1e9)),
    "GFLOP/s": optional("gflop_per_s", "{:.0f}".format),
    "GB/s": optional("gb_per_s", "{:.1f}".format),
    "of the limit": optional("fraction_of_limit", "{:.0%}".format),
    "error": optional("error", "{:.0e}".format),
    "difference": optional("max_error", "{:.1e}".format),
    "1 - cosine": optional("min_cosine", lambda cosine: f"{1 - cosine:.1e}"),
    "same nearest": optional("same_nearest", "{:.1%}".format),
    "rank correlation": optional("rank_correlation", "{:.5f}".format),
}
"""Columns of what a side may have in addition to its times."""


def sides_table(
    cases: Sequence[Mapping[str, Any]], rate: str | None = None, *, title: str = "", note: str = ""
) -> dict[str, Any]:
    """Table with a row for each side of each case; times are in seconds if all take one, else in milliseconds.

    Without a title, the cases' groups have a column. Columns without any cell are left out.

    Args:
        cases: of a result.
        rate: heading of the column of rates, such as `tokens/s`; None for no such column.
        title, note: as in `table`.
    """
    rows = [(case, name, side) for case in cases for name, side in case["sides"].items()]
    scale, unit = (1.0, "s") if all(side["median_s"] >= 1 for _, _, side in rows) else (1e3, "ms")
    columns: dict[str, Callable[[Any], object]] = {
        "operation": lambda row: "" if title else row[0].get("group", ""),
        "case": lambda row: row[0]["case"],
        "side": lambda row: f"**{row[1]}**" if row[1] == row[0]["chosen"] else row[1],
        f"median {unit}": lambda row: number(scale * row[2]["median_s"]),
        f"P10-P90 {unit}": lambda row: f"{number(scale * row[2]['p10_s'])}-{number(scale * row[2]['p90_s'])}",
        **({} if rate is None else {rate: lambda row: number(row[2]["rate"])}),
        "verax is faster by": lambda row: f"{row[0]['ratios'][row[1]]:.2f}x" if row[1] in row[0]["ratios"] else "",
        **SIDE_COLUMNS,
    }
    filled = {name: cell for name, cell in columns.items() if any(cell(row) for row in rows)}
    return table(rows, filled, title=title, note=note)


def number(value: float) -> str:
    """A positive number to three significant digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def rounds(settings: Mapping[str, Any]) -> str:
    """Number of rounds as text, with a warning if they are fewer than `ENOUGH_RUNS`."""
    few = f" (fewer than {ENOUGH_RUNS}: look at the spread)" if settings["runs"] < ENOUGH_RUNS else ""
    return f"{settings['runs']} rounds{few} after at least {settings['warmup']} of warm-up, until no side got faster"


def noise_line(noise: Mapping[str, Any]) -> str:
    """Sentence on the noise, for pages and the log."""
    what = f"other processes used {100 * noise['others']:.0f}% of the processor"
    return f"The machine was busy before the start: {what}." if noise["busy"] else f"Before the start {what}."


def markdown(result: Mapping[str, Any]) -> str:
    """Page of a result: title, intro, tables, notes, and a line on the machine."""
    lines = [f"# {result['title']}", "", result["intro"], ""]
    for one in result["tables"]:
        lines += table_lines(one)
    for note in result["notes"]:
        lines += [note] if note.startswith("- ") else ["", note, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "", _about(result)])).rstrip() + "\n"


def table_lines(one: Mapping[str, Any]) -> list[str]:
    """Markdown lines of a table, its heading and note included."""
    lines = [f"## {one['title']}", ""] if one.get("title") else []
    lines += [one["note"], ""] if one.get("note") else []
    if "columns" not in one:
        return lines
    head, *rows = ("| " + " | ".join(row) + " |" for row in (one["columns"], *one["rows"]))
    return [*lines, head, "|" + "---|" * len(one["columns"]), *rows, ""]


def _about(result: Mapping[str, Any]) -> str:
    if "machine" not in result:
        return ""
    machine, memory = result["machine"], result.get("memory", {})
    limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.get("measured", {}).items())
    facts = ", ".join(f"{name} {machine[name]}" for name in MACHINE_FACTS if name in machine)
    peaks = [f"{name} {memory[key]:.2f} GB" for name in ("host", "device") if memory.get(key := f"{name}_peak_gb")]
    parts = (
        f"Machine: {facts}.",
        f"Measured: {limits}." if limits else "",
        f"Peak memory of the process: {', '.join(peaks)}." if peaks else "",
        noise_line(result["noise"]) if "noise" in result else "",
        result.get("date", ""),
    )
    return " ".join(part for part in parts if part)


def slug(*parts: str) -> str:
    """Name of a result or file: lower-case words of letters and digits with hyphens between them."""
    return "-".join(word for part in parts if (word := re.sub("[^a-z0-9]+", "-", part.lower()).strip("-")))


def date() -> str:
    """Text of this moment, in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a result into its subject's and processor's file in a folder, in place of an earlier one of its name.

    Returns:
        The file: `SUBJECT-PROCESSOR-CORESc.json`.
    """
    machine, subject = result["machine"], result["subject"]
    device = str(machine["cpu"] if machine["platform"] == "cpu" else machine["devices"][0])
    processor = slug(re.sub(r"\((R|TM)\)|Processor", "", device))
    path = folder / f"{subject}-{processor}-{machine['cores']}c.json"
    results = read_results(path) if path.exists() else {}
    results[result["name"]] = dict(result)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json_value({"subject": subject, "results": results}), indent=1)
    # A list of numbers or cells, of which a result is full, takes one line.
    write_text(path, re.sub(r"\[[^][{}]*\]", lambda numbers: re.sub(r"\n\s*", " ", numbers[0]), text) + "\n")
    return path


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results in a file by name; also of a single result, as `--json` prints it.

    Raises:
        InvalidParameterError: if the file is not a result of verax bench.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidParameterError(f"{path}: not JSON: {error}") from error
    results = read.get("results", {read.get("name"): read}) if isinstance(read, dict) else None
    if not isinstance(results, dict) or "subject" not in read or None in results:
        raise InvalidParameterError(f"{path}: not a result of verax bench; expected the JSON that --output wrote")
    return results


def render(template: Path, folder: Path) -> str:
    """Page of a Jinja template with the results in a folder: no number in it is typed.

    The template is given `result(NAME)`, `names(BEGINNING)` and `table(NAME, NUMBER, only=CELLS)`. A name is the
    results' file and name, such as `text-amd-epyc-2c/short-prompts-int8`; `table` keeps the rows of which a cell is
    among `only`, and has no heading.

    Raises:
        InvalidParameterError: if there is no template, or it asks for what the results do not have.
    """
    if not template.is_file():
        raise InvalidParameterError(f"template: there is no file {template}; run this in the repository's root")
    paths = sorted(folder.glob("*.json"))
    results = {f"{path.stem}/{name}": one for path in paths for name, one in read_results(path).items()}

    def result(name: str) -> dict[str, Any]:
        if name not in results:
            raise InvalidParameterError(f"{folder}: no result of {name!r}; there are {', '.join(results) or 'none'}")
        return results[name]

    def rows_of(name: str, number: int = 0, *, only: Sequence[str] | None = None) -> str:
        one = result(name)["tables"][number]
        rows = [row for row in one["rows"] if only is None or set(row) & set(only)]
        if only is not None and len(rows) < len(only):
            raise InvalidParameterError(f"only: {name} has {len(rows)} of the {len(only)} rows")
        return "\n".join(table_lines({"columns": one["columns"], "rows": rows})[:-1])

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    names = lambda beginning: sorted(name for name in results if name.startswith(beginning))
    try:
        page = environment.from_string(template.read_text(encoding="utf-8"))
        text = page.render(result=result, table=rows_of, names=names)
    except jinja2.TemplateError as error:
        raise InvalidParameterError(f"{template}: {error}") from error
    return re.sub(r"\n{3,}", "\n\n", text)  # what macros leave


RESAMPLES, CONFIDENCE = 10_000, 0.95
"""Draws of the bootstrap, and the confidence of the interval."""

BASELINES = (
    *("torch", "transformers", "llama.cpp", "ik_llama.cpp", "fla", "diffusers", "stable-diffusion.cpp", "openvino"),
    *("onnxruntime", "vllm"),
)
"""First words of the names of baselines: if one changes, the machine did, or its version."""


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any], *, threshold: float = 0.05) -> dict[str, Any]:
    """Page that compares each side of the old results with the same side of the new ones; `complete` if none is slower.

    A side is `slower` (`faster`) if the whole interval of the ratio is more than `threshold` above (below) 1, `same` if
    it is within the threshold on both sides, and else `undecided`. It is also undecided where the runs are too few for
    the confidence: even the greatest difference would arise by chance too often (a permutation test's smallest p).

    Args:
        old, new: results of the same subject, by name.
        threshold: relative change of time that matters.

    Raises:
        InvalidParameterError: if the results are not timed, are of different subjects, or have no side in common.
    """
    if not 0 <= threshold < 1:
        raise InvalidParameterError(f"threshold: expected a share from 0 to less than 1, got {threshold}")
    before, after = _series("old", old), _series("new", new)
    subject, other = (next(iter(results.values()))["subject"] for results in (old, new))
    if subject != other:
        raise InvalidParameterError(f"new: expected a result of bench {subject}, got one of bench {other}")
    common = [name for name in before if name in after]
    if not common:
        raise InvalidParameterError(f"new: none of its sides is in old, which has {', '.join(before)}")
    ours = lambda name: not name.rpartition(" / ")[2].startswith(BASELINES)
    rows = [{"name": name, "ours": ours(name), **_judged(before[name], after[name], threshold)} for name in common]
    slower = [row["name"] for row in rows if row["ours"] and row["verdict"] == "slower"]
    columns = {
        "side": lambda row: row["name"] if row["ours"] else f"{row['name']} (not ours)",
        "old ms": lambda row: f"{1e3 * row['old_s']:.4g}",
        "new ms": lambda row: f"{1e3 * row['new_s']:.4g}",
        "new / old": lambda row: f"{row['ratio']:.3f}",
        f"{100 * CONFIDENCE:g}% interval": lambda row: f"{row['low']:.3f}-{row['high']:.3f}",
        "runs": lambda row: ", ".join(map(str, row["runs"])),
        "verdict": lambda row: f"**{row['verdict']}**" if row["name"] in slower else row["verdict"],
    }
    differing = _differing(old, new)
    notes = {
        "Only in old": [name for name in before if name not in after],
        "Only in new": [name for name in after if name not in before],
        "Not the same in both, or busy, so the difference may be theirs": [
            f"{name}: {values[0]} and {values[1]}" for name, values in differing.items()
        ],
    }
    return {
        "title": f"bench {subject}: " + (f"{len(slower)} slower" if slower else "nothing proven slower"),
        "intro": f"A change counts beyond {threshold:.0%} of the time.",
        "tables": [table(rows, columns)],
        "notes": [f"{label}: {'; '.join(parts)}." for label, parts in notes.items() if parts],
        "rows": rows,
        "regressions": slower,
        "complete": not slower,
        "differing": differing,
    }


def _series(which: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Numbers of every timed side, by the names of result, group, case and side."""
    series = {
        " / ".join([name, *(case[key] for key in ("group", "case") if case.get(key)), side]): times
        for name, result in results.items()
        for case in result.get("cases", ())
        for side, times in case["sides"].items()
    }
    if not series:
        raise InvalidParameterError(f"{which}: no timed result of verax bench; expected the JSON that --output wrote")
    return series


def _judged(before: Mapping[str, Any], after: Mapping[str, Any], threshold: float) -> dict[str, Any]:
    """Medians of a side's seconds, their ratio, new over old, the ends of its interval, and the verdict.

    Where both results have the rates of runs, they are the seconds of one piece of work, infinite in a run that
    finished none.
    """
    old, new = before["seconds"], after["seconds"]
    if "rates" in before and "rates" in after:
        old, new = ([1 / rate if rate else math.inf for rate in side["rates"]] for side in (before, after))
    rng = np.random.default_rng(0)  # the same files give the same verdict
    medians = [np.median(rng.choice(np.asarray(runs), (RESAMPLES, len(runs))), axis=1) for runs in (new, old)]
    ends = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    with np.errstate(invalid="ignore"):  # two infinities, of sides that finished nothing
        low, high = np.quantile(medians[0] / medians[1], ends, method="nearest")  # nothing lies between infinities
    verdict = "undecided"
    if 2 / math.comb(len(old) + len(new), len(old)) <= 1 - CONFIDENCE:
        if low > 1 + threshold:
            verdict = "slower"
        elif high < 1 - threshold:
            verdict = "faster"
        elif 1 - threshold <= low and high <= 1 + threshold:
            verdict = "same"
    old_s, new_s = float(np.median(old)), float(np.median(new))
    interval = {"ratio": new_s / old_s, "low": float(low), "high": float(high)}
    return {"old_s": old_s, "new_s": new_s, "runs": [len(old), len(new)], **interval, "verdict": verdict}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Facts of the machine, and settings, that are not the same in the results of one name."""

    def facts(result: Mapping[str, Any]) -> dict[str, Any]:
        settings = {key: value for key, value in result["settings"].items() if key not in ("runs", "warmup")}
        machine = {key: result["machine"].get(key) for key in MACHINE_FACTS}
        return machine | settings | {"noise": "busy" if result.get("noise", {}).get("busy") else "quiet"}

    differing: dict[str, list[Any]] = {}
    for before, after in ((facts(old[name]), facts(new[name])) for name in old if name in new):
        pairs = {key: [before.get(key), after.get(key)] for key in before | after}
        differing |= {key: pair for key, pair in pairs.items() if pair[0] != pair[1] or "busy" in pair}
    return differing
