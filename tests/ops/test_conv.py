"""Convolutions: against the definition in float64, in chunks of frames, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.conv import conv_arrays, exact_conv3d
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.conv import ConvShape

CASES = {
    "3x3x3": dict(x=(2, 4, 6, 7, 5), kernel=(3, 3, 3), padding=1),
    "one frame": dict(x=(1, 1, 6, 7, 4), kernel=(3, 3, 3), padding=1),
    "1x1x1": dict(x=(2, 3, 4, 5, 6), kernel=(1, 1, 1)),
    "time only": dict(x=(1, 5, 3, 4, 6), kernel=(3, 1, 1)),
    "stride in time": dict(x=(1, 6, 3, 4, 4), kernel=(3, 1, 1), stride=(2, 1, 1)),
    "stride in space": dict(x=(1, 3, 8, 9, 4), kernel=(3, 3, 3), stride=(1, 2, 2), padding=((0, 1), (0, 1))),
    "each axis its own": dict(x=(1, 3, 8, 9, 3), kernel=(2, 5, 4), stride=(2, 3, 1), padding=(3, (2, 0))),
}


def pairs(padding):
    padding = (padding, padding) if isinstance(padding, int) else padding
    return [(side, side) if isinstance(side, int) else side for side in padding]


@pytest.mark.parametrize("implementation", ["reference", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_sum_over_the_kernel(case, dtype, implementation):
    x, weight, bias = conv_arrays(case["x"], case["kernel"], 7, dtype=dtype)
    stride, padding = case.get("stride", (1, 1, 1)), case.get("padding", 0)
    with ops.use_implementations(conv3d=implementation, conv2d=implementation):
        y = ops.conv3d(x, weight, bias, stride=stride, padding=padding)
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 and implementation == "reference" else 2e-2
    exact = exact_conv3d(x, weight, bias, stride=stride, padding=pairs(padding))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "bfloat16"])
@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, ((0, 1), (0, 1)), ((2, 0), (1, 3))])
def test_images_are_videos_of_one_frame(stride, padding, implementation):
    x, weight, bias = conv_arrays((2, 6, 7, 5), (3, 3), 4)
    strides = (stride, stride) if isinstance(stride, int) else stride
    with ops.use_implementations(conv2d=implementation):
        y = ops.conv2d(x, weight, bias, stride=stride, padding=padding)
    exact = exact_conv3d(x[:, None], weight[:, :, None], bias, stride=(1, *strides), padding=pairs(padding))[:, 0]
    np.testing.assert_allclose(y, exact, atol=1e-5 if implementation == "reference" else 4e-2)


def test_an_output_frame_sees_no_later_frame():
    x, weight, _ = conv_arrays((1, 5, 4, 4, 3), (3, 3, 3), 2)
    y = ops.conv3d(x, weight, padding=1)
    changed = ops.conv3d(x.at[:, 3:].set(jnp.nan), weight, padding=1)
    np.testing.assert_array_equal(changed[:, :3], y[:, :3])
    assert np.isnan(changed[:, 3:]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
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


def test_x_is_rounded_to_the_weight_and_keeps_its_dtype():
    x, weight, bias = conv_arrays((1, 2, 4, 4, 8), (3, 3, 3), 4, weight_dtype=jnp.bfloat16)
    y = ops.conv3d(x, weight, bias, padding=1)
    assert y.dtype == jnp.float32
    exact = exact_conv3d(x.astype(jnp.bfloat16), weight, bias, padding=((1, 1), (1, 1)))
    np.testing.assert_allclose(y, exact, atol=1e-5)


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


@pytest.mark.parametrize("implementation", ["reference", "bfloat16", "native"])
def test_every_implementation_refuses_it(implementation):
    x, weight, _ = conv_arrays((1, 2, 4, 4, 3), (3, 3, 3), 2)
    with ops.use_implementations(conv2d=implementation, conv3d=implementation):
        for call in (
            lambda: ops.conv3d(x, weight, stride=0),
            lambda: ops.conv2d(x[0], weight[:, :, 0], padding=-1),
        ):
            with pytest.raises(InvalidParameterError, match=r"stride|padding"):
                call()
