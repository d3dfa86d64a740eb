"""`verax compare`: proof that verax gives what PyTorch gives, layer by layer."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from verax.cli import options
from verax.cli.compare_videos import videos
from verax.errors import UnsupportedModelError, VeraxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from verax.compare import Case, Comparison
    from verax.compare.video_report import VideoReport

__all__ = ["app"]

REFERENCES = {"text": ("transformers",), "video": ("diffusers",), "embed": ("transformers", "torch")}
"""What each kind of model is compared with: LAM with a PyTorch form of its own, all others with a library's."""

OUTPUT = "output"
"""What `--part` calls the clip of the whole pipeline."""

PIPE_WIDTH = 160
"""Columns where there is no terminal."""

DIFFERENT = 1
"""Exit status where the two sides are not equal."""


class _Group(TyperGroup):
    """`verax compare MODEL` beside `verax compare videos`: what is no command is a model's name, or its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="Compare with PyTorch, layer by layer.", no_args_is_help=True, cls=_Group)


@app.callback()
def _group() -> None:
    """Compare with PyTorch, layer by layer: verax compare text|video|embed|MODEL."""


app.command()(videos)


@app.command("model")
def model(
    what: Annotated[
        str,
        typer.Argument(metavar="text|video|embed|MODEL", help="Built-in models, or a checkpoint's folder or hub id."),
    ],
    against: Annotated[
        str | None, typer.Option(help="transformers, diffusers or torch; what fits the model if left out.")
    ] = None,
    dtype: options.Dtype = "float32",
    random: Annotated[
        bool, typer.Option("--random", help="Small random weights instead of the built-in model.")
    ] = False,
    inject: Annotated[
        bool, typer.Option("--inject", help="Run each layer on PyTorch's activations too, to locate errors.")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Compare gradients of each parameter too.")] = False,
    part: Annotated[
        str | None,
        typer.Option(help="video: transformer, vae, text_encoder, image_encoder, or output; all if left out."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="text, embed: a text instead of random tokens; video: of the output.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="text, embed: random tokens of a row.", min=1)] = None,
    max_rel: Annotated[
        float | None,
        typer.Option(help="Bound on each layer's relative L2 error; 1e-4 in float32 if left out.", min=0.0),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print all layers, however many.")] = False,
    height: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 128 if left out.")] = None,
    width: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 192 if left out.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="video: of the output, 4n + 1; 9 if left out.")] = None,
    inference_steps: Annotated[int | None, typer.Option(help="video: of the solver; 4 if left out.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write HTML, Markdown and JSON into this folder.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Run a model in PyTorch and in verax on the same inputs, and compare what each layer gives.

    Exit status 0 if the two are equal, 1 if not, 2 if they cannot be compared. Equal means: in float32 every layer
    within --max-rel, and every frame of a clip within 60 dB; in bfloat16 the output's error against float32 at most
    1.1 times PyTorch's own.

    Examples:

        verax compare text

        verax compare text --dtype bfloat16 --output report

        verax compare embed --random --inject --backward

        verax compare video --random --part vae

        verax compare path/to/model --part output --output report
    """
    from verax import plots
    from verax._compat import enable_compilation_cache
    from verax.compare import Case, Comparison, compare_case, show, write
    from verax.models import DTYPES

    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if output is not None and output.exists() and not output.is_dir():
        raise typer.BadParameter(f"--output: {output} is a file; a folder is written")
    sizes = {"height": height, "width": width, "num_frames": num_frames, "num_inference_steps": inference_steps}
    results: list[Comparison | VideoReport] = []
    try:
        if output is not None:
            plots.pyplot("compare")  # before the work, not after it
        enable_compilation_cache()
        with tempfile.TemporaryDirectory() as scratch:
            for name, case in _cases(what, Path(scratch), against, random, prompt, tokens, part, sizes):
                if isinstance(case, Case):
                    result = compare_case(case, dtype=dtype, inject=inject, backward=backward, max_rel=max_rel)
                else:
                    result = case(dtype=dtype)
                results.append(result)
                if not as_json:
                    console = Console()
                    console = console if console.is_terminal else Console(width=PIPE_WIDTH)
                    if isinstance(result, Comparison):
                        show(result, console, every=every)
                    else:
                        result.show(console, every=True)
                if output is not None:
                    folder = output / name
                    written = write(result, folder) if isinstance(result, Comparison) else result.write(folder)
                    sys.stderr.write(f"written: {', '.join(map(str, written))}\n")
    except VeraxError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        found = [result.as_dict() for result in results]
        sys.stdout.write(json.dumps(found[0] if len(found) == 1 else found, indent=1) + "\n")
    if any(result.failures for result in results):
        raise typer.Exit(DIFFERENT)


def _cases(
    what: str,
    scratch: Path,
    against: str | None,
    random: bool,
    prompt: str | None,
    tokens: int | None,
    part: str | None,
    sizes: dict[str, int | None],
) -> Iterator[tuple[str, Case | Callable[..., VideoReport]]]:
    """What the arguments ask for, and the folders of the reports; each made when it is its turn."""
    from verax.compare import cases

    kind = what if what in REFERENCES else _kind(what)
    if against not in (None, *REFERENCES[kind]):
        known = " or ".join(REFERENCES[kind])
        raise typer.BadParameter(f"--against: the reference of {what} is {known}, not {against!r}")
    if random and what != kind:
        raise typer.BadParameter(f"--random: {what} has weights; random ones are made for {', '.join(REFERENCES)}")
    clip = {name: size for name, size in sizes.items() if size is not None}
    if kind != "video":
        for option in (("part",) if part is not None else ()) + tuple(clip):
            raise typer.BadParameter(f"--{option.replace('_', '-')}: only video models have it, not {what}")
        make = cases.text_case if kind == "text" else cases.embed_case
        model = "random" if random else None if what == kind else what
        yield "", make(model, scratch, prompt=prompt, tokens=tokens)
        return
    if tokens is not None:
        raise typer.BadParameter("--tokens: parts of video models are compared on inputs of one size")
    if prompt is not None:
        clip = {**clip, "prompt": prompt}
    if clip and part not in (None, OUTPUT):
        raise typer.BadParameter(
            f"--{next(iter(clip)).replace('_', '-')}: of the output; --part {part} has random inputs"
        )
    yield from _video(None if random else _video_model(what), scratch, part, clip)


def _video(
    model: str | Path | None, scratch: Path, part: str | None, clip: dict[str, Any]
) -> Iterator[tuple[str, Case | Callable[..., VideoReport]]]:
    """The parts of a video model, or of a random one, and its output; or one of them."""
    from verax.compare.cases_video import VIDEO_PARTS, has_part, video_case

    if part != OUTPUT:
        for name in (part,) if part is not None else VIDEO_PARTS:
            if part is not None or has_part(model, name):
                yield name if part is None else "", video_case(model, name)
    if part in (None, OUTPUT):
        from verax.compare.pipelines import Clip, compare_pipelines, random_video

        model = random_video(scratch / "video") if model is None else model
        yield "", partial(compare_pipelines, model, Clip(**clip))


def _video_model(what: str) -> str | Path | None:
    """The model that is asked for by its kind or its name; None for a random one."""
    from verax import builtin

    if what != "video":
        return what
    return builtin.video_model() if builtin.video_model().is_dir() else None


def _kind(model: str) -> str:
    """What a checkpoint is."""
    from verax.checkpoint import Checkpoint
    from verax.checkpoint.checkpoint import read_json
    from verax.models import causal_lm, encoder

    folder = Path(model).expanduser()
    if (folder / "model_index.json").is_file() or (folder / "transformer").is_dir():
        return "video"
    own = folder / "config.json"
    config = read_json(own) if own.is_file() else Checkpoint.open(model).config
    if "_class_name" in config:
        return "video"
    try:
        encoder(config)
    except UnsupportedModelError:
        causal_lm(config)
        return "text"
    return "embed"
