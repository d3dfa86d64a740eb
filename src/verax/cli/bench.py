"""`verax bench`: measurements that anyone can repeat."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from verax.bench import settings
from verax.cli import options
from verax.cli.files import check_folder
from verax.cli.options import Flags
from verax.errors import InvalidParameterError

app = typer.Typer(help="Measure speed and memory, compared with other libraries.", no_args_is_help=True)

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the result into this folder's file of the subject and processor."),
]

SUBJECTS: Mapping[str, tuple[type[settings.Settings], str]] = {
    "text": (settings.TextSettings, "text.cases"),
    "quality": (settings.QualitySettings, "text.quality"),
    "embed": (settings.EmbedSettings, "embed.cases"),
    "video": (settings.VideoSettings, "video.cases"),
    "ops": (settings.OpsSettings, "ops"),
    "delta": (settings.DeltaSettings, "delta"),
    "serve": (settings.ServeSettings, "serve.cases"),
    "accelerator": (settings.AcceleratorSettings, "accelerator"),
    "reports": (settings.ReportsSettings, "accelerator"),
}
"""Settings of each command, whose options are its flags, and the module of `verax.bench` with its `bench_NAME`."""


def _command(name: str, table: type[settings.Settings], module: str) -> Callable[..., None]:
    """Command of a subject, with the docstring of its settings as its help."""

    def run(*, values: dict[str, Any], output: Output = None, as_json: options.Json = False) -> None:
        try:
            given = table(**values)
        except InvalidParameterError as error:
            raise typer.BadParameter(str(error)) from error
        if output is not None:
            check_folder(output)
        _show(getattr(importlib.import_module(f"verax.bench.{module}"), f"bench_{name}")(given), output, as_json)

    run.__annotations__["values"] = Annotated[dict[str, Any], Flags(table)]
    run.__name__, run.__doc__ = name, table.__doc__
    return options.with_flags(run)


for _name, _subject in SUBJECTS.items():
    app.command(cls=options.Command)(_command(_name, *_subject))


def _show(result: dict[str, Any], output: Path | None, as_json: bool) -> None:
    """Print a result as its page or as JSON, and write it if there is a folder; status 1 if it is not `complete`."""
    from verax.bench.results import markdown, write
    from verax.files import json_value

    sys.stdout.write(json.dumps(json_value(result), indent=2) + "\n" if as_json else markdown(result))
    if output is not None:
        typer.echo(f"written: {write(result, output)}", err=True)
    if not result.get("complete", True):
        raise typer.Exit(1)


@app.command(cls=options.VerdictCommand)
def compare(
    old: Annotated[Path, typer.Argument(help="A JSON that verax bench --output wrote.", exists=True, dir_okay=False)],
    new: Annotated[Path, typer.Argument(help="A later one, of the same benchmark.", exists=True, dir_okay=False)],
    threshold: Annotated[float, typer.Option(help="Change of time that matters, in percent.")] = 5.0,
    as_json: options.Json = False,
) -> None:
    """Changes of speed between two files of results.

    Exit status 1 if a side of verax is slower, 2 if the files cannot be compared. Prints Markdown, for a terminal or a
    pull request. A side counts as slower only if the whole interval of the ratio of the medians is beyond the
    threshold; baselines are shown, and do not count.

    \b
    Examples:
        verax bench compare before.json after.json --threshold 10 >> "$GITHUB_STEP_SUMMARY"
    """
    from verax.bench.results import compare_results, read_results

    _show(compare_results(read_results(old), read_results(new), threshold=threshold / 100), None, as_json)


@app.command(cls=options.Command)
def docs(
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("docs/performance.md"),
) -> None:
    """Write docs/performance.md from the results in benchmarks/.

    Runs in the repository's root, where benchmarks/ also has the template of the page.

    \b
    Examples:
        verax bench text --against transformers --output benchmarks/results && verax bench docs
    """
    from verax.bench.results import render
    from verax.files import write_text

    write_text(output, render(Path("benchmarks/performance.template.md"), Path("benchmarks/results")))
    typer.echo(f"written: {output}", err=True)
