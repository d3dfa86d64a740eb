"""Clips and encoders on several devices: the results of one device, by the collectives that are meant.

They run in a process of their own, for its eight devices.
"""

import re

import jax
import pytest
from jax.sharding import AbstractMesh

from tests.support.devices import run_on_devices
from verax import VideoPipeline
from verax.errors import InvalidParameterError

AXES = ("guidance", "sequence")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_on_devices(8, "tests.support.video_mesh", tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def clips(measured):
    return measured["clips"]


@pytest.fixture(scope="module")
def encoders(measured):
    return measured["encoders"]


@pytest.mark.parametrize(
    ("mesh", "collectives"),
    [
        ("(True, 1)", {"all-gather": 1}),  # of the two passes
        ("(True, 4)", {"all-to-all": 8, "all-gather": 2}),  # four of each of two layers; of the tokens too
    ],
)
def test_frames_equal_one_devices_and_a_step_has_the_collectives_that_are_meant(clips, mesh, collectives):
    case = clips["t2v"][mesh]
    assert case["difference"] < 1e-4
    assert (case["collectives"], case["context"]) == (collectives, {})


# Weights of i2v and of the two experts are divided.
@pytest.mark.parametrize(
    ("name", "steps"),
    [("i2v", [2, 2]), ("df", [5, 5]), ("cache", [8, 5]), ("experts", [5, 5]), ("vace", [2, 2])],
)
def test_every_kind_of_model_makes_the_latents_of_one_device(clips, name, steps):
    case = clips[name]
    assert case["steps"] == steps
    assert case["difference"] < 1e-4 * case["spread"]


def test_divided_weights_are_gathered_once_a_block_where_they_are_used(clips):
    case = clips["t2v"]["(True, 4, True)"]
    assert case["difference"] < 1e-4
    # One block in a loop has its four all-to-alls. It gathers eight matrices, and the step the tokens and the passes.
    assert case["collectives"] == {"all-to-all": 4, "all-gather": 8 + 2}
    assert case["context"] == {"all-gather": 2}  # the other two matrices of cross-attention: keys and values


def test_the_plan_has_one_devices_part_of_divided_weights(clips):
    (whole, whole_work), (divided, divided_work) = clips["plans"]
    D, F, layers = 32 * 12, 32, 2
    block = 4 * (8 * D * D + 2 * D * F)  # bytes of its matrices: eight of attention, two of the feed-forward
    assert divided == whole - layers * block * 7 // 8
    assert divided_work - whole_work < 1.5 * block  # one is gathered, not both


def test_the_instant_plan_has_the_weights_of_the_compiled_one_and_no_more_work(clips):
    for case in clips["planned"]:
        for (name, weights, others, work), least in zip(case["compiled"], case["instant"], strict=True):
            assert least[:3] == [name, weights, others]
            assert least[3] <= work


def test_tiles_of_frames_decode_on_several_devices_as_on_one(clips):
    for case in clips["decode"]:
        assert case["difference"] < 1e-4 * case["spread"]


def test_the_plan_has_the_memory_of_one_of_the_devices(clips):
    guidance, both = clips["work"]
    assert both < 0.75 * guidance


def test_a_mesh_makes_the_latents_of_the_options_on_its_own_devices(clips):
    case = clips["given"]
    assert case["equal"]
    assert case["devices"] == [[4, 5, 6, 7]] * 3  # of text encoder, VAE and transformer


def test_a_number_of_devices_is_divided_as_the_clip_and_the_model_allow(clips):
    # Four heads, and two rows of four tokens where nothing else is said.
    assert clips["chosen"] == {"8": [2, 4], "6": [2, 2], "1": [1, 1], "no guidance": [1, 4], "15 tokens": [2, 1]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", "sequence_parallel: .*divides this model's 4 heads .2, 4., got 8"),
        ("tokens", "sequence_parallel: .*divides the 3 x 5 tokens .*got 4; height=64 or width=64 would fit"),
        ("half size", "half_size_steps: expected 0, or tokens of half a frame that sequence_parallel, 4, divides"),
        ("guidance", "guidance_parallel: expected a guidance_scale above 1, got 1"),
        ("devices", "sequence_parallel=8, guidance_parallel=True: expected 2 x 8 = 16 devices, got 8"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_would_fit(clips, name, message):
    assert re.match(message, clips["refusals"][name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_weights": True}, "shard_weights: expected several devices to divide the weights"),
        ({"mesh": jax.make_mesh((1, 1), ("data", "model"))}, "mesh: expected .*; got {'data': 1, 'model': 1}"),
        ({"mesh": jax.make_mesh((1, 1), ("sequence", "guidance"))}, "mesh: expected .*, in this order; got "),
        ({"mesh": AbstractMesh((4, 2), AXES)}, "mesh: expected a jax.sharding.Mesh .*; got Abstract"),
        ({"mesh": "tensor"}, "mesh: expected a jax.sharding.Mesh of this host's devices .*; got 'tensor'"),
        ({"mesh": jax.make_mesh((1, 1), AXES), "devices": 1}, "mesh: give it, or guidance_parallel, sequence_parallel"),
        *(
            ({"sequence_parallel": size}, "sequence_parallel: expected a whole number of at least 1, got")
            for size in (0, 1.0, True, "2")
        ),
        ({"devices": 0}, "devices: expected a whole number of at least 1, got 0"),
        ({"devices": 4096}, "devices: expected 4096 devices, got "),
        (
            {"devices": 3, "guidance_parallel": True, "sequence_parallel": 2},
            "devices: expected 4, of guidance_parallel=True and sequence_parallel=2, or these left out; got 3",
        ),
        ({"devices": 4096, "sequence_parallel": 4096}, "sequence_parallel=4096, .* = 4096 devices, got "),
    ],
)
def test_devices_that_cannot_be_had_are_refused(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        VideoPipeline.from_pretrained(**options)


NORMS = 4 * 16 * (2 * 2 + 1)
"""Bytes of the norms, which are whole on each device: two in each of two layers and one at the end, 16 float32 each."""

UNDIVIDED = 4 * 20 * (3 * 14 * 14 + 1 + 5 + 2 * 2 + 3 * 6)
"""Bytes of an image encoder of width 20 that are whole on each device: patch and class embedding, five positions, two
norms outside of the blocks, and of each of three blocks two norms and the biases of two sums; float32."""


@pytest.mark.parametrize(("mesh", "devices"), [("(False, 4)", 4), ("(True, 4)", 8)])
def test_states_equal_one_devices_with_a_part_of_the_weights_on_each(encoders, mesh, devices):
    case = encoders["text"][mesh]
    assert case["difference"] < 1e-5 * case["spread"]
    # Two of each of two layers, and one of the embedding.
    assert case["collectives"] == {"all-reduce": 5}
    part = (case["whole"] - NORMS) // devices + NORMS
    assert case["bytes"] == [part] * devices
    assert case["planned"] == part
    assert case["arguments"] < part + 4096  # the tokens


def test_an_images_states_equal_one_devices_with_a_part_of_the_weights_on_each(encoders):
    case, devices = encoders["image"], 4  # of eight
    assert case["difference"] < 1e-5 * case["spread"]
    assert case["collectives"] == {"all-reduce": 4}  # two of each of the two layers that run
    part = (case["whole"] - UNDIVIDED) // devices + UNDIVIDED
    assert case["bytes"] == [part] * devices
    assert case["planned"] == part
    message = "image encoder: its weights are on 4 of 8 devices; numbers that it divides over: 1, 2, 4"
    assert case["messages"][-1] == message


def test_an_image_encoder_that_does_not_divide_is_on_the_first_device(encoders):
    case = encoders["five heads"]
    assert case["difference"] < 1e-5 * case["spread"]
    assert (case["bytes"], case["collectives"]) == ([case["whole"]], {})


def test_the_most_devices_that_the_sizes_divide_over_are_used_and_named(encoders):
    some, none = encoders["some"], encoders["none"]
    for case in (some, none):
        assert case["difference"] < 1e-5 * case["spread"]
    assert (len(some["bytes"]), some["collectives"]) == (4, {"all-reduce": 5})
    assert (none["bytes"], none["collectives"]) == ([none["whole"]], {})
    assert encoders["text"]["(True, 4)"]["messages"] == []
    said = "text encoder: its weights are on {} of 8 devices; numbers that it divides over: {}"
    assert (some["messages"], none["messages"]) == ([said.format(4, "1, 2, 4")], [said.format(1, "1")])


@pytest.mark.parametrize("how", ["dropped", "offloaded"])
def test_parts_come_back_to_their_devices(encoders, how):
    case = encoders[how]
    assert case["difference"] < 1e-5
    assert case["loaded"] == [False] * 2
    assert case["bytes"] == encoders["text"]["(False, 4)"]["bytes"]
