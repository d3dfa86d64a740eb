"""Convolutions by every implementation: against the definition in float64, causal, and what is refused; short ones."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.conv import conv_arrays, exact_conv3d
from tests.support.cpu import NATIVE, at_level
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.conv import ConvShape

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
    implementation, level = at_level(by)
    with level:
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
@pytest.mark.parametrize(
    ("stride", "padding"), [(1, 0), (2, 1), (2, ((0, 1), (0, 1))), ((2, 1), ((2, 0), (1, 3))), (1, ((2, 0), (1, 3)))]
)
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
        (dict(cache=(1, 2, 4, 5, 3)), "cache: expected frames of the shape of x"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        ConvShape(**{"x": (1, 2, 4, 4, 3), "weight": (2, 3, 3, 3, 3), "stride": 1, "padding": 1, **changes})


def test_strides_and_padding_may_be_whole_numbers_of_numpy(unchecked):
    x, weight = jnp.ones((1, 4, 4, 3)), jnp.ones((2, 3, 3, 3))
    y = ops.conv2d(x, weight, stride=np.int64(2), padding=np.int32(1))
    np.testing.assert_array_equal(y, ops.conv2d(x, weight, stride=2, padding=1))
    for name, number in (("stride", 2.0), ("stride", (1, 2.0)), ("padding", 0.5)):
        with pytest.raises(InvalidParameterError, match=f"^{name}: expected"):
            ops.conv2d(x, weight, **{name: number})


def test_integers_are_refused(unchecked):
    images, weight = jnp.ones((1, 4, 4, 3)), jnp.ones((2, 3, 2, 2))
    for x, w, name in ((images.astype(jnp.uint8), weight, "x"), (images, weight.astype(jnp.int8), "weight")):
        with pytest.raises(InvalidParameterError, match=f"^{name}: expected floats"):
            ops.conv2d(x, w)


RNG = np.random.default_rng(0)
T, C = 23, 5


def short_arguments(width, sequences=1):
    shapes = (1, T, C), (C, 1, width), (sequences, width - 1, C)
    return [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in shapes]


def exact_short(x, weight, state):
    """The definition, in float64: outputs, and the last inputs."""
    whole, taps = np.concatenate([state, x]).astype(np.float64), np.asarray(weight[:, 0].T, np.float64)
    out = [(whole[t : t + len(taps)] * taps).sum(0) for t in range(len(x))]
    return np.asarray(out).reshape(x.shape), whole[len(x) :]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_short_convolution_is_its_definition(width):
    x, weight, state = short_arguments(width)
    out, last = ops.short_convolution(x, weight, initial_state=state)
    for got, expected in zip((out[0], last[0]), exact_short(x[0], weight, state[0]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    fresh, _ = ops.short_convolution(x, weight)
    np.testing.assert_allclose(fresh[0], exact_short(x[0], weight, 0 * state[0])[0], atol=1e-6)


@pytest.mark.parametrize("packing", [[0, 1, 3, 3, 10, 23], [0, 0, 2, 17, 18, 20], [0, 4, 4, 4, 4, 4]])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_packed_short_convolutions_equal_separate_ones(packing, width):
    # Empty sequences, sequences shorter than the filter, and tokens after the last of them.
    x, weight, states = short_arguments(width, sequences=5)
    packed = jax.jit(lambda cu_seqlens: ops.short_convolution(x, weight, initial_state=states, cu_seqlens=cu_seqlens))
    out, last = packed(jnp.asarray(packing))
    for n, (start, stop) in enumerate(pairwise(packing)):
        expected, left = exact_short(x[0, start:stop], weight, states[n])
        np.testing.assert_allclose(out[0, start:stop], expected, atol=1e-6)
        np.testing.assert_array_equal(last[n], left.astype(np.float32))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"x": (1, 5, 1)}, "weight: expected shape"),
        ({"weight": (6, 2, 4)}, "weight: expected shape"),
        ({"weight": (6, 1, 0)}, "weight: expected shape"),
        ({"initial_state": (1, 4, 6)}, r"initial_state: expected shape \[1, 3, 6\]"),
        ({"x": (2, 5, 6), "initial_state": (2, 3, 6), "cu_seqlens": (3,)}, "cu_seqlens: .* batch of 2"),
    ],
)
def test_arguments_that_do_not_fit_a_short_convolution_are_refused_by_name(changes, begins):
    shapes = {"x": (1, 5, 6), "weight": (6, 1, 4), "initial_state": (1, 3, 6)} | changes
    arrays = {name: jnp.zeros(shape, int if name == "cu_seqlens" else float) for name, shape in shapes.items()}
    with pytest.raises(InvalidParameterError, match=f"^{begins}"):
        ops.short_convolution(**arrays)


def test_no_tokens_leave_the_inputs_of_each_sequence():
    _, weight, states = short_arguments(4, sequences=3)
    out, last = ops.short_convolution(
        jnp.zeros((1, 0, C)), weight, initial_state=states, cu_seqlens=jnp.zeros(4, jnp.int32)
    )
    assert out.shape == (1, 0, C)
    np.testing.assert_array_equal(last, states)


@pytest.mark.parametrize("cut", [1, 2, 9, 22])
def test_a_short_convolution_continues_from_where_it_stopped(cut):
    x, weight, state = short_arguments(4)
    whole, last = ops.short_convolution(x, weight, initial_state=state)
    first, middle = ops.short_convolution(x[:, :cut], weight, initial_state=state)
    second, end = ops.short_convolution(x[:, cut:], weight, initial_state=middle)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(end, last)
