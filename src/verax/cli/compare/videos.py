"""`verax compare videos`: how close two files of video are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["videos"]


def videos(
    first: Annotated[Path, typer.Argument(help="A clip: .mp4, .gif, .webp, ..., or a folder of pictures.")],
    second: Annotated[Path, typer.Argument(help="The clip to compare with it, of the same size and length.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for videos.json, .md, .html and side-by-side.mp4."),
    ] = None,
    min_psnr: Annotated[
        float | None, typer.Option(help="Exit with 1 if the PSNR of any frame is below this, in dB.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare two clips: PSNR, SSIM and MSE of each frame, differences of pixels, and a verdict.

    Exit status: 0, 1 if a frame falls below --min-psnr, 2 if the clips cannot be compared. Needs the extra
    named compare.

    Examples:

        verax compare videos jax.mp4 torch.mp4

        verax compare videos jax.mp4 torch.mp4 --output report --min-psnr 35
    """
    from rich.console import Console

    from verax import plots
    from verax.compare.video_report import VideoReport
    from verax.compare.videos import compare_clips
    from verax.errors import VeraxError
    from verax.video.images import read_clip

    if output is not None and output.exists() and not output.is_dir():
        raise typer.BadParameter(f"--output: {output} is a file; a folder is written")
    try:
        if output is not None:
            plots.pyplot("compare")  # before the work, not after it
        (a, fps), (b, other_fps) = read_clip(first, name=str(first)), read_clip(second, name=str(second))
        report = VideoReport(compare_clips(a, b), a, b, (str(first), str(second)), fps or other_fps, min_psnr)
        written = [] if output is None else report.write(output)
    except VeraxError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        report.show(Console())
    if written:
        sys.stderr.write(f"written: {', '.join(map(str, written))}\n")
    if report.failures:
        sys.stderr.write("\n".join(report.failures) + "\n")
        raise typer.Exit(1)
