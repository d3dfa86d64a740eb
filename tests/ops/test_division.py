"""Parts of weights, quantised ones too: a device holds a smaller weight with the rows or inputs that it should."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.support import gguf
from verax import ops
from verax.errors import InvalidParameterError
from verax.ops.division import Division, check_division, partition, repeated, resized

ROWS, INPUTS, PARTS = Division(), Division(axis=1), Division(unit=(8, 24))
WEIGHT = jnp.asarray(np.random.default_rng(0).standard_normal((64, 512)), jnp.float32)

WEIGHTS = {
    "float32": WEIGHT,
    "int8": ops.quantize(WEIGHT, 8),
    "int8 by 64": ops.quantize(WEIGHT, 8, 64),
    "int4": ops.quantize(WEIGHT, 4, 32),
    "Q8_0": ops.BlockQuantizedWeight.from_blocks("Q8_0", gguf.encode(np.asarray(WEIGHT), "Q8_0")),
    "Q4_K": ops.BlockQuantizedWeight.from_blocks("Q4_K", gguf.encode(np.asarray(WEIGHT), "Q4_K")),
}

every_weight = pytest.mark.parametrize("kind", WEIGHTS)


def plain(weight):
    return np.asarray(weight if isinstance(weight, (jax.Array, np.ndarray)) else weight.dequantize())


def part_of(weight, division, index, count):
    """Part of device `index` of `count`, cut by the partitions as XLA would."""

    def cut(array, spec):
        axis = next((i for i, name in enumerate(spec) if name is not None), None)
        if axis is None:
            return array
        order = division.order(len(array), count)
        return jnp.split(jnp.asarray(array if order is None else array[order]), count, axis)[index]

    return resized(jax.tree.map(cut, weight, partition(weight, division)))


@every_weight
@pytest.mark.parametrize("division", [ROWS, INPUTS], ids=["rows", "inputs"])
def test_parts_put_together_are_the_whole(kind, division):
    weight = WEIGHTS[kind]
    check_division("w", weight, division, 2)
    parts = [plain(part_of(weight, division, i, 2)) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, division.axis), plain(weight))


@every_weight
def test_a_part_of_several_matrices_has_its_rows_of_each(kind):
    weight, division = WEIGHTS[kind], Division(unit=(16, 16))
    check_division("w", weight, division, 2)
    first, second = (plain(part_of(weight, division, i, 2)) for i in range(2))
    expected = np.split(plain(weight), 4)
    np.testing.assert_array_equal(first, np.concatenate(expected[0::2]))
    np.testing.assert_array_equal(second, np.concatenate(expected[1::2]))


def test_matrices_in_one_weight_may_have_units_of_different_sizes():
    queries, keys, values = np.arange(4), 10 + np.arange(4), 100 + np.arange(8)
    weight, division = np.concatenate([queries, keys, values]), Division(unit=(2, 2, 4))
    expected = [0, 1, 10, 11, 100, 101, 102, 103, 2, 3, 12, 13, 104, 105, 106, 107]
    assert weight[division.order(16, 2)].tolist() == expected


@every_weight
def test_units_are_repeated_next_to_each_other(kind):
    weight = WEIGHTS[kind]
    computed = repeated("w", weight, Division(unit=32, repeats=True), 3)
    assert computed.shape == (192, 512)
    expected = np.repeat(plain(weight).reshape(2, 32, 512), 3, axis=0).reshape(192, 512)
    np.testing.assert_array_equal(plain(jax.tree.map(jnp.asarray, computed)), expected)


def test_a_unit_across_blocks_of_rows_cannot_be_repeated():
    with pytest.raises(InvalidParameterError, match="w: units of 8 rows lie across blocks of 16"):
        repeated("w", WEIGHTS["int4"], Division(unit=8, repeats=True), 2)


@pytest.mark.parametrize(
    ("kind", "division", "devices", "message"),
    [
        ("float32", ROWS, 3, "w: 64 rows do not divide over 3 devices"),
        ("int4", ROWS, 8, "w: 64 rows, 16 of which stay together, do not divide over 8 devices"),
        ("int8", ROWS, 8, None),
        ("int8 by 64", INPUTS, 16, "w: 512 inputs, 64 of which stay together, do not divide over 16 devices"),
        ("Q4_K", INPUTS, 4, "w: 512 inputs, 256 of which stay together, do not divide over 4 devices"),
        ("float32", Division(unit=32), 4, "w: 64 rows, 32 of which stay together, do not divide over 4 devices"),
        ("float32", PARTS, 4, "w: 16 of its 64 rows, 8 of which stay together, do not divide over 4 dev"),
        ("int4", PARTS, 2, "w: 16 of its 64 rows, 16 of which stay together, do not divide over 2 dev"),
        ("int8", PARTS, 2, None),
        ("int8", Division(unit=(8, 16)), 2, "w: 21 of its 64 rows, 8 of which stay together, do not divide over 2 dev"),
        ("float32", Division(unit=32, repeats=True), 4, None),
        ("float32", Division(unit=32, repeats=True), 3, "do not divide over 3 devices"),
    ],
)
def test_what_is_stored_together_stays_together(kind, division, devices, message):
    if message is None:
        return check_division("w", WEIGHTS[kind], division, devices)
    with pytest.raises(InvalidParameterError, match=message):
        check_division("w", WEIGHTS[kind], division, devices)


def test_inputs_in_an_order_of_their_own_are_not_divided():
    weight = replace(WEIGHTS["int4"], order=jnp.arange(512)[::-1])
    assert partition(weight, ROWS).order == PartitionSpec()
    with pytest.raises(InvalidParameterError, match=r"w: its columns are in an order .* quantization='dequantize'"):
        check_division("w", weight, INPUTS, 2)


def test_padding_is_not_a_part_of_a_whole_weight():
    weight = ops.quantize(WEIGHT[:37], 4, 32)
    assert resized(weight).shape == (37, 512)
