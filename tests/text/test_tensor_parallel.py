"""A model over several devices, and replicas on devices of their own: the tokens of one engine on one device."""

from functools import partial

import pytest
from flax import nnx

from tests.support.devices import run_on_devices
from tests.support.packing import awq, float8, gptq, mxfp4, quantized_checkpoint
from tests.support.tensor_parallel import FAMILIES, FEATURES, model_of, run
from tests.support.tiny import tiny_config
from verax import LLM
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError
from verax.loading import model_shapes
from verax.models import causal_lm
from verax.models.causal_lm import config_on_devices
from verax.nn.parallel import check_divisions, fitting_sizes
from verax.plan.model import parts_of

SUMS = {"qwen3": 5, "llama": 3, "gemma3": 5, "qwen3-moe": 3, "qwen3.5": 5, "qwen3-next": 5, "two-key-heads": 4}
SUMS |= {"phi3": 5, "olmo3": 7, "smollm3": 5, "granite": 5, "ministral3": 5, "qwen2-moe": 3, "gpt-oss": 5, "gemma4": 7}
SUMS |= {"gemma4-two-kinds": 5}
"""Sums over devices of a decode step: two for each layer, and one of the embedding.

A delta layer that is whole on every device has none. XLA joins the ones of a shared expert and of the experts. OLMo's
norms of queries and of keys have one in each layer. Gemma 4 has two embeddings, whose sums XLA joins, and a layer
that attends to the keys of another.
"""

HYBRIDS = ("qwen3.5", "qwen3-next")

WHOLE_DELTA_LAYERS = "two-key-heads"
"""The hybrid family whose delta layers are whole on every device: four devices cannot divide two key heads."""

SIZES = dict.fromkeys(FAMILIES, (1, 8)) | {
    "qwen3-moe": (1, 2),
    WHOLE_DELTA_LAYERS: (1, 4),
    **dict.fromkeys(("phi3", "olmo3", "smollm3", "granite", "ministral3", "qwen2-moe", "gpt-oss", "gemma4"), (1, 4)),
    "gemma4-two-kinds": (1, 4),
}
"""Numbers of devices. Eight share heads of keys and values, except in Llama, and have an expert each; two have four.

Features run on two devices, so that their families do, too.
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Results of the engines of each family, by number of devices."""
    return run(FAMILIES, tmp_path_factory.mktemp("families"), SIZES)


@pytest.fixture(params=FAMILIES)
def family(request, families):
    """A family and what its engines gave."""
    return request.param, families[request.param]


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """Results of the engines with each feature, on one and on two devices."""
    return run(FEATURES, tmp_path_factory.mktemp("features"), dict.fromkeys(FEATURES, (1, 2)))


def test_tokens_equal_one_device(family):
    name, found = family
    assert all(len(set(answer)) > 4 for answer in found[1]["tokens"])
    assert tuple(size for size, of in found.items() if of["tokens"] == found[1]["tokens"]) == SIZES[name]


def test_a_decode_step_has_two_sums_a_layer_one_of_the_embedding_and_gathers_scores(family):
    name, found = family
    assert found[1]["collectives"] == {}
    for size in SIZES[name][1:]:
        assert found[size]["collectives"] == {"all-reduce": SUMS[name], "all-gather": 1}


def test_nothing_compiles_after_the_start_and_slots_and_cache_stay_in_their_buffers(family):
    _, found = family
    for of in found.values():
        before, after = of["compiled"]
        assert before == after
        assert of["aliased"] == of["donated"]


def test_each_device_runs_the_kernels_that_one_device_runs(family):
    name, found = family
    calls = [of["native_calls"] for of in found.values()]
    # The norms of OLMo's queries and keys are over all devices, so that no device's kernel computes them.
    assert calls == ([calls[0], calls[0] - 4] if name == "olmo3" else [calls[0]] * len(calls))


def test_each_device_holds_its_part_of_weights_and_heads(family):
    name, found = family
    for size, of in found.items():
        assert of["heads_on_a_device"] == sorted({max(1, heads // size) for heads in found[1]["heads_on_a_device"]})
        whole, part = of["bytes"]
        if name != WHOLE_DELTA_LAYERS:
            assert part < 1.1 * whole / size + 12_000  # norms are whole


def test_recurrent_states_are_divided_with_their_layers(families):
    for name in HYBRIDS:
        whole, _ = families[name][1]["state_bytes"]
        assert whole > 0
        assert {size: of["state_bytes"] for size, of in families[name].items()} == {
            size: [whole, whole // size] for size in SIZES[name]
        }
    whole, part = families[WHOLE_DELTA_LAYERS][4]["state_bytes"]
    assert whole == part


def planned_bytes(case, size):
    """Bytes of weights that a device has by the plan."""
    family, changes = model_of(case)
    architecture, config = causal_lm(tiny_config(family, **changes))
    config = config_on_devices(config, size)
    quantization = FEATURES.get(case, {}).get("quantization")
    model = model_shapes(architecture, config, dtype="float32", quantization=quantization)
    return sum(part.per_device for part in parts_of(model, size))


def test_the_plan_has_the_bytes_of_each_device(family):
    name, found = family
    assert {size: planned_bytes(name, size) for size in found} == {size: of["bytes"][1] for size, of in found.items()}


@pytest.mark.parametrize("feature", ["int8", "int4", "moe-int4", "delta-int4", "fused-int4"])
def test_the_plan_has_the_bytes_of_quantised_parts(features, feature):
    assert planned_bytes(feature, 2) == features[feature][2]["bytes"][1]


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_gives_one_devices_answers(features, feature):
    one, two = features[feature].values()
    assert two["tokens"] == one["tokens"]
    assert two["compiled"][0] == two["compiled"][1]
    assert bool(one["prompt_logprobs"][0]) == (feature == "lora")
    for name in ("logprobs", "prompt_logprobs"):
        assert len(two[name]) == len(one[name])
        for ours, theirs in zip(two[name], one[name], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)


def shapes(family="qwen3", **changes):
    architecture, config = causal_lm(tiny_config(family, **changes))
    return nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0)))


def test_a_number_that_does_not_divide_is_refused_with_those_that_do():
    model = shapes(num_attention_heads=6, num_key_value_heads=2, intermediate_size=96)
    assert fitting_sizes(model) == [1, 2]
    with pytest.raises(InvalidParameterError, match=r"^size: model\.\S+: .* over 3 devices; .* divides over: 1, 2$"):
        check_divisions(model, 3, argument="size")


def test_a_head_stays_whole():
    """Rows of three heads would divide over two devices, but half a head is none."""
    model = shapes(num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(InvalidParameterError, match=r"[qk]_proj\.weight: 48 rows, 16 of which stay together, do not"):
        check_divisions(model, 2, argument="size")


@pytest.mark.parametrize(
    ("pack", "scheme", "group"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, 32),
        (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, 32),
        (mxfp4, {"quant_method": "compressed-tensors"}, 32),
        (partial(float8, block=(64, 64)), {"quant_method": "fp8", "weight_block_size": [64, 64]}, 64),
    ],
)
def test_inputs_that_share_a_scale_of_a_file_are_known_before_it_is_read(tmp_path, pack, scheme, group):
    quantized_checkpoint(tmp_path, pack, scheme)
    opened = Checkpoint.open(tmp_path)
    model = model_shapes(*causal_lm(opened.config), dtype="float32", opened=opened)
    with pytest.raises(InvalidParameterError, match=rf"down_proj.weight: 192 inputs, {group} of which stay together"):
        check_divisions(model, 4, argument="size")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Facts of one engine, of two replicas, of two replicas of two devices each, and of programs out of a folder."""
    return run_on_devices(4, "tests.support.data_parallel", tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("case", ["two", "two of two"])
def test_answers_of_replicas_equal_one_engine_and_every_replica_serves(replicas, case):
    one, several = replicas["one"], replicas[case]
    expected = one["answers"][: len(several["answers"])]
    assert several["answers"] == expected
    assert all(len(set(answer[1])) > 4 for answer in expected[:5])
    # Requests without a seed draw one in the order in which they come.
    assert expected[2] != expected[3]
    for i, answer in enumerate(several["collected"]):
        assert answer == expected[i] or i in (2, 3)
    assert min(several["generated"]) >= 32
    assert all(after > count for count, after in zip(several["generated"], several["generated_later"], strict=True))


def test_programs_of_a_folder_run_on_a_host_of_several_devices(replicas):
    assert replicas["from a folder"]["answers"] == replicas["one"]["answers"][:5]
    assert replicas["from a folder"]["devices"] == [[0]]


def test_each_replica_has_devices_of_its_own_and_compiles_nothing_after_the_start(replicas):
    for case, devices in {"one": [[0]], "two": [[0], [1]], "two of two": [[0, 1], [2, 3]]}.items():
        assert replicas[case]["devices"] == replicas[case]["cache_devices"] == devices
        before, after = replicas[case]["compiled"]
        assert before == after
    assert replicas["two"]["cache"] == f"{replicas['one']['cache']} on each of 2 replicas"
    assert (replicas["one"]["slots"], replicas["two"]["slots"]) == (2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 512}, r"tensor_parallel_size: 512 .* JAX_NUM_CPU_DEVICES=512"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected a whole number of at least 1"),
        (
            {"data_parallel_size": 256, "tensor_parallel_size": 2},
            r"data_parallel_size: 256 replicas of tensor_parallel_size 2 need 512 devices, .*JAX_NUM_CPU_DEVICES=512",
        ),
        ({"data_parallel_size": 0}, "data_parallel_size: expected a whole number of at least 1"),
    ],
)
def test_more_devices_than_there_are_are_refused_with_the_way_to_virtual_ones(tiny_folder, options, message):
    with pytest.raises(InvalidParameterError, match=f"^{message}"):
        LLM(tiny_folder, **options)
