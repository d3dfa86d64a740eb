"""`verax bench reports`: the tables of the earlier ports, as cases of the other benchmarks, measured again here."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from verax import builtin
from verax.bench.delta.cases import CONFIGURATIONS, bench_delta
from verax.bench.harness import Benchmark, check_names
from verax.bench.ops.cases import bench_ops
from verax.bench.results import markdown, not_run, table, to_json
from verax.bench.text.cases import bench_text
from verax.bench.text.workload import short_prompts
from verax.bench.video.cases import bench_video
from verax.compare import Comparison, compare_case
from verax.compare.cases.text import embed_case, text_case
from verax.compare.cases.video import VIDEO_PARTS, has_part, video_case
from verax.compare.pipelines import Clip, compare_pipelines, random_video
from verax.errors import VeraxError
from verax.files import write_text

__all__ = ["REPORTS", "bench_reports", "write_reports"]

VERSIONS = ("torch", "transformers", "diffusers", "cython")
"""Names of the baselines' versions in a result's machine."""

MOST_WORDS = 300
"""Characters of an error that a page repeats."""

FRAMES, FEW = (9, 17, 57), 17
"""Frames of the earlier ports' clips, and those up to which `--quick` runs."""

ATTENTION = ("standard", "chunked", "auto")
"""Implementations of attention whose memory is planned; the last is what verax runs."""

DTYPES = ("float32", "bfloat16")

CLIP = Clip(num_frames=13, height=64, width=64, num_inference_steps=5)
"""Frames and steps of the earlier port's clip."""

WORST_LAYERS, QUICK_PARTS = 12, 2
"""Rows of a table of layers, and parts of the video model that `--quick` compares: the transformer and the VAE."""

Results = Callable[[bool], Iterator[Mapping[str, Any]]]
"""Function of `quick`, which makes results: tables, and a machine with the versions of baselines."""


def memory_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """Memory of a forward pass of SkyReels-V2's 1.3B at the reports' full size, by the compiler's plan."""
    layers = 1 if quick else None
    yield bench_video(frames=FRAMES, memory=ATTENTION, runs=0, layers=layers, height=544, width=960)


def speed_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """Time of a forward pass and of decoding by frames, what compiling costs and when it pays, and diffusers'."""
    sizes: dict[str, Any] = dict(height=64, width=112, layers=4) if quick else dict(height=272, width=480)
    frames = [count for count in FRAMES if not quick or count <= FEW]
    options = {"also": ("standard", "chunked"), "against": ("diffusers",), "runs": 3 if quick else 10}
    yield bench_video(frames=frames, **options, **sizes)


def generation_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """Hugging Face prompt by prompt and in one batch, and our engine: short prompts, fewer tokens if quick."""
    runs, tokens = (3, 16) if quick else (10, 100)
    make = lambda vocab_size: short_prompts(vocab_size, max_tokens=tokens)
    yield bench_text(None, make, runs=runs, warmup=1, against=("transformers",))


def paged_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """The decode step's attention by sequences: the chosen implementation, chunks in XLA, and keys gathered first."""
    yield bench_ops(operations=["paged"], runs=5 if quick else 15, warmup=2)


def delta_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """The hierarchical rule and the layer around it, and PyTorch's eager and through Cython: equal work each time."""
    yield bench_delta(
        sections=("rule", "layer"),
        configurations=list(CONFIGURATIONS)[: 2 if quick else None],
        without=("torch.compile", "transformers", "fla"),
        runs=3 if quick else 10,
        warmup=1,
    )


def frame_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """One clip by diffusers' whole pipeline and by verax's, in both precisions: overall, by frame, by pixel."""
    with tempfile.TemporaryDirectory() as scratch:
        there = builtin.video_model().is_dir()
        model = builtin.video_model() if there else random_video(Path(scratch) / "video")
        clips = {dtype: compare_pipelines(model, CLIP, dtype=dtype).comparison for dtype in DTYPES}
    percent = lambda part: f"{100 * part:.2g}%"
    overall = {
        "precision": lambda row: row[0],
        "MSE": lambda row: f"{sum(row[1].mse) / row[1].frames:.1e}",
        "PSNR dB": lambda row: f"{row[1].clip_psnr:.2f}",
        "SSIM": lambda row: f"{row[1].clip_ssim:.6f}",
        "verdict": lambda row: row[1].verdict,
    }
    frames: dict[str, Callable[[int], object]] = {"frame": lambda i: i + 1}
    for dtype, clip in clips.items():
        frames |= {
            f"{dtype} MSE": lambda i, clip=clip: f"{clip.mse[i]:.1e}",
            f"{dtype} PSNR dB": lambda i, clip=clip: f"{clip.psnr[i]:.2f}",
            f"{dtype} SSIM": lambda i, clip=clip: f"{clip.ssim[i]:.6f}",
        }
    pixels = {
        "precision": lambda row: row[0],
        "mean": lambda row: percent(row[1].mean_difference),
        "95th percentile": lambda row: percent(row[1].p95_difference),
        "99th percentile": lambda row: percent(row[1].p99_difference),
        "largest": lambda row: percent(row[1].max_difference),
        "mean, of the clip's mean": lambda row: percent(row[1].relative_difference or 0),
    }
    note = (
        f"The {'built-in video model' if there else 'small video model of random weights'}: one clip of "
        f"{CLIP.num_frames} frames of {CLIP.height} x {CLIP.width} in {CLIP.num_inference_steps} steps, by diffusers' "
        "pipeline and by verax from the same noise; `verax compare video --part output`. Pixels from 0 to 1."
    )
    tables = [
        table(clips.items(), overall, title="Overall statistics", note=note),
        table(range(clips[DTYPES[0]].frames), frames, title="Frame by frame"),
        table(clips.items(), pixels, title="Distribution of pixel differences"),
    ]
    yield {"tables": tables, "machine": _versions()}


def layer_results(quick: bool) -> Iterator[Mapping[str, Any]]:
    """Errors by layer of the built-in models against PyTorch, in float32, and in bfloat16 with float32 as arbiter."""
    video = builtin.video_model() if builtin.video_model().is_dir() else None
    parts = [part for part in VIDEO_PARTS if has_part(video, part)]
    makers: dict[str, Any] = {"text": lambda scratch: text_case(None, scratch)}
    makers["embedding"] = lambda scratch: embed_case(None, scratch)
    for part in parts[: QUICK_PARTS if quick else None]:
        makers[f"video, {part}"] = lambda scratch, part=part: video_case(video, part)
    tables: list[dict[str, Any]] = []
    for name, make in makers.items():
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as scratch:
                tables.append(_layers(f"{name}, {dtype}", compare_case(make(Path(scratch)), dtype=dtype)))
    if quick and parts[QUICK_PARTS:]:
        tables.append(not_run(f"Errors by layer: {', '.join(parts[QUICK_PARTS:])}", "--quick leaves it out"))
    yield {"tables": tables, "machine": _versions()}


def _versions() -> dict[str, str]:
    import diffusers
    import torch
    import transformers

    return {library.__name__: str(library.__version__) for library in (torch, transformers, diffusers)}


def _layers(title: str, compared: Comparison) -> dict[str, Any]:
    """Table of the layers with the largest errors, and the output."""
    worst = sorted(compared.rows, key=lambda row: -row.errors.l2)[:WORST_LAYERS]
    columns: dict[str, Callable[[Any], object]] = {
        "layer": lambda row: row.name,
        "PyTorch's dtype": lambda row: row.reference_dtype,
        "ours": lambda row: row.dtype,
        "max abs": lambda row: f"{row.errors.max_abs:.1e}",
        "max / mean": lambda row: f"{row.errors.max_rel:.1e}",
        "relative L2": lambda row: f"{row.errors.l2:.1e}",
        "cosine": lambda row: f"{row.errors.cosine:.6f}",
    }
    note = (
        f"{compared.title}. {len(compared.rows)} layers compared ({'equal' if compared.passed else 'different'}); "
        "those with the largest errors, in the order of the model."
    )
    if compared.output is not None and compared.output.ratio is not None:
        columns["error ratio"] = lambda row: "" if row.ratio is None else f"{row.ratio:.2f}"
        note += " The ratio is our error over PyTorch's, both against float32."
    rows = [row for row in compared.rows if row in worst or row is compared.output]
    return table(rows, columns, title=f"Errors by layer: {title}", note=note)


@dataclass(frozen=True)
class Report:
    """One page: its title, a sentence on the earlier port, and its results, by section."""

    title: str
    about: str
    sections: Mapping[str, Results]


REPORTS: Mapping[str, Report] = {
    "video": Report(
        "Video compared with PyTorch: memory and speed",
        "The earlier port made 57 frames of 544 x 960 in 5 steps on a GPU: PyTorch in 20 s, the port in 130 s.",
        {"memory": memory_results, "speed": speed_results},
    ),
    "accuracy": Report(
        "Accuracy compared with PyTorch",
        "The earlier port's clip of 13 frames, in bfloat16, had 36.63 dB and an SSIM of 0.9937 against PyTorch's.",
        {"frames": frame_results, "layers": layer_results},
    ),
    "text": Report(
        "Text generation compared with Hugging Face",
        "The earlier port ran Qwen3-0.6B on a GPU: 37.5 tokens/s prompt by prompt, 117.0 batched, 76.1 with its JAX "
        "engine.",
        {"generation": generation_results, "paged attention": paged_results},
    ),
    "delta-rule": Report(
        "The hierarchical delta rule compared with PyTorch and Cython",
        "The earlier port reported 758x to 1958x; what remains of that is in "
        "[delta-comparison.md](../delta-comparison.md).",
        {"delta rule": delta_results},
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

    A section that cannot run here (a library or a device that is missing, too little memory) is a table that says why.

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
        benchmark, tables, versions = Benchmark("report"), [], {}
        begin = time.perf_counter()
        for section, make in REPORTS[name].sections.items():
            report(f"{name}: {section}")
            try:
                for result in make(quick):
                    heading = {"title": section.capitalize(), "note": result.get("intro", "")}
                    tables += [
                        heading | {key: value for key, value in one.items() if value} for one in result["tables"]
                    ]
                    versions |= {key: result["machine"][key] for key in VERSIONS if key in result["machine"]}
            except (VeraxError, ImportError, MemoryError, jax.errors.JaxRuntimeError) as error:
                tables.append(not_run(section.capitalize(), " ".join(str(error).split())[:MOST_WORDS]))
        command = f"verax bench reports{' --quick' if quick else ''} --only {name}"
        _ = benchmark.limits  # what the page shows of the machine
        results.append(
            benchmark.result(
                name,
                title=REPORTS[name].title,
                intro=f"{REPORTS[name].about} Made by `{command}`.",
                settings={"quick": quick, "command": command},
                versions=versions,
                tables=tables,
                seconds=time.perf_counter() - begin,
            )
        )
    return results


def write_reports(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write `NAME.md` and `NAME.json` for each report, and a `README.md` that lists all in the folder; their paths.

    Earlier reports in the folder that are not in `results` stay unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now, texts = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), {}
    for result in results:
        dated = {**result, "date": now}
        texts[folder / f"{result['name']}.md"] = markdown(dated)
        texts[folder / f"{result['name']}.json"] = to_json(dated)
    for path, text in texts.items():
        write_text(path, text)
    there = {name: folder / f"{name}.json" for name in REPORTS}
    found = [json.loads(path.read_text(encoding="utf-8")) for path in there.values() if path.is_file()]
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
        "bench reports` makes the same tables on any machine. A table that cannot be made there states the reason.",
        "tables": [table(found, columns)],
        "notes": [],
    }
    write_text(folder / "README.md", markdown(index))
    return [*texts, folder / "README.md"]
