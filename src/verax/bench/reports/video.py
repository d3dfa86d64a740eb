"""Tables of the earlier ports on the speed and memory of video, measured again by `verax bench reports`.

Random weights in the shapes of SkyReels-V2's image-to-video model of 1.3B parameters, as in the earlier ports.
"""

from __future__ import annotations

from typing import Any

from verax.bench.reports.tables import Table, not_run, times
from verax.bench.video.cases import work
from verax.bench.video.diffusers import DiffusersSide
from verax.bench.video.run import bench_video
from verax.errors import MissingDependencyError

__all__ = ["memory_tables", "speed_tables"]

FRAMES = (9, 17, 57)
"""Frames of the earlier ports' clips, of 544 x 960."""

IMPLEMENTATIONS = {"standard": "standard attention", "chunked": "chunked attention", "auto": "what verax runs"}
"""Implementations of attention, with their names in the tables."""

STEPS = (5, 10, 30, 50)
"""Steps in the table of the costs of compiling."""

GUIDED = 2
"""Forward passes of a step with guidance."""

DTYPE = "bfloat16"

FEW = 17
"""Frames up to which `--quick` runs."""

LAYERS = 30
"""Layers of the model."""

SMALL: dict[str, Any] = dict(height=64, width=112, layers=4)
"""Clip and layers that `--quick` is timed with."""

SIDES = {
    "diffusers": "PyTorch (diffusers)",
    "verax, standard": "verax, standard attention",
    "verax, chunked": "verax, chunked attention",
    "verax": "**verax**",
}


def memory_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """Memory of a forward pass at the reports' full size, by implementation of attention.

    Ours is the compiler's plan, and nothing runs; PyTorch has none, and runs one layer.
    """
    layers = 1 if quick else LAYERS
    sizes: dict[str, Any] = dict(height=544, width=960)
    result = bench_video(frames=FRAMES, memory=tuple(IMPLEMENTATIONS), runs=0, layers=layers, **sizes)
    by = {(row["frames"], row["attention"]): row for row in result["attention_memory"]}
    weights = next(row["weights_gb"] for row in by.values() if "weights_gb" in row)
    result["diffusers_memory"], rows = [], []
    for count in FRAMES:
        theirs: dict[str, Any] = {"frames": count, "left_out": "--quick leaves it out"}
        if not quick or count <= FEW:
            theirs = {"frames": count, **_measured(count, sizes, weights)}
            result["machine"] |= theirs.pop("versions", {})
        result["diffusers_memory"].append(theirs)
        rows.append(
            [
                str(count),
                *(_gigabytes(by[count, impl]) for impl in IMPLEMENTATIONS),
                _gigabytes(theirs),
            ]
        )
    note = (
        f"544 x 960, bfloat16, one forward pass of the transformer with {layers} of its {LAYERS} layers, whose weights "
        f"({weights:.2f} GB) are included. verax: `memory_analysis()` of the compiled program. PyTorch: what the "
        "process grew by at most while one layer ran, measured."
    )
    columns = ["frames", *(f"{name}, GB" for name in IMPLEMENTATIONS.values()), "PyTorch (diffusers), GB"]
    return [Table("Memory by implementation of attention and frames", columns, rows, note)], result


def _measured(frames: int, sizes: dict[str, Any], weights: float) -> dict[str, Any]:
    """Memory of PyTorch in GB, with as many GB of weights; or the reason that it is not known."""
    try:
        todo = work("transformer", "1.3b", frames=frames, dtype=DTYPE, layers=1, **sizes)
        side = DiffusersSide(todo, DTYPE)
    except MissingDependencyError as error:
        return {"left_out": str(error)}
    temporary = side.temporary()
    if temporary is None:
        return {"left_out": "this system does not tell the memory of a process"}
    return {"peak_gb": weights + temporary / 1e9, "temporary_gb": temporary / 1e9, "versions": side.versions}


def speed_tables(quick: bool) -> tuple[list[Table], dict[str, Any]]:
    """Time by frames, what compiling costs, and the steps until it pays: beside diffusers, interleaved."""
    sizes: dict[str, Any] = SMALL if quick else dict(height=272, width=480, layers=None)
    frames = tuple(count for count in FRAMES if not quick or count <= FEW)
    runs = 3 if quick else 10
    result = bench_video(
        stages=("transformer", "vae"),
        frames=frames,
        also=("standard", "chunked"),
        runs=runs,
        against=("diffusers",),
        **sizes,
    )
    what = f"{sizes['height']} x {sizes['width']}, bfloat16, {sizes['layers'] or LAYERS} of {LAYERS} layers"
    cases = {(case["stage"], case["frames"]): case for case in result["cases"]}
    tables = [_speed(cases, frames, f"{what}, {runs} interleaved runs"), _compiling(cases, frames)]
    tables.append(_paying(cases, frames))
    tables.append(not_run("Without compiling", "verax does not run op by op, as the report's port could"))
    if len(frames) < len(FRAMES):
        tables.append(not_run(f"Speed at {FRAMES[-1]} frames", "--quick leaves it out"))
    return tables, result


def _speed(cases: dict[tuple[str, int], Any], frames: tuple[int, ...], what: str) -> Table:
    rows = []
    for count in frames:
        denoise, decode = cases["transformer", count]["sides"], cases["vae", count]["sides"]
        totals = {}
        for side, name in SIDES.items():
            step = GUIDED * denoise[side]["median_s"]
            video = decode[side.partition(",")[0]][
                "median_s"
            ]  # decoding has no attention to choose an implementation of
            totals[side] = STEPS[0] * step + video
            cells = [f"{seconds:.2f}" for seconds in (step, STEPS[0] * step, video, totals[side])]
            faster = times(GUIDED * denoise["diffusers"]["median_s"] / step), times(totals["diffusers"] / totals[side])
            rows.append([str(count), name, *cells, *faster])
    note = (
        f"{what}; {STEPS[0]} steps with guidance, which are two forward passes each, and decoding; medians, compiling "
        "apart. The last columns: how many times as fast as PyTorch."
    )
    columns = ["frames", "side", "a step s", f"{STEPS[0]} steps s", "decoding s", "total s", "a step", "total"]
    return Table("Speed by frames", columns, rows, note)


def _compiling(cases: dict[tuple[str, int], Any], frames: tuple[int, ...]) -> Table:
    rows = []
    for count in frames:
        case = cases["transformer", count]
        step = GUIDED * case["sides"]["verax"]["median_s"]
        cells = (case["compile_s"] + step, step, case["compile_s"], case["compile_cached_s"])
        rows.append([str(count), *(f"{seconds:.2f}" for seconds in cells)])
    columns = ["frames", "first step s", "later steps s", "compiling s", "compiling from the disk cache s"]
    return Table("What compiling costs", columns, rows, "The transformer's program, tracing included.")


def _paying(cases: dict[tuple[str, int], Any], frames: tuple[int, ...]) -> Table:
    rows = []
    for count in frames:
        case = cases["transformer", count]
        ours, theirs = (GUIDED * case["sides"][side]["median_s"] for side in ("verax", "diffusers"))
        for steps in STEPS:
            warm = max(0.0, case["beside"]["diffusers"]["first_s"] - case["sides"]["diffusers"]["median_s"])
            totals = warm + steps * theirs, case["compile_s"] + steps * ours, case["compile_cached_s"] + steps * ours
            faster = (times(totals[0] / totals[1]), times(totals[0] / totals[2]))
            rows.append([str(count), str(steps), *(f"{total:.1f}" for total in totals), *faster])
    columns = ["frames", "steps", "diffusers s", "verax s", "verax from the disk cache s", "as fast", "as fast, cached"]
    note = "Out of the measured times: a first call, which compiles or warms up, and the steps."
    return Table("Steps until compiling pays", columns, rows, note)


def _gigabytes(row: dict[str, Any]) -> str:
    return f"{row['peak_gb']:.2f}" if "peak_gb" in row else f"not run: {row['left_out']}"
