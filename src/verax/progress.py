"""Progress bars: on a terminal only, on stderr, so that pipes and scripts see results and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[..., None]
"""`report(done, total, note="")`."""

_showing: list[Progress] = []


def shown() -> bool:
    """True if bars are shown, which is where stderr is a terminal."""
    return Console(stderr=True).is_terminal


@contextlib.contextmanager
def bar(label: str, *, enabled: bool = True, count: bool = True) -> Iterator[Report]:
    """A bar named `label`, driven by the function that it yields. Silent where stderr is not a terminal.

    `enabled`: False for none at all. `count`: show done/total (for things), rather than a percentage (for bytes).
    """
    if not (enabled and shown()):
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None, note="")
        _showing.append(progress)
        try:
            yield lambda done, total, note="": progress.update(task, completed=done, total=total, note=note)
        finally:
            _showing.remove(progress)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No bars meanwhile, so that a person can be asked something."""
    stopped = list(_showing)
    for progress in stopped:
        progress.stop()
    try:
        yield
    finally:
        for progress in stopped:
            progress.start()
