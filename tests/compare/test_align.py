"""Which array is which: by name, table, or shape and order; and how it is arranged."""

import numpy as np
import pytest

from verax.checkpoint.video.parts import Renaming
from verax.compare import Trace, align
from verax.compare.align import find_layout
from verax.compare.comparison import JUMP, MAX_REL, SMALL, measure


def trace(**shapes):
    made = Trace()
    for name, shape in shapes.items():
        made.add(name.replace("_", "."), np.zeros(shape, np.float32))
    return made


@pytest.mark.parametrize(
    ("source", "target", "rearrange"),
    [
        ((2, 3, 4), (2, 3, 4), lambda x: x),
        ((2, 3, 4, 5, 6), (2, 60, 6), lambda x: x.reshape(2, 60, 6)),
        ((2, 3, 4, 5, 6), (2, 6, 3, 4, 5), lambda x: x.transpose(0, 4, 1, 2, 3)),
        ((2, 7, 4, 5), (2, 4, 7, 5), lambda x: x.transpose(0, 2, 1, 3)),
        ((7, 5), (1, 7, 5), lambda x: x[None]),
        ((2, 12, 5), (2, 5, 3, 4), lambda x: x.transpose(0, 2, 1).reshape(2, 5, 3, 4)),
    ],
)
def test_arrangements_are_found_by_shape_and_undone(source, target, rearrange):
    layout = find_layout(source, target)
    x = np.arange(np.prod(source)).reshape(source)
    np.testing.assert_array_equal(layout.apply(x), rearrange(x))
    np.testing.assert_array_equal(layout.invert(layout.apply(x)), x)
    assert not layout.ambiguous
    assert bool(str(layout)) == (source != target)


def test_what_is_repeated_is_compared_with_each_of_its_copies():
    layout = find_layout((1, 4), (2, 3, 4))
    x = np.arange(4.0)[None]
    np.testing.assert_array_equal(layout.apply(x), np.broadcast_to(x, (2, 3, 4)))
    np.testing.assert_array_equal(layout.invert(layout.apply(x)), x)


@pytest.mark.parametrize(
    ("source", "target", "axes"),
    [
        ((2, 3, 3, 5), (2, 5, 3, 3), (0, 3, 1, 2)),
        # [B, T, H, W, C] and [B T, C, H, W]: channels of a clip's pictures move rather than neighbours change places.
        ((1, 4, 8, 12, 8), (4, 8, 8, 12), (0, 1, 4, 2, 3)),
        ((4, 8, 8, 12), (1, 4, 8, 12, 8), (0, 2, 3, 1)),
    ],
)
def test_an_arrangement_that_is_not_the_only_one_says_so(source, target, axes):
    layout = find_layout(source, target)
    assert layout.axes == axes
    assert layout.ambiguous
    assert str(layout).endswith("?")


def test_names_tables_and_several_results_concatenated():
    ours = trace(blocks_3_attn_qkv=(2, 12), blocks_3_norm=(2, 4), head=(1, 2), only=(9,))
    reference = trace(layer_3_q=(2, 4), layer_3_k=(2, 4), layer_3_v=(2, 4), layer_3_norm=(2, 4), head=(2, 1), more=(3,))
    qkv = Renaming([("blocks.{i}.attn.qkv", tuple(f"layer.{{i}}.{x}" for x in "qkv"))])
    found = align(ours, reference, [qkv, Renaming([("blocks.{i}", "layer.{i}")])])
    assert [(pair.ours, pair.reference, pair.by) for pair in found.pairs] == [
        (("blocks.3.attn.qkv",), ("layer.3.q", "layer.3.k", "layer.3.v"), "table"),
        (("blocks.3.norm",), ("layer.3.norm",), "table"),
        (("head",), ("head",), "name"),
    ]
    assert (found.ours_only, found.reference_only) == (["only"], ["more"])


def test_calls_are_put_together_along_the_axis_that_keeps_all_sizes():
    ours, reference = Trace(), Trace()
    whole = np.random.default_rng(0).standard_normal((1, 3, 5, 3, 8))
    for frame in range(3):
        ours.add("conv", whole[:, frame : frame + 1])
    reference.add("conv", whole.transpose(0, 4, 1, 2, 3))
    (pair,) = align(ours, reference).pairs
    assert measure(*pair.load(ours, reference)).l2 == 0
    assert pair.layout.ambiguous


def test_a_name_with_another_shape_is_reported():
    found = align(trace(a=(2, 3), b=(2,)), trace(a=(2, 4), b=(2,)))
    assert [pair.ours for pair in found.pairs] == [("b",)]
    assert found.mismatched == [("a", "a", "[2, 3] is not an arrangement of [2, 4]")]


def test_only_axes_before_the_last_are_repeated_and_never_in_an_output():
    assert find_layout((1, 1, 4), (2, 3, 4)).broadcast
    assert find_layout((1,), (3,)) is None
    assert find_layout((0, 3), (0, 4)) is None
    both = trace(row=(1, 4)), trace(row=(2, 4))
    assert [pair.layout.broadcast for pair in align(*both).pairs] == [True]
    for one in both:
        one.add("(output)", one["row"])
    assert [names[0] for names in align(*both).mismatched] == ["(output)"]


@pytest.mark.parametrize(
    ("ours", "reference", "fits"),
    [
        ((2, 5, 3), (2, 3, 5), True),  # channels of a sequence
        ((2, 6, 8, 3), (2, 3, 6, 8), True),  # of a picture
        ((2, 3, 6, 8), (2, 6, 8, 3), True),
        ((6, 8, 3), (3, 6, 8), True),
        ((1, 2, 6, 8, 3), (2, 3, 6, 8), True),  # of the pictures of a clip
        ((5, 3), (1, 5, 3), True),
        ((5, 3), (15,), True),
        ((5, 3), (3, 5), False),
        ((5, 2, 3), (2, 5, 3), False),  # tokens before rows
        ((2, 3, 8, 6), (2, 3, 6, 8), False),  # width before height
        ((2, 5, 4, 3), (2, 4, 5, 3), False),  # tokens before heads
    ],
)
def test_axes_of_outputs_keep_their_order_but_for_channels(ours, reference, fits):
    sides = []
    for shape in (ours, reference):
        sides.append(trace(layer=shape))
        sides[-1].add("(output)", np.zeros(shape, np.float32))
    found = align(*sides)
    assert [pair.ours for pair in found.pairs] == [("layer",), ("(output)",)][: 1 + fits]
    assert [(ours, "only channels move" in why) for ours, _, why in found.mismatched] == [("(output)", True)][fits:]


def test_errors_match_their_definitions():
    reference = np.array([1.0, -2.0, 3.0, -2.0])
    errors = measure(reference + np.array([0, 0.5, 0, 0]), reference)
    assert errors.max_abs == 0.5
    assert errors.max_rel == 0.25
    assert errors.l2 == pytest.approx(0.5 / 18**0.5)
    assert measure(2 * reference, reference).cosine == pytest.approx(1)
    assert measure(reference * np.nan, reference).not_finite.startswith("ours has 4 NaN of 4 numbers, the first (nan)")
    assert measure(reference, 0 * reference).l2 == np.inf
    assert measure(reference + 3j, reference + 1j).max_abs == 2
    assert measure(reference[:0], reference[:0]).l2 == 0


ROWS = np.random.default_rng(0).standard_normal((2, 32, 16)).astype(np.float32)
SPECTRUM = np.abs(np.fft.fft(np.exp(-(np.linspace(-5, 5, 64) ** 2)))).astype(np.float32)[:, None] * ROWS[0, :1]


@pytest.mark.parametrize(
    ("large", "wrong", "where"),
    [
        (np.s_[0, 3, 0], np.s_[1, 5], "at [1, 5]"),  # a token's outlier
        (np.s_[..., 0], np.s_[..., 7], "in channel 7"),  # an outlier in each token
        (np.s_[0, 0], np.s_[1, 31, :], "at [1, 31]"),
        (np.s_[:0], np.s_[..., 7], "in channel 7"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_large_numbers_hide_no_wrong_row_or_channel(large, wrong, where, dtype):
    reference = ROWS.astype(dtype)
    reference[large] *= 1e3
    ours = reference * np.float32(1 + 1e-6)
    assert measure(ours, reference).worst < 1e-5
    ours[wrong] *= 1.01
    errors = measure(ours, reference)
    assert 0.005 < errors.worst < 0.02
    assert errors.worst_at == where


def test_a_number_of_a_one_dimensional_array_is_a_row():
    reference = np.array([1e5, 1, 2, 3, 1], np.float32)
    errors = measure(reference + np.array([0, 0, 0, 0.1, 0], np.float32), reference)
    assert errors.worst == pytest.approx(0.1 / (SMALL * 1e5))  # 10, more than the row and the median
    assert errors.worst_at == "at [3]"
    assert measure(np.array(2.0), np.array(1.0)).worst == 1


@pytest.mark.parametrize("arrange", [lambda x: x, np.transpose])
def test_rounding_of_the_largest_row_or_channel_is_not_an_error_of_small_ones(arrange):
    noise = 2**-25 * SPECTRUM.max(0) * np.sign(ROWS.reshape(64, 16))
    errors = measure(arrange(SPECTRUM + noise), arrange(SPECTRUM))
    assert errors.worst < JUMP * MAX_REL


def test_rows_of_zeros_count_for_the_median():
    padded = ROWS[0] * (np.arange(32) < 20)[:, None]
    assert measure(padded + np.float32(1e-7), padded).worst < 1e-6
    assert measure(padded + np.float32(1e-2) * (padded == 0), padded).worst > 1e-3
