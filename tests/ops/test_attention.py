"""Attention in chunks and by other platforms' kernels against the reference, and when each is chosen.

Results of cuDNN need a GPU (tests/gpu); a TPU's splash attention is interpreted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention import exact_attention, exact_paged_attention, paged_problem
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.attention import CHUNK, MAX_SCORES, join_heads, own_results, spread_queries
from verax.ops.tpu import attention as tpu


def arrays(T, S, N=4, K=2, H=8, B=2):
    keys = jax.random.split(jax.random.key(T), 3)
    return [jax.random.normal(key, (B, n, heads, H)) for key, n, heads in zip(keys, (T, S, S), (N, K, K), strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(CHUNK, 300), (CHUNK + 1, CHUNK + 1), (600, 700), (700, 600)])
def test_chunks_give_the_references_result(T, S, causal):
    q, k, v = arrays(T, S)
    with ops.use_implementations(attention="chunked"):
        got = ops.attention(q, k, v, causal=causal, scale=0.3)
    np.testing.assert_allclose(got, ops.attention.reference(q, k, v, causal=causal, scale=0.3), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_sees_its_window_and_its_sink_only_and_scores_are_capped(implementation, causal):
    T, S, window, soft_cap = CHUNK + 44, CHUNK + 60, 21, 1.5
    q, k, v = arrays(T, S)
    sinks = jnp.linspace(-4.0, 4.0, q.shape[2])
    options = {"soft_cap": soft_cap, "sinks": sinks}
    with ops.use_implementations(attention=implementation):
        got = ops.attention(q, k, v, causal=causal, window=window, **options)
    distance = (np.arange(T) + S - T)[:, None] - np.arange(S)
    visible = (distance < window) & (distance >= 0 if causal else distance > -window)
    expected = [exact_attention(*rows, visible, **options) for rows in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("window", -1), ("soft_cap", 0.0), ("soft_cap", -2.0)])
def test_a_window_or_a_cap_that_is_not_above_zero_is_refused_by_every_implementation(option, value):
    q, k, v = arrays(CHUNK + 1, CHUNK + 1)
    pages = [jnp.zeros((3, 2, 4, 8))] * 2
    calls = {
        "attention": (q, k, v),
        "paged_decode_attention": (q[0, :1], *pages, jnp.asarray([[1, 2]]), jnp.asarray([4])),
        "paged_attention": (q[0, :1], *pages, jnp.asarray([[1, 2]]), jnp.asarray([4]), jnp.asarray([0, 1])),
    }
    for name, given in calls.items():
        operation = ops.operations()[name]
        names = {"reference", "chunked", "tiled"} & operation.implementations.keys()
        for implementation in {operation.select(*given).name, *names}:
            with pytest.raises(InvalidParameterError, match=f"^{option}: expected a number above 0"):
                operation.implementations[implementation](*given, **{option: value})


def test_scale_and_soft_cap_can_be_learned(unchecked):
    q, k, v = arrays(9, 9)
    options = {"scale": 0.3, "soft_cap": 2.0}

    def loss(options):
        return jnp.sum(jnp.sin(ops.attention(q, k, v, **options)))

    slopes = jax.jit(jax.grad(loss))(options)
    for name, slope in slopes.items():
        h = 1e-2
        ends = [loss(options | {name: options[name] + step}) for step in (-h, h)]
        np.testing.assert_allclose(slope, (ends[1] - ends[0]) / (2 * h), rtol=5e-3)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("options", [{}, {"window": 3, "causal": False}, {"sinks": jnp.zeros(4)}])
def test_queries_that_see_no_key_give_zeros_and_no_gradient(implementation, options):
    T, S = CHUNK + 9, CHUNK
    q, k, v = arrays(T, S)
    blind = 9 if "window" not in options else 9 - 2
    with ops.use_implementations(attention=implementation):
        out, pull = jax.vjp(lambda *arrays: ops.attention(*arrays, **options), q, k, v)
        np.testing.assert_array_equal(out[:, :blind], 0)
        assert np.all(np.abs(out[:, blind:]).max((1, 2, 3)) > 0)
        for slope in pull(jnp.zeros_like(out).at[:, :blind].set(1)):
            np.testing.assert_array_equal(slope, 0)


def test_chunks_keep_packed_sequences_apart():
    q, k, v = arrays(600, 600)
    segments = jnp.asarray(np.repeat([[0, 1, 2], [3, 3, 4]], 200, axis=1))
    with ops.use_implementations(attention="chunked"):
        got = ops.attention(q, k, v, segments=segments)
    np.testing.assert_allclose(got, ops.attention.reference(q, k, v, segments=segments), atol=2e-6)


def test_chunks_have_the_references_gradient():
    q, k, v = arrays(CHUNK + 20, CHUNK + 20)

    def gradients(implementation):
        def loss(q, k, v):
            with ops.use_implementations(attention=implementation):
                return jnp.sum(jnp.sin(ops.attention(q, k, v)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for got, expected in zip(gradients("chunked"), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_scores_beyond_the_limit_are_never_written_out_at_once():
    def chosen(T):
        q = jax.ShapeDtypeStruct((1, T, 16, 64), jnp.float32)
        return ops.attention.select(q, q, q)  # pyright: ignore[reportArgumentType]

    T = int((MAX_SCORES / 16) ** 0.5)
    with ops.use_target("tpu"):
        assert chosen(T).name == "reference"
        assert chosen(T + 1).name == "chunked"
    assert "flash" in chosen(T + 1).traits


@pytest.mark.parametrize(
    ("implementation", "N", "K", "m"),
    [*(("tiled", *sizes) for sizes in ((4, 4, 2), (12, 4, 4), (6, 2, 2))), ("pallas", 6, 2, 2)],
)
def test_joined_heads_give_the_results_of_separate_heads(implementation, N, K, m):
    lengths, counts, H, options = [5, 70, 17, 40], [1, 1, 1, 40], 8, {"window": 37, "scale": 0.3}
    (q, k, v), table, lengths, starts = paged_problem(0, lengths, counts, N=N, K=K, H=H, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts, **options)
    k, v = (jnp.swapaxes(join_heads(jnp.swapaxes(x, 1, 2), m), 1, 2) for x in (k, v))  # [P, K/m, p, m H]
    arguments = spread_queries(q, K, m), k, v, table, lengths, starts
    if implementation == "pallas":
        interpreted = pltpu.InterpretParams(uninitialized_memory="nan")
        out = tpu.ragged_attention(*arguments, pages=2, interpret=interpreted, **options)
    else:
        out = ops.paged_attention.implementations[implementation].function(*arguments, **options)
    np.testing.assert_allclose(own_results(out, K, m), exact, atol=2e-5)


def chosen(T=40, S=40, H=128, K=2, dtype=jnp.bfloat16, **options):
    q, k = jax.ShapeDtypeStruct((1, T, 4, H), jnp.float32), jax.ShapeDtypeStruct((1, S, K, H), dtype)
    return ops.attention.select(q, k, k, **options).name


def test_half_precision_without_masks_runs_on_cudnn():
    segments = jax.ShapeDtypeStruct((1, 40), jnp.int32)
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        for taken in ({"causal": False}, {}, {"S": 700, "causal": False}, {"H": 64, "dtype": jnp.float16}):
            assert chosen(**taken) == "cudnn"
        others = [{"dtype": jnp.float32}, {"H": 12}, {"H": 256}, {"segments": segments}, {"window": 8}]
        others += [{"T": 3}, {"S": 0, "causal": False}, {"soft_cap": 50.0}]  # keys are counted from the other end
        for other in others:
            assert chosen(**other) != "cudnn"
    for capability in ("7.5", "gfx942", ""):
        with ops.use_target("gpu", "some GPU", compute_capability=capability):
            assert chosen() == "reference"
    assert chosen() != "cudnn"


def test_without_a_gpu_products_of_the_same_result_stand_for_cudnns():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 40, 2, 64), jnp.bfloat16) for key in keys)
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        got = jax.jit(lambda *arrays: ops.attention(*arrays, causal=True))(q, k, v)
    assert got.dtype == jnp.float32
    assert jnp.allclose(got, ops.attention.reference(q, k, v, causal=True), atol=2e-2)


def splash_arrays(T, S, N=2, K=1, H=64, B=1):
    q, *caches = arrays(T, S, N, K, H, B)
    return q, *(x.astype(jnp.bfloat16) for x in caches)


@pytest.mark.parametrize(
    ("T", "S", "sizes", "options"),
    [
        (1, 1, {}, {}),
        (200, 200, {"N": 6, "K": 2, "B": 2}, {}),
        (130, 300, {"H": 128}, {"causal": False, "scale": 0.3}),
        (150, 390, {"K": 2}, {"soft_cap": 1.5}),
        (300, 300, {}, {"window": 1}),
        (270, 300, {}, {"window": 130}),
        (300, 300, {}, {"window": 20, "causal": False}),
    ],
)
def test_splash_attention_is_the_references_but_for_rounding(T, S, sizes, options):
    rows = splash_arrays(T, S, **sizes)
    got = tpu.splash_attention(*rows, **options, interpret=True)
    np.testing.assert_allclose(got, ops.attention.reference(*rows, **options), atol=0.02)


def test_packed_sequences_see_their_own_keys_in_splash_attention(monkeypatch):
    monkeypatch.setattr(tpu, "QUERIES", 128)  # several tiles and blocks
    monkeypatch.setattr(tpu, "KEYS", 128)
    rows = splash_arrays(300, 300, B=2)
    segments = jnp.asarray([np.repeat([0, 1, 2], [120, 50, 130]), np.repeat([0, 1], [7, 293])])
    options = {"segments": segments, "window": 70}
    got = tpu.splash_attention(*rows, **options, interpret=True)
    np.testing.assert_allclose(got, ops.attention.reference(*rows, **options), atol=0.02)


def test_gradients_of_splash_attention_equal_the_references(monkeypatch):
    monkeypatch.setattr(tpu, "splash_attention", lambda q, *_, **__: q * 0.0)
    rows = splash_arrays(40, 40)
    options = {"segments": jnp.asarray(np.repeat([[0, 1]], 20, axis=1)), "scale": 0.2, "window": 7, "soft_cap": 2.0}

    def gradients(attend):
        return jax.grad(lambda *rows: jnp.sum(jnp.sin(attend(*rows, **options))), (0, 1, 2))(*rows)

    mine = gradients(ops.attention.implementations["splash"].function)
    for got, expected in zip(mine, gradients(ops.attention.reference), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_splash_attention_runs_where_it_is_named_and_takes_the_call():
    with ops.use_target("tpu"), ops.use_implementations(attention="splash"):
        assert chosen() == chosen(H=64) == chosen(T=300, S=40, causal=False) == "splash"
        for others in (dict(dtype=jnp.float32), dict(H=96), dict(T=60), dict(S=0, causal=False)):
            assert chosen(**others) != "splash"
        assert chosen(scale=jnp.ones(())) != "splash"  # an array, as a traced one is
