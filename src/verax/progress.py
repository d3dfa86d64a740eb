"""Progress bars: on a terminal only, on stderr, so that pipes and scripts see results and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["Report", "bar"]

Report = Callable[..., None]
"""`report(done, total, note="")`."""


@contextlib.contextmanager
def bar(label: str, *, enabled: bool = True, count: bool = True) -> Iterator[Report]:
    """A bar named `label`, driven by the function that it yields. Silent where stderr is no terminal.

    Args:
        label: what is going on, as a few words.
        enabled: False for none at all.
        count: show done/total (for things), rather than a percentage (for bytes).
    """
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield lambda done, total, note="": None
        return
    amount = MofNCompleteColumn() if count else TaskProgressColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None, note="")
        yield lambda done, total, note="": progress.update(task, completed=done, total=total, note=note)
