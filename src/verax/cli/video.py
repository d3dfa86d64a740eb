"""`verax video`: a prompt, an image or a clip to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.cli.clips import make_clips
from verax.cli.lines import checked

if TYPE_CHECKING:
    from verax.video.memory import StageMemory
    from verax.video.outputs import VideoOutput, VideoProgress
    from verax.video.pipeline import VideoPipeline

__all__ = ["video"]

_FORCING = "Diffusion forcing"
_SPEED = "Speed and memory"


def _option(help_text: str, *, panel: str | None = None, names: Sequence[str] = (), **more: Any) -> Any:
    """An option; a name with dashes is also taken with underscores, as the reports' commands have it."""
    spelled = [one for name in names for one in dict.fromkeys((name, "--" + name[2:].replace("-", "_")))]
    return typer.Option(*spelled, help=help_text, rich_help_panel=panel, **more)


def video(
    prompt: Annotated[
        list[str] | None,
        _option("Description of the clip; again for each segment.", names=["--prompt"], show_default=False),
    ] = None,
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
        _option(
            "A file of clips: JSONL or Parquet with custom_id, prompt and any options, or a prompt a line. Started "
            "again, it goes on where it stopped.",
            names=["--batch"],
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
            help="A folder of SkyReels-V2, Wan2.1 or Wan2.2, or its hub id.",
        ),
    ] = None,
    image: Annotated[str | None, _option("An image: the first frame.")] = None,
    negative_prompt: Annotated[
        str | None,
        _option(
            "Description of what the clip should not show.", names=["--negative-prompt"], show_default="checkpoint's"
        ),
    ] = None,
    resolution: Annotated[str | None, _option("540P or 720P.", show_default="checkpoint's")] = None,
    height: Annotated[int | None, _option("Size of a frame in pixels.", show_default="checkpoint's")] = None,
    width: Annotated[int | None, _option("Size of a frame in pixels.", show_default="checkpoint's")] = None,
    num_frames: Annotated[int | None, _option("4n + 1.", names=["--num-frames"], show_default="checkpoint's")] = None,
    inference_steps: Annotated[
        int | None,
        _option(
            "Steps of the solver.", names=["--inference-steps", "--num-inference-steps"], show_default="checkpoint's"
        ),
    ] = None,
    guidance_scale: Annotated[
        float | None,
        _option("Scale of classifier-free guidance.", names=["--guidance-scale"], show_default="checkpoint's"),
    ] = None,
    guidance_scale_2: Annotated[
        float | None,
        _option(
            "Scale with the second of two transformers.", names=["--guidance-scale-2"], show_default="checkpoint's"
        ),
    ] = None,
    shift: Annotated[float | None, _option("More: more steps at high noise.", show_default="checkpoint's")] = None,
    fps: Annotated[int | None, _option("Frames per second.", show_default="checkpoint's")] = None,
    seed: Annotated[int, _option("The same seed gives the same clip.")] = 42,
    reference: Annotated[str | None, _option("skyreels or diffusers: rules where the two differ.")] = None,
    kind: Annotated[str | None, _option("t2v, i2v, ti2v or df.", show_default="as the folder says")] = None,
    lora: Annotated[list[str] | None, _option("FILE or FILE:FACTOR; can be repeated.")] = None,
    contact_sheet: Annotated[Path | None, _option("Also some frames in one .png.", names=["--contact-sheet"])] = None,
    resume: Annotated[
        Path | None, _option("A .safetensors file that keeps finished segments, to continue from.")
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Write each segment next to the output as soon as it is finished.")
    ] = False,
    last_image: Annotated[
        str | None, _option("An image: the last frame.", names=["--last-image", "--end-image"], panel=_FORCING)
    ] = None,
    clip: Annotated[
        str | None, _option("A clip to continue.", names=["--video", "--video-path"], panel=_FORCING)
    ] = None,
    base_num_frames: Annotated[
        int | None, _option("Frames of a segment.", names=["--base-num-frames"], panel=_FORCING)
    ] = None,
    overlap_history: Annotated[
        int | None, _option("Frames that segments share.", names=["--overlap-history"], panel=_FORCING)
    ] = None,
    addnoise_condition: Annotated[
        int, _option("Noise on prefix frames; 20 hides seams.", names=["--addnoise-condition"], panel=_FORCING)
    ] = 0,
    ar_step: Annotated[int, _option("Steps between blocks.", names=["--ar-step"], panel=_FORCING)] = 0,
    causal_block_size: Annotated[
        int | None, _option("Latent frames in a block.", names=["--causal-block-size"], panel=_FORCING)
    ] = None,
    cache: Annotated[str | None, _option("teacache: skip steps that change little.", panel=_SPEED)] = None,
    teacache: Annotated[
        bool, typer.Option("--teacache", help="The same as --cache teacache.", rich_help_panel=_SPEED)
    ] = False,
    cache_threshold: Annotated[
        float, _option("A higher threshold skips more.", names=["--cache-threshold", "--teacache-thresh"], panel=_SPEED)
    ] = 0.2,
    guidance: Annotated[
        str, _option("batch; sequential for less memory; auto: the first that fits.", panel=_SPEED)
    ] = "auto",
    attention: Annotated[str, _option("auto, standard, chunked or flash.", panel=_SPEED)] = "auto",
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Keep weights in the host's memory meanwhile.", rich_help_panel=_SPEED),
    ] = False,
    devices: Annotated[
        int | None,
        _option(
            "Devices to divide a clip over: guidance and sequence parallelism that use the most of them.",
            show_default=False,
            panel=_SPEED,
        ),
    ] = None,
    guidance_parallel: Annotated[
        bool,
        typer.Option(
            "--guidance-parallel", help="Prompt and negative prompt on two groups of devices.", rich_help_panel=_SPEED
        ),
    ] = False,
    sequence_parallel: Annotated[
        int, _option("Devices of a group, which divide the tokens.", names=["--sequence-parallel"], panel=_SPEED)
    ] = 1,
    shard_weights: Annotated[
        bool,
        typer.Option(
            "--shard-weights",
            help="Divide the transformer's weights over the devices: less memory, more communication.",
            rich_help_panel=_SPEED,
        ),
    ] = False,
    dtype: options.Dtype = "bfloat16",
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory that each stage needs, and stop.")] = False,
) -> None:
    """Make a video of a prompt; from an image or a clip, if one is given.

    Examples:

        verax video --model SkyReels-V2-I2V-1.3B-540P --image cat.png --prompt "The cat turns its head." -o cat.mp4

        verax video -m SkyReels-V2-DF-1.3B-540P --prompt "A street" --prompt "Rain begins" --num-frames 257

        verax video --batch prompts.jsonl -o clips/
    """
    from verax.video import files
    from verax.video.memory import free_memory
    from verax.video.pipeline import VideoPipeline
    from verax.video.request import VideoRequest

    shared: dict[str, Any] = dict(
        image=image,
        last_image=last_image,
        video=clip,
        negative_prompt=negative_prompt,
        resolution=resolution,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=inference_steps,
        guidance_scale=guidance_scale,
        guidance_scale_2=guidance_scale_2,
        shift=shift,
        fps=fps,
        seed=seed,
        ar_step=ar_step,
        causal_block_size=causal_block_size,
        overlap_history=overlap_history,
        addnoise_condition=addnoise_condition,
        base_num_frames=base_num_frames,
        cache="teacache" if teacache else cache,
        cache_threshold=cache_threshold,
        guidance=guidance,
        attention=attention,
    )
    pipeline: dict[str, Any] = dict(
        model=model,
        dtype=dtype,
        reference=reference,
        kind=kind,
        lora=_factors(lora or []),
        offload=offload,
        guidance_parallel=guidance_parallel,
        sequence_parallel=sequence_parallel,
        devices=devices,
        devices_for=VideoRequest(**shared),
        shard_weights=shard_weights,
    )
    if batch is not None:
        one = {"prompt": prompt, "contact-sheet": contact_sheet, "resume": resume, "preview": preview, "plan": plan}
        if given := [f"--{name}" for name, value in one.items() if value]:
            raise typer.BadParameter(f"--batch: {given[0]} is for one clip; leave it out")
        return make_clips(batch, output, pipeline, shared, retry_errors=retry_errors)
    if retry_errors:
        raise typer.BadParameter("--retry-errors: it is for --batch")
    if not prompt:
        raise typer.BadParameter("give --prompt, or a file of prompts with --batch")
    output = output or Path("video.mp4")
    checked(prompt)
    files.check_path(output, name="--output")
    if contact_sheet is not None:
        files.check_sheet_path(contact_sheet, name="--contact-sheet")
    pipe = VideoPipeline.from_pretrained(**pipeline)
    request = VideoRequest(prompt, **shared, resume=resume, callback=_previews(output) if preview else None)
    begin = time.perf_counter()
    planned = pipe.plan(request)
    if plan:
        if pipe.mesh is not None:
            typer.echo(f"memory of the first of {_devices(pipe)}")
        typer.echo(_table(planned, free_memory(pipe.parts.components)))
        return
    seconds = time.perf_counter() - begin
    divided = "" if pipe.mesh is None else f"; {_devices(pipe)}"
    sys.stderr.write(f"memory: {_summary_of_plan(planned)}; programs ready in {seconds:.1f} s{divided}\n")
    made = pipe.generate(request)
    written = [made.save(output)]
    if contact_sheet is not None:
        written.append(made.save_contact_sheet(contact_sheet))
    sys.stderr.write(_summary(made))
    typer.echo("\n".join(map(str, written)))


def _devices(pipe: VideoPipeline) -> str:
    """Devices of a pipeline that has several."""
    assert pipe.mesh is not None
    groups, size = pipe.mesh.shape.values()
    return f"{groups} x {size} devices (guidance x sequence)"


def _factors(lora: list[str]) -> dict[str, float]:
    """Factor of each FILE or FILE:FACTOR."""
    found: dict[str, float] = {}
    for one in lora:
        file, colon, factor = one.rpartition(":")
        try:
            found.update({file: float(factor)} if colon else {one: 1.0})
        except ValueError:
            found[one] = 1.0  # a colon of the file's name
    return found


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


def _summary(made: VideoOutput) -> str:
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in made.seconds.items())
    steps = f"{made.computed} of {made.steps} steps computed"
    if made.steps:  # none if all segments were there already
        if made.computed < made.steps:
            steps += " (verax bench teacache measures what that costs)"
        steps += f", {made.seconds['denoise'] / made.steps:.3g} s a step"
    count, height, width, _ = made.frames.shape
    return f"{count} frames of {height} x {width}: {stages}; {steps}\n"
