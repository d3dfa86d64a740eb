"""Calls of the device that overlap with the host's work on the texts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from verax import ops, progress
from verax._compat import compiler_options
from verax.embed.buckets import Job
from verax.errors import InvalidParameterError

__all__ = ["check_batch_size", "check_texts", "compiled", "run_jobs", "tokens_per_call"]

IN_FLIGHT = 2
"""Calls that the device has before the oldest result is read: one runs, one waits."""


TOKENS_PER_CALL = {"cpu": 512}
"""Tokens of several texts in a packed call, by platform."""

ELSEWHERE = 2048
"""Tokens of such a call on other platforms. Attention by segments computes the scores of all pairs of tokens there."""


def tokens_per_call() -> int:
    """Most tokens of several texts in a call on the target."""
    return TOKENS_PER_CALL.get(ops.target().platform, ELSEWHERE)


def compiled(function: Callable[..., Array], modules: Any) -> tuple[Any, tuple[Array, ...]]:
    """A program `program(weights, *arrays)` of `function(modules, *arrays)`, and its weights.

    The modules are flattened once: a call passes a flat tuple of arrays, and modules exist only while tracing.
    """
    graph, state = nnx.split(modules)
    leaves, treedef = jax.tree.flatten(state)

    def call(weights: tuple[Array, ...], *arrays: Array) -> Array:
        return function(nnx.merge(graph, jax.tree.unflatten(treedef, weights)), *arrays)

    return jax.jit(call, compiler_options=compiler_options(ops.target().platform)), tuple(leaves)


def run_jobs(
    jobs: Iterable[Job],
    dispatch: Callable[[Job], Array],
    results: Float32[np.ndarray, "n ..."],
    *,
    label: str,
    unit: str,
    show_progress: bool,
) -> None:
    """Run calls and write their results. While the device works on the calls that it has, the host makes the next.

    Args:
        jobs: calls.
        dispatch: function that begins one and returns its result, a row for each row of the call.
        results: array that gets the result of each text.
        label: words for the progress bar.
        unit: what there is one result of, for the progress bar.
        show_progress: a bar, if stderr is a terminal.
    """
    done = 0
    pending: deque[tuple[Job, Array]] = deque()
    begin = time.perf_counter()
    with progress.bar(label, enabled=show_progress) as report:

        def collect() -> int:
            job, result = pending.popleft()
            results[job.members] = np.asarray(result)[: len(job.members)]
            rate = (done + len(job.members)) / (time.perf_counter() - begin)
            report(done + len(job.members), len(results), f"{rate:,.0f} {unit}/s")
            return len(job.members)

        for job in jobs:
            result = dispatch(job)
            result.copy_to_host_async()
            pending.append((job, result))
            if len(pending) > IN_FLIGHT:
                done += collect()
        while pending:
            done += collect()


def check_batch_size(batch_size: Any) -> None:
    """Check the number of texts of a call, if one is given.

    Raises:
        InvalidParameterError: if it is below 1, or no whole number.
    """
    if batch_size is None:
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidParameterError(f"batch_size: expected a whole number of at least 1, got {batch_size!r}")


def check_texts(texts: Any, name: str) -> list[str]:
    """Texts as a list, if they are texts; `name` is the argument's, for messages.

    Raises:
        InvalidParameterError: naming the first that is none.
    """
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise InvalidParameterError(f"{name}: expected a text or texts, got {texts!r}")
    found = list(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise InvalidParameterError(f"{name}: expected texts, got {text!r} at {number}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: bytes of another encoding
            raise InvalidParameterError(f"{name}: not Unicode text at {number}: {text!r}") from error
    return found
