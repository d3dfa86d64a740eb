"""The delta-rule family token by token in NumPy and float64, from the published equations, and inputs that break it."""

import jax.numpy as jnp
import numpy as np

RULES = ("delta_rule", "gated_delta_rule", "kda", "gated_delta_product", "comba", "dplr_delta_rule")
HOUSEHOLDERS = 3


def inputs(rule, B=2, T=37, H=2, HV=4, K=12, V=20, seed=0):
    """Arguments of `rule` by name (float32 values in float64 arrays), with keys of length 1."""
    rng = np.random.default_rng(seed)
    if rule == "dplr_delta_rule":
        HV = H
    S = T * HOUSEHOLDERS if rule == "gated_delta_product" else T

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    def unit(*shape):
        x = normal(*shape)
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32).astype(np.float64)

    def gate(*shape):
        return -np.abs(normal(*shape)) * rng.choice([0.01, 1.0], shape)

    x = {"q": normal(B, T, H, K), "k": unit(B, S, H, K), "v": normal(B, S, HV, V)}
    if rule == "dplr_delta_rule":
        kk = unit(B, T, H, K)
        return x | {"a": -kk, "b": kk * np.abs(np.tanh(normal(B, T, H, K))), "gk": gate(B, T, H, K)}
    if rule == "comba":
        x["p"] = 0.8 * x["k"] + 0.1 * unit(B, S, H, K)
    if rule != "delta_rule":
        x["g"] = gate(B, T, HV, K) if rule == "kda" else gate(B, T, HV)
    return x | {"beta": 1 / (1 + np.exp(-normal(B, S, HV)))}


def options(rule):
    """Options of a call of `rule`, other than its arrays."""
    return {"num_householder": HOUSEHOLDERS} if rule == "gated_delta_product" else {}


def oracle(rule, x, initial_state=None, scale=None):
    """Outputs and final states `[B, HV, K, V]` of `rule`, float64."""
    q, k, v = x["q"], x["k"], x["v"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    state = np.zeros((B, HV, K, V)) if initial_state is None else np.array(initial_state, np.float64)
    scale = K**-0.5 if scale is None else scale
    steps = k.shape[1] // T

    def key(array, t):
        return np.repeat(array[:, t], HV // H, axis=1)

    def read(array, t):
        return np.einsum("bhk,bhkv->bhv", key(array, t), state)

    def outer(array, t, values):
        return key(array, t)[..., None] * values[:, :, None, :]

    out = np.zeros((B, T, HV, V))
    for t in range(T):
        if rule == "comba":
            old = read(x["p"], t)
            state = np.exp(x["g"][:, t])[..., None, None] * state
            state = state + outer(k, t, x["beta"][:, t, :, None] * (v[:, t] - old))
        elif rule == "dplr_delta_rule":
            old = read(x["a"], t)
            state = np.exp(x["gk"][:, t])[..., None] * state + outer(x["b"], t, old) + outer(k, t, v[:, t])
        else:
            if "g" in x:
                decay = np.exp(x["g"][:, t])
                state = (decay[..., None] if decay.ndim == 3 else decay[..., None, None]) * state
            for s in range(t * steps, (t + 1) * steps):
                beta = x["beta"][:, s, :, None]
                state = state - outer(k, s, beta * read(k, s)) + outer(k, s, beta * v[:, s])
        out[:, t] = scale * read(q, t)
    return out, state


def extremes(rule, T, K, V, seed=0):
    """A batch of the inputs that break implementations, a row for each kind of keys, beta and decay; and the kinds."""
    kinds = [
        (keys, beta, decay)
        for keys in ("random", "positive", "repeated", "alternating", "zero rows")
        for beta, decay in ((1.0, "none"), (2.0, "none"), (1.0, "strong"), (0.5, "mixed"), (2.0, "weak"))
    ]
    x = inputs(rule, B=len(kinds), T=T, H=1, HV=1 if rule == "dplr_delta_rule" else 2, K=K, V=V, seed=seed)
    rng = np.random.default_rng(seed + 1)
    for row, (keys, beta, decay) in enumerate(kinds):
        k = x["k"][row]
        if keys == "positive":
            k = np.abs(k) + 0.3
        elif keys in ("repeated", "alternating"):
            k = np.broadcast_to(k[:1], k.shape) + 1e-3 * k
            if keys == "alternating":
                k[1::2] *= -1
        elif keys == "zero rows":
            k = k * (rng.random((k.shape[0], 1, 1)) < 0.5)
        norm = np.linalg.norm(k, axis=-1, keepdims=True)
        x["k"][row] = (k / np.where(norm > 0, norm, 1.0)).astype(np.float32)
        if "beta" in x:
            x["beta"][row] = beta
        gate = "gk" if "gk" in x else "g"
        if gate in x:
            g = x[gate][row]
            strong = rng.random(g.shape) < 0.3
            x[gate][row] = {
                "none": np.zeros_like(g),
                "strong": np.full_like(g, -100.0),
                "mixed": np.where(strong, -100.0, 0.01 * g),
                "weak": 0.01 * g,
            }[decay]
        if rule == "dplr_delta_rule":
            x["a"][row], x["b"][row] = -x["k"][row], beta * x["k"][row]
        elif rule == "comba":
            x["p"][row] = x["k"][row]
    return {name: a.astype(np.float32).astype(np.float64) for name, a in x.items()}, kinds


def float32(x):
    """Arrays of `inputs` in float32, on the device."""
    return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}


def error(result, exact):
    """Largest error of each batch row, over the row's largest value."""
    B = exact.shape[0]
    difference = np.abs(np.asarray(result, np.float64) - exact).reshape(B, -1).max(-1)
    return difference / np.maximum(np.abs(exact).reshape(B, -1).max(-1), 1e-30)


def rounded_inputs(**sizes):
    """Arguments of `gated_delta_rule` in bfloat16, with long keys and one of zeros, and normalised in float64."""
    x = inputs("gated_delta_rule", **sizes)
    x["k"] = x["k"] * 5.0
    x["k"][0, 3] = 0.0
    low = {name: jnp.asarray(a, jnp.bfloat16) for name, a in x.items()}
    exact = {name: np.asarray(a, np.float64) for name, a in low.items()}
    for name in "qk":
        exact[name] = exact[name] / np.sqrt((exact[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    return low, exact


HARD_SHAPES = [
    ("gated_delta_rule", 1, 60, 100),
    ("gated_delta_rule", 15, 100, 60),
    ("gated_delta_rule", 63, 16, 60),
    ("gated_delta_rule", 1000, 24, 16),
    ("kda", 65, 60, 100),
    ("kda", 1000, 24, 16),
    ("gated_delta_product", 65, 20, 12),
    ("comba", 65, 20, 12),
    ("dplr_delta_rule", 65, 20, 12),
]
"""Rule, T, K, V: one token, around a chunk's end, several chunks and none full; K != V, neither a power of two."""


def hard_errors(run, rule, T, K, V, repeated):
    """Errors of `run(x)` above their bounds on `extremes`, by kind of input.

    At beta = 2 a repeated key is a reflection: nothing is ever forgotten, rounding errors included, so that the bound
    is `repeated` instead of 1e-5.
    """
    x, kinds = extremes(rule, T, K, V)
    exact = oracle(rule, x)
    errors = np.maximum(*(error(a, b) for a, b in zip(run(x), exact, strict=True)))
    return {kind: e for kind, e in zip(kinds, errors, strict=True) if not e < (repeated if kind[1] == 2 else 1e-5)}
