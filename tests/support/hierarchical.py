"""Inputs of LAM's rules, and the gated one token by token in NumPy and float64, from the equations of docs/lam.md."""

import jax.numpy as jnp
import numpy as np

from verax.ops.hierarchical import Perceptron, ResonanceFlux


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def inputs(B=2, T=40, H=3, K=8, V=8, keys="random", seed=0):
    """Arguments by name, float32; `keys` is random, positive, repeated or zero rows."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    k = normal(B, T, H, K)
    if keys == "positive":
        k = np.abs(k)
    elif keys == "repeated":
        k = k[:, :1] + 1e-3 * k
    elif keys == "zero rows":
        k[:, ::3] = 0
    return {
        "q": normal(B, T, H, K),
        "k": k,
        "v": normal(B, T, H, V),
        "beta": sigmoid(normal(B, T, H)),
        "decays": (sigmoid(normal(B, T, H)), sigmoid(normal(B, T, H))),
        "gates": (sigmoid(normal(B, T, H)), sigmoid(normal(B, T, H))),
    }


def flux(H=3, K=8, V=8, seed=1):
    """Weights large enough that both fluxes differ from token to token and from chunk to chunk."""
    rng = np.random.default_rng(seed)

    def perceptron(size):
        return Perceptron(*(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((4, size), 4, (1, 4), 1)))

    return ResonanceFlux(
        jnp.asarray(rng.standard_normal((H, K, V)), jnp.float32),
        jnp.full(H, 0.5, jnp.float32),
        perceptron(K + V + 1),
        perceptron(K + V),
    )


def gated_oracle(q, k, v, beta, log_decays, gates, flux, interval):
    """Outputs `[B, T, H, V]` of `hierarchical_gated_delta_rule`."""
    flux = ResonanceFlux(*(np.asarray(a, np.float64) for a in flux[:2]), *(_double(p) for p in flux[2:]))
    q, k = (_unit(np.asarray(a, np.float64)) for a in (q, k))
    B, T, H, K = q.shape
    V = v.shape[3]
    out = np.zeros((B, T, H, V))
    for b in range(B):
        for h in range(H):
            states = [np.zeros((K, V)), np.zeros((K, V))]
            key, value, score = np.zeros(K), np.zeros(V), 0.0
            for t in range(T):
                kt, vt, bt = k[b, t, h], np.asarray(v[b, t, h], np.float64), float(beta[b, t, h])
                share = 0.5 + 0.3 * _perceptron(flux.token, np.concatenate([bt * kt, bt * vt]))
                for x, part in enumerate((share, 1 - share)):
                    state = np.exp(float(log_decays[x][b, t, h])) * states[x]
                    states[x] = state + np.outer(kt, bt * (vt - kt @ state))
                    out[b, t, h] += part * gates[x][b, t, h] * (q[b, t, h] @ states[x])
                key, value = key + kt, value + bt * vt
                score += kt @ flux.bilinear[h] @ (bt * vt) / flux.temperature[h]
                if (t + 1) % interval == 0:
                    psi = _perceptron(flux.chunk, np.concatenate([key, value, [score]]) / interval)
                    c = 0.05 + 0.1 * psi
                    fast, slow = states
                    states = [
                        (fast + c * psi * slow) / (1 + c * psi),
                        (slow + c * (1 - psi) * fast) / (1 + c * (1 - psi)),
                    ]
                    key, value, score = np.zeros(K), np.zeros(V), 0.0
    return out


def _double(perceptron):
    return Perceptron(*(np.asarray(w, np.float64) for w in perceptron))


def _unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _perceptron(weights, x):
    hidden = weights.w1 @ x + weights.b1
    return np.clip(sigmoid(weights.w2[0] @ (hidden * sigmoid(hidden)) + weights.b2[0]), 0.01, 0.99)
