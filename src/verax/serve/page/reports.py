"""Reports of `verax compare` and `verax bench` in a folder, for the page.

A name that a client sends is only looked up among the files that a listing of the folder has found. It never becomes
part of a path.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTENT_TYPES", "Report", "Reports"]

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    ".png": "image/png",
}
"""Kinds of files that are reports, and the type each is served with."""

MAX_REPORTS = 1000
MAX_DEPTH = 3
"""Levels of folders that are listed: `verax compare` and `verax bench` write one folder for each run."""


@dataclass(frozen=True)
class Report:
    """One file: its name relative to the folder with `/` between parts, its size in bytes, its time of change."""

    name: str
    path: Path
    size: int
    modified: float


class Reports:
    """Listing of a folder of reports.

    Args:
        folder: where the reports are. It may be missing, and files may come and go.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.token = secrets.token_urlsafe(24)
        """Secret part of the addresses of reports, which a browser opens without an API key. The listing has it."""

    def listing(self) -> dict[str, Report]:
        """Reports by name, the newest first, at most `MAX_REPORTS`. Links and hidden files are left out."""
        found = sorted(self._files(), key=lambda report: -report.modified)
        return {report.name: report for report in found[:MAX_REPORTS]}

    def find(self, token: str, name: str) -> Report | None:
        """The report of a name in the listing; None if there is none, or the token is wrong."""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return None
        return self.listing().get(name)

    def _files(self) -> list[Report]:
        found: list[Report] = []
        for parent, folders, names in os.walk(self._folder):
            inside = Path(parent).relative_to(self._folder)
            if len(inside.parts) >= MAX_DEPTH:
                folders.clear()
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(parent, name)
                if name.startswith(".") or path.suffix not in CONTENT_TYPES or path.is_symlink():
                    continue
                try:
                    status = path.stat()
                except OSError:
                    continue
                found.append(Report((inside / name).as_posix(), path, status.st_size, status.st_mtime))
        return found
