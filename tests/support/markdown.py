"""Fenced code blocks of the Markdown pages, with the marker that excuses a block from being run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUNNABLE = ("python", "sh")
"""Languages whose blocks are run, or carry a marker."""

SHOWN = ("text", "console")
"""Languages of outputs and of sessions. They are never run."""

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(\S*)\s*$")
_COMMENT = re.compile(r"^<!--(.*)-->$")
_NOT_RUN = re.compile(r"^not run: (\S.*)$")


class MarkdownError(Exception):
    """A page that the checker cannot accept."""


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is the number of its first line of code, from 1."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    """The reason of its marker, or None for a block that is run."""

    @property
    def place(self) -> str:
        """The page's name and the line, for messages."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in their order.

    Raises:
        MarkdownError: for an unknown language, an unknown marker, a marker without a reason or on a block that is never
            run, and a fence without an end.
    """
    found: list[Block] = []
    fence: re.Match[str] | None = None
    lines: list[str] = []
    before = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if fence is None and match is not None:
            fence, start, lines = match, number + 1, []
        elif fence is not None and line.strip() == fence[2]:
            text = "\n".join(content.removeprefix(fence[1]) for content in lines)
            found.append(_block(page, start, fence[3], text, before))
            fence, before = None, ""
        elif fence is not None:
            lines.append(line)
        elif line.strip():
            before = line.strip()
    if fence is not None:
        raise MarkdownError(f"{page.name}:{start}: this block has no end")
    return found


def inline_commands(page: Path) -> list[str]:
    """Code spans of the page's prose that begin with `verax `."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", page.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`(verax [^`]+)`", text)]


def is_generated(page: Path) -> bool:
    """True if a command writes the page from measurements: its commands are the measurements'."""
    return page.parent.name == "reports" or page.read_text(encoding="utf-8").startswith("<!-- Written by")


def _block(page: Path, line: int, language: str, text: str, before: str) -> Block:
    where = f"{page.name}:{line}"
    if language not in (*RUNNABLE, *SHOWN):
        raise MarkdownError(f"{where}: a block of {language!r}; expected one of {', '.join((*RUNNABLE, *SHOWN))}")
    comment = _COMMENT.match(before)
    if comment is None:
        return Block(page, line, language, text, None)
    marker = _NOT_RUN.match(comment[1].strip())
    if marker is None:
        raise MarkdownError(f"{where}: unknown marker {before!r}; expected <!-- not run: the reason -->")
    if language not in RUNNABLE:
        raise MarkdownError(f"{where}: a block of {language!r} is never run, so it needs no marker")
    return Block(page, line, language, text, marker[1])
