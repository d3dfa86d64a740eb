"""Search for the sampler's thresholds on NVIDIA GPUs in Pallas, lowered to Triton.

    PASSES times:
        for each row and each chunk of its scores, all at once:
            narrow the row's bracket by the sums over the pass before
            if one of the chunk's scores lies in the bracket:
                sum up what each of 16 trials within the bracket keeps of the chunk

So a pass divides the bracket, a range of bit patterns, by 16, where bisection halves it and needs 31 passes. A kernel has
no way to make the programs of a row wait for each other, so that a pass is a launch; XLA records all of them in one
command buffer. Sums are added in one order whatever the batch is, and nothing is atomic: equal calls have equal results.
`gpu/paged_kernel.py` says why Triton compiles it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

__all__ = ["FIRST_TRIALS", "PASSES", "chunk_of_program", "search"]

TRIALS = 16
"""Thresholds of a pass. Twice as many would need 7 passes in place of 8, of twice the comparisons."""

PASSES = 8
"""Passes after which a bracket has one pattern: the first leaves at most 2^28, and each of the others divides by 16."""

FIRST_TRIALS = -np.asarray(
    [2.0**-96, 2.0**-64, 2.0**-32, 0.5, 1, 2, 4, 6, 8, 12, 16, 24, 2.0**32, 2.0**64, 2.0**96, np.inf], np.float32
)
"""Trials of the first pass: dense where a threshold is likely, elsewhere as far apart as the passes after it allow."""

INFINITY = 0x7F800000
"""Bit pattern of infinity, above those of all scores that are possible."""

TILE = 512
"""Scores that a program compares at a time: four for each thread."""

AT_ONCE = 2
"""Tiles that are loaded before one is compared: latency of the cache is hidden."""

LARGEST_CHUNK, SMALLEST_CHUNK = 8192, 1024
"""Scores of a program. A program sums up what the pass before found in all chunks of its row, so these are not many."""

PROGRAMS = 528
"""Programs that keep an H100's 132 multiprocessors busy, four on each."""

PARAMETERS = {"num_warps": 4, "num_stages": 1}


def chunk_of_program(rows: int, V: int) -> int:
    """Scores of a program: the most that leave `PROGRAMS` to run."""
    chunk = LARGEST_CHUNK
    while chunk > SMALLEST_CHUNK and rows * pl.cdiv(V, chunk) < PROGRAMS:
        chunk //= 2
    return chunk


class Bracket(NamedTuple):
    """Range of thresholds of each row, as bit patterns of their negatives: a larger pattern keeps more."""

    trials: Int[Array, "*B t"]
    """Patterns that are tried, ascending. The last one is enough, or everything."""
    below: Int[Array, "*B"]
    """Largest pattern that is known not to be enough; -1 without one."""
    base: Float[Array, "*B"]
    """Sum over the scores that `below` keeps."""
    total: Float[Array, "*B"]
    """Largest sum so far: after the first pass, that of all scores."""


def search(
    scores: Float[Array, "B V"],
    least: Float[Array, "B"],
    wanted: Float[Array, "B"],
    *,
    weighted: bool,
    interpret: bool = False,
) -> Float[Array, "B"]:
    """`ops.sampling.Search` for an NVIDIA GPU, with `interpret` as `pallas_call` takes it."""
    B, V = scores.shape
    chunk = chunk_of_program(B, V)
    chunks = pl.cdiv(V, chunk)
    partials = jax.ShapeDtypeStruct((B, chunks, TRIALS), jnp.float32)
    run = partial(
        pl.pallas_call,
        grid=(B, chunks),
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name=f"sample_by_{'probability' if weighted else 'rank'}",
    )
    first = jnp.broadcast_to(_patterns(jnp.asarray(FIRST_TRIALS)), (B, TRIALS))
    # Rows that keep everything have a bracket of nothing, and their programs end at once.
    below = jnp.where(wanted < jnp.inf, -1, INFINITY)
    bracket = Bracket(first, below, jnp.zeros(B, jnp.float32), jnp.zeros(B, jnp.float32))
    settings = {"weighted": weighted, "chunk": chunk}
    sums = run(partial(_first_kernel, **settings), out_shape=partials)(scores, least, *bracket)
    for _ in range(PASSES - 1):
        out_shape = [*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in bracket), partials]
        *found, sums = run(partial(_next_kernel, **settings), out_shape=out_shape)(
            scores, least, wanted, *bracket, sums
        )
        bracket = Bracket(*found)
    narrowed, _ = jax.vmap(partial(_narrowed, weighted=weighted))(bracket, sums, wanted)
    return -lax.bitcast_convert_type(narrowed.trials[:, -1], jnp.float32)


def _patterns(scores: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Bit patterns of the negatives of non-positive scores, and of zeros of either sign."""
    return lax.bitcast_convert_type(scores, jnp.int32) & 0x7FFFFFFF


def _narrowed(
    bracket: Bracket, partials: Float[Array, "c t"], wanted: Float[Array, ""], *, weighted: bool
) -> tuple[Bracket, Bool[Array, "t"]]:
    """A row's next bracket, and which of the trials were enough.

    Args:
        bracket: the bracket of the pass.
        partials: sums that the pass found between `below` and each trial, by chunk.
        wanted: see `ops.sampling.Search`.
        weighted: likewise.
    """
    at = jnp.arange(TRIALS)
    sums = bracket.base + jnp.sum(partials, axis=0)
    total = jnp.maximum(bracket.total, jnp.max(sums))
    enough = (sums >= (wanted * total if weighted else wanted)) | (at == TRIALS - 1)
    below = jnp.max(jnp.where(enough, bracket.below, bracket.trials))
    upto = jnp.min(jnp.where(enough, bracket.trials, INFINITY))
    base = jnp.max(jnp.where(enough, bracket.base, sums))
    trials = jnp.minimum(below + (at + 1) * pl.cdiv(upto - below, TRIALS), upto)
    return Bracket(trials, below, base, total), enough


def _first_kernel(scores: Any, least: Any, *refs: Any, weighted: bool, chunk: int) -> None:
    b = pl.program_id(0)
    trials, below, _, _ = Bracket(*refs[:-1])
    patterns = plgpu.load(trials.at[b, jnp.arange(TRIALS)])
    _sum_up(scores, least, refs[-1], patterns, below[b], below[b] < INFINITY, weighted, chunk)


def _next_kernel(scores: Any, least: Any, wanted: Any, *refs: Any, weighted: bool, chunk: int) -> None:
    size = len(Bracket._fields)
    before, partials, after, out = refs[:size], refs[size], refs[size + 1 : -1], refs[-1]
    b, c, at = pl.program_id(0), pl.program_id(1), jnp.arange(TRIALS)
    trials, *numbers = before
    bracket = Bracket(plgpu.load(trials.at[b, at]), *(ref[b] for ref in numbers))
    chunks = jnp.arange(pl.next_power_of_2(partials.shape[1]))[:, None]
    found = plgpu.load(partials.at[b, chunks, at[None]], mask=chunks < partials.shape[1], other=0.0)
    bracket, enough = _narrowed(bracket, found, wanted[b], weighted=weighted)
    own = plgpu.load(partials.at[b, c, at])
    inside = jnp.min(jnp.where(enough, own, jnp.inf)) > jnp.max(jnp.where(enough, 0.0, own))
    undecided = jnp.max(bracket.trials) - bracket.below > 1
    _sum_up(scores, least, out, bracket.trials, bracket.below, inside & undecided, weighted, chunk)
    trials, *numbers = after
    only = jnp.arange(1)
    plgpu.store(trials.at[b, at], bracket.trials, mask=jnp.broadcast_to(c == 0, at.shape))
    for ref, number in zip(numbers, bracket[1:], strict=True):
        plgpu.store(ref.at[b + only], jnp.broadcast_to(number, only.shape), mask=only == c)


def _sum_up(
    scores: Any, least: Any, out: Any, trials: Array, below: Array, wanted: Array, weighted: bool, chunk: int
) -> None:
    """Write what each trial keeps of a program's chunk, beside what `below` keeps: sums, or zeros if none are wanted."""
    V = scores.shape[1]
    b, c = pl.program_id(0), pl.program_id(1)
    lowest = least[b]

    def body(i: Any, acc: Array) -> Array:
        for part in range(AT_ONCE):
            at = c * chunk + (i * AT_ONCE + part) * TILE + jnp.arange(TILE)[None]
            score = plgpu.load(scores.at[b, at], mask=at < V, other=-jnp.inf)
            pattern = _patterns(score)
            weight = jnp.exp(score) if weighted else 1.0
            weight = jnp.where((pattern > below) & (score >= lowest), weight, 0.0)
            acc += jnp.where(pattern <= trials[:, None], weight, 0.0)
        return acc

    turns = wanted.astype(jnp.int32) * (chunk // (AT_ONCE * TILE))
    acc = lax.fori_loop(0, turns, body, jnp.zeros((TRIALS, TILE), jnp.float32))
    plgpu.store(out.at[b, c, jnp.arange(TRIALS)], jnp.sum(acc, axis=1))
