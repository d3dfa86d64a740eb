"""UniPC and other solvers for flow matching, whose every coefficient is known before the run.

UniPC is a predictor-corrector:

Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models" (2023), with what
the video models use: order 2, B(h) = expm1(-h), prediction of the clean clip, first order in the first and last step. A
step takes the velocity v that the model sees in the sample x, and is linear in what it combines:

    clean      = x - sigma v
    corrected  = keep x + a last + b newest + c older + d clean        (the corrector, which redoes the step before)
    x'         = e corrected + f clean + g newest                      (the predictor)

where `last` is the corrected sample one step ago, and `newest` and `older` are the clean clips one and two steps ago.

Euler's method and LCM (Luo et al., "Latent Consistency Models", 2023) are rows of the same table: the sample is kept,
Euler's `x' = x + (sigma' - sigma) v` is `e = sigma' / sigma`, `f = 1 - e`, and LCM, which adds fresh noise to the clean
clip in each step, has `f = 1 - sigma'` and a term `sigma' noise`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int


class SolverTable(NamedTuple):
    """Coefficients of each of `N` steps, by the letters above. `noise`: of fresh noise; None for solvers without."""

    sigma: Float32[np.ndarray, "N"]
    keep: Float32[np.ndarray, "N"]
    a: Float32[np.ndarray, "N"]
    b: Float32[np.ndarray, "N"]
    c: Float32[np.ndarray, "N"]
    d: Float32[np.ndarray, "N"]
    e: Float32[np.ndarray, "N"]
    f: Float32[np.ndarray, "N"]
    g: Float32[np.ndarray, "N"]
    noise: Float32[np.ndarray, "N"] | None = None


class SolverState(NamedTuple):
    """State between steps. Different frames may be at different steps."""

    sample: Float32[Array, "B F h w C"]
    last: Float32[Array, "B F h w C"]
    newest: Float32[Array, "B F h w C"]
    older: Float32[Array, "B F h w C"]


def tabulate(
    sigmas: Float32[np.ndarray, "N_and_1"], *, overwritten: bool = False, corrects: bool = True
) -> SolverTable:
    """Coefficients for a schedule of falling noise levels that ends at 0, worked out in float64.

    `overwritten`: True to follow both published diffusion-forcing pipelines: their solver remembers the first sample by
    reference, the loop writes the first step's result over it, and so the second step's corrector starts from that
    result in place of the noise. `corrects`: False for the predictor alone, which is DPM-Solver++ of order 2 by the
    midpoint (Lu et al., 2022, arXiv:2211.01095).
    """
    sigma = sigmas.astype(np.float64)
    N = len(sigma) - 1
    with np.errstate(divide="ignore"):  # half the log signal-to-noise ratio; infinite at the end
        ratio = np.log(1 - sigma) - np.log(sigma)
    rows = np.zeros((9, N))
    for i in range(N):
        order = 1 if i in (0, N - 1) else 2
        keep, a, b, c, d = 1.0, 0.0, 0.0, 0.0, 0.0
        if i > 0 and corrects:
            keep = 0.0
            a, b, c, d = _correct(sigma, ratio, i, order=1 if i == 1 else 2)
            if i == 1 and overwritten:
                keep, a = a, 0.0
        rows[:, i] = (sigma[i], keep, a, b, c, d, *_predict(sigma, ratio, i, order))
    return SolverTable(*rows.astype(np.float32))


def tabulate_euler(sigmas: Float32[np.ndarray, "N_and_1"], *, overwritten: bool = False) -> SolverTable:
    """Coefficients of Euler's method, for a schedule as `tabulate` takes it; it remembers no sample to overwrite."""
    sigma = sigmas.astype(np.float64)
    ratio = sigma[1:] / sigma[:-1]
    zero = np.zeros_like(ratio)
    rows = (sigma[:-1], np.ones_like(ratio), *(zero,) * 4, ratio, 1 - ratio, zero)
    return SolverTable(*(row.astype(np.float32) for row in rows))


def tabulate_lcm(sigmas: Float32[np.ndarray, "N_and_1"], *, overwritten: bool = False) -> SolverTable:
    """Coefficients of LCM, for a schedule as `tabulate` takes it; it remembers no sample to overwrite."""
    table, sigma = tabulate_euler(sigmas), sigmas.astype(np.float64)[1:]
    return table._replace(e=np.zeros_like(table.e), f=(1 - sigma).astype(np.float32), noise=sigma.astype(np.float32))


SOLVERS: Mapping[str, Callable[..., SolverTable]] = {
    "unipc": tabulate,
    "dpm++": partial(tabulate, corrects=False),
    "euler": tabulate_euler,
    "lcm": tabulate_lcm,
}
"""Functions from a schedule to its coefficients, by the solver's name."""


def _predict(sigma: np.ndarray, ratio: np.ndarray, i: int, order: int) -> tuple[float, float, float]:
    """Step `i`'s e, f, g: from noise level `i` to level `i + 1`."""
    h = ratio[i + 1] - ratio[i]
    weight = (1 - sigma[i + 1]) * np.expm1(-h)
    slope = 0.0 if order == 1 else 0.5 * h / (ratio[i - 1] - ratio[i])
    return sigma[i + 1] / sigma[i], -weight * (1 - slope), -weight * slope


def _correct(sigma: np.ndarray, ratio: np.ndarray, i: int, order: int) -> tuple[float, float, float, float]:
    """Step `i`'s a, b, c, d: from noise level `i - 1` to level `i` again, now that the model has looked there."""
    h = ratio[i] - ratio[i - 1]
    weight = (1 - sigma[i]) * np.expm1(-h)
    if order == 1:
        older, new = 0.0, 0.5
    else:
        r = (ratio[i - 2] - ratio[i - 1]) / h
        # The moments that the two slopes have to meet: B(h) times h^k phi_k(h), for k of 2 and 3.
        second = np.expm1(-h) / -h - 1
        third = second / -h - 0.5
        moments = np.array([second, 2 * third]) / np.expm1(-h)
        slope, new = np.linalg.solve(np.array([[1.0, 1.0], [r, 1.0]]), moments)
        older = slope / r
    return sigma[i] / sigma[i - 1], -weight * (1 - older - new), -weight * older, -weight * new


def start(noise: Float32[Array, "B F h w C"]) -> SolverState:
    """State before the first step."""
    # Separate arrays: a program that donates its state cannot take one buffer twice.
    return SolverState(noise, *(jnp.zeros_like(noise) for _ in range(3)))


def step(
    table: SolverTable,
    index: Int[Array, ""] | Int[Array, "F"],
    state: SolverState,
    velocity: Float32[Array, "B F h w C"],
    update: Bool[Array, "F"] | None = None,
    noise: Float32[Array, "B F h w C"] | None = None,
) -> SolverState:
    """State after a step.

    Args:
        index: number of the step, counted from 0, of all frames or of each frame.
        state: state of `start` or of the step before.
        velocity: velocity of `state.sample` by the model.
        update: frames that take this step; the state of the others does not change. All frames if None.
        noise: fresh noise, for a table that has a coefficient for it.
    """
    sigma, keep, a, b, c, d, e, f, g, *fresh = (
        jnp.asarray(column)[index].reshape(-1, 1, 1, 1) for column in table if column is not None
    )
    clean = state.sample - sigma * velocity
    corrected = keep * state.sample + a * state.last + b * state.newest + c * state.older + d * clean
    predicted = e * corrected + f * clean + g * state.newest
    if noise is not None:
        predicted += fresh[0] * noise
    after = SolverState(predicted, corrected, clean, state.newest)
    if update is None:
        return after
    chosen = update.reshape(-1, 1, 1, 1)
    return jax.tree.map(lambda new, old: jnp.where(chosen, new, old), after, state)
