"""The encoders on the devices of a clip: the states of one device, a part of the weights on each. A process of its own,
for its eight devices."""

import pytest

from tests.support.devices import run_on_devices

NORMS = 4 * 16 * (2 * 2 + 1)
"""Bytes of the norms, which are whole on each device: two in each of two layers and one at the end, 16 float32 each."""

UNDIVIDED = 4 * 20 * (3 * 14 * 14 + 1 + 5 + 2 * 2 + 3 * 6)
"""Bytes of an image encoder of width 20 that are whole on each device: patch and class embedding, five positions, two
norms outside of the blocks, and of each of three blocks two norms and the biases of two sums; float32."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_devices(8, "tests.support.video_encoder_mesh", tmp_path_factory.mktemp("encoders"))


@pytest.mark.parametrize(
    ("mesh", "devices"), [("(True, 1)", 2), ("(False, 2)", 2), ("(True, 2)", 4), ("(False, 4)", 4), ("(True, 4)", 8)]
)
def test_states_are_those_of_one_device_with_a_part_of_the_weights_on_each(found, mesh, devices):
    case = found["float32"][mesh]
    assert case["difference"] < 1e-5 * case["spread"]
    # Two of each of two layers, and one of the embedding.
    assert case["collectives"] == {"all-reduce": 5}
    part = (case["whole"] - NORMS) // devices + NORMS
    assert case["bytes"] == [part] * devices
    assert case["planned"] == part
    assert case["arguments"] < part + 4096  # the tokens


@pytest.mark.parametrize(
    ("mesh", "devices"), [("(True, 1)", 2), ("(False, 2)", 2), ("(True, 2)", 4), ("(False, 4)", 4)]
)
def test_an_images_states_are_those_of_one_device_with_a_part_of_the_weights_on_each(found, mesh, devices):
    case = found["images"][mesh]
    assert case["difference"] < 1e-5 * case["spread"]
    assert case["collectives"] == {"all-reduce": 4}  # two of each of the two layers that run
    part = (case["whole"] - UNDIVIDED) // devices + UNDIVIDED
    assert case["bytes"] == [part] * devices
    assert case["planned"] == part


def test_an_images_states_in_bfloat16_differ_by_its_rounding(found):
    case = found["bfloat16 images"]
    assert 0 < case["difference"] < 2e-2 * case["spread"]


def test_an_image_encoder_that_does_not_divide_is_on_the_first_device(found):
    case = found["five heads"]
    assert case["difference"] < 1e-5 * case["spread"]
    assert (case["bytes"], case["collectives"]) == ([case["whole"]], {})
    assert (
        found["image messages"][-1]
        == "image encoder: its weights are on 4 of 8 devices; numbers that it divides over: 1, 2, 4"
    )


def test_states_in_bfloat16_differ_by_its_rounding(found):
    case = found["bfloat16"]["(True, 4)"]
    assert 0 < case["difference"] < 2e-2 * case["spread"]


def test_the_most_devices_that_the_sizes_divide_over_are_used_and_named(found):
    some, none = found["some"], found["none"]
    for case in (some, none):
        assert case["difference"] < 1e-5 * case["spread"]
    assert (len(some["bytes"]), some["collectives"]) == (4, {"all-reduce": 5})
    assert (none["bytes"], none["collectives"]) == ([none["whole"]], {})
    assert found["messages"] == {
        "8": [],
        "4": ["text encoder: its weights are on 4 of 8 devices; numbers that it divides over: 1, 2, 4"],
        "3": ["text encoder: its weights are on 1 of 8 devices; numbers that it divides over: 1"],
    }


def test_the_built_in_encoder_is_on_three_of_four_devices(found):
    case = found["built-in"]  # three heads, and 36 words
    assert case["difference"] < 1e-5 * case["spread"]
    assert len(case["bytes"]) == 3


@pytest.mark.parametrize(("how", "loaded"), [("kept", True), ("dropped", False), ("offloaded", False)])
def test_parts_come_back_to_their_devices(found, how, loaded):
    case = found[how]
    assert case["difference"] < 1e-5
    assert case["loaded"] == [loaded] * 2
    assert case["bytes"] == found["float32"]["(True, 2)"]["bytes"]
