"""Texts from a file or a pipe, one on each line."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

__all__ = ["checked", "read_lines"]


def read_lines(file: Path | None = None) -> list[str]:
    """The lines of a file, or of standard input, that are not blank.

    Raises:
        typer.BadParameter: naming the source, if it does not exist, is no UTF-8 text, or has no such line.
    """
    source = "standard input" if file is None else str(file)
    if file is not None and not file.is_file():
        raise typer.BadParameter(f"{source}: no such file")
    try:
        text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise typer.BadParameter(f"{source}: it is empty; expected a prompt on each line")
    return checked(found)


def checked(texts: list[str]) -> list[str]:
    """The texts, if a tokenizer can read them: bytes of other encodings reach Python as lone surrogates.

    Raises:
        typer.BadParameter: naming the text that is not UTF-8, or empty.
    """
    for number, text in enumerate(texts, start=1):
        if not text:
            raise typer.BadParameter(f"prompt {number}: it is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise typer.BadParameter(f"prompt {number}: not UTF-8 text: {text!r}") from error
    return texts
