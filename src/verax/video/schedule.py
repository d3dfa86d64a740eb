"""Schedule of a segment: noise levels, and steps of each frame under diffusion forcing.

Flow matching mixes a clip x and noise n as `(1 - sigma) x + sigma n`. A schedule begins near 1 and ends at 0. The
timestep, which is an input of the model, is 1000 sigma, and with UniPC and DPM-Solver++ cut to a whole number. How
sigma is spaced before it is shifted towards noise is a rule of the family's reference, or is given by the request.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, Real

from verax.errors import InvalidParameterError
from verax.models.video_model import Sigmas, VideoModel, shift_sigmas
from verax.video import solvers
from verax.video.recipes import RECIPES
from verax.video.request import ResolvedRequest

TRAIN_TIMESTEPS = 1000
"""Noise levels in training: the timestep of sigma 1."""

ROWS = 64
"""Rows of tables are a multiple of this, so that runs of different numbers of steps share a program."""

_BELOW_ONE = 1e-6
"""Distance that diffusers keeps between the first sigma and 1, where the signal is 0 and its logarithm infinite."""


class NoiseLevels(NamedTuple):
    """Noise levels of `N` steps, from sigma[0] to sigma[N] = 0, and the timestep of each."""

    sigmas: Float32[np.ndarray, "N_and_1"]
    timesteps: Real[np.ndarray, "N"]


def noise_levels(
    steps: int, shift: float, sigmas: Sigmas, *, solver: str = "unipc", whole_timesteps: bool = False
) -> NoiseLevels:
    """Noise levels of a run of `steps` steps.

    Args:
        steps: number of steps, at least 1.
        shift: shift towards noise, above 0.
        sigmas: schedule of the family's reference (`ReferenceRules.sigmas`), or of the request.
        solver: one of `solvers.SOLVERS`. As in their references, UniPC's and DPM-Solver++'s timesteps are cut to whole
            numbers, and UniPC's first sigma is kept below 1, where its logarithms are finite.
        whole_timesteps: True to round the timesteps of other solvers, see `Recipe`.
    """
    levels = sigmas(steps, shift)
    if solver == "unipc" and abs(levels[0] - 1) < _BELOW_ONE:
        levels[0] -= _BELOW_ONE
    timesteps = levels * TRAIN_TIMESTEPS
    if solver in ("unipc", "dpm++"):
        timesteps = timesteps.astype(np.int32)
    else:
        timesteps = (np.rint(timesteps) if whole_timesteps else timesteps).astype(np.float32)
    return NoiseLevels(np.append(levels, 0).astype(np.float32), timesteps)


class Tables(NamedTuple):
    """Values of each iteration of a segment; rows after the last iteration are padding.

    `timesteps`: timestep of all frames, or of each frame. `row`: row of `solver` of all frames, or of each frame.
    `update`: frames that take a step; None if all do.
    """

    solver: solvers.SolverTable
    timesteps: Real[np.ndarray, "R *F"]
    row: Int32[np.ndarray, "R *F"]
    update: Bool[np.ndarray, "R F"] | None
    run_blocks: Bool[np.ndarray, "R"]


class Schedule(NamedTuple):
    """Iterations of a segment.

    `tables`: tables of the denoising loop; all iterations run the transformer's blocks. `timesteps`: timesteps as the
    transformer sees them, of all frames or of each frame.
    """

    tables: Tables
    timesteps: Real[np.ndarray, "R *F"]


HALF_SIZE_SHIFT = 1.0
"""Shift of the noise levels after half-size steps beyond the shift before, as in LightX2V."""


def segment_schedules(
    request: ResolvedRequest, model: VideoModel, *, latents: int, given: int, last: int
) -> list[Schedule]:
    """Iterations of a segment at half size, if it has some, and at full size.

    At full size the solver starts again. As in LightX2V (`WanScheduler4ChangingResolution`), the noise levels are
    shifted further, since an enlarged clip lacks more than its small noise says; but sigmas of the request stay, as
    distilled models know no others.

    `given`: number of them at the beginning that are not denoised. `last`: latent frames after them, which are not
    denoised either.
    """
    sizes = {"latents": latents, "given": given, "last": last}
    levels = request_levels(request, model, request.shift)
    if not (N := request.half_size_steps):
        return [_segment_schedule(request, model, levels, **sizes)]
    shift = request.shift + (HALF_SIZE_SHIFT if request.sigmas is None else 0)
    full = request_levels(request, model, shift)
    halves = NoiseLevels(levels.sigmas[: N + 1], levels.timesteps[:N]), NoiseLevels(full.sigmas[N:], full.timesteps[N:])
    return [_segment_schedule(request, model, half, **sizes) for half in halves]


def request_levels(request: ResolvedRequest, model: VideoModel, shift: float) -> NoiseLevels:
    """Noise levels of a request's steps.

    Raises:
        InvalidParameterError: if two levels are the same float32, between which a solver divides by 0.
    """
    own, rules = request.sigmas, model.rules
    spacing = rules.other_sigmas.get(request.solver, rules.sigmas)
    levels = noise_levels(
        request.num_inference_steps,
        shift,
        spacing if own is None else lambda steps, shift: shift_sigmas(np.array(own), shift),
        solver=request.solver,
        whole_timesteps=request.recipe is not None and RECIPES[request.recipe].whole_timesteps,
    )
    if not (np.diff(levels.sigmas) < 0).all():
        name, given = ("shift", f"{shift:g}") if own is None else ("sigmas", f"{own} with shift {shift:g}")
        raise InvalidParameterError(
            f"{name}: expected noise levels that differ as float32 in each of the {len(levels.timesteps)} steps, got "
            f"{given}"
        )
    return levels


def _segment_schedule(
    request: ResolvedRequest, model: VideoModel, levels: NoiseLevels, *, latents: int, given: int, last: int
) -> Schedule:
    is_forcing = model.conditioning.forcing
    if not (is_forcing or given):
        return Schedule(make_tables(levels, solver=request.solver), levels.timesteps)
    frames = latents + last
    forcing = forcing_schedule(
        frames,
        levels.timesteps,
        ar_step=request.ar_step,
        causal_block_size=request.causal_block_size,
        prefix=given,
        keep_partial_blocks=model.rules.keep_partial_blocks,
    )
    forcing.timesteps[:, latents:], forcing.update[:, latents:] = 0, False
    timesteps = forcing.timesteps
    if request.addnoise_condition:
        added = np.asarray(request.addnoise_condition, timesteps.dtype)
        timesteps = np.where(np.arange(frames) < given, added, timesteps)
    return Schedule(make_tables(levels, forcing, solver=request.solver, overwritten=is_forcing), timesteps)


def make_tables(
    levels: NoiseLevels, forcing: ForcingSchedule | None = None, *, solver: str = "unipc", overwritten: bool = False
) -> Tables:
    """Tables of a segment.

    `forcing`: step of each latent frame in each iteration; None for all frames together. `solver`: one of
    `solvers.SOLVERS`. `overwritten`: see `solvers.tabulate`.
    """
    table = solvers.SOLVERS[solver](levels.sigmas, overwritten=overwritten)
    together = levels.timesteps, np.arange(len(levels.timesteps), dtype=np.int32), None
    timesteps, row, update = together if forcing is None else forcing
    return jax.tree.map(padded_rows, Tables(table, timesteps, row, update, np.ones(len(timesteps), bool)))


def padded_rows(rows: np.ndarray) -> np.ndarray:
    """Rows and zeros after them, up to a multiple of `ROWS`."""
    return np.concatenate([rows, np.zeros((-len(rows) % ROWS, *rows.shape[1:]), rows.dtype)])


def transformer_spans(timesteps: Real[np.ndarray, "R *F"], boundary_ratio: float | None) -> list[tuple[int, int, int]]:
    """Runs of iterations with one transformer: its index, the first iteration, and the one after the last.

    `timesteps`: timesteps of all frames, or of each frame. `boundary_ratio`: share of all noise, where 1 is noise
    alone, down to which the first of two transformers is used. As in diffusers' `WanPipeline`, the iteration at the
    boundary is the first's. Of frames with a time each, the noisiest decides. None for one transformer.
    """
    noisiest = timesteps.reshape(len(timesteps), -1).max(axis=1)
    boundary = -1.0 if boundary_ratio is None else boundary_ratio * TRAIN_TIMESTEPS
    spans, begin = [], 0
    for index, same in groupby((noisiest < boundary).astype(int).tolist()):
        end = begin + len(list(same))
        spans.append((index, begin, end))
        begin = end
    return spans


_NOT_STARTED = 999
"""Timestep of frames that are noise and whose first step is still to come."""


class ForcingSchedule(NamedTuple):
    """Steps of `F` latent frames in `R` iterations.

    `row`: row of the solver's table, where `update` is set. `update`: True for frames that take a step.
    """

    timesteps: Real[np.ndarray, "R F"]
    row: Int32[np.ndarray, "R F"]
    update: Bool[np.ndarray, "R F"]


def forcing_schedule(
    frames: int,
    timesteps: Real[np.ndarray, "N"],
    *,
    ar_step: int = 0,
    causal_block_size: int = 1,
    prefix: int = 0,
    keep_partial_blocks: bool = True,
) -> ForcingSchedule:
    """Steps of the latent frames of a segment under diffusion forcing.

    As in SkyReels-V2 (2025), `generate_timestep_matrix`. Latent frames are grouped in blocks. Block 0 takes a step in
    every iteration. Block i follows block i - 1 by `ar_step` steps until that one is done, and then takes a step in
    every iteration. With `ar_step` 0 all blocks take their steps together. Given frames (an image, the end of an
    earlier clip) count as done from the start.

    Args:
        frames: latent frames, a multiple of `causal_block_size`.
        ar_step: steps by which a block follows the one before it; 0 for all together.
        keep_partial_blocks: True to leave all of them unchanged. False, as in diffusers, to leave only those that
            fill whole blocks: the others are taken for noise.
    """
    N = len(timesteps)
    blocks, done = frames // causal_block_size, prefix // causal_block_size
    # A block's count is the number of its last step, 0 before the first; N + 1 says that it was done before.
    timestep_of = np.concatenate([[_NOT_STARTED], timesteps, [0]]).astype(timesteps.dtype)
    counts = np.zeros(blocks, np.int32)
    counts[:done] = N + 1
    iterations, updates = [], []
    while (counts < N).any():
        after = np.empty_like(counts)
        for i in range(blocks):
            goes_alone = i == 0 or counts[i - 1] >= N
            after[i] = np.clip(counts[i] + 1 if goes_alone else after[i - 1] - ar_step, 0, N + 1)
        iterations.append(after)
        updates.append((after != counts) & (after <= N))
        counts = after
    matrix = np.repeat(np.array(iterations, np.int32).reshape(-1, blocks), causal_block_size, axis=1)
    update = np.repeat(np.array(updates, bool).reshape(-1, blocks), causal_block_size, axis=1)
    if keep_partial_blocks:
        matrix[:, :prefix], update[:, :prefix] = N + 1, False
    return ForcingSchedule(timestep_of[matrix], np.clip(matrix - 1, 0, N - 1), update)
