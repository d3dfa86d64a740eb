"""Denoising: from noise to latents, in the loop that diffusers' pipelines write as `for t in timesteps`.

`denoise` is the loop, and `predict_velocity` the transformer with guidance. Both are functions of arrays: programs are
made of them, divided over devices and planned elsewhere (`networks.Denoiser`). The timestep of an iteration, the
coefficients of the solver, the frames that take a step and whether the blocks run are rows of tables, so that text to
video, diffusion forcing and step caches are one loop, and one program whatever the number of steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Num

from verax.models.video_model import SequenceParallel, VideoTransformer
from verax.video import solvers
from verax.video.mesh import GUIDANCE, SEQUENCE, AnyMesh, axis_size
from verax.video.schedule import Tables


class Conditions(NamedTuple):
    """Inputs of a segment in addition to its noise, the same in every iteration.

    Attributes:
        context: the transformer's context of the prompt and, with guidance, of the negative prompt in a second row.
        image_condition: channels after the latents; None for models without them.
        fps: frames per second, for a model that has this input; else None.
        prefix_mask: diffusion forcing: True for the given frames, if the model sees them with noise; else None.
        added_noise: amount of that noise, in timesteps.
    """

    context: Any
    image_condition: Float32[Array, "1 F h w E"] | None
    fps: Int32[np.ndarray, "1"] | None
    guidance_scale: Float32[np.ndarray, ""]
    prefix_mask: Bool[np.ndarray, "F"] | None
    added_noise: Int32[np.ndarray, ""]
    key: Array


class DenoisingState(NamedTuple):
    """State between iterations.

    `residual`: with a step cache, the sum that the blocks added when they last ran, of each row; else None. Tokens that
    are divided over devices stand in one row, `[G, F, 1, h w, D]`.
    """

    solver: solvers.SolverState
    residual: Float32[Array, "G F h w D"] | None


def denoise(
    model: VideoTransformer,
    state: DenoisingState,
    tables: Tables,
    conditions: Conditions,
    begin: Int32[Array, ""],
    end: Int32[Array, ""],
    *,
    mesh: AnyMesh | None,
    guidance: str | None,
    **options: Any,
) -> DenoisingState:
    """Run the iterations from `begin` to the one before `end`.

    Args:
        mesh: devices that divide guidance and tokens, inside `jax.shard_map` over them; None for one device.
        guidance: `"batch"`, `"sequential"`, or None for the prompt alone.
        options: `causal_block_size` and `attention` of `VideoTransformer.run_blocks`.
    """

    def iteration(i: Array, state: DenoisingState) -> DenoisingState:
        # 1. What the model sees: the sample, with noise on given frames, and the channels of an image.
        run_blocks = jnp.asarray(tables.run_blocks)[i]
        timesteps, x = jnp.asarray(tables.timesteps)[i], state.solver.sample
        if conditions.prefix_mask is not None:
            timesteps, x = _with_noise(timesteps, x, conditions, i)
        if conditions.image_condition is not None:
            x = jnp.concatenate([x, conditions.image_condition], axis=-1)

        # 2. The velocity that it predicts, guided away from the negative prompt.
        prediction, residual = predict_velocity(
            model, x, timesteps, conditions, state.residual, run_blocks, mesh=mesh, guidance=guidance, **options
        )

        # 3. The solver's step.
        update = None if tables.update is None else jnp.asarray(tables.update)[i]
        noise = None
        if tables.solver.noise is not None:
            key = jax.random.fold_in(jax.random.fold_in(conditions.key, i), 1)  # not the prefix's, which has no 1
            noise = jax.random.normal(key, state.solver.sample.shape, jnp.float32)
        solver = solvers.step(tables.solver, jnp.asarray(tables.row)[i], state.solver, prediction, update, noise)
        return DenoisingState(solver, residual)

    return jax.lax.fori_loop(begin, end, iteration, state)


def predict_velocity(
    model: VideoTransformer,
    x: Float32[Array, "1 F h w C"],
    timesteps: Num[Array, "*F"],
    conditions: Conditions,
    residual: Any = None,
    run_blocks: Any = None,
    *,
    mesh: AnyMesh | None,
    guidance: str | None,
    **options: Any,
) -> tuple[Float32[Array, "1 F h w O"], Any]:
    """Velocity of a clip with guidance, and the residual of the blocks.

    `residual`: sum that the blocks added when they last ran; None without a cache.
    """
    sequence = _sequence(model, x.shape, mesh)

    def predict(context: Any, residual: Any) -> tuple[Array, Any]:
        """Velocity of this device's tokens, one row for each row of the context, and the residual of the blocks."""
        G, fps = jax.tree.leaves(context)[0].shape[0], conditions.fps
        whole = jnp.broadcast_to(x, (G, *x.shape[1:]))
        times = jnp.broadcast_to(timesteps, (G, *timesteps.shape))
        e, e0 = model.embed_time(times, None if fps is None else jnp.broadcast_to(fps, (G,)))
        before = model.embed_latents(whole if sequence is None else sequence.divide(whole))

        def with_blocks() -> Array:
            return model.run_blocks(before, e0, context, sequence=sequence, **options)

        if residual is None:
            return model.unembed(with_blocks(), e), None
        after, added = jax.lax.cond(
            run_blocks, lambda: (after := with_blocks(), after - before), lambda: (before + residual, residual)
        )
        return model.unembed(after, e), added

    if guidance == "sequential":
        # One row after the other through one copy of the model in the program.
        def predict_row(row: tuple[Any, Any]) -> tuple[Array, Any]:
            return jax.tree.map(lambda a: a[0], predict(*jax.tree.map(lambda a: a[None], row)))

        rows, residual = jax.lax.map(predict_row, (conditions.context, residual))
    else:
        rows, residual = predict(conditions.context, residual)
    return _combine(rows, None if guidance is None else conditions.guidance_scale, sequence, mesh), residual


def _combine(
    velocity: Float32[Array, "G F h w C"], guidance_scale: Any, sequence: SequenceParallel | None, mesh: AnyMesh | None
) -> Float32[Array, "1 F hp wp C"]:
    """Velocity of a clip, from the rows and tokens of all devices; `guidance_scale` is None for one row."""
    if axis_size(mesh, GUIDANCE) > 1:
        velocity = jax.lax.all_gather(velocity, GUIDANCE, tiled=True)
    if guidance_scale is not None:
        cond, uncond = velocity[:1], velocity[1:]
        velocity = uncond + guidance_scale * (cond - uncond)
    return velocity if sequence is None else sequence.gather(velocity)


def _sequence(model: Any, latents: tuple[int, ...], mesh: AnyMesh | None) -> SequenceParallel | None:
    """Division of the tokens of latents `[1, F, h, w, C]`; None where each device has all tokens."""
    if axis_size(mesh, SEQUENCE) == 1:
        return None
    patch = model.config.patch
    return SequenceParallel(SEQUENCE, latents[2] // patch, latents[3] // patch)


def _with_noise(
    timesteps: Num[Array, "F"], sample: Float32[Array, "1 F h w C"], conditions: Conditions, i: Array
) -> tuple[Num[Array, "F"], Float32[Array, "1 F h w C"]]:
    """Timesteps and sample as the model sees them, with noise on the given frames, which hides a seam."""
    mask = jnp.asarray(conditions.prefix_mask)
    amount = jnp.float32(0.001) * conditions.added_noise
    noise = jax.random.normal(jax.random.fold_in(conditions.key, i), sample.shape, sample.dtype)
    shown = (1 - amount) * sample + amount * noise
    return jnp.where(mask, conditions.added_noise, timesteps), jnp.where(mask[:, None, None, None], shown, sample)


def half_size_noise(noise: Float32[Array | np.ndarray, "1 F H W C"], h: int, w: int) -> Float32[Array, "1 F h w C"]:
    """Noise of height `h` and width `w`, at most half of the noise's: the sum of each 2 x 2, halved.

    It is white, as the noise is, and has its large shapes, so that clips of both sizes are composed alike.
    """
    B, F, _, _, C = noise.shape
    return noise[:, :, : 2 * h, : 2 * w].reshape(B, F, h, 2, w, 2, C).sum(axis=(3, 5)) / 2


def enlarged(
    clean: Float32[Array, "1 F h w C"], noise: Float32[Array, "1 F H W C"], sigma: float
) -> Float32[Array, "1 F H W C"]:
    """Predicted clean latents at the size of `noise`, by linear interpolation, with noise of level `sigma`."""
    return (1 - sigma) * jax.image.resize(clean, noise.shape, "linear") + sigma * noise
