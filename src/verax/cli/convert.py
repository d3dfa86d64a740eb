"""`verax convert`: convert a video model from one published layout to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="A SkyReels-V2 or Wan folder, of either layout.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="Layout to write: original or diffusers.", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the transformer and the encoders: bfloat16 or float32. The VAE keeps its own.",
            show_default="as they are",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the target if it exists.")] = False,
) -> None:
    """Write a video model in the original's layout or in diffusers', as safetensors; weights keep their bits.

    In the original layout, .pth files become safetensors files of the same name (Wan2.1_VAE.safetensors,
    models_t5_umt5-xxl-enc-bf16.safetensors, ...), with their settings beside them. verax opens either.

    Examples:

        verax convert SkyReels-V2-I2V-1.3B-540P SkyReels-V2-I2V-1.3B-540P-Diffusers --to diffusers

        verax convert SkyReels-V2-DF-14B-540P-Diffusers DF-14B --to original --dtype bfloat16
    """
    from verax import progress
    from verax.checkpoint.video import convert as video_convert
    from verax.checkpoint.video.folder import VideoFolder
    from verax.errors import InvalidParameterError

    if to not in ("original", "diffusers"):
        raise InvalidParameterError(f"to: expected original or diffusers, got {to!r}")
    if dtype not in (None, "bfloat16", "float32"):
        raise InvalidParameterError(f"dtype: expected bfloat16 or float32, got {dtype!r}")
    with progress.bar("converting", count=False) as report:
        folder = video_convert.convert(VideoFolder(source), target, to, dtype=dtype, force=force, progress=report)
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    typer.echo(
        f"{folder}: {written / 1e6:.1f} MB in the layout of {'diffusers' if to == 'diffusers' else 'the original'}"
    )
