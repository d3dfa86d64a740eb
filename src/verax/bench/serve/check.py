"""Checks that a loaded server lost and mixed nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Ask

__all__ = ["check_answers", "count_answers"]


async def check_answers(ask: Ask, answers: Sequence[Answer], *, most: int) -> dict[str, Any]:
    """Ask some requests again, one by one, and count how the loaded server's answers compare.

    Decoding is greedy, so both answers are the same text, unless the numbers of another batch round differently where
    two tokens were almost equally likely: the answers then begin the same and part at that token (`diverged`).

    Args:
        ask: sends a request to the server, which has no other load now.
        answers: of the load.
        most: requests to ask again, evenly spread over the load.
    """
    whole = [answer for answer in answers if answer.completed]
    chosen = [whole[i * len(whole) // most] for i in range(most)] if len(whole) > most else whole
    again = [await ask(answer.request) for answer in chosen]
    ids = Counter(answer.id for answer in answers if answer.id is not None)
    return {
        **count_answers(chosen, again),
        "repeated_ids": sum(count - 1 for count in ids.values()),
        "lost": sum((answer.error or "").startswith(("lost", "mixed")) for answer in answers),
    }


def count_answers(loaded: Sequence[Answer], unloaded: Sequence[Answer]) -> dict[str, Any]:
    """Numbers of answers that are identical to those of an unloaded server, that part from them, or are another's.

    An answer is `mixed` if at least half of it is the beginning of another request's reference, and less of its own.
    """
    counts = Counter({"checked": len(loaded), "failed": 0, "identical": 0, "diverged": 0, "mixed": 0})
    for position, (answer, reference) in enumerate(zip(loaded, unloaded, strict=True)):
        if not reference.completed:
            counts["failed"] += 1
        elif answer.text == reference.text:
            counts["identical"] += 1
        else:
            own = _common(answer.text, reference.text)
            others = [other.text for number, other in enumerate(unloaded) if number != position]
            mixed = any(_common(answer.text, other) > max(own, len(answer.text) / 2) for other in others)
            counts["mixed" if mixed else "diverged"] += 1
    return {**counts, "distinct": len({reference.text for reference in unloaded})}


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))
