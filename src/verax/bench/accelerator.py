"""`verax bench accelerator` and `verax bench reports`: lists of commands of the other benchmarks.

Each command runs in a process of its own: one that dies, hangs or fills the memory takes nothing else with it, and what
it held on the device is free afterwards. Several load and compile at the same time, which is most of their time, and
measure in turns. The record of an accelerator's part is written when it ends, and a part that has finished is not
repeated.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from verax import builtin, progress
from verax.bench.harness import TURN
from verax.bench.processes import run_command
from verax.bench.results import date, table, write
from verax.bench.settings import AcceleratorSettings, ReportsSettings, check_names
from verax.errors import InvalidParameterError, VeraxError
from verax.files import write_json

SHORTEST, DEVICE_SECONDS, REPORT_SECONDS = 20.0, 120.0, 7200.0
"""Seconds that have to be left for a part to be begun, to find the devices, and of a report's command at most."""

LONGEST_NOTE = 160
"""Characters of an error on the page. The log of the part has all of it."""


class Part(NamedTuple):
    """One command of a list.

    Attributes:
        summary: what it measures, or the number that the project wants to reach on one H200.
        command: words after the Python interpreter, as a shell has them.
        tiny: options that a rehearsal adds; they replace the same options before them.
        full: options that a rehearsal leaves out.
        memory: share of the device's memory that JAX may take in it, next to other parts.
        traced: True if a call is profiled after the measurement; the folder `traces` has what a profiler's page reads.
    """

    summary: str
    command: str
    tiny: str = ""
    memory: float = 0.1
    traced: bool = False
    full: str = ""

    def words(self, *, tiny: bool) -> list[str]:
        """Words of the command, with the options of a rehearsal or those that it leaves out."""
        return shlex.split(f"{self.command} {self.tiny if tiny else self.full}")


BENCH = "-m verax bench {} --json"
PYTEST = "-m pytest tests/gpu/test_{}.py -p no:cacheprovider --numprocesses 2"
ONCE = "--runs 1 --warmup 0"

WORKLOADS = {
    "nano-vllm": ("--workload nano-vllm", "--requests 4 --scale 0.01"),
    "short-prompts": ("--workload short-prompts", "--requests 2 --max-tokens 3"),
    "prompt-512": ("--workload prompt --prompt-tokens 512", "--prompt-tokens 16"),
    "prompt-4096": ("--workload prompt --prompt-tokens 4096", "--prompt-tokens 32"),
}
"""Options of text workloads, and of their rehearsals."""

MEMORY = {"0.6b": 0.35, "8b": 0.5}
"""Shares of memory of text models: of an H100 the first holds 200,000 tokens of Qwen3-0.6B's cache."""

TEXT_TARGETS = {
    "text-0.6b-bfloat16-nano-vllm": "; target: 24,000 tokens/s",
    "text-0.6b-bfloat16-short-prompts": "; target: 3,000 tokens/s",
}


def _text(size: str, quantization: str | None) -> dict[str, Part]:
    shapes, precision = {"0.6b": "qwen3", "8b": "qwen3-8b"}[size], quantization or "bfloat16"
    summary, tiny_model = f"Qwen3-{size.upper()} shapes, {precision}", shlex.quote(str(builtin.text_model()))
    parts = {}
    for workload, (options, tiny) in WORKLOADS.items():
        options += f" --quantization {quantization}" if quantization else ""
        against = "" if quantization else " --against transformers --no-starts"
        command = BENCH.format(f"text --runs 3 {options}{against}")
        name = f"text-{size}-{precision}-{workload}"
        tiny_options = f"--model {tiny_model} {tiny} {ONCE}"
        target = TEXT_TARGETS.get(name, "")
        full = f"--shapes {shapes}"
        parts[name] = Part(summary + target, command, tiny_options, MEMORY[size], traced=bool(target), full=full)
    return parts


def _video(summary: str, stage: str, frames: str) -> Part:
    command = BENCH.format(f"video --stage {stage} --frames {frames} --height 544 --width 960 --against diffusers")
    tiny = f"--size tiny --frames 5 --height 16 --width 32 {ONCE}"
    return Part(f"Wan 1.3B, 544 x 960: {summary}", command, tiny, 0.15, traced="target" in summary)


PARTS: Mapping[str, Part] = {
    "tests": Part("an engine and cuDNN's attention, in a checkout", PYTEST.format("gpu")),
    "operations": Part("every implementation compared with its reference, in a checkout", PYTEST.format("operations")),
    # Those that a target is set for come before the rest, in case the time does not suffice.
    **_text("0.6b", None),
    "video-57": _video("a forward pass at 57 frames; target: 0.43 s", "transformer", "57"),
    "delta": Part(
        "the gated delta rule; target: at most 1.5 times flash-linear-attention's time",
        BENCH.format("delta --only gated --configs Small"),
        ONCE,
    ),
    "kernels": Part(
        "experimental implementations compared with the others",
        BENCH.format("ops --only kernels --runs 20"),
        f"--only attention {ONCE}",
    ),
    **_text("0.6b", "int8"),
    **_text("0.6b", "int4"),
    **_text("8b", None),
    **_text("8b", "int8"),
    **_text("8b", "int4"),
    "video-9-17": _video("a forward pass at 9 and 17 frames", "transformer", "9,17"),
    "video-97": _video("a forward pass at 97 frames; target: 1.04 s", "transformer", "97"),
    "video-vae": _video("decoding 9 and 57 frames", "vae", "9,57"),
}
"""Parts by name, correctness first."""

REPORTS: Mapping[str, Part] = {
    "video": Part(
        "The earlier port made 57 frames of 544 x 960 in 5 steps on a GPU: PyTorch in 20 s, the port in 130 s",
        BENCH.format("video --frames 9,17,57 --against diffusers --runs 10"),
        "--frames 9,17 --height 64 --width 112 --layers 4 --runs 3",
    ),
    "text": Part(
        "The earlier port ran Qwen3-0.6B on a GPU: 37.5 tokens/s prompt by prompt, 117.0 batched, 76.1 by its engine",
        BENCH.format("text --against transformers"),
        "--max-tokens 16 --runs 3",
    ),
    "delta-rule": Part(
        "The earlier port reported 758x to 1958x; [delta-comparison.md](../delta-comparison.md) has what remains of it",
        BENCH.format("delta --only rule,layer --against torch,cython"),
        "--configs Small,Medium --runs 3",
    ),
}
"""Tables of the earlier ports, by the names of their reports; `tiny` has the options of `--quick`."""


def bench_accelerator(settings: AcceleratorSettings) -> dict[str, Any]:
    """Run the parts in order, or list them.

    The folder gets `parts/NAME.json` and `.log` of each part, and the results of the benchmarks in them. A part begins
    only if some of the total time is left, and is stopped at the end of that time.

    Raises:
        InvalidParameterError: for an unknown part, or a CPU without `rehearse`.
        VeraxError: if JAX does not start.
    """
    # Parts run in the checkout, if there is one.
    folder, rehearse, seconds = settings.folder.absolute(), settings.rehearse, settings.seconds
    check_names("only", settings.only, PARTS)
    names = [name for name in PARTS if name in (settings.only or PARTS)]
    name = "rehearsal" if rehearse else "parts"
    page: dict[str, Any] = {"subject": "accelerator", "name": name, "date": date(), "notes": []}
    if settings.list:
        columns = {"part": lambda name: name, "measures": lambda name: PARTS[name].summary}
        return {**page, "title": "Accelerator: parts", "intro": "In this order.", "tables": [table(names, columns)]}
    begin = time.monotonic()
    machine = find_device(folder)
    if machine["platform"] == "cpu" and not rehearse:
        raise InvalidParameterError("rehearse: JAX has no GPU or TPU here; --rehearse runs the parts at tiny sizes")
    run = {"device": machine["devices"][0], "rehearse": rehearse}
    paths = {name: folder / "parts" / f"{name}.json" for name in names}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}
    records = {name: record for name, record in found.items() if record | run == record and not record["error"]}
    todo = [name for name in names if name not in records]

    def measure(name: str) -> dict[str, Any]:
        part, path, left = PARTS[name], paths[name], seconds - (time.monotonic() - begin)
        if left < min(SHORTEST, seconds):
            return {"error": f"not begun: the budget of {seconds:g} s is spent", "note": "", "result": None}
        words = part.words(tiny=rehearse)
        if part.traced:
            words += ["--trace", str(folder / "traces" / name)]
        variables = {TURN: str(folder / "turn"), "XLA_PYTHON_CLIENT_MEM_FRACTION": str(part.memory)}
        record = run_command(words, path.with_suffix(".log"), min(left, settings.part_seconds), variables) | run
        write_json(path, record)
        return record

    with progress.bar("running parts") as report, ThreadPoolExecutor(settings.jobs) as pool:
        for done, (name, record) in enumerate(zip(todo, pool.map(measure, todo), strict=True)):
            report(done, len(todo), name)
            records[name] = record
            if record["result"] is not None and "machine" in record["result"]:
                write(record["result"], folder)
    records = {name: records[name] for name in names}
    title = f"Accelerator: {run['device']}"
    return {
        **page,
        "title": title + (" (a rehearsal at tiny sizes: its numbers have no meaning)" if rehearse else ""),
        "intro": "Targets are for one H200; the limit is the one that was measured on this device.",
        "settings": {"parts": names, "rehearse": rehearse, "part_seconds": settings.part_seconds, "seconds": seconds},
        "machine": machine,
        "parts": records,
        "complete": not any(record["error"] for record in records.values()),
        "tables": [
            one for name, record in records.items() for one in _tables(name, f"{PARTS[name].summary}. ", record)
        ],
    }


def _tables(title: str, note: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tables of a command's result under a title, or the reason that it has none."""
    result = record["result"] or {}
    if record["error"]:
        error = textwrap.shorten(record["error"], LONGEST_NOTE, placeholder="...").rstrip(".")
        return [{"title": title, "note": f"**Not run**: {error}."}]
    if "tables" not in result:
        return [{"title": title, "note": f"{note}{record['note']}"}]
    heading = {"title": title, "note": f"{note}{result['intro']}"}
    return [heading | {key: value for key, value in one.items() if value} for one in result["tables"]]


def find_device(folder: Path) -> dict[str, Any]:
    """Fingerprint of the machine, from another process: this one must not hold a part of the device's memory.

    Raises:
        VeraxError: if JAX does not start.
    """
    record = run_command(["-m", "verax", "info", "--json", "--no-measure"], folder / "device.log", DEVICE_SECONDS)
    if record["error"] or record["result"] is None:
        raise VeraxError(f"JAX does not start: {record['error'] or record['note']}")
    return record["result"]["machine"]


def bench_reports(settings: ReportsSettings) -> dict[str, Any]:
    """Measure the table of an earlier port again. If it cannot be made here, the page states the reason."""
    check_names("only", [settings.only], REPORTS)
    part, made_by = REPORTS[settings.only], f"{'--quick ' if settings.quick else ''}--only {settings.only}"
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as scratch:
        record = run_command(part.words(tiny=settings.quick), Path(scratch) / "log", REPORT_SECONDS)
    return {
        **{key: record["result"][key] for key in ("machine", "measured", "noise", "date") if not record["error"]},
        **{"subject": "reports", "name": settings.only, "settings": {"quick": settings.quick}, "notes": []},
        "title": f"An earlier port, measured again: {settings.only}",
        "intro": f"{part.summary}. Made by `verax bench reports {made_by}`.",
        "tables": _tables("", "", record),
    }
