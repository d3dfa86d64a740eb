"""`verax video --batch`: the clips of a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from verax._optional import require_optional
from verax.cli.results import check_input, open_results, run_lines

__all__ = ["make_clips"]


def make_clips(
    path: Path, folder: Path | None, pipeline: dict[str, Any], request: dict[str, Any], *, retry_errors: bool
) -> None:
    """Make the clips of a file, but for those that the folder holds already.

    Args:
        path: of the file.
        folder: of the clips.
        pipeline: arguments of `VideoPipeline.from_pretrained`.
        request: fields of `VideoRequest` for lines that do not have them.
        retry_errors: as in `ResultFile.open`.
    """
    from verax.batch.lines import InputFile
    from verax.batch.work import RESULTS, ClipLine, Clips
    from verax.video.pipeline import VideoPipeline

    if folder is None or folder.suffix:
        got = "none" if folder is None else folder
        raise typer.BadParameter(f"--output: {got}: expected a folder for clips beside --batch")
    check_input(path, folder / RESULTS, "--batch")
    require_optional("av")
    folder.mkdir(exist_ok=True)
    results = open_results(folder / RESULTS, ClipLine, retry_errors=retry_errors)  # before the model is loaded
    pipe = VideoPipeline.from_pretrained(**pipeline, show_progress=False)
    if not run_lines("clips", InputFile(path, "prompt"), results, Clips(pipe, folder, request)):
        raise typer.Exit(1)
