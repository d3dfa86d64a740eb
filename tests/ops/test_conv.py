"""Convolutions by every implementation: against the definition in float64, in chunks of frames, and what is refused."""

import contextlib
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.conv import conv_arrays, exact_conv3d
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.conv import ConvShape
from verax.ops.cpu import library

NATIVE = [f"native {level}" for level in library.levels()]
ONES = ((1, 1), (1, 1))
CASES = {
    "one pixel": dict(x=(1, 1, 1, 1, 1), kernel=(1, 1, 1), out=1),
    "rgb in": dict(x=(1, 3, 9, 20, 3), kernel=(3, 3, 3), out=96, padding=ONES),
    "rgb out": dict(x=(2, 2, 5, 17, 33), kernel=(3, 3, 3), out=3, padding=ONES),
    "deep": dict(x=(1, 2, 3, 7, 200), kernel=(1, 3, 3), out=50, padding=ONES),
    "wide": dict(x=(1, 1, 3, 75, 16), kernel=(3, 3, 3), out=112, padding=ONES),
    "1x1x1": dict(x=(2, 2, 3, 13, 36), kernel=(1, 1, 1), out=64),
    "time only": dict(x=(1, 5, 3, 4, 12), kernel=(3, 1, 1), out=24),
    "stride in time": dict(x=(1, 6, 3, 4, 12), kernel=(3, 1, 1), out=24, stride=(2, 1, 1)),
    "downsampler": dict(x=(1, 2, 15, 18, 48), kernel=(1, 3, 3), out=48, stride=(1, 2, 2), padding=((0, 1), (0, 1))),
    "odd all over": dict(x=(2, 3, 11, 9, 7), kernel=(2, 5, 4), out=19, stride=(2, 3, 4), padding=((3, 2), (0, 7))),
    "more zeros than image": dict(x=(1, 1, 2, 2, 4), kernel=(1, 3, 3), out=5, padding=((9, 4), (40, 1))),
}

each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


@cache
def program(operation, implementation):
    function = getattr(ops, operation).implementations[implementation].function
    return jax.jit(function, static_argnames=("stride", "padding"))


def run(by, *arrays, operation="conv3d", **options):
    """A convolution by an implementation, at a level if it is the C++ kernel: one program serves all levels."""
    implementation, _, level = by.partition(" ")
    with library.use_level(level) if level else contextlib.nullcontext():
        return program(operation, implementation)(*arrays, **options)


def pairs(padding):
    padding = (padding, padding) if isinstance(padding, int) else padding
    return tuple((side, side) if isinstance(side, int) else tuple(side) for side in padding)


def arguments(case, dtype=jnp.float32):
    options = dict(stride=case.get("stride", (1, 1, 1)), padding=case.get("padding", ((0, 0), (0, 0))))
    return conv_arrays(case["x"], case["kernel"], case["out"], dtype=dtype), options


def close(y, exact, by, dtype):
    if by == "bfloat16":
        np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=2e-2, rtol=2e-2)
    elif dtype == jnp.float32:
        np.testing.assert_allclose(y, exact, atol=2e-5)
    else:
        # Half a unit in the last place of the result, and what products of rounded inputs are summed to.
        np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("by", ["reference", "bfloat16", *NATIVE])
@each_dtype
def test_it_is_the_sum_over_the_kernel(by, dtype):
    for case in CASES.values():
        (x, weight, bias), options = arguments(case, dtype)
        y = run(by, x, weight, bias, **options)
        assert y.dtype == dtype
        close(y, exact_conv3d(x, weight, bias, **options), by, dtype)
        cache = jnp.ones((*x.shape[:1], 3, *x.shape[2:]), dtype)
        close(run(by, x, weight, cache=cache, **options), exact_conv3d(x, weight, cache=cache, **options), by, dtype)


@pytest.mark.parametrize("by", ["reference", "bfloat16", "native"])
@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, ((0, 1), (0, 1)), ((2, 0), (1, 3))])
def test_images_are_videos_of_one_frame(stride, padding, by):
    x, weight, bias = conv_arrays((2, 6, 7, 5), (3, 3), 4)
    strides = (stride, stride) if isinstance(stride, int) else stride
    y = run(by, x, weight, bias, operation="conv2d", stride=stride, padding=padding)
    exact = exact_conv3d(x[:, None], weight[:, :, None], bias, stride=(1, *strides), padding=pairs(padding))[:, 0]
    np.testing.assert_allclose(y, exact, atol=4e-2 if by == "bfloat16" else 2e-5)


@pytest.mark.parametrize("by", ["reference", *NATIVE])
@each_dtype
@pytest.mark.parametrize("frames", [5, 6])  # the C++ kernel's pairs of frames begin after the first of an odd number
def test_an_output_frame_sees_no_later_frame(by, dtype, frames):
    x, weight, bias = conv_arrays((1, frames, 20, 30, 16), (3, 3, 3), 32, dtype=dtype)
    y, changed = (run(by, clip, weight, bias, padding=1) for clip in (x, x.at[:, 3:].set(jnp.nan)))
    np.testing.assert_array_equal(changed[:, :3].astype(jnp.float32), y[:, :3].astype(jnp.float32))
    assert np.isnan(changed[:, 3:]).all()


@each_dtype
@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_a_scan_over_chunks_with_a_cache_equals_the_whole(chunk, dtype):
    x, weight, bias = conv_arrays((2, 6, 5, 4, 4), (3, 3, 3), 3, dtype=dtype)

    def step(cache, frames):
        y = ops.conv3d(frames, weight, bias, padding=1, cache=cache)
        return jnp.concatenate([cache, frames], axis=1)[:, -2:], y

    chunks = jnp.moveaxis(x.reshape(2, 6 // chunk, chunk, 5, 4, 4), 1, 0)
    _, y = jax.lax.scan(step, jnp.zeros((2, 2, 5, 4, 4), dtype), chunks)
    whole = ops.conv3d(x, weight, bias, padding=1)
    np.testing.assert_allclose(
        jnp.moveaxis(y, 0, 1).reshape(whole.shape).astype(jnp.float32), whole.astype(jnp.float32), atol=1e-6, rtol=1e-2
    )


def test_chunks_with_a_stride_in_time_keep_one_frame():
    # Wan's temporal downsampling: no padding, chunks of 4 frames after the first.
    x, weight, bias = conv_arrays((1, 9, 2, 3, 4), (3, 1, 1), 3)
    options = dict(stride=(2, 1, 1))
    whole = ops.conv3d(x, weight, bias, cache=x[:, :0], **options)
    assert whole.shape[1] == 4
    first = ops.conv3d(x[:, 1:5], weight, bias, cache=x[:, :1], **options)
    second = ops.conv3d(x[:, 5:9], weight, bias, cache=x[:, 4:5], **options)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-6)


@pytest.mark.parametrize("by", ["reference", *NATIVE])
def test_x_is_rounded_to_the_weight_and_keeps_its_dtype(by):
    shapes = (1, 2, 4, 9, 40), (3, 3, 3), 20
    x, weight, bias = conv_arrays(*shapes, weight_dtype=jnp.bfloat16)
    y = run(by, x, weight, bias, padding=1)
    assert y.dtype == jnp.float32
    close(y, exact_conv3d(x.astype(jnp.bfloat16), weight, bias, padding=ONES), by, jnp.float32)
    x, weight, bias = conv_arrays(*shapes, dtype=jnp.bfloat16, weight_dtype=jnp.float32)
    y = run(by, x, weight, bias, padding=1)
    assert y.dtype == jnp.bfloat16
    close(y, exact_conv3d(x, weight, bias, padding=ONES), by, jnp.bfloat16)


@pytest.mark.parametrize("implementation", ["reference", "bfloat16"])
def test_both_dtypes_can_be_trained(implementation):
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight, bias = conv_arrays((1, 2, 4, 4, 3), (3, 3, 3), 2, dtype=dtype)
        with ops.use_implementations(conv3d=implementation):
            loss = jax.grad(lambda *a: ops.conv3d(*a, padding=1).astype(jnp.float32).sum(), argnums=(0, 1, 2))
            gradients = loss(x, weight, bias)
        assert [g.shape for g in gradients] == [x.shape, weight.shape, bias.shape]
        np.testing.assert_allclose(gradients[2].astype(jnp.float32), 2 * 4 * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(weight=(2, 4, 3, 3, 3)), "weight: takes 4 channels, but x has 3"),
        (dict(stride=0), "stride: expected at least 1"),
        (dict(stride=(1, 2)), "stride: expected at least 1, one number or 3"),
        (dict(padding=-1), "padding: expected a number"),
        (dict(padding=(1, 1, 1)), "padding: expected a number"),
        (dict(padding=0, x=(1, 2, 2, 5, 3)), "kernel of 3 in height does not fit into 2"),
        (dict(x=(1, 0, 4, 4, 3)), "kernel of 3 in time does not fit into 2"),
        (dict(cache=(1, 2, 4, 5, 3)), "cache: expected frames like those of x"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        ConvShape(**{"x": (1, 2, 4, 4, 3), "weight": (2, 3, 3, 3, 3), "stride": 1, "padding": 1, **changes})


@pytest.mark.parametrize("by", ["reference", "bfloat16", "native"])
def test_every_implementation_refuses_it(by):
    x, weight, _ = conv_arrays((1, 2, 4, 4, 3), (3, 3, 3), 2)
    with pytest.raises(InvalidParameterError, match="stride"):
        run(by, x, weight, stride=0)
    with pytest.raises(InvalidParameterError, match="padding"):
        run(by, x[0], weight[:, :, 0], operation="conv2d", padding=-1)
