"""LAM's rules: fast implementations against references, oddities of the published rules, their mending.

Parity of the published rules with PyTorch in float64 is in tests/parity/test_lam.py.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import NATIVE, at_level, needs_library
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.hierarchical import HierarchicalInputs, Perceptron, ResonanceFlux


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


FLUX = flux()


def published(x, rule="hierarchical", implementation="factored", **options):
    return published_program(rule, implementation, **options)(x)


@cache
def published_program(rule, implementation, **options):
    def run(x):
        with ops.use_implementations(**{f"{rule}_rule": implementation}):
            return getattr(ops, f"{rule}_delta_rule")(**x, flux=FLUX, **options)

    return jax.jit(run)


@partial(jax.jit, static_argnames=("interval", "mode", "chunk_size"))
def gated(x, lengths=None, state=None, interval=16, mode="auto", chunk_size=None, flux=FLUX):
    x = dict(x)
    decays = tuple(map(jnp.log, x.pop("decays")))
    return ops.hierarchical_gated_delta_rule(
        **x,
        log_decays=decays,
        flux=flux,
        lengths=lengths,
        initial_state=state,
        output_final_state=True,
        coupling_interval=interval,
        mode=mode,
        chunk_size=chunk_size,
    )


def cut(x, start, stop):
    return jax.tree.map(lambda a: a[:, start:stop], x)


def cut_rows(x, start, stop):
    return jax.tree.map(lambda a: a[start:stop], x)


def error(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


@cache
def outputs(rule, implementation, chunk_size):
    function = ops.operations()[rule].implementations[implementation].function
    return jax.jit(lambda x: function(x, chunk_size=chunk_size)[0])


# One token; one short chunk; chunks that blocks do not divide; blocks of 32, of 64; several chunks of several blocks;
# sizes that fill no register, or are not alike.
@pytest.mark.parametrize("by", ["factored", *NATIVE])
@pytest.mark.parametrize(
    ("T", "chunk_size", "K", "V", "keys"),
    [
        *(
            (1, 64, 8, 8, "random"),
            (7, 64, 8, 8, "positive"),
            (63, 64, 32, 32, "repeated"),
            (96, 64, 8, 8, "zero rows"),
        ),
        *((130, 130, 20, 36, keys) for keys in ("random", "positive", "repeated", "zero rows")),
        *((256, 128, 32, 32, keys) for keys in ("random", "repeated")),
    ],
)
def test_each_form_gives_what_the_equations_give(T, chunk_size, K, V, keys, by):
    x = HierarchicalInputs(**inputs(T=T, K=K, V=V, keys=keys), flux=flux(K=K, V=V))
    for rule in ("hierarchical_rule", "local_rule"):
        with jax.enable_x64(True):
            exact = outputs(rule, "reference", chunk_size)(jax.tree.map(lambda a: np.asarray(a, np.float64), x))
        implementation, level = at_level(by)
        with level:
            out = outputs(rule, implementation, chunk_size)(x)
        # Repeated keys make T as large as C, and sums over it cancel.
        assert error(out, exact) < (1e-4 if keys == "repeated" else 5e-6)


# Four chunks: the fast and the slow state are alike until the third.
@pytest.mark.parametrize("implementation", ["factored", "native"])
def test_each_form_leaves_the_same_states(implementation):
    x = inputs(T=128)
    results = (published(x, implementation=name, chunk_size=32) for name in (implementation, "reference"))
    for state, exact in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(state, exact, atol=2e-6 * max(1.0, float(np.abs(exact).max())))
    if implementation == "factored":
        options = {"rule": "local", "chunk_size": 64, "output_final_state": True}
        exact = published(x, implementation="reference", **options)[1]
        np.testing.assert_allclose(published(x, **options)[1], exact, atol=2e-6)


@needs_library
@pytest.mark.parametrize("rule", ["hierarchical_rule", "local_rule"])
def test_gradients_of_the_cpus_kernels_equal_the_references_and_they_are_chosen(rule):
    x = HierarchicalInputs(**jax.tree.map(jnp.asarray, inputs(T=64, K=8, V=12)), flux=flux(K=8, V=12))
    native, reference = (
        jax.jit(jax.grad(lambda x, name=name: jnp.sum(jnp.sin(outputs(rule, name, 32)(x)))))(x)
        for name in ("native", "reference")
    )
    for a, b in zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(b).max())))
    assert ops.operations()[rule].select(x, chunk_size=64).name == "native"


def test_gradients_are_finite_on_zero_rows():
    x = inputs(T=64, keys="zero rows")
    for rule in ("hierarchical", "local"):
        loss = partial(lambda rule, x: jnp.sum(published(x, rule, chunk_size=32)[0] ** 2), rule)
        grads = jax.jit(jax.grad(loss))(x)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("T", [1, 16, 45, 64])
@pytest.mark.parametrize("keys", ["random", "repeated", "zero rows"])
def test_gated_rule_is_its_recurrence(T, keys):
    x = inputs(T=T, V=12, keys=keys)
    weights = flux(V=12)
    out, _ = gated(x, flux=weights)
    log_decays = tuple(np.log(d) for d in x.pop("decays"))
    exact = gated_oracle(**x, log_decays=log_decays, flux=weights, interval=16)
    assert error(out, exact) < 3e-6


def test_gated_result_does_not_depend_on_the_chunk_size():
    x = inputs(T=100)
    computations = (("recurrent", None), ("chunk", 16), ("chunk", 64))
    results = [gated(x, interval=48, mode=mode, chunk_size=size)[0] for mode, size in computations]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=3e-6)


@pytest.mark.parametrize("at", [1, 16, 23, 40])
def test_gated_sequence_may_be_cut_anywhere_and_continued(at):
    x = inputs(T=50)
    whole, end = gated(x)
    first, state = gated(cut(x, 0, at))
    second, last = gated(cut(x, at, 50), None, state)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=3e-6)
    for a, b in zip(last, end, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_gated_rows_continue_from_where_each_of_them_is():
    """Rows of different lengths are at different places of their intervals."""
    x, lengths = inputs(B=2, T=50), np.array([30, 9])
    _, state = gated(x, lengths)
    out, _ = gated(cut(x, 30, 50), None, state)
    np.testing.assert_allclose(out[:1], gated(cut_rows(x, 0, 1))[0][:, 30:], atol=3e-6)
    short = jax.tree.map(lambda a: np.concatenate([a[1:, :9], a[1:, 30:]], axis=1), x)
    np.testing.assert_allclose(out[1:], gated(short)[0][:, 9:], atol=3e-6)


def test_gated_rows_do_not_see_padding_later_tokens_or_each_other():
    x, other = inputs(T=70), inputs(T=70, seed=9)
    out = np.asarray(gated(x, np.array([40, 70]))[0])
    # Everything after 40 tokens of the first row, and all of the second, is another's.
    y = jax.tree.map(lambda a, b: np.concatenate([np.concatenate([a[:1, :40], b[:1, 40:]], axis=1), b[1:]]), x, other)
    np.testing.assert_array_equal(gated(y, np.array([40, 70]))[0][0, :40], out[0, :40])
    np.testing.assert_allclose(gated(cut(cut_rows(x, 0, 1), 0, 40))[0], out[:1, :40], atol=3e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": np.ones((2, 40, 4), np.float32)}, "beta: expected shape [2, 40, 3]"),
        ({"gates": (np.ones((2, 40, 3), np.float32), np.ones((2, 4), np.float32))}, "gates[1]: expected shape"),
        ({"k": np.ones((2, 40, 3, 5), np.float32)}, "k: expected shape [2, 40, 3, 8]"),
        ({"gates": (np.ones((2, 40, 3), np.float32),)}, "gates: expected two"),
        ({"flux": FLUX._replace(bilinear=FLUX.bilinear[:1])}, "flux.bilinear: expected shape [3, 8, 8]"),
        ({"flux": FLUX._replace(token=FLUX.chunk)}, "flux.token.w1: expected shape [4, 16]"),
    ],
)
@pytest.mark.parametrize("rule", [ops.hierarchical_delta_rule, ops.local_delta_rule, ops.hierarchical_gated_delta_rule])
def test_shapes_that_do_not_fit_are_named(unchecked, changes, message, rule):
    with pytest.raises(InvalidParameterError) as raised:
        rule(*({**inputs(), "flux": FLUX, **changes}).values())
    assert message in str(raised.value)


@pytest.mark.parametrize("size", [0, 16.0])
def test_sizes_of_chunks_and_intervals_are_whole_numbers(unchecked, size):
    arguments = *inputs().values(), FLUX
    for rule, name in ((ops.hierarchical_delta_rule, "chunk_size"), (ops.local_delta_rule, "chunk_size")):
        with pytest.raises(InvalidParameterError, match=name):
            rule(*arguments, chunk_size=size)
    with pytest.raises(InvalidParameterError, match="coupling_interval"):
        ops.hierarchical_gated_delta_rule(*arguments, coupling_interval=size)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}])
def test_batches_of_no_sequences_or_tokens_have_states(sizes):
    x = inputs(**sizes)
    programs = [
        *(published_program("hierarchical", by) for by in ("reference", "factored")),
        *(published_program("local", by, output_final_state=True) for by in ("reference", "factored")),
        *(partial(gated, interval=interval) for interval in (1, 16)),
    ]
    for program in programs:
        out, states = jax.eval_shape(program, x)
        assert out.shape == x["v"].shape
        assert jax.tree.leaves(states)[0].shape[0] == len(x["q"])


def test_nan_in_padding_reaches_no_gated_state():
    x, lengths = inputs(), np.array([40, 17])
    out, state = gated(x, lengths)
    padded = {name: np.array(x[name]) for name in ("q", "k", "v", "beta")}
    for array in padded.values():
        array[1, 17:] = np.nan
    out_of_padded, state_of_padded = gated({**x, **padded}, lengths)
    np.testing.assert_array_equal(out_of_padded[1, :17], out[1, :17])
    jax.tree.map(np.testing.assert_array_equal, state_of_padded, state)


def test_a_gated_state_may_be_bfloat16_and_has_the_shapes_of_its_rows(unchecked):
    x = inputs()
    state = gated(x)[1]
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, state)
    widened = jax.tree.map(lambda a, b: a.astype(b.dtype), rounded, state)
    np.testing.assert_array_equal(gated(x, None, rounded)[0], gated(x, None, widened)[0])
    with pytest.raises(InvalidParameterError, match=r"initial_state\.memory"):
        gated(x, None, jax.tree.map(lambda a: a[:1], state))
