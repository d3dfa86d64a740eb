"""Search for the sampler's thresholds on NVIDIA GPUs in Pallas, lowered to Triton.

    PASSES times:
        for each row and each chunk of its scores, all at once:
            narrow the row's bracket by what the pass before found
            if one of the chunk's scores lies in the bracket:
                sum up what each of 16 trials within the bracket keeps of the chunk

So a pass divides the bracket, a range of bit patterns, by 16, where bisection halves it and needs 31 passes. The
programs of a row cannot wait for each other, so that a pass is a launch, and XLA records the launches in a command
buffer. Nothing is atomic, and sums are added in one order: equal calls have equal results. `gpu/paged_kernel.py` says
why Triton compiles it.
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
"""Thresholds of a pass. Twice as many would need 7 passes in place of 8, with twice the comparisons in each."""

PASSES = 8
"""Passes that leave one pattern of a bracket: the first leaves 2^28 of them at most, each of the others a 16th."""

FIRST_TRIALS = -np.asarray(
    [2.0**-96, 2.0**-64, 2.0**-32, 0.5, 1, 2, 4, 6, 8, 12, 16, 24, 2.0**32, 2.0**64, 2.0**96, np.inf], np.float32
)
"""Trials of the first pass: dense where a threshold is likely, elsewhere as far apart as the passes after it allow."""

INFINITY = 0x7F800000
"""Bit pattern of infinity, which keeps everything."""

TILE = 512
"""Scores that a program compares at a time: four for each thread."""

AT_ONCE = 2
"""Tiles that are loaded before one is compared, so that the cache's latency is paid once for them."""

PROGRAMS = 528
"""Programs that fill an H100's 132 multiprocessors, whose registers have room for four each."""

PARAMETERS = {"num_warps": 4, "num_stages": 1}


def chunk_of_program(rows: int, V: int) -> int:
    """Scores of a program: the fewest of which there are at most `PROGRAMS`, or a whole row if there are more rows."""
    fewest = pl.cdiv(V, max(1, PROGRAMS // rows))
    return pl.cdiv(fewest, AT_ONCE * TILE) * AT_ONCE * TILE


class Bracket(NamedTuple):
    """Range of thresholds of each row, as bit patterns of their negatives: a larger pattern keeps more."""

    trials: Int[Array, "*B t"]
    """Patterns that are tried, ascending. The last one is enough, or everything."""
    below: Int[Array, "*B"]
    """Largest pattern that is known not to be enough; -1 without one, and infinity's in rows that keep everything."""
    base: Float[Array, "*B"]
    """Sum over the scores that `below` keeps."""
    total: Float[Array, "*B"]
    """Largest sum so far: after the first pass, that of all scores."""


_FIELDS = (((TRIALS,), jnp.int32), ((), jnp.int32), ((), jnp.float32), ((), jnp.float32))
"""Shape and dtype of a row's `Bracket`."""


def search(
    scores: Float[Array, "B V"],
    least: Float[Array, "B"],
    wanted: Float[Array, "B"],
    *,
    weighted: bool,
    interpret: bool = False,
) -> Float[Array, "B"]:
    """`ops.sampling.Search` for an NVIDIA GPU, with `interpret` as `pallas_call` takes it."""
    settings = {"chunk": chunk_of_program(*scores.shape), "weighted": weighted, "interpret": interpret}
    bracket, sums = _pass(scores, least, wanted, _patterns(jnp.asarray(FIRST_TRIALS)), first=True, **settings)
    for _ in range(PASSES - 1):
        bracket, sums = _pass(scores, least, wanted, *bracket, sums, first=False, **settings)
    narrowed, _ = jax.vmap(partial(_narrowed, weighted=weighted))(bracket, sums, wanted)
    return _scores(narrowed.trials[:, -1])


@partial(jax.jit, static_argnames=("first", "chunk", "weighted", "interpret"))  # all but the first are lowered as one
def _pass(
    scores: Float[Array, "B V"],
    least: Float[Array, "B"],
    wanted: Float[Array, "B"],
    *before: Array,
    first: bool,
    chunk: int,
    weighted: bool,
    interpret: bool,
) -> tuple[Bracket, Float[Array, "B c t"]]:
    """The bracket of a pass, and what each of its trials keeps of each chunk beside what `below` keeps.

    Args:
        scores, least, wanted: see `ops.sampling.Search`.
        before: both of the pass before; the trials of the first one.
        first: True for the first pass.
        chunk: scores of a program.
        weighted: see `ops.sampling.Search`.
        interpret: as `pallas_call` takes it.
    """
    B, V = scores.shape
    grid = B, pl.cdiv(V, chunk)
    run = pl.pallas_call(
        partial(_kernel, first=first, weighted=weighted, chunk=chunk),
        grid=grid,
        out_shape=[
            *(jax.ShapeDtypeStruct((B, *size), dtype) for size, dtype in _FIELDS),
            jax.ShapeDtypeStruct((*grid, TRIALS), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(**PARAMETERS),
        interpret=interpret,
        name=f"sample_by_{'probability' if weighted else 'rank'}{'_first' if first else ''}",
    )
    *bracket, sums = run(scores, least, wanted, *before)
    return Bracket(*bracket), sums


def _patterns(scores: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Bit patterns of the negatives of non-positive scores, and of zeros of either sign."""
    return lax.bitcast_convert_type(scores, jnp.int32) & 0x7FFFFFFF


def _scores(patterns: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Scores of bit patterns."""
    return -lax.bitcast_convert_type(patterns, jnp.float32)


def _narrowed(
    bracket: Bracket, sums: Float[Array, "c t"], wanted: Float[Array, ""], *, weighted: bool
) -> tuple[Bracket, Bool[Array, "t"]]:
    """A row's next bracket, and which of the trials were enough.

    Args:
        bracket: the row's bracket in a pass.
        sums: what each trial keeps of each chunk beside what `below` keeps.
        wanted: see `ops.sampling.Search`.
        weighted: likewise.
    """
    at, of_row = jnp.arange(TRIALS), bracket.base + jnp.sum(sums, axis=0)
    total = jnp.maximum(bracket.total, jnp.max(of_row))
    enough = (of_row >= (wanted * total if weighted else wanted)) | (at == TRIALS - 1)
    below = jnp.max(jnp.where(enough, bracket.below, bracket.trials))
    upto = jnp.min(jnp.where(enough, bracket.trials, INFINITY))
    base = jnp.max(jnp.where(enough, bracket.base, of_row))
    trials = jnp.minimum(below + (at + 1) * ((upto - below + TRIALS - 1) // TRIALS), upto)
    return Bracket(trials, below, base, total), enough


def _kernel(scores: Any, least: Any, wanted: Any, *refs: Any, first: bool, weighted: bool, chunk: int) -> None:
    size = len(Bracket._fields)
    before, after, out = refs[: -size - 1], refs[-size - 1 : -1], refs[-1]
    b, c, at, only = pl.program_id(0), pl.program_id(1), jnp.arange(TRIALS), jnp.arange(1)
    if first:
        trials = plgpu.load(before[0].at[at])
        below = jnp.where(wanted[b] < jnp.inf, -1, jnp.max(trials))
        bracket = Bracket(trials, below, jnp.float32(0), jnp.float32(0))
        needed = below < INFINITY
    else:
        trials, *numbers, sums = before
        bracket = Bracket(plgpu.load(trials.at[b, at]), *(ref[b] for ref in numbers))
        num_chunks = sums.shape[1]
        chunks = jnp.arange(pl.next_power_of_2(num_chunks))[:, None]
        found = plgpu.load(sums.at[b, chunks, at[None]], mask=chunks < num_chunks, other=0.0)
        bracket, enough = _narrowed(bracket, found, wanted[b], weighted=weighted)
        own = plgpu.load(sums.at[b, c, at])
        inside = jnp.min(jnp.where(enough, own, jnp.inf)) > jnp.max(jnp.where(enough, 0.0, own))
        needed = inside & (jnp.max(bracket.trials) - bracket.below > 1)
    trials, *numbers = after
    plgpu.store(trials.at[b, at], bracket.trials, mask=jnp.broadcast_to(c == 0, at.shape))
    for ref, number in zip(numbers, bracket[1:], strict=True):
        plgpu.store(ref.at[b + only], jnp.broadcast_to(number, only.shape), mask=only == c)

    thresholds, above = _scores(bracket.trials)[:, None], jnp.where(bracket.below < 0, 1.0, _scores(bracket.below))

    def body(i: Any, acc: Array) -> Array:
        tokens = [(c * chunk + (i * AT_ONCE + j) * TILE + jnp.arange(TILE))[None] for j in range(AT_ONCE)]
        tiles = [plgpu.load(scores.at[b, v], mask=v < scores.shape[1], other=-jnp.inf) for v in tokens]
        for score in tiles:
            weight = jnp.exp(score) if weighted else None
            score = jnp.where((score < above) & (score >= least[b]), score, jnp.nan)  # no threshold keeps it
            # A comparison that gives 1 or 0, which is multiplied: to select a weight takes the slower unit twice.
            kept = jnp.where(score >= thresholds, 1.0, 0.0)
            acc += kept if weight is None else kept * weight
        return acc

    # The bound is a product: JAX lowers a choice between two constants to one of another dtype.
    turns = needed.astype(jnp.int32) * (chunk // (AT_ONCE * TILE))
    acc = lax.fori_loop(0, turns, body, jnp.zeros((TRIALS, TILE), jnp.float32))
    plgpu.store(out.at[b, c, at], jnp.sum(acc, axis=1))
