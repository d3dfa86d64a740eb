"""`verax video`: a prompt, an image or a clip to a file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax._optional import require_optional
from verax.cli import options
from verax.cli.files import check_folder, check_input, checked, open_results, run_lines
from verax.cli.options import Flags
from verax.options import option
from verax.video.options import VideoRequest
from verax.video.recipes import describe_recipe, with_recipe

if TYPE_CHECKING:
    from verax.video.memory import StageMemory
    from verax.video.outputs import VideoOutput, VideoProgress
    from verax.video.pipeline import VideoPipeline

_SPEED = "Speed and memory"


@dataclass(frozen=True)
class PipelineOptions:
    """Options of the load of a video model: arguments of `VideoPipeline.from_pretrained`."""

    dtype: str = option("bfloat16", "bfloat16 or float32.")
    quantization: str | None = option(
        None,
        "int8 or fp8: 8-bit weights of transformer and UMT5, made while loading; dequantize: floats of quantised ones.",
        flags=("--quantization", "-q"),
        shown="the files'",
    )
    reference: str | None = option(
        None, "skyreels, wan or diffusers: rules where PyTorch's pipelines differ.", shown="the authors'"
    )
    kind: str | None = option(None, "t2v, i2v, flf2v, ti2v, df or vace.", shown="the folder's")
    lora: tuple[str, ...] = option((), "LoRA: FILE or FILE:FACTOR; can be repeated.", shown="")
    lora_2: tuple[str, ...] = option(
        (),
        "LoRA of the second of two transformers (Wan2.2's A14B). If left out, --lora is for both, or for the one that "
        "a file's name says (high_noise, low_noise).",
        shown="",
    )
    vae: str | None = option(
        None,
        "tiny=FILE, or tiny: decode by TAEHV's tiny decoder, faster and less sharp.",
        panel=_SPEED,
        shown="the checkpoint's",
    )
    offload: bool = option(False, "Keep weights in the host's memory while they are not used.", panel=_SPEED)
    devices: int | None = option(
        None,
        "Devices to divide a clip over: guidance and sequence parallelism that use the most of them.",
        low=1,
        panel=_SPEED,
        shown="",
    )
    guidance_parallel: bool = option(
        False, "Prompt and negative prompt of a clip on two groups of devices.", panel=_SPEED
    )
    sequence_parallel: int = option(1, "Devices of a group, which divide the tokens of a clip.", low=1, panel=_SPEED)
    shard_weights: bool = option(
        False, "Divide the transformer's weights over the devices: less memory, more communication.", panel=_SPEED
    )


PYTHON_ONLY = (*("latents", "prompt_embeds", "negative_prompt_embeds", "output_type", "callback", "causal_attention"),)
"""Options of a request that only Python has."""


@options.with_flags
def video(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A name that ends in .mp4, .gif or .webp, or a folder for png; with --batch a folder of clips.",
            show_default="video.mp4",
        ),
    ] = None,
    batch: Annotated[
        Path | None,
        typer.Option(
            help="A file of clips: JSONL or Parquet with custom_id, prompt and any options, or a prompt a line. "
            "Started again, it continues where it stopped."
        ),
    ] = None,
    retry_errors: options.RetryErrors = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            "--model-id",
            "--model_id",
            help="A folder of SkyReels-V2, Wan2.1 or Wan2.2, or its hub id; the built-in model if left out.",
        ),
    ] = None,
    *,
    request: Annotated[dict[str, Any], Flags(VideoRequest, without=PYTHON_ONLY, underscores=True)],
    contact_sheet: Annotated[
        Path | None, typer.Option("--contact-sheet", "--contact_sheet", help="Also some frames in one .png.")
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Write each segment next to the output as soon as it is finished.")
    ] = False,
    teacache: Annotated[
        bool, typer.Option("--teacache", help="The same as --cache teacache.", rich_help_panel=_SPEED)
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Measure MagCache's curve of the checkpoint for these steps, write it to a JSON file for "
            "--cache-curve, and stop.",
            rich_help_panel=_SPEED,
        ),
    ] = None,
    pipeline: Annotated[dict[str, Any], Flags(PipelineOptions, underscores=True)],
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory that each stage needs, and stop.")] = False,
) -> None:
    """Make a video of a prompt, and of an image or a clip if given.

    \b
    Examples:
        verax video --model SkyReels-V2-I2V-1.3B-540P --image cat.png --prompt "The cat turns its head." -o cat.mp4
        verax video -m SkyReels-V2-DF-1.3B-540P --prompt "A street" --prompt "Rain begins" --num-frames 257
        verax video --batch prompts.jsonl -o clips/
    """
    from verax.video import files
    from verax.video.memory import free_memory
    from verax.video.pipeline import VideoPipeline

    prompt, resume = request.pop("prompt"), request.pop("resume")
    if teacache:
        request["cache"] = "teacache"
    clip_options = with_recipe(VideoRequest(**request))
    if clip_options.recipe is not None:
        sys.stderr.write(f"{describe_recipe(clip_options.recipe)}\n")
    pipeline |= {"model": model, "lora_2": pipeline["lora_2"] or None, "devices_for": clip_options}
    if batch is not None:
        one = {"prompt": prompt, "contact-sheet": contact_sheet, "resume": resume, "preview": preview, "plan": plan}
        one["calibrate"] = calibrate
        if given := [f"--{name}" for name, value in one.items() if value]:
            raise typer.BadParameter(f"--batch: {given[0]} is for one clip; leave it out")
        return _make_clips(batch, output, pipeline, request, retry_errors=retry_errors)
    if retry_errors:
        raise typer.BadParameter("--retry-errors: it is for --batch")
    if not prompt:
        raise typer.BadParameter("give --prompt, or a file of prompts with --batch")
    output = output or Path("video.mp4")
    checked(list(prompt))
    files.check_path(output, fps=clip_options.fps, name="--output")
    for name, path in (("--resume", resume), ("--contact-sheet", contact_sheet)):
        if path is not None and output.resolve() in ((inside := Path(path).resolve()), *inside.parents):
            raise typer.BadParameter(f"{name}: {path}: a folder of frames (--output) holds nothing else; name another")
    if calibrate is not None:
        files.check_parent(calibrate, "--calibrate")
    if contact_sheet is not None:
        files.check_sheet_path(contact_sheet, name="--contact-sheet")
    pipe = VideoPipeline.from_pretrained(**pipeline)
    clip = VideoRequest(prompt, **request, resume=resume, callback=_previews(output) if preview else None)
    if calibrate is not None:
        typer.echo(pipe.calibrate(clip).save(calibrate))
        return
    begin = time.perf_counter()
    planned = pipe.plan(clip)
    if plan:
        if pipe.mesh is not None:
            typer.echo(f"memory of the first of {_devices(pipe)}")
        typer.echo(_table(planned, free_memory(pipe.parts.components)))
        return
    seconds = time.perf_counter() - begin
    divided = "" if pipe.mesh is None else f"; {_devices(pipe)}"
    sys.stderr.write(f"memory: {_summary_of_plan(planned)}; programs ready in {seconds:.1f} s{divided}\n")
    result = pipe.generate(clip)
    written = [result.save(output)]
    if contact_sheet is not None:
        written.append(result.save_contact_sheet(contact_sheet))
    sys.stderr.write(_summary(result))
    typer.echo("\n".join(map(str, written)))


def _make_clips(
    path: Path, folder: Path | None, pipeline: dict[str, Any], request: dict[str, Any], *, retry_errors: bool
) -> None:
    """Make the clips of a file, but for those that the folder holds already."""
    from verax.batch.lines import InputFile
    from verax.batch.work import RESULTS, ClipLine, Clips
    from verax.video.pipeline import VideoPipeline

    if folder is None or folder.suffix:
        got = "none" if folder is None else folder
        raise typer.BadParameter(f"--output: {got}: expected a folder for clips with --batch")
    check_folder(folder)
    check_input(path, folder / RESULTS, "--batch")
    require_optional("av")
    file = InputFile(path, "prompt")
    folder.mkdir(parents=True, exist_ok=True)
    results = open_results(folder / RESULTS, ClipLine, retry_errors=retry_errors)  # before the model is loaded
    pipe = VideoPipeline.from_pretrained(**pipeline, show_progress=False)
    if not run_lines("clips", file, results, Clips(pipe, folder, request)):
        raise typer.Exit(1)


def _devices(pipe: VideoPipeline) -> str:
    """Devices of a pipeline that has several."""
    assert pipe.mesh is not None
    groups, size = pipe.mesh.shape.values()
    return f"{groups} x {size} devices (guidance x sequence)"


def _previews(output: Path) -> Any:
    """Callback that writes each segment next to the output."""
    from verax.video import files

    def write(now: VideoProgress) -> None:
        if now.stage == "decode" and now.frames is not None and now.segments > 1:
            path = output.with_name(f"{output.stem}-segment-{now.segment + 1}{output.suffix}")
            files.write_clip(now.frames, path, fps=now.fps)
            sys.stderr.write(f"segment {now.segment + 1} of {now.segments}: {path}\n")

    return write


def _summary_of_plan(stages: list[StageMemory]) -> str:
    from verax.video.memory import format_bytes, largest

    parts = ", ".join(f"{stage.stage} {format_bytes(stage.peak)}" for stage in stages)
    return f"{format_bytes(largest(stages).peak)} at most ({parts})"


def _table(stages: list[StageMemory], free: int | None) -> str:
    from verax.video.memory import format_bytes

    heads = ("stage", "weights", "other models", "work", "together")
    rows = [
        (stage.stage, *map(format_bytes, (stage.weights, stage.others, stage.work, stage.peak))) for stage in stages
    ]
    if free is not None:
        rows.append(("free", "", "", "", format_bytes(free)))
    return "\n".join(f"{row[0]:13}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in (heads, *rows))


def _summary(result: VideoOutput) -> str:
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.seconds.items())
    steps = f"{result.computed} of {result.steps} steps computed"
    if result.steps:  # 0 if all segments were there already
        if result.computed < result.steps:
            steps += " (verax bench video --stage clip measures what that costs)"
        steps += f", {result.seconds['denoise'] / result.steps:.3g} s a step"
    count, height, width, _ = result.frames.shape
    return f"{count} frames of {height} x {width}: {stages}; {steps}\n"
