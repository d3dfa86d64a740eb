"""The denoising loop written out, as an oracle of a pipeline's."""

import jax.numpy as jnp
import numpy as np

from verax.video import solvers
from verax.video.schedule import noise_levels


def denoised(noise, steps, shift, sigmas, velocity):
    """Latents `[1, C, F, h, w]` of a loop over steps.

    `velocity(i, sample, timestep)` is the velocity at step i, of a sample `[1, F, h, w, C]` and a timestep `[1]`.
    """
    levels = noise_levels(steps, shift, sigmas)
    table, state = solvers.tabulate(levels.sigmas), solvers.start(jnp.asarray(noise.transpose(0, 2, 3, 4, 1)))
    for i, timestep in enumerate(levels.timesteps):
        state = solvers.step(table, jnp.int32(i), state, velocity(i, state.sample, jnp.array([timestep])))
    return np.asarray(state.sample).transpose(0, 4, 1, 2, 3)


def guided(rows, scale):
    """Velocity of a prompt, guided away from the negative prompt's by `scale`."""
    prompt, negative = rows
    return negative + scale * (prompt - negative)
