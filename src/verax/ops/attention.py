"""Softmax attention over whole sequences (Vaswani et al., 2017, arXiv:1706.03762), with grouped key/value heads."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, check_axes, check_integers, check_shapes, float32, operation

MASKED = -1e30
"""Score of a masked key, which no softmax notices. Not -inf: a row without visible keys, which gives 0, must not have
a gradient of NaN."""


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of every attention over keys: `scale`, `window`, `soft_cap`, `sinks`, see `attention`."""

    scale: float | None
    window: int | None
    soft_cap: float | None
    sinks: Float[Array, "N"] | None


def _check(
    q: Any, k: Any, v: Any, *, segments: Any = None, causal: bool = True, **options: Unpack[ScoreOptions]
) -> None:
    check_axes(q=q, k=k, v=v)
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    check_shapes(k=(k, (B, S, K, H)), v=(v, (B, S, K, H)), segments=(segments, (B, T)))
    check_integers(segments=segments)
    check_heads(N, K, **options)
    if segments is not None and T != S:
        raise InvalidParameterError(f"segments: expected as many keys as queries with them, got {S} and {T}")
    for name, array in (("k", k), ("v", v)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InvalidParameterError(f"{name}: expected floats, got {array.dtype}")


@operation(check=_check)
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    segments: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of T queries over S keys; query head n reads key/value head `n // (N / K)`. Float32 out.

    Scores and softmax are float32; both products take inputs of the dtype of `k`. Memory is `O(B N T S)`. A query that
    sees no key, as the first T - S of more causal queries than keys, gives 0.

    Args:
        q, k, v: queries, keys and values.
        causal: query t sees keys up to `t + S - T`.
        segments: for packed sequences (T == S): a query sees the keys of its own segment only.
        scale: factor on the scores; `H ** -0.5` if None.
        window: keys that a query sees, its own position's the last of them: position i sees i - window < j <= i.
            Without `causal` it sees as many after it: |i - j| < window.
        soft_cap: bound of the scores, which become `soft_cap * tanh(scores / soft_cap)` (Gemma 2, arXiv:2408.00118).
        sinks: score of one more key, for each query head, whose value is zero (gpt-oss, arXiv:2508.10925); neither
            `scale` nor `soft_cap` changes it.

    Raises:
        InvalidParameterError: for a window or a soft cap that is not above 0, or arrays that do not fit each other.
    """
    check_scores(window, soft_cap)
    T, S = q.shape[1], k.shape[1]
    visible = _visible(jnp.arange(T) + (S - T), S, causal, window)
    if segments is not None:
        visible &= segments[:, :, None] == segments[:, None, :]
    return _attend(q, k, v, visible, scale, soft_cap, sinks, may_see_nothing=T > S)


CHUNK = 256
"""Queries of a chunk in `chunked_attention`: the number in the reports whose memory tables it reproduces."""

MAX_SCORES = 1 << 26
"""Scores that attention may write out at once: 256 MB."""


def _is_too_large_at_once(q: Any, k: Any, v: Any, **options: Any) -> bool:
    B, T, N, _ = q.shape
    return T > CHUNK and B * T * N * k.shape[1] > MAX_SCORES


class AttentionOptions(ScoreOptions, total=False):
    """Keyword arguments of `attention`."""

    causal: bool
    segments: Int[Array, "B T"] | None


@attention.implementation("chunked", faster=_is_too_large_at_once)
def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    **options: Unpack[AttentionOptions],
) -> Float[Array, "B T N H"]:
    """`attention` in chunks of 256 queries, one after the other. Memory is `O(B N S)`."""
    T, S = q.shape[1], k.shape[1]
    if T <= CHUNK:
        return attention.reference(q, k, v, **options)
    causal, segments, window = options.get("causal", True), options.get("segments"), options.get("window")
    check_scores(window, options.get("soft_cap"))
    chunks = -(-T // CHUNK)
    pad = chunks * CHUNK - T
    owners = None if segments is None else jnp.pad(segments, ((0, 0), (0, pad)))

    def attend(i: Array, rows: Array) -> Array:
        begin = i * CHUNK
        visible = _visible(begin + jnp.arange(CHUNK) + (S - T), S, causal, window)
        if segments is not None and owners is not None:
            visible &= lax.dynamic_slice_in_dim(owners, begin, CHUNK, 1)[:, :, None] == segments[:, None, :]
        queries = lax.dynamic_slice_in_dim(rows, begin, CHUNK, 1)
        scores = options.get("scale"), options.get("soft_cap"), options.get("sinks")
        chunk = _attend(queries, k, v, visible, *scores, may_see_nothing=T > S)
        return lax.dynamic_update_slice_in_dim(rows, chunk, begin, 1)

    # Results take their queries' place. A loop that fills an array of zeros begins with a copy of them, and XLA makes
    # the copies of all layers before the first layer: half a gigabyte each for 57 frames at 544 x 960.
    rows = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
    return lax.fori_loop(0, chunks, attend, rows)[:, :T]


def check_scores(window: int | None, soft_cap: float | None) -> None:
    """Raise for a window or a soft cap that is not above 0, or not a number of its kind. Arrays are not checked."""
    for name, value in (("window", window), ("soft_cap", soft_cap)):
        if value is None or isinstance(value, jax.Array):
            continue
        if not isinstance(value, Real) or not 0 < value < math.inf:
            raise InvalidParameterError(f"{name}: expected a number above 0, or None for none, got {value}")
        if name == "window" and not (isinstance(value, Integral) and value < 1 << 31):
            raise InvalidParameterError(f"window: expected a whole number below 2**31, or None for none, got {value}")


def are_numbers(*, scale: Any = None, window: Any = None, soft_cap: Any = None, **_: Any) -> bool:
    """True for options of scores that are known while tracing: kernels do not take arrays in their place."""
    return not any(isinstance(value, jax.Array) for value in (scale, window, soft_cap))


def check_heads(
    N: int, K: int, *, sinks: Any = None, window: Any = None, soft_cap: Any = None, scale: Any = None
) -> None:
    """Raise for N heads of queries that K heads of keys do not divide, or options of scores that do not fit them."""
    check_scores(window, soft_cap)
    if K == 0 or N % K:
        raise InvalidParameterError(f"q: expected a multiple of the {K} heads of keys and values, got {N} heads")
    check_shapes(sinks=(sinks, (N,)))


def _visible(positions: Int[Array, "T"], S: int, causal: bool, window: int | None) -> Bool[Array, "1 T S"]:
    """True for keys that a query sees, by its position among the keys."""
    distance = positions[:, None] - jnp.arange(S)
    visible = jnp.ones(distance.shape, bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= abs(distance) < window
    return visible[None]


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    visible: Bool[Array, "#B T S"],
    scale: float | None,
    soft_cap: float | None,
    sinks: Float[Array, "N"] | None,
    *,
    may_see_nothing: bool,
) -> Float[Array, "B T N H"]:
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = (q * (H**-0.5 if scale is None else scale)).astype(k.dtype).reshape(B, T, K, N // K, H)
    scores = float32_product("btkgh,bskh->bkgts", grouped, k)
    scores = jnp.where(visible[:, None, None], soft_capped(scores, soft_cap), MASKED)
    weights = softmax_with_sinks(scores, None if sinks is None else sinks.reshape(K, -1, 1))
    if may_see_nothing:
        weights = jnp.where(visible.any(-1)[:, None, None, :, None], weights, 0.0)
    return float32_product("bkgts,bskh->btkgh", weights.astype(v.dtype), v).reshape(B, T, N, H)


attention.examples = [Example((float32(1, 64, 16, 128), float32(1, 64, 8, 128), float32(1, 64, 8, 128)))]


def soft_capped(scores: Float[Array, "*B"], soft_cap: float | None) -> Float[Array, "*B"]:
    """Scores bent into (-soft_cap, soft_cap) by `soft_cap * tanh(scores / soft_cap)`; unchanged if it is None."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def softmax_with_sinks(scores: Float[Array, "*B s"], sinks: Float[Array, "*#B"] | None) -> Float[Array, "*B s"]:
    """Weights of keys; `sinks` are the scores of one more key, whose weight is left out."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32), scores.shape[:-1])[..., None]
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


def exact_products(x: Array) -> jax.lax.Precision | None:
    """Precision of products of `x`: exact for float32, which XLA's default rounds elsewhere than on a CPU."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def float32_product(equation: str, x: Array, y: Array) -> Array:
    """`jnp.einsum(equation, x, y)` of arrays of one dtype, in float32."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32, precision=exact_products(y))


def biased_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    bias: Float[Array, "*#B #N #T T"],
    segments: Int[Array, "B T"],
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attention of every token to all tokens of its sentence, with numbers that are added to the scores. Float32.

    Not `attention`, which adds nothing to scores: memory is `O(B N T T)`. Sentences and prompts are short.
    """
    scores = float32_product("btnh,bsnh->bnts", (q * scale).astype(k.dtype), k) + bias
    visible = segments[:, None, :, None] == segments[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    return float32_product("bnts,bsnh->btnh", weights.astype(v.dtype), v)


# Joined heads of keys and values: m heads of size H are stored as one head of size m H.
#
# A register of a TPU has 128 numbers side by side. A head of 64 fills half of one, two joined heads fill it. A query
# has zeros where the heads lie that are not its own, so that its scores are its own head's:
#
#     [q 0] . [k0 k1] = q . k0        [0 q] . [k0 k1] = q . k1
#
# Its result holds the values of all m heads, of which its own part is taken. An implementation sees fewer, larger heads
# with m times as many queries each. A key that is not finite makes NaN of the scores of the heads joined with its own.
JOINED = {32: 4, 64: 2}
"""Heads that fill a register, by their size."""


def heads_to_join(H: int) -> int:
    """Heads of size H that fill a register together; 1 of a size that is not joined."""
    return JOINED.get(H, 1)


def join_heads(x: Float[Array, "*B K H"], m: int) -> Float[Array, "*B J W"]:
    """Keys or values with each m heads as one."""
    return x.reshape(*x.shape[:-2], -1, m * x.shape[-1])


def spread_queries(q: Float[Array, "*B N H"], K: int, m: int) -> Float[Array, "*B N W"]:
    """Queries for joined heads, with zeros where the heads lie that are not theirs.

    `q`: queries, head n of them for key/value head `n // (N / K)`. `K`: heads of keys and values before they were
    joined.
    """
    *lead, N, H = q.shape
    own = jnp.eye(m, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, q.reshape(*lead, K // m, m, N // K, 1, H), 0)
    return spread.reshape(*lead, N, m * H)


def own_results(out: Float[Array, "*B N W"], K: int, m: int) -> Float[Array, "*B N H"]:
    """Each query's part of a result with joined heads; arguments as in `spread_queries`."""
    *lead, N, joined = out.shape
    parts = out.reshape(*lead, K // m, m, N // K, m, joined // m)
    return jnp.stack([parts[..., i, :, i, :] for i in range(m)], axis=-3).reshape(*lead, N, joined // m)
