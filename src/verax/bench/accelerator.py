"""`verax bench accelerator`: everything that waits for a GPU or TPU, as cases of the other benchmarks, in parts.

Each part runs in a process of its own (`python -m verax.bench.accelerator NAME FOLDER`), within a budget of time: a
part that dies, hangs or fills the memory takes nothing else with it, and what it held on the device is free afterwards.
Its file is written after each row, and a part that has finished is not repeated.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from verax.bench.results import Measured, Row, slug, table, write
from verax.errors import InvalidParameterError, VeraxError
from verax.files import write_json
from verax.plan.devices import DEVICES, Device

__all__ = ["PARTS", "Part", "attention_work", "bench_accelerator"]

REHEARSE = "--rehearse"

DEVICE, DEVICE_SECONDS = "device", 120.0
"""In the place of a part's name: the process writes the machine's fingerprint. Seconds to find the devices."""

SHORTEST = 20.0
"""Seconds that have to be left for a part to be begun."""

MOST = 160
"""Characters of an error in the table. The log of the part has all of it."""

WITHIN = 1.5
"""Time over flash-linear-attention's time that the project wants to stay below."""

# Baselines need some of the device's memory too, of which JAX would take three quarters at once.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True)
class Part:
    """One part of a run."""

    name: str
    about: str
    measure: Callable[[bool], Iterator[Measured]]
    """Measurement, at tiny sizes if its argument is true. It imports what it needs."""


TINY_SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Sizes of a rehearsal's language model."""

TEXT_CASES: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nano-vllm's mix": ("nano-vllm", {}, {"requests": 4, "scale": 0.01}),
    "4 x 100 tokens": ("short-prompts", {}, {"requests": 2, "max_tokens": 3}),
    "prompt of 512": ("prompt", {"tokens": 512}, {"tokens": 16}),
    "prompt of 4096": ("prompt", {"tokens": 4096}, {"tokens": 32}),
}
"""Workloads by case: name, options, and options of a rehearsal."""

TEXT_TARGETS = {("qwen3", None, "nano-vllm's mix"): 24_000.0, ("qwen3", None, "4 x 100 tokens"): 3_000.0}
"""Tokens per second on one H200, by shapes, quantisation and workload."""

AGAINST_TRANSFORMERS = {("qwen3", None, "4 x 100 tokens"), ("qwen3", None, "prompt of 512")}
"""Cases that transformers runs too, which takes the better part of an hour for nano-vllm's mix."""

VIDEO_TARGETS = {57: 0.85, 97: 2.07}
"""Seconds of a guided step on one H200, by number of frames."""


def _measured(case: Mapping[str, Any], name: str, unit: str, scale: float = 1.0, **more: Any) -> Row:
    """Row of a result's case: its chosen side's seconds, `scale` calls of it, or its rate in another unit."""
    side = case["sides"][case["chosen"]]
    seconds = scale * side["median_s"]
    work = {key: scale * (side if key in side else case)[key] for key in ("flops", "bytes_moved")}
    value = {"s": seconds, "ms": 1e3 * seconds}.get(unit, side["rate"])
    ratios = {other: ratio for other, ratio in case["ratios"].items() if not other.startswith("verax")}
    return Row(name, **({"value": value, "unit": unit, "seconds": seconds, **work, "ratios": ratios} | more))


def _tried(name: str, measure: Callable[[], Measured]) -> Measured:
    """A measurement, or a row with its failure: what does not fit or run here says nothing of the next case."""
    try:
        return measure()
    except (VeraxError, RuntimeError, MemoryError) as error:
        return [Row(name, error=f"{type(error).__name__}: {error}")], None


def _turns(rehearse: bool, runs: int) -> dict[str, int]:
    return {"runs": 1, "warmup": 0} if rehearse else {"runs": runs, "warmup": 1}


def measure_text(shapes: str, quantization: str | None, rehearse: bool) -> Iterator[Measured]:
    """Tokens per second of each workload, with random weights and an engine of its own for each."""
    import jax

    from verax.bench.harness import checkpoint_folder
    from verax.bench.text.cases import bench_text
    from verax.bench.text.workload import WORKLOADS
    from verax.shapes import SHAPES

    words, config = SHAPES[shapes]
    config = {**config, **TINY_SIZES} if rehearse else config
    with checkpoint_folder(None, "bfloat16", config) as folder:
        for name, (workload, options, tiny) in TEXT_CASES.items():
            gc.collect()  # an engine has cycles, and the next one sizes its cache by what is free
            jax.clear_caches()
            key = shapes, quantization, name
            make = partial(WORKLOADS[workload], **(tiny if rehearse else options))
            against = ("transformers",) if key in AGAINST_TRANSFORMERS and _torch_runs_here() else ()

            def run(name: str = name, key: Any = key, make: Any = make, against: Any = against) -> Measured:
                turns = _turns(rehearse, 3)
                result = bench_text(str(folder), make, **turns, against=against, quantization=quantization)
                result["settings"] |= {"model": f"random weights, {words}", "shapes": shapes}
                result["name"] = f"{shapes}-{result['name'].removeprefix(slug(folder.stem) + '-')}"
                flops, cached = attention_work(make(config["vocab_size"]), config)
                work = {"flops": result["work"]["flops"] + flops, "bytes_moved": result["work"]["bytes_moved"] + cached}
                case = {**result["cases"][0], **work}
                return [_measured(case, name, "tokens/s", target=TEXT_TARGETS.get(key))], result

            yield _tried(name, run)


def attention_work(workload: Any, config: Mapping[str, Any]) -> tuple[int, int]:
    """Work of attention that `bench_text` leaves out, for a model whose layers all see all keys.

    Args:
        workload: the prompts and the numbers of new tokens.
        config: config.json of the model.

    Returns:
        Operations of the scores and of the sums of values; bytes of the cache in bfloat16 that new tokens read.
    """
    size = config["num_hidden_layers"] * config["head_dim"]
    pairs = list(zip(map(len, workload.prompts), workload.max_tokens, strict=True))
    up_to = lambda count: count * (count + 1) // 2
    scores = sum(up_to(tokens + new - 1) for tokens, new in pairs)
    read = scores - sum(up_to(tokens) for tokens, _ in pairs)
    return 4 * config["num_attention_heads"] * size * scores, 4 * config["num_key_value_heads"] * size * read


def _torch_runs_here() -> bool:
    """True if transformers is installed, and torch on the platform that JAX runs on."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return False
    import jax
    import torch

    return {"cpu": True, "gpu": torch.cuda.is_available()}.get(jax.default_backend(), False)


def measure_video(stage: str, frames: Sequence[int], rehearse: bool) -> Iterator[Measured]:
    """Seconds of a guided step, or of decoding a clip, by number of frames; diffusers' too where it is installed."""
    from verax.bench.video.cases import bench_video

    passes = 2 if stage == "transformer" else 1  # a guided step: with the prompt, and with the negative one
    against = ("diffusers",) if importlib.util.find_spec("diffusers") is not None else ()
    for count in frames:
        name = f"{count} frames, " + ("guided step" if stage == "transformer" else "VAE decoding")
        clip: dict[str, Any] = dict(size="1.3b", frames=(count,), height=544, width=960)
        if rehearse:
            clip = dict(size="tiny", frames=(5,), height=16, width=32)

        def run(name: str = name, clip: Any = clip, count: int = count) -> Measured:
            result = bench_video(stages=(stage,), against=against, **clip, **_turns(rehearse, 3))
            target, note = VIDEO_TARGETS.get(count), f"compiled in {result['cases'][0]['compile_s']:.0f} s"
            target = target if stage == "transformer" else None
            return [_measured(result["cases"][0], name, "s", passes, target=target, note=note)], result

        yield _tried(name, run)


def measure_delta(rehearse: bool) -> Iterator[Measured]:
    """Milliseconds of the gated delta rule in bfloat16; transformers' and flash-linear-attention's where they run."""
    from verax.bench.delta.baselines import find_baselines
    from verax.bench.delta.cases import delta_result, measure
    from verax.bench.delta.gated import GPU_SHAPE, gated_case, gradient_case
    from verax.bench.harness import Benchmark

    shape, turns, benchmark = (1, 64, 2, 16) if rehearse else GPU_SHAPE, _turns(rehearse, 10), Benchmark("delta")
    with tempfile.TemporaryDirectory(prefix="verax-bench-") as folder:
        try:
            baselines = find_baselines(None, Path(folder), without=("torch", "cython", "torch.compile"))
            missing = baselines.skipped.get("fla", "")
        except (VeraxError, ImportError) as error:
            baselines, missing = None, str(error)
        for section, make in {"forward": gated_case, "forward and backward": gradient_case}.items():
            name = f"delta rule, {section}"

            def run(name: str = name, make: Any = make) -> Measured:
                case = measure(make("Long", shape, "bfloat16", baselines), benchmark.limits, **turns)
                theirs = case["sides"].get("fla chunk")
                target = None if theirs is None else 1e3 * WITHIN * theirs["median_s"]
                note = f"no target without flash-linear-attention: {missing}" if theirs is None and missing else ""
                settings = {"operations": [case["group"]], "configurations": ["Long"], "cpu_level": None, **turns}
                versions = {} if baselines is None else baselines.versions
                result = delta_result(benchmark, [case], settings, (), versions)
                return [_measured(case, name, "ms", target=target, note=note)], result

            yield _tried(name, run)


def measure_kernels(rehearse: bool) -> Iterator[Measured]:
    """Milliseconds of each experimental implementation, which no program runs unless it is named.

    The reference takes part where it is what is chosen: it writes out what the others do not, and may take seconds.
    Decode steps of Qwen3-0.6B and 8B, a prompt's chunk, a chunk next to decodes, a feed-forward layer of 8B. Whole
    sequences are a layer of Wan 1.3B at 81 frames of 480 x 832, and one of Gemma 3 270M with a sliding window.
    """
    from verax import ops
    from verax.bench.harness import Benchmark
    from verax.bench.ops.cases import measure_case

    benchmark = Benchmark("ops")
    for case in _kernel_cases(rehearse):
        name, known = f"{case.group}, {case.name}", ops.operations()[case.group].implementations
        kernels = [side for side in case.sides if side in known and known[side].experimental]
        slow = {side for side in case.sides if side in known and known[side].is_reference} - {case.chosen}
        if not kernels:
            note = f"no experimental implementation takes it on {ops.target().platform}"
            yield [Row(name, note=note)], None
            continue
        sides = {side: call for side, call in case.sides.items() if side not in slow}
        for kernel in kernels:
            one = replace(case, chosen=kernel, sides=sides)
            title = f"{name}, {kernel}"
            run = lambda one=one, title=title: ([_measured(measure_case(one, benchmark, 20, 2), title, "ms")], None)
            yield _tried(title, run)


def _kernel_cases(rehearse: bool) -> Iterator[Any]:
    from verax.bench.ops.attention import paged_decode_case, ragged_case, sampling_case, whole_sequence_case
    from verax.bench.ops.linear import linear_cases

    if rehearse:
        yield paged_decode_case(2, 40)
        yield whole_sequence_case(48, heads=2)
        yield whole_sequence_case(48, heads=2, kv_heads=1, window=16)
        yield sampling_case(2, vocab=600, top_k=50, top_p=0.95)
        return
    for rows, length in ((1, 8192), (16, 1024), (64, 2048), (256, 512)):
        yield paged_decode_case(rows, length)
    yield paged_decode_case(64, 2048, cache_dtype="int8")
    yield paged_decode_case(64, 2048, heads=32)
    yield ragged_case([4096], [512])
    yield ragged_case([1024] * 33, [1] * 32 + [480])
    yield whole_sequence_case(32760)
    yield whole_sequence_case(8192, heads=4, kv_heads=1, size=256, window=512)
    yield from linear_cases(4096, 12288, (1, 16, 64), ("int8", "int4-128", "float8-128"), None)
    for rows, top_k, top_p in ((1, 50, 1.0), (16, 50, 1.0), (16, 0, 0.95), (64, 50, 0.95)):
        yield sampling_case(rows, top_k=top_k, top_p=top_p)


def _tests(rehearse: bool) -> Iterator[Measured]:
    from verax.bench.correctness import measure_tests

    return measure_tests(rehearse)


def _operations(rehearse: bool) -> Iterator[Measured]:
    from verax.bench.correctness import measure_operations

    return measure_operations(rehearse)


def _text(size: str, quantization: str | None) -> Part:
    precision = quantization or "bfloat16"
    about = f"Qwen3-{size} shapes, {precision}: nano-vllm's mix, 4 x 100 tokens, prompts of 512 and 4096"
    shapes = {"0.6B": "qwen3", "8B": "qwen3-8b"}[size]
    return Part(f"text-{size.lower()}-{precision}", about, partial(measure_text, shapes, quantization))


def _video(name: str, about: str, stage: str, frames: Sequence[int]) -> Part:
    return Part(f"video-{name}", f"Wan 1.3B, 544 x 960: {about}", partial(measure_video, stage, frames))


_ALL = (
    Part("tests", "tests/gpu, in a checkout", _tests),
    Part("operations", "every implementation of every operation against its reference", _operations),
    # Those that a target is set for come before the rest, in case the time does not suffice.
    _text("0.6B", None),
    _video("57-97", "guided steps of 57 and 97 frames", "transformer", (57, 97)),
    Part("delta", "the gated delta rule: batch 4, 4096 tokens, 16 heads of 128, forward and backward", measure_delta),
    Part("kernels", "experimental implementations compared with the others", measure_kernels),
    _text("0.6B", "int8"),
    _text("0.6B", "int4"),
    _text("8B", None),
    _text("8B", "int8"),
    _text("8B", "int4"),
    _video("9-17", "guided steps of 9 and 17 frames", "transformer", (9, 17)),
    _video("vae", "decoding 9, 57 and 97 frames", "vae", (9, 57, 97)),
)

PARTS: Mapping[str, Part] = {part.name: part for part in _ALL}
"""Parts by name, correctness first."""


def bench_accelerator(
    folder: Path,
    *,
    only: Sequence[str] = tuple(PARTS),
    rehearse: bool = False,
    part_seconds: float = 300.0,
    seconds: float = 600.0,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the parts in order. The arguments are the options of `verax bench accelerator`.

    The folder gets `parts/NAME.json` and `.log` of each part, and the results of the benchmarks in them. No part is
    begun without a share of the time of all, and one that is running is stopped at its end.

    Raises:
        InvalidParameterError: for an unknown part, a budget that is not positive, or a CPU without `rehearse`.
        VeraxError: if JAX does not start.
    """
    if unknown := [name for name in only if name not in PARTS]:
        raise InvalidParameterError(f"only: expected {', '.join(PARTS)}, got {unknown[0]!r}")
    for what, value in (("part_seconds", part_seconds), ("seconds", seconds)):
        if not value > 0:
            raise InvalidParameterError(f"{what}: expected more than 0, got {value:g}")
    begin = time.monotonic()
    machine = find_device(folder)
    kind = machine["device_kind"]
    if machine["platform"] == "cpu" and not rehearse:
        raise InvalidParameterError("rehearse: JAX has no GPU or TPU here; --rehearse runs the parts at tiny sizes")
    records: dict[str, Any] = {}
    for name in [name for name in PARTS if name in only]:
        left = seconds - (time.monotonic() - begin)
        path = _part_file(name, folder)
        done = json.loads(path.read_text()) if path.exists() else {}
        if (done.get("device"), done.get("rehearse")) == (kind, rehearse) and not _failure(done):
            records[name] = done
            report(f"{name}: finished before")
        elif left < min(SHORTEST, seconds):
            records[name] = {"rows": [], "error": f"not begun: the budget of {seconds:g} s is spent", "seconds": 0.0}
        else:
            report(f"{name}: {PARTS[name].about}")
            records[name] = run_part(name, folder, rehearse=rehearse, seconds=min(left, part_seconds))
            report(f"{name}: {_failure(records[name]) or 'finished'} ({records[name]['seconds']:.0f} s)")
    device = next((device for device in DEVICES.values() if device.kind == kind), None)
    limits = "It is not in the table of devices, so no limits are shown."
    if device is not None:
        limits = (
            f"Its limits by {device.source}: {device.rate('bfloat16') / 1e12:,.1f} TFLOP/s of dense bfloat16 products, "
            f"{device.bandwidth / 1e9:,.0f} GB/s."
        )
    return {
        "subject": "accelerator",
        "name": "rehearsal" if rehearse else "parts",
        "title": f"Accelerator: {kind}" + (" (a rehearsal at tiny sizes: its numbers say nothing)" if rehearse else ""),
        "intro": f"{limits} TFLOP/s count products, GB/s weights and cache, each by formula. Targets are for one "
        "H200. 'verax is' the factor by which it is faster than a baseline in the same run.",
        "settings": {"parts": list(records), "rehearse": rehearse, "part_seconds": part_seconds, "seconds": seconds},
        "machine": machine,
        "parts": records,
        "complete": not any(_failure(record) for record in records.values()),
        "tables": [_table(records, device)],
        "notes": [],
    }


def _failure(record: Mapping[str, Any]) -> str:
    """First error of a part; empty if it has none."""
    return next(filter(None, (record["error"], *(row["error"] for row in record["rows"]))), "")


def _table(records: Mapping[str, Any], device: Device | None) -> dict[str, Any]:
    def amount(row: Any, key: str) -> str:
        value, unit = row[1][key], row[1]["unit"]
        if value is None:
            return ""
        if unit == "error":
            return f"{value:.1e}"
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

    def rate(row: Any, key: str, scale: float, form: str) -> str:
        seconds, value = row[1]["seconds"], row[1][key]
        return format(value / seconds / scale, form) if seconds and value else ""

    def share(row: Any) -> str:
        """Least time of the work by the sheet of the device, over its time."""
        seconds, flops, moved = (row[1][key] for key in ("seconds", "flops", "bytes_moved"))
        if device is None or not seconds or not flops:
            return ""
        return f"{max(flops / device.rate('bfloat16'), (moved or 0) / device.bandwidth) / seconds:.0%}"

    def notes(row: Any) -> str:
        line = " ".join((row[1]["error"] or row[1]["note"]).split()).replace("|", "\\|")
        return line if len(line) <= MOST else line[: MOST - 3] + "..."

    rows = [(name, row) for name, record in records.items() for row in record["rows"]]
    rows += [(name, asdict(Row("", error=record["error"]))) for name, record in records.items() if record["error"]]
    columns = {
        "part": lambda row: row[0],
        "case": lambda row: row[1]["case"],
        "measured": lambda row: "**failed**" if row[1]["error"] else amount(row, "value"),
        "target": lambda row: amount(row, "target"),
        "TFLOP/s": lambda row: rate(row, "flops", 1e12, ",.1f"),
        "GB/s": lambda row: rate(row, "bytes_moved", 1e9, ",.0f"),
        "of the limit": share,
        "verax is": lambda row: ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row[1]["ratios"].items()),
        "notes": notes,
    }
    return table(sorted(rows, key=lambda row: list(records).index(row[0])), columns)


def _part_file(name: str, folder: Path) -> Path:
    return folder / "parts" / f"{name}.json"


def run_part(name: str, folder: Path, *, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; its record, which its file holds too.

    Args:
        name: a name out of `PARTS`.
        folder: folder of all files.
        rehearse: at tiny sizes.
        seconds: time after which it is stopped.

    Returns:
        `rows`, `seconds`, `device`, `rehearse` and `error`, which is empty if the part came to its end.
    """
    path = _part_file(name, folder)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, log = time.monotonic(), path.with_suffix(".log")
    status = _run([name, str(folder), *([REHEARSE] if rehearse else [])], log, seconds)
    record = json.loads(path.read_text()) if path.exists() else {"rows": [], "error": "", "rehearse": rehearse}
    if status is None:
        record["error"] = f"stopped after {seconds:.0f} s"
    elif status:
        record["error"] = _last_line(log) or f"ended with status {status}"
    record["seconds"] = time.monotonic() - begin
    write_json(path, record)
    return record


def find_device(folder: Path) -> dict[str, Any]:
    """Fingerprint of the machine, with JAX's name of the device as `device_kind`.

    It is found in a process of its own: this one must not hold a part of the device's memory.

    Raises:
        VeraxError: if JAX does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "device.log"
    if _run([DEVICE, str(folder)], log, DEVICE_SECONDS) != 0:
        raise VeraxError(f"JAX does not start: {_last_line(log) or f'no answer after {DEVICE_SECONDS:.0f} s'}")
    return json.loads((folder / "device.json").read_text())


def _run(arguments: list[str], log: Path, seconds: float) -> int | None:
    """Exit status of this module's process; None if it was stopped with all that it had started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "verax.bench.accelerator", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _main(name: str, folder: str, *options: str) -> None:
    """Run a part in this process, or write the machine's fingerprint."""
    import jax

    from verax._compat import enable_compilation_cache
    from verax.machine import fingerprint

    kind, rehearse = jax.devices()[0].device_kind, REHEARSE in options
    if name == DEVICE:
        write_json(Path(folder) / "device.json", {**fingerprint(), "device_kind": kind})
        return
    enable_compilation_cache()
    record: dict[str, Any] = {"rows": [], "error": "", "rehearse": rehearse, "device": kind}
    for rows, result in PARTS[name].measure(rehearse):
        record["rows"] += [asdict(row) for row in rows]
        if result is not None:
            write(result, Path(folder))
        write_json(_part_file(name, Path(folder)), record)


if __name__ == "__main__":
    _main(*sys.argv[1:])
