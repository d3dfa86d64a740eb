"""Texts from a file or a pipe, one on each line."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

__all__ = ["checked", "read_lines"]


def read_lines(file: Path | None = None, what: str = "prompt", *, keep_blank: bool = False) -> list[str]:
    """Lines of a file, or of standard input: all lines if `keep_blank`, otherwise those that are not blank.

    `what` is a word for one line, in errors.

    Raises:
        typer.BadParameter: naming the source, if it does not exist, is not UTF-8 text, or has blank lines only.
    """
    source = "standard input" if file is None else str(file)
    if file is not None and not file.is_file():
        raise typer.BadParameter(f"{source}: no such file")
    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    # Not splitlines, which also splits at characters that may be part of a text (U+2028 in JSON, for example).
    lines = text.removesuffix("\n").split("\n")
    found = [line for line in lines if line.strip()]
    if not found:
        raise typer.BadParameter(f"{source}: it is empty; expected a {what} on each line")
    return checked(lines if keep_blank else found, what, allow_empty=keep_blank)


def checked(texts: list[str], what: str = "prompt", *, allow_empty: bool = False) -> list[str]:
    """Texts, after a check that a tokenizer can read them: bytes of other encodings are lone surrogates in Python.

    Raises:
        typer.BadParameter: naming the text that is not UTF-8, or empty.
    """
    for number, text in enumerate(texts, start=1):
        if not text and not allow_empty:
            raise typer.BadParameter(f"{what} {number}: it is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise typer.BadParameter(f"{what} {number}: not UTF-8 text: {text!r}") from error
    return texts
