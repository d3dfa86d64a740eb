"""Denoising: the loop over steps as one program, whatever the number of steps.

An iteration is the transformer, guidance and the solver. Its timestep, its coefficients, the frames that it updates and
whether the blocks run are rows of tables, so that text to video, diffusion forcing and TeaCache are one loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from verax.models.wan.layers import SequenceParallel
from verax.models.wan.model import WanConfig, WanContext, WanModel
from verax.video import unipc
from verax.video.mesh import BY_ROW, GUIDANCE, REPLICATED, SEQUENCE, AnyMesh, axis_size, layout
from verax.video.programs import Component, Program, ProgramCall, Weights, shapes_of
from verax.video.request import ResolvedRequest
from verax.video.schedule import ForcingSchedule, NoiseLevels

__all__ = ["Carry", "Conditions", "Denoiser", "Tables", "make_tables", "padded_rows"]

ROWS = 64
"""Rows of tables are a multiple of this, so that runs of different numbers of steps share a program."""


class Tables(NamedTuple):
    """Values of each iteration of a segment; rows after the last iteration are padding.

    Attributes:
        solver: coefficients of each step of the solver.
        timesteps: timestep of all frames, or of each frame.
        row: row of `solver` of all frames, or of each frame.
        update: frames that take a step; None if all do.
        run_blocks: True for iterations in which the transformer's blocks run.
    """

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
    """Build the tables of a segment.

    Args:
        levels: noise levels of the steps.
        forcing: step of each latent frame in each iteration; None for all frames together.
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
    return jax.tree.map(padded_rows, Tables(solver, *forcing_rows, run_blocks))


def padded_rows(rows: np.ndarray) -> np.ndarray:
    """Rows and zeros after them, up to a multiple of `ROWS`."""
    return np.concatenate([rows, np.zeros((-len(rows) % ROWS, *rows.shape[1:]), rows.dtype)])


class Conditions(NamedTuple):
    """Inputs of a segment besides its noise, the same in every iteration.

    Attributes:
        context: cross-attention keys of the prompt and, with guidance, of the negative prompt in a second row.
        image_condition: image to video: channels behind the latents', see `Stages.condition_call`; else None.
        fps: frames per second, for a model that has this input; else None.
        guidance_scale: scale of classifier-free guidance.
        prefix_mask: diffusion forcing: True for the prefix frames, if the model sees them with noise; else None.
        added_noise: amount of that noise, in timesteps.
        key: random key of that noise.
    """

    context: WanContext
    image_condition: Float32[Array, "1 F h w E"] | None
    fps: Int32[np.ndarray, "1"] | None
    guidance_scale: Float32[np.ndarray, ""]
    prefix_mask: Bool[np.ndarray, "F"] | None
    added_noise: Int32[np.ndarray, ""]
    key: Array


class Carry(NamedTuple):
    """State between iterations.

    Attributes:
        solver: state of the solver.
        residual: with TeaCache, the sum that the blocks added when they last ran, of each row; else None. Tokens that
            are divided over devices stand in one row, `[G, F, 1, h w, D]`.
    """

    solver: unipc.UniPCState
    residual: Float32[Array, "G F h w D"] | None


_RESIDUAL = PartitionSpec(GUIDANCE, None, None, SEQUENCE)
_CARRY: Any = Carry._make([REPLICATED, _RESIDUAL])
_CONDITIONS: Any = Conditions._make([BY_ROW] + [REPLICATED] * (len(Conditions._fields) - 1))
"""Partition of each array over a mesh."""


class Denoiser:
    """Programs over one transformer: context, embedding of time, and the loop over iterations.

    Attributes:
        transformer: model.
        mesh: devices of the programs; None for the default device.
        context_program: function of weights, text states `[G, T, D]` and image states `[G, P, I]` or None.
        time_program: function of weights, timesteps `[R, *F]` and fps or None.
        program: function of weights, carry, tables, conditions, and the first iteration and the one after the last.
    """

    def __init__(self, transformer: Component[WanModel], mesh: AnyMesh | None = None):
        """Describe the programs; nothing is compiled.

        Args:
            transformer: model, whose weights are whole on each device of the mesh, or divided over all of them.
            mesh: of `video_mesh`.
        """
        self.transformer = transformer
        self.mesh = mesh

        def context(weights: Weights, text: Array, image: Array | None) -> WanContext:
            return transformer.module(weights).encode_context(text, image)

        def time(weights: Weights, timesteps: Array, fps: Array | None) -> tuple[Array, Array]:
            fps = None if fps is None else jnp.broadcast_to(fps, timesteps.shape[:1])
            return transformer.module(weights).embed_time(timesteps, fps)

        each, of_model = REPLICATED, transformer.partition
        self.context_program = Program(context, layout=layout(mesh, of_model, BY_ROW, BY_ROW, results=BY_ROW))
        self.time_program = Program(time, layout=layout(mesh, of_model, each, each))
        self.program = Program(
            self._iterations,
            options=("guidance", "causal_block_size", "attention"),
            donate=(1,),
            layout=layout(mesh, of_model, _CARRY, each, _CONDITIONS, each, each, results=_CARRY),
        )

    def context_call(self, text: Any, image: Any) -> ProgramCall:
        """Call that makes the transformer's cross-attention keys from states of text and image, given by shape."""
        return ProgramCall(self.context_program, self.transformer, (text, image))

    def call(self, latents: Any, tables: Tables, conditions: Conditions, request: ResolvedRequest) -> ProgramCall:
        """Call of the loop over iterations, given by the shapes of the first sample and of the conditions."""
        cached = request.cache is not None
        carry = jax.eval_shape(lambda noise: self.start(noise, guided=request.guided, cached=cached), latents)
        arguments = (carry, tables, shapes_of(conditions), np.int32(0), np.int32(0))
        return ProgramCall(self.program, self.transformer, arguments, request.program_options)

    def embed_time(self, timesteps: Int32[np.ndarray, "R *F"], fps: Any) -> tuple[np.ndarray, np.ndarray]:
        """Embedding of time of each row of timesteps, and its projection, which modulates the blocks."""
        with self.transformer.weights() as weights:
            return jax.tree.map(np.asarray, self.time_program(weights, timesteps, fps))

    def start(self, noise: Float32[Array, "1 F h w C"], *, guided: bool, cached: bool) -> Carry:
        """State before the first iteration.

        Args:
            noise: first sample: noise, with prefix and last latents in their places.
            guided: True if the batch has a second row, the negative prompt.
            cached: True if some iterations skip the blocks.
        """
        _, F, h, w, _ = noise.shape
        config: WanConfig = self.transformer.config
        h, w = h // config.patch, w // config.patch
        sharding = None if self.mesh is None else NamedSharding(self.mesh, _RESIDUAL)
        if axis_size(self.mesh, SEQUENCE) > 1:
            h, w = 1, h * w
        size = (1 + guided, F, h, w, config.dim)
        return Carry(unipc.start(noise), jnp.zeros(size, jnp.float32, device=sharding) if cached else None)

    def velocity(
        self,
        model: WanModel,
        x: Float32[Array, "1 F h w C"],
        timesteps: Int32[Array, "*F"],
        context: WanContext,
        fps: Any = None,
        residual: Any = None,
        run_blocks: Any = None,
        *,
        causal_block_size: int | None = None,
        attention: str = "auto",
    ) -> tuple[Array, Any]:
        """Velocity of this device's tokens, one row for each row of the context, and the residual of the blocks.

        Args:
            model: the transformer.
            x: latents and condition.
            timesteps: timestep of all frames, or of each frame.
            context: of `context_program`.
            fps: frames per second `[1]`, or None.
            residual: sum that the blocks added when they last ran; None without a cache.
            run_blocks: whether the blocks run, with a residual.
            causal_block_size, attention: as `WanModel.run_blocks` takes them.
        """
        G = jax.tree.leaves(context)[0].shape[0]
        sequence = self._sequence(x.shape)
        x = jnp.broadcast_to(x, (G, *x.shape[1:]))
        times = jnp.broadcast_to(timesteps, (G, *timesteps.shape))
        e, e0 = model.embed_time(times, None if fps is None else jnp.broadcast_to(fps, (G,)))
        before = model.embed_latents(x if sequence is None else sequence.divide(x))

        def with_blocks() -> Array:
            return model.run_blocks(
                before, e0, context, causal_block_size=causal_block_size, attention=attention, sequence=sequence
            )

        if residual is None:
            after = with_blocks()
        else:
            after = jax.lax.cond(run_blocks, with_blocks, lambda: before + residual)
            residual = after - before
        return model.unembed(after, e), residual

    def combine(
        self, velocity: Float32[Array, "G F h w C"], latents: tuple[int, ...], guidance_scale: Any
    ) -> Float32[Array, "1 F hp wp C"]:
        """Velocity of a clip, from the rows and tokens of all devices.

        Args:
            velocity: of this device.
            latents: shape of the whole latents, `[1, F, hp, wp, C]`.
            guidance_scale: scale of classifier-free guidance; None for one row.
        """
        if axis_size(self.mesh, GUIDANCE) > 1:
            velocity = jax.lax.all_gather(velocity, GUIDANCE, tiled=True)
        if guidance_scale is not None:
            cond, uncond = velocity[:1], velocity[1:]
            velocity = uncond + guidance_scale * (cond - uncond)
        sequence = self._sequence(latents)
        return velocity if sequence is None else sequence.gather(velocity)

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
        model = self.transformer.module(weights)
        options = {"causal_block_size": causal_block_size, "attention": attention}

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
                    found = self.velocity(model, x, timesteps, context, conditions.fps, added, run_blocks, **options)
                    return jax.tree.map(lambda a: a[0], found)

                found, residual = jax.lax.map(one_row, (conditions.context, residual))
            else:
                found, residual = self.velocity(
                    model, x, timesteps, conditions.context, conditions.fps, residual, run_blocks, **options
                )
            found = self.combine(found, x.shape, None if guidance is None else conditions.guidance_scale)
            update = None if tables.update is None else jnp.asarray(tables.update)[i]
            return Carry(unipc.step(tables.solver, jnp.asarray(tables.row)[i], solver, found, update), residual)

        return jax.lax.fori_loop(begin, end, one_iteration, carry)

    def _sequence(self, latents: tuple[int, ...]) -> SequenceParallel | None:
        """Division of the tokens of latents `[1, F, h, w, C]`; None where each device has all tokens."""
        if axis_size(self.mesh, SEQUENCE) == 1:
            return None
        patch = self.transformer.config.patch
        return SequenceParallel(SEQUENCE, latents[2] // patch, latents[3] // patch)


def _with_noise(
    timesteps: Int32[Array, "F"], sample: Float32[Array, "1 F h w C"], conditions: Conditions, i: Array
) -> tuple[Int32[Array, "F"], Float32[Array, "1 F h w C"]]:
    """Timesteps and sample as the model sees them, with noise on the prefix frames, which hides a seam."""
    mask = jnp.asarray(conditions.prefix_mask)
    amount = jnp.float32(0.001) * conditions.added_noise
    noise = jax.random.normal(jax.random.fold_in(conditions.key, i), sample.shape, sample.dtype)
    shown = (1 - amount) * sample + amount * noise
    return jnp.where(mask, conditions.added_noise, timesteps), jnp.where(mask[:, None, None, None], shown, sample)
