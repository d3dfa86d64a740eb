"""Checks that a loaded server lost and mixed nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Ask

__all__ = ["Tokenize", "check_answers"]

Tokenize = Callable[[str], Awaitable[list[int] | None]]
"""Token ids of a text by the server; None if it cannot say."""

MOST_TIES = 3
"""Tokens of an answer that may differ by rounding. An answer to another prompt differs at many more."""


async def check_answers(ask: Ask, tokenize: Tokenize, answers: Sequence[Answer], *, most: int) -> dict[str, Any]:
    """Ask some requests again, one by one, and count how the loaded server's answers compare.

    Decoding is greedy, so both answers are the same text, unless the numbers of another batch round differently where
    two tokens were almost equally likely. Such an answer (`diverged`) follows from its prompt all the same, but for
    that token. An answer that does not (`mixed`) is another request's, or has parts of one.

    Args:
        ask: sends a request to the server, which has no other load now.
        tokenize: for answers that are not identical.
        answers: of the load.
        most: requests to ask again, evenly spread over the load.
    """
    whole = [answer for answer in answers if answer.completed]
    chosen = [whole[i * len(whole) // most] for i in range(most)] if len(whole) > most else whole
    unloaded = [await ask(replace(answer.request, slow=False, leave_after=None)) for answer in chosen]
    counts = Counter(dict.fromkeys(("failed", "identical", "diverged", "mixed"), 0))
    for answer, again in zip(chosen, unloaded, strict=True):
        if not again.completed:
            counts["failed"] += 1
        elif again.text == answer.text:
            counts["identical"] += 1
        else:
            follows = await _follows(ask, tokenize, answer, again)
            if follows is None:
                follows = not _is_anothers(answer, again, unloaded)
            counts["diverged" if follows else "mixed"] += 1
    ids = Counter(answer.id for answer in answers if answer.id is not None)
    return {
        "checked": len(chosen),
        **counts,
        "distinct": len({answer.text for answer in unloaded}),
        "repeated_ids": sum(count - 1 for count in ids.values()),
        "lost": sum((answer.error or "").startswith(("lost", "mixed")) for answer in answers),
    }


async def _follows(ask: Ask, tokenize: Tokenize, answer: Answer, again: Answer) -> bool | None:
    """True if an answer is the model's own continuation of its prompt, but for a few tokens.

    The prompt is asked again with the answer up to the token where they part, until the rest is the same or too many
    tokens differ.

    Args:
        ask: sends a request.
        tokenize: gives the token ids of texts.
        answer: of the loaded server.
        again: answer of the server to the same request without load.

    Returns:
        None if the tokens of the answers cannot be had from their texts.
    """
    tokens, theirs = await tokenize(answer.text), await tokenize(again.text)
    if tokens is None or theirs is None or len(tokens) != answer.request.max_tokens:
        return None
    forced = 0
    for _ in range(MOST_TIES):
        same = next((n for n, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b), len(theirs))
        forced = max(forced, same) + 1
        if forced >= len(tokens):
            return True
        prompt = (*answer.request.prompt, *tokens[:forced])
        rest = replace(answer.request, prompt=prompt, max_tokens=len(tokens) - forced, slow=False, leave_after=None)
        continued = await ask(rest)
        if not continued.completed:
            return None
        if answer.text.endswith(continued.text):
            return True
        theirs = [*tokens[:forced], *(await tokenize(continued.text) or [])]
    return False


def _is_anothers(answer: Answer, own: Answer, unloaded: Sequence[Answer]) -> bool:
    """True if at least half of an answer is the beginning of another request's, and less of its own."""
    most = max(_common(answer.text, own.text), len(answer.text) / 2)
    return any(_common(answer.text, other.text) > most for other in unloaded if other is not own)


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(first), len(second)))
