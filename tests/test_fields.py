"""Values of configuration files are taken if they have the type and range of their field, and else named."""

import pytest

from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Depth, Epsilon, Positive, Size, check_multiple, read_fields, read_value, require_fields
from verax.files import JsonObject
from verax.models.bert import BertConfig

SIZES = dict(vocab_size=9, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((Size, value) for value in ("4", 4.0, True, 0, -1, 10**12, 10**30, [4], {}, None)),
        *((Depth, value) for value in (0, 10**12)),
        *((Epsilon, value) for value in (float("nan"), float("inf"), -1e-9, "1e-6", False)),
        *((Positive, value) for value in (0, float("inf"), 10**400)),
        *((bool, value) for value in (0, 1, "true")),
        *((tuple[Size, ...], value) for value in (3, "34", [3, "4"])),
    ],
)
def test_a_value_of_another_type_or_range_is_named_with_its_file(kind, value):
    config = JsonObject({"key": value}, "folder/config.json")
    with pytest.raises(CheckpointError, match=r"^folder/config\.json: key: expected .*, got "):
        read_value(config, "key", kind)


def test_a_value_that_is_missing_or_null_has_its_default():
    assert read_value({}, "key", Size, 3) == read_value({"key": None}, "key", Size, 3) == 3
    with pytest.raises(UnsupportedModelError, match=r"config\.json lacks key"):
        read_value({}, "key", Size)


def test_whole_numbers_become_floats_and_lists_tuples():
    assert isinstance(read_value({"key": 3}, "key", Positive), float)
    assert read_value({"key": [1, 2]}, "key", tuple[Size, ...]) == (1, 2)


def test_fields_of_a_dataclass_are_read_by_their_annotations():
    read = read_fields({**SIZES, "layer_norm_eps": None, "other": []}, BertConfig)
    assert read == SIZES
    with pytest.raises(CheckpointError, match="hidden_size: expected a whole number of 1 to 16777216, got 'x'"):
        read_fields({**SIZES, "hidden_size": "x"}, BertConfig)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(CheckpointError) as raised:
        read_value({"key": "x" * 10**6}, "key", Size)
    assert len(str(raised.value)) < 200


def test_all_missing_keys_and_sizes_that_do_not_divide_are_named():
    with pytest.raises(UnsupportedModelError, match="of a bert model lacks a, c"):
        require_fields({"b": 1}, ("a", "b", "c"), "bert model")
    check_multiple({}, whole=8, part=4)
    with pytest.raises(UnsupportedModelError, match="whole 9 is not a multiple of part 4"):
        check_multiple({}, whole=9, part=4)
