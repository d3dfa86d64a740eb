"""Random problems of the delta rule's scan over chunks, the scan and its gradient in float64."""

import jax.numpy as jnp
import numpy as np

from verax.ops.delta._scan import Chunk


def scan_problem(seed, owner, *, m=2, R=1, C=16, K=32, V=64, D=1, N=1):
    """Chunks of random numbers, zeros where nobody owns them; initial states; owners."""
    rng = np.random.default_rng(seed)
    lead, used = (len(owner), m, R), (np.asarray(owner) < N)[:, None, None, None, None]

    def array(*shape, scale=1.0):
        return jnp.asarray(np.where(used, scale * rng.standard_normal((*lead, *shape)), 0), jnp.float32)

    keep = jnp.asarray(np.where(used[..., 0], rng.uniform(0.2, 1, (*lead, D)), 1), jnp.float32)
    key = K**-0.5
    chunks = Chunk(
        array(C, V),
        array(C, K, scale=key),
        array(C, K, scale=key),
        keep,
        array(C, K, scale=key),
        array(C, C, scale=0.3),
    )
    states = jnp.asarray(rng.standard_normal((N, m, R, K, V)), jnp.float32)
    return chunks, states, jnp.asarray(owner, jnp.int32)


def exact_scan(chunks, states, owner):
    """The scan in float64: outputs, final states, and the state before each chunk."""
    chunks, states = Chunk(*(np.asarray(x, np.float64) for x in chunks)), np.array(states, np.float64)
    out, before = np.zeros(chunks.value.shape), []
    for i, n in enumerate(np.minimum(owner, len(states) - 1)):
        state = states[n]
        before.append(state.copy())
        written = chunks.value[i] - chunks.erase[i] @ state
        out[i] = chunks.read[i] @ state + chunks.inner[i] @ written
        states[n] = chunks.keep[i][..., None] * state + chunks.write[i].swapaxes(-1, -2) @ written
    return out, states, np.stack(before)


def cotangents(seed, chunks, states, owner):
    """Random cotangents of the final states, and of the outputs, zeros where nobody owns a chunk."""
    rng = np.random.default_rng(seed)
    used = np.asarray(owner)[:, None, None, None, None] < len(states)
    d_out = np.where(used, rng.standard_normal(chunks.value.shape), 0)
    return jnp.asarray(rng.standard_normal(states.shape), jnp.float32), jnp.asarray(d_out, jnp.float32)


def exact_scan_backward(chunks, d_final, owner, d_out):
    """Cotangents of the initial states and of the state after each chunk, in float64."""
    chunks = Chunk(*(np.asarray(x, np.float64) for x in chunks))
    d_states, d_out = np.array(d_final, np.float64), np.asarray(d_out, np.float64)
    d_next = np.zeros((len(owner), *d_states.shape[1:]))
    for i in reversed(range(len(owner))):
        n = min(int(owner[i]), len(d_states) - 1)
        d_next[i] = d_states[n]
        d_written = chunks.inner[i].swapaxes(-1, -2) @ d_out[i] + chunks.write[i] @ d_next[i]
        d_states[n] = (
            chunks.keep[i][..., None] * d_next[i]
            + chunks.read[i].swapaxes(-1, -2) @ d_out[i]
            - chunks.erase[i].swapaxes(-1, -2) @ d_written
        )
    return d_states, d_next
