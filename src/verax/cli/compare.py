"""`verax compare`: proof that verax computes what PyTorch computes, layer by layer."""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from verax._optional import load_pyplot
from verax.cli import options
from verax.cli.files import check_folder
from verax.cli.options import Flags
from verax.errors import UnsupportedModelError, VeraxError
from verax.options import option

if TYPE_CHECKING:
    from verax.compare import Alignment, Case, Comparison
    from verax.compare.case import Inputs
    from verax.compare.report import VideoReport

    Made = Case | Callable[..., VideoReport]
    """A comparison of layers, or of clips: a function of the dtype and of whether each side runs again."""

PIPE_WIDTH = 160
"""Columns where there is no terminal."""

DIFFERENT, NOT_COMPARED = 1, 2
"""Exit statuses where the two sides are not equal, and where they could not be compared."""


class _Group(TyperGroup):
    """Group in which `verax compare MODEL` needs no command: an unknown first word is a model, or an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(no_args_is_help=True, cls=_Group)


@app.callback()
def _group() -> None:
    """Compare with PyTorch, layer by layer.

    The word model may be left out: verax compare text|video|embed|MODEL.
    """


@dataclass(frozen=True)
class RunOptions:
    """Options of each comparison of layers: what is run, and what is reported."""

    dtype: str = option("float32", "float32 or bfloat16.")
    inject: bool = option(False, "Run each layer on PyTorch's activations too, to locate errors.")
    backward: bool = option(False, "Compare gradients of each parameter too.")
    fused: bool = option(
        False,
        "Also run the model as one compiled program with fused operations, as the engines do, and compare its output: "
        "a clip is always made so.",
    )
    repeat: bool = option(True, "Run each side a second time, to say whether it is deterministic.")
    max_rel: float | None = option(
        None, "Bound on each layer's relative L2 error; 1e-4 in float32 if left out.", low=0, shown=""
    )
    every: bool = option(False, "Print all layers, however many.", flags=("--all",))
    output: Path | None = option(
        None, "Write HTML, Markdown and JSON into this folder.", flags=("--output", "-o"), shown=""
    )
    as_json: bool = option(False, "JSON on standard output, for scripts.", flags=("--json",))


RunFlags = Annotated[dict[str, Any], Flags(RunOptions)]
InputsFile = Annotated[
    Path | None,
    typer.Option(
        "--inputs", help="Inputs instead of random ones: a text a line (.txt), or arrays (.npz, .safetensors)."
    ),
]


def given_inputs(path: Path | None, prompt: str | None = None) -> Inputs:
    """Inputs from `--inputs` or `--prompt`, which exclude each other."""
    from verax.compare.case import Inputs, read_inputs

    if path is not None and prompt is not None:
        raise typer.BadParameter("--prompt: --inputs has the texts; give one of the two")
    if prompt is not None:
        return Inputs(texts=(prompt,))
    try:
        return Inputs() if path is None else read_inputs(path)
    except VeraxError as error:
        raise typer.BadParameter(f"--{error}") from error


def run_cases(
    cases: Iterable[tuple[str, Made]],
    *,
    every: bool,
    output: Path | None,
    as_json: bool,
    confirm: Callable[[Alignment], None] | None = None,
    **run: Any,
) -> None:
    """Run cases in sequence, print or write their results, and end the command.

    `confirm`: called with the alignment if shapes and order alone may match layers; without it none are matched so.
    `run`: the other options of `RunOptions`: arguments of `compare_case`.
    """
    from verax._compat import enable_compilation_cache
    from verax.compare import Case, Comparison, compare_case, show, write
    from verax.models import DTYPES

    if run["dtype"] not in DTYPES:
        raise typer.BadParameter(f"--dtype: expected one of {', '.join(DTYPES)}, got {run['dtype']!r}")
    guessing = {} if confirm is None else {"guess": True, "confirm": confirm}
    results: list[Comparison | VideoReport] = []
    try:
        _check_output(output)
        enable_compilation_cache()
        for name, case in cases:
            if isinstance(case, Case):
                result = compare_case(case, **run, **guessing)
            else:
                result = case(dtype=run["dtype"], repeat=run["repeat"])
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
    except (typer.BadParameter, VeraxError, OSError):
        raise
    except Exception as error:  # of the models' code too
        traceback.print_exc()
        raise typer.Exit(NOT_COMPARED) from error
    if as_json:
        records = [result.as_dict() for result in results]
        sys.stdout.write(json.dumps(records[0] if len(records) == 1 else records, indent=1) + "\n")
    if any(result.failures for result in results):
        raise typer.Exit(DIFFERENT)


def _check_output(output: Path | None) -> None:
    """Check before the work that a report can be written."""
    if output is None:
        return
    check_folder(output)
    load_pyplot("compare")


@app.command(cls=options.VerdictCommand)
def videos(
    first: Annotated[Path, typer.Argument(help="A clip: .mp4, .gif, .webp, ..., or a folder of pictures.")],
    second: Annotated[Path, typer.Argument(help="The clip to compare with it, of the same size and length.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for videos.json, .md, .html and side-by-side.mp4.")
    ] = None,
    min_psnr: Annotated[
        float | None, typer.Option(help="Exit with 1 if the PSNR of any frame is below this, in dB.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare two clips frame by frame.

    Prints PSNR, SSIM and MSE, differences of pixels, and a verdict. Exit status: 0, 1 if a frame falls below
    --min-psnr, 2 if the clips cannot be compared. Needs the extra named compare.

    \b
    Examples:
        verax compare videos jax.mp4 torch.mp4
        verax compare videos jax.mp4 torch.mp4 --output report --min-psnr 35
    """
    from verax.compare.report import VideoReport
    from verax.compare.videos import compare_clips
    from verax.video.images import read_clip

    _check_output(output)
    (a, fps), (b, other_fps) = read_clip(first, name=str(first)), read_clip(second, name=str(second))
    report = VideoReport(compare_clips(a, b), a, b, (str(first), str(second)), fps or other_fps, min_psnr)
    written = [] if output is None else report.write(output)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        report.show(Console())
    if written:
        sys.stderr.write(f"written: {', '.join(map(str, written))}\n")
    if report.failures:
        sys.stderr.write("\n".join(report.failures) + "\n")
        raise typer.Exit(1)


@app.command(cls=options.VerdictCommand)
@options.with_flags
def own(
    file: Annotated[
        Path, typer.Argument(help="Python that defines `reference` and `ours`, and `inputs` and `names` if you like.")
    ],
    inputs: InputsFile = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take layers as the same that only shape and order match, unasked.")
    ] = False,
    *,
    run: RunFlags,
) -> None:
    """Compare a PyTorch model of your own with its port, layer by layer.

    The file defines `reference` (a torch module, a function with taps, or a `verax.compare.Side`), `ours` (a Flax NNX
    module, a function or a `Side`), `inputs` (a tuple of NumPy arrays, or a dict by argument name) and `names` (a dict
    from beginnings of our names to the reference's). Or it defines `case`, a `verax.compare.Case`, which --dtype
    bfloat16 needs. Layers that no name matches are matched by shape and order, shown, and taken if you say so.

    \b
    Examples:
        verax compare own examples/compare_own_pair.py --inject
        verax compare own pair.py --inputs batch.npz --yes --output report
    """
    run_cases(_own(file, given_inputs(inputs), run["dtype"]), **run, confirm=partial(_confirm, yes=yes))


def _own(file: Path, inputs: Inputs, dtype: str) -> Iterator[tuple[str, Case]]:
    """The case that the file defines, on the inputs given. The file is run when it is asked for."""
    from verax.compare import Case
    from verax.compare.case import pair_case

    if not file.is_file():
        raise typer.BadParameter(f"{file}: there is no such file")
    sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
    try:
        names = runpy.run_path(str(file), run_name="verax_compare")
    except SystemExit as ended:
        raise typer.BadParameter(
            f"{file}: it ended the program with {ended.code}, before anything was compared"
        ) from ended
    if inputs.texts:
        raise typer.BadParameter("--inputs: models of your own take arrays, .npz or .safetensors")
    case = names.get("case")
    if isinstance(case, Case):
        if inputs.arrays:
            raise typer.BadParameter(f"--inputs: the case of {file} has inputs of its own")
        yield "", case
        return
    if missing := [name for name in ("reference", "ours") if name not in names]:
        raise typer.BadParameter(f"{file}: it defines no {' and no '.join(missing)}; see verax compare own --help")
    if dtype != "float32":
        raise typer.BadParameter(f"--dtype: {file} defines no `case`, which makes both sides in a dtype")
    given = inputs.arrays or names.get("inputs", ())
    args = () if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else (given,)
    kwargs = given if isinstance(given, Mapping) else {}
    yield "", pair_case(names["reference"], names["ours"], *args, names=names.get("names"), title=file.stem, **kwargs)


def _confirm(alignment: Alignment, *, yes: bool) -> None:
    """Show the pairs that only shape and order match, and wait for a confirmation."""
    if not alignment.guessed:
        return
    typer.echo("matched by shape and order only, ours = the reference's:", err=True)
    for pair in alignment.guessed:
        typer.echo(f"  {pair}", err=True)
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            "layers are matched by shape and order only, and there is no terminal to confirm them on: look at them, "
            "then give --yes, or a table `names`"
        )
    if not typer.confirm("Are these the same layers?", err=True):
        raise typer.BadParameter("layers that are not the same cannot be compared: give a table `names`")


REFERENCES = {"text": ("transformers",), "video": ("diffusers",), "embed": ("transformers", "torch")}
"""References of each kind of model: LAM has a PyTorch form of its own, all others a library's."""

OUTPUT = "output"
"""Value of `--part` for the clip of the whole pipeline."""


@app.command("model", cls=options.VerdictCommand)
@options.with_flags
def model(
    what: Annotated[
        str,
        typer.Argument(metavar="text|video|embed|MODEL", help="Built-in models, or a checkpoint's folder or hub id."),
    ],
    against: Annotated[
        str | None, typer.Option(help="transformers, diffusers or torch; what fits the model if left out.")
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Small random weights instead of the built-in model.")
    ] = False,
    size: Annotated[
        str | None, typer.Option(help="Of random weights: tiny; text: moe, with experts; video: 1.3b, 5b, tiny-5b.")
    ] = None,
    inputs: InputsFile = None,
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
    height: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 128 if left out.")] = None,
    width: Annotated[int | None, typer.Option(help="video: of the output's frames; up to 192 if left out.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="video: of the output, 4n + 1; 9 if left out.")] = None,
    inference_steps: Annotated[int | None, typer.Option(help="video: of the solver; 4 if left out.")] = None,
    *,
    run: RunFlags,
) -> None:
    """Compare each layer of a model in PyTorch and in verax.

    Both run on the same inputs. Exit status 0 if the two are equal, 1 if not, 2 if they cannot be compared. Equal
    means: in float32 every layer within --max-rel, and every frame of a clip within 60 dB; in bfloat16 the output's
    error against float32 at most 1.1 times PyTorch's own.

    \b
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
        run_cases(_cases(what, Path(scratch), against, random, given, tokens, part, size, clip), **run)


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
            raise typer.BadParameter("--tokens: a number of random tokens; --inputs and --prompt bring their own")
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
    from verax.compare.case import Inputs
    from verax.compare.cases.video import VIDEO_PARTS, has_part, video_case

    if part != OUTPUT:
        for name in (part,) if part is not None else VIDEO_PARTS:
            if part is not None or has_part(model, name, size=size):
                given = Inputs() if part is None else inputs
                yield name if part is None else "", video_case(model, name, inputs=given, size=size)
    from verax.compare.pipelines import RANDOM_PIPELINES, compare_pipelines, random_video

    if part == OUTPUT or (part is None and (model is not None or size in RANDOM_PIPELINES)):
        if model is None and size not in RANDOM_PIPELINES:
            raise typer.BadParameter(f"--size: {size} has no random weights for a whole pipeline; name a --part")
        model = random_video(scratch / "video", size) if model is None else model
        yield "", partial(compare_pipelines, model, **clip, inputs=inputs if part == OUTPUT else Inputs())


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
