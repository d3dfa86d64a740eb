"""Noise to latents: the loop over steps as one program, whatever the number of steps.

A step is the transformer, guidance and the solver. Which timestep, which coefficients, which frames and whether the
blocks run at all is looked up in tables, so that text to video, diffusion forcing and TeaCache are one loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from verax.models.wan.model import WanConfig, WanContext, WanModel
from verax.video import unipc
from verax.video.forcing import ForcingSchedule
from verax.video.programs import Component, Program, Weights
from verax.video.sigmas import NoiseLevels

__all__ = ["Carry", "Conditions", "Denoiser", "Tables", "make_tables"]

ROWS = 64
"""Tables are filled up to a multiple of this, so that another number of steps is no other program."""


class Tables(NamedTuple):
    """Values for each of a run's iterations; rows beyond the last are never read."""

    solver: unipc.UniPCTable
    timesteps: Int32[np.ndarray, "R *F"]
    row: Int32[np.ndarray, "R *F"]
    update: Bool[np.ndarray, "R F"] | None
    run_blocks: Bool[np.ndarray, "R"]


def make_tables(
    levels: NoiseLevels,
    forcing: ForcingSchedule | None = None,
    run_blocks: Bool[np.ndarray, "R"] | None = None,
    *,
    overwritten: bool = False,
) -> Tables:
    """The tables of a run.

    Args:
        levels: its noise levels.
        forcing: what each latent frame does in each iteration; None for all frames together.
        run_blocks: iterations in which the blocks run; all if None.
        overwritten: see `unipc.tabulate`.
    """
    solver = unipc.tabulate(levels.sigmas, overwritten=overwritten)
    if forcing is None:
        iterations = len(levels.timesteps)
        forcing_rows = levels.timesteps, np.arange(iterations, dtype=np.int32), None
    else:
        iterations = len(forcing.timesteps)
        forcing_rows = forcing
    if run_blocks is None:
        run_blocks = np.ones(iterations, bool)
    return jax.tree.map(_filled, Tables(solver, *forcing_rows, run_blocks))


def _filled(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.zeros((-len(rows) % ROWS, *rows.shape[1:]), rows.dtype)])


class Conditions(NamedTuple):
    """What a run is told besides its noise; nothing here changes from iteration to iteration."""

    context: WanContext
    """Of the prompt and, with guidance, of the negative prompt in a second row."""
    image_condition: Float32[Array, "1 F h w E"] | None
    """Image to video: channels behind the latents', see `Stages.condition`."""
    fps: Int32[np.ndarray, "1"] | None
    """For a model that is told."""
    guidance_scale: Float32[np.ndarray, ""]
    prefix_mask: Bool[np.ndarray, "F"] | None
    """Diffusion forcing: frames that were given, where the model is shown them with noise; else None."""
    added_noise: Int32[np.ndarray, ""]
    """How much noise, in timesteps."""
    key: Array
    """Of that noise."""


class Carry(NamedTuple):
    """What goes from iteration to iteration."""

    solver: unipc.UniPCState
    residual: Float32[Array, "G F h w D"] | None
    """With TeaCache, what the blocks added when they last ran, with and without the prompt; else None."""


class Denoiser:
    """The loop, for one transformer."""

    def __init__(self, transformer: Component[WanModel]):
        self._transformer = transformer
        options = ("guidance", "causal_block_size", "attention")
        self.program = Program(self._iterations, options=options, donate=(1,))
        """Of weights, carry, tables, conditions, and the first iteration and the one after the last to run."""

    def start(self, noise: Float32[Array, "1 F h w C"], *, guided: bool, cached: bool) -> Carry:
        """What goes into the first iteration.

        Args:
            noise: and, where frames are given, those in their places.
            guided: whether there is a second row.
            cached: whether some iterations leave the blocks out.
        """
        _, F, h, w, _ = noise.shape
        config: WanConfig = self._transformer.config
        size = (1 + guided, F, h // config.patch, w // config.patch, config.dim)
        return Carry(unipc.start(noise), jnp.zeros(size, jnp.float32) if cached else None)

    def _iterations(
        self,
        weights: Weights,
        carry: Carry,
        tables: Tables,
        conditions: Conditions,
        begin: Int32[Array, ""],
        end: Int32[Array, ""],
        *,
        guidance: str | None,
        causal_block_size: int | None,
        attention: str,
    ) -> Carry:
        model = self._transformer.module(weights)
        fps = conditions.fps

        def velocity(
            x: Float32[Array, "G F h w C"],
            timesteps: Int32[Array, "*F"],
            rows: WanContext,
            residual: Any,
            run_blocks: Any,
        ) -> tuple[Array, Any]:
            """Of some rows, and what the blocks added."""
            G = x.shape[0]
            times = jnp.broadcast_to(timesteps, (G, *timesteps.shape))
            e, e0 = model.embed_time(times, None if fps is None else jnp.broadcast_to(fps, (G,)))
            before = model.embed_latents(x)

            def with_blocks() -> Array:
                return model.run_blocks(before, e0, rows, causal_block_size=causal_block_size, attention=attention)

            if residual is None:
                after = with_blocks()
            else:
                after = jax.lax.cond(run_blocks, with_blocks, lambda: before + residual)
                residual = after - before
            return model.unembed(after, e), residual

        def one_iteration(i: Array, carry: Carry) -> Carry:
            solver, residual = carry
            run_blocks = jnp.asarray(tables.run_blocks)[i]
            timesteps, x = jnp.asarray(tables.timesteps)[i], solver.sample
            if conditions.prefix_mask is not None:
                timesteps, x = _with_noise(timesteps, x, conditions, i)
            if conditions.image_condition is not None:
                x = jnp.concatenate([x, conditions.image_condition], axis=-1)
            if guidance == "sequential":
                # One row after the other through one copy of the model in the program.
                def one_row(row: tuple[Any, Any]) -> tuple[Array, Any]:
                    context, added = jax.tree.map(lambda a: a[None], row)
                    return jax.tree.map(lambda a: a[0], velocity(x, timesteps, context, added, run_blocks))

                found, residual = jax.lax.map(one_row, (conditions.context, residual))
            else:
                rows = 1 if guidance is None else 2
                x = jnp.broadcast_to(x, (rows, *x.shape[1:]))
                found, residual = velocity(x, timesteps, conditions.context, residual, run_blocks)
            if guidance is not None:
                cond, uncond = found[:1], found[1:]
                found = uncond + conditions.guidance_scale * (cond - uncond)
            update = None if tables.update is None else jnp.asarray(tables.update)[i]
            return Carry(unipc.step(tables.solver, jnp.asarray(tables.row)[i], solver, found, update), residual)

        return jax.lax.fori_loop(begin, end, one_iteration, carry)


def _with_noise(
    timesteps: Int32[Array, "F"], sample: Float32[Array, "1 F h w C"], conditions: Conditions, i: Array
) -> tuple[Int32[Array, "F"], Float32[Array, "1 F h w C"]]:
    """What the model is told and shown where frames were given: less than clean, which hides a seam."""
    mask = jnp.asarray(conditions.prefix_mask)
    amount = jnp.float32(0.001) * conditions.added_noise
    noise = jax.random.normal(jax.random.fold_in(conditions.key, i), sample.shape, sample.dtype)
    shown = (1 - amount) * sample + amount * noise
    return jnp.where(mask, conditions.added_noise, timesteps), jnp.where(mask[:, None, None, None], shown, sample)
