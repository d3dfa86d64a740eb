"""`verax compare`: proof that verax gives what PyTorch gives, layer by layer."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from verax.cli import options
from verax.cli.compare.own import own
from verax.cli.compare.run import Backward, Every, Fused, Inject, InputsFile, MaxRel, Output, given_inputs, run_cases
from verax.cli.compare.videos import videos
from verax.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verax.cli.compare.run import Made
    from verax.compare.inputs import Inputs

__all__ = ["app"]

REFERENCES = {"text": ("transformers",), "video": ("diffusers",), "embed": ("transformers", "torch")}
"""References of each kind of model: LAM has a PyTorch form of its own, all others a library's."""

OUTPUT = "output"
"""Value of `--part` for the clip of the whole pipeline."""


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


app.command()(own)
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
    size: Annotated[
        str | None,
        typer.Option(help="Of random weights: tiny; text: moe, with experts; video: 1.3b, 5b, tiny-5b."),
    ] = None,
    inputs: InputsFile = None,
    inject: Inject = False,
    backward: Backward = False,
    fused: Fused = False,
    part: Annotated[
        str | None,
        typer.Option(
            help="video: transformer, transformer_2, vae, text_encoder, image_encoder, output; all if left out."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="text, embed: a text instead of random tokens; video: of the output.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="text, embed: random tokens of a row.", min=1)] = None,
    max_rel: MaxRel = None,
    every: Every = False,
    height: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 128 if left out.")] = None,
    width: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 192 if left out.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="video: of the output, 4n + 1; 9 if left out.")] = None,
    inference_steps: Annotated[int | None, typer.Option(help="video: of the solver; 4 if left out.")] = None,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Run a model in PyTorch and in verax on the same inputs, and compare what each layer gives.

    Exit status 0 if the two are equal, 1 if not, 2 if they cannot be compared. Equal means: in float32 every layer
    within --max-rel, and every frame of a clip within 60 dB; in bfloat16 the output's error against float32 at most
    1.1 times PyTorch's own.

    Examples:

        verax compare text

        verax compare text --dtype bfloat16 --output report

        verax compare text --random --size moe

        verax compare embed --random --inject --backward

        verax compare text --fused

        verax compare video --random --part vae

        verax compare embed --inputs sentences.txt

        verax compare path/to/model --part output --output report
    """
    given = given_inputs(inputs, prompt)
    clip = {"height": height, "width": width, "num_frames": num_frames, "num_inference_steps": inference_steps}
    with tempfile.TemporaryDirectory() as scratch:
        run_cases(
            _cases(what, Path(scratch), against, random, given, tokens, part, size, clip),
            dtype=dtype,
            inject=inject,
            backward=backward,
            fused=fused,
            max_rel=max_rel,
            every=every,
            output=output,
            as_json=as_json,
        )


def _cases(
    what: str,
    scratch: Path,
    against: str | None,
    random: bool,
    inputs: Inputs,
    tokens: int | None,
    part: str | None,
    size: str | None,
    sizes: dict[str, int | None],
) -> Iterator[tuple[str, Made]]:
    """Cases that the arguments select, with the folders of their reports; each is made when it is its turn."""
    from verax.compare.cases import text as cases

    kind = what if what in REFERENCES else _kind(what)
    if against not in (None, *REFERENCES[kind]):
        known = " or ".join(REFERENCES[kind])
        raise typer.BadParameter(f"--against: the reference of {what} is {known}, not {against!r}")
    if random and what != kind:
        raise typer.BadParameter(f"--random: {what} has weights; random ones are made for {', '.join(REFERENCES)}")
    clip = {name: size for name, size in sizes.items() if size is not None}
    if size is not None and (kind == "embed" or not random):
        raise typer.BadParameter("--size: of random weights of text or video; it goes with --random")
    if kind != "video":
        for option in (("part",) if part is not None else ()) + tuple(clip):
            raise typer.BadParameter(f"--{option.replace('_', '-')}: only video models have it, not {what}")
        make = partial(cases.text_case, size=size or "tiny") if kind == "text" else cases.embed_case
        model = "random" if random else None if what == kind else what
        if tokens is not None and (inputs.texts or inputs.arrays):
            raise typer.BadParameter("--tokens: so many random ones; --inputs and --prompt have their own")
        yield "", make(model, scratch, inputs=inputs, tokens=tokens)
        return
    if tokens is not None:
        raise typer.BadParameter("--tokens: parts of video models have no random tokens but their own")
    if inputs.arrays and part is None:
        raise typer.BadParameter("--inputs: each part takes arrays of its own; name one with --part")
    if len(inputs.texts) > 1:
        raise typer.BadParameter(f"--inputs: one clip has one prompt, not {len(inputs.texts)}")
    if inputs.texts:
        clip = {**clip, "prompt": inputs.texts[0]}
    if clip and part not in (None, OUTPUT):
        raise typer.BadParameter(
            f"--{next(iter(clip)).replace('_', '-')}: of the output; --part {part} takes arrays, of --inputs"
        )
    yield from _video(None if random else _video_model(what), scratch, part, size or "tiny", inputs, clip)


def _video(
    model: str | Path | None, scratch: Path, part: str | None, size: str, inputs: Inputs, clip: dict[str, Any]
) -> Iterator[tuple[str, Made]]:
    """The parts of a video model, or of a random one, and its output; or one of them."""
    from verax.compare.cases.video import VIDEO_PARTS, has_part, video_case
    from verax.compare.inputs import Inputs

    if part != OUTPUT:
        for name in (part,) if part is not None else VIDEO_PARTS:
            if part is not None or has_part(model, name, size=size):
                given = Inputs() if part is None else inputs
                yield name if part is None else "", video_case(model, name, inputs=given, size=size)
    from verax.compare.pipelines import RANDOM_PIPELINES, Clip, compare_pipelines, random_video

    if part == OUTPUT or (part is None and (model is not None or size in RANDOM_PIPELINES)):
        if model is None and size not in RANDOM_PIPELINES:
            raise typer.BadParameter(f"--size: {size} has no random weights for a whole pipeline; name a --part")
        model = random_video(scratch / "video", size) if model is None else model
        yield "", partial(compare_pipelines, model, Clip(**clip), inputs=inputs if part == OUTPUT else Inputs())


def _video_model(what: str) -> str | Path | None:
    """The model that is selected by its kind or its name; None for a random one."""
    from verax import builtin

    if what != "video":
        return what
    return builtin.video_model() if builtin.video_model().is_dir() else None


def _kind(model: str) -> str:
    """Kind of a checkpoint: text, embed or video."""
    from verax.checkpoint import Checkpoint
    from verax.checkpoint.video.folder import is_video_folder
    from verax.files import read_json
    from verax.models import causal_lm, encoder

    folder = Path(model).expanduser()
    if is_video_folder(folder):
        return "video"
    own = folder / "config.json"
    if own.is_file():
        config = read_json(own)
    else:
        opened = Checkpoint.open(model)
        folder, config = opened.folder, opened.config
    if (folder / "modules.json").is_file():  # sentence-transformers': it may be a language model's too
        encoder(config)
        return "embed"
    try:
        causal_lm(config)
    except UnsupportedModelError:
        encoder(config)
        return "embed"
    return "text"
