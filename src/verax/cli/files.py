"""Files of commands: prompts of a text file or a pipe, and files of work whose results a stopped command continues."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from verax._optional import require_optional
from verax.batch.lines import is_parquet, lines_path
from verax.batch.results import ResultFile, ResultLine

if TYPE_CHECKING:
    from verax.batch.lines import InputFile, InputLine
    from verax.batch.results import LineCounts


PIPE = Path("-")
"""Name of standard input and standard output."""


def read_lines(file: Path | None = None, what: str = "prompt", *, keep_blank: bool = False) -> list[str]:
    """Lines of a file, or of standard input: all lines if `keep_blank`, otherwise the lines that are not blank.

    `file`: a pipe such as bash's `<(...)` too; `-` is standard input. `what`: a word for one line, in errors.
    """
    if file is None and sys.stdin.isatty():  # nobody would know what it waits for
        raise typer.BadParameter(f"no {what}: give one as an argument, in a file, or through a pipe")
    file = None if file == PIPE else file
    source = "standard input" if file is None else str(file)
    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise typer.BadParameter(f"{source}: {(error.strerror or str(error)).lower()}") from error
    # Not splitlines, which also splits at characters that may be part of a text (U+2028 in JSON, for example).
    lines = text.removeprefix("\ufeff").removesuffix("\n").split("\n")
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise typer.BadParameter(f"{source}: it is empty; expected a {what} on each line")
    return checked(lines if keep_blank else filled, what, allow_empty=keep_blank)


def checked(texts: list[str], what: str = "prompt", *, allow_empty: bool = False) -> list[str]:
    """Texts, after a check that a tokenizer can read them: bytes of other encodings are lone surrogates in Python."""
    for number, text in enumerate(texts, start=1):
        if not text and not allow_empty:
            raise typer.BadParameter(f"{what} {number}: it is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise typer.BadParameter(f"{what} {number}: not UTF-8 text: {text!r}") from error
    return texts


R = TypeVar("R", bound=ResultLine)

AGAIN = ": the same command continues with the rest"


def check_input(path: Path, output: Path, option: str) -> None:
    """Check that there is a file of work, and that results go elsewhere."""
    if not path.is_file():
        raise typer.BadParameter(f"{option}: {path}: no such file")
    if output.exists() and output.samefile(path):
        raise typer.BadParameter("--output: it is the input")


def check_output(path: Path) -> None:
    """Check that a file of results can be written, to a new one next to it that is then renamed."""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        problem = f"the folder {path.parent.absolute()} cannot be written to"
    else:
        return
    raise typer.BadParameter(f"--output: {path}: {problem}")


def check_folder(path: Path) -> None:
    """Check that a folder of results can be written; it is made with the first of them."""
    nearest = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"{nearest} is a file; a folder is written")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"--output: {nearest} cannot be written to")


def open_results(path: Path, kind: type[R], *, retry_errors: bool) -> ResultFile[R]:
    """File of results, or of the lines that become a Parquet file.

    `retry_errors`: as in `ResultFile.open`.
    """
    if is_parquet(path):
        require_optional("pyarrow")
    if not path.is_file():  # lines are appended to a file that exists, wherever it is
        check_output(path)
    return ResultFile.open(lines_path(path), kind, retry_errors=retry_errors)


def counted(counts: LineCounts, failed_before: int) -> str:
    """Sentence with the counts and the time of a run."""
    earlier = f" (earlier errors: {failed_before:,}; --retry-errors runs them again)" if failed_before else ""
    return (
        f"{counts.done:,} done, {counts.failed:,} failed, {counts.skipped:,} skipped{earlier} in {counts.seconds:.1f} s"
    )


@contextlib.contextmanager
def line_bar(label: str, size: int | None) -> Iterator[Callable[[LineCounts], None]]:
    """Bar of the lines of a file, and the function that moves it. `size`: bytes of the lines; None if unknown."""
    from verax.progress import bar

    with bar(label, count=False) as report:
        yield lambda counts: report(counts.bytes, size, f"{counts.done:,} done, {counts.failed:,} failed")


def run_lines(
    label: str,
    file: InputFile,
    results: ResultFile[R],
    work: Callable[[Sequence[InputLine]], Sequence[R]],
    *,
    least: int = 1,
    most: int = 1,
    summary: Callable[[LineCounts], str] = lambda counts: "",
) -> bool:
    """Answer a file of work, with a bar; print what was done. True if no result in the output is an error.

    `file`, `results`, `work`, `least`, `most`: as in `LineRun`. The results are closed.
    """
    from verax.batch.results import LineRun

    failed_before = results.num_failed
    with results.file, line_bar(label, file.size) as show:
        run = LineRun(file, results, work, least=least, most=most, report=show)
        try:
            run.run()
        finally:
            sys.stderr.write(f"{counted(run.counts, failed_before)}{summary(run.counts)}\n")
            if not run.complete:
                sys.stderr.write(f"stopped before the end{AGAIN}\n")
    return not (run.counts.failed or failed_before)
