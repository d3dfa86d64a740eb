"""Plans of language models and encoders against arrays of real engines, formulas by hand and limits; devices."""

import jax
import pytest

from tests.support import gguf
from tests.support.tiny import HYBRID, WINDOWED, tiny_checkpoint, tiny_config
from tests.support.tiny_encoder import SIZES, tiny_encoder
from verax import LLM, Encoder
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.files import write_json
from verax.loading import load_causal_lm
from verax.nn import pack_linear_weights
from verax.plan import plan
from verax.plan.devices import find_device
from verax.plan.model import Described, describe, multiplied
from verax.plan.text import plan_embed, plan_text, text_plan
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.runner import ModelRunner
from verax.text.step.sizes import plan_sizes

DEVICE = find_device("test", memory=1e9, bandwidth=1e11, flops=1e13)
CPU = find_device("cpu", memory=8e9, bandwidth=1e10, flops=1e12)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False)


@pytest.fixture
def config_only(tmp_path):
    """Makes a folder with a config.json and nothing else."""

    def make(family="qwen3", **changes):
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        write_json(folder / "config.json", tiny_config(family, **changes))
        return str(folder)

    return make


def nbytes(tree):
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def runner_of(path, *, quantization=None, **options):
    """The engine's runner with its arrays on the device. It compiles when it first runs, which it does not here."""
    config = EngineConfig(**options)
    loading = {"prediction_head": config.uses_prediction_head, "quantization": quantization}
    model = load_causal_lm(Checkpoint.open(path), dtype="float32", **loading)
    pack_linear_weights(model, few_rows=True)  # as `verax.LLM` does
    return ModelRunner(model, plan_sizes(model.config, "float32", config))


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}, {"kv_cache_dtype": "int8"}),
        ("qwen3", {"head_dim": 24}, {"kv_cache_dtype": "fp8"}),
        ("qwen3", {}, {"quantization": "int8"}),
        ("qwen3", {}, {"quantization": "int4"}),
        ("qwen3", WINDOWED, {}),
        ("qwen3", {"prediction_head": True, "num_nextn_predict_layers": 1}, {"speculative_config": {"method": "mtp"}}),
        ("qwen3_5_text", HYBRID, {}),
        ("qwen3_moe", EXPERTS, {"quantization": "int8"}),
    ],
)
def test_bytes_are_those_of_the_arrays_that_an_engine_holds(tmp_path, family, changes, options):
    folder = tiny_checkpoint(tmp_path / "model", family=family, **changes)
    runner = runner_of(folder, max_num_seqs=4, max_model_len=64, **options)
    result = plan(str(folder), CPU, dtype="float32", max_num_seqs=4, max_model_len=64, **options)
    assert result["memory"]["weights"] == nbytes(runner._weights)
    assert result["memory"]["cache"] == runner.cache_bytes == nbytes((runner._cache, runner._kept))
    assert result["memory"]["slots"] == nbytes(runner._slots)
    assert sum(row["nbytes"] for row in result["weights"]) == result["memory"]["weights"]


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
def test_weights_of_a_cpu_are_those_of_a_loaded_engine_with_the_rows_that_fill_panels(tmp_path, dtype, tied):
    folder = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=tied)  # no matrix but one has panels that are full
    sizes = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 32}
    llm = LLM(folder, dtype=dtype, skip_tokenizer_init=True, use_tqdm=False, **sizes)
    planned = text_plan(describe(str(folder)), CPU, dtype=dtype, max_num_seqs=2, max_model_len=32)
    assert planned.weight_bytes == nbytes(llm.engine.runner._weights)
    packs = any(weight.ndim == 4 for weight in llm.engine.runner._weights)
    elsewhere = text_plan(describe(str(folder)), DEVICE, dtype=dtype, max_num_seqs=2, max_model_len=32)
    assert (planned.weight_bytes > elsewhere.weight_bytes) == packs
    assert [part.weights for part in planned.parts] == [part.weights for part in elsewhere.parts]


def test_a_gguf_file_is_planned_in_its_own_formats(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    gguf.write(folder, tmp_path / "a.gguf", "Q4_K", kinds={"token_embd.weight": "Q6_K"})
    runner = runner_of(tmp_path / "a.gguf", max_num_seqs=1, max_model_len=96)
    result = plan(str(tmp_path / "a.gguf"), DEVICE, dtype="float32", max_num_seqs=1, max_model_len=96)
    assert result["memory"]["weights"] == nbytes(runner._weights)
    assert {row["precision"] for row in result["weights"]} >= {"Q4_K", "float32"}


def test_products_are_those_of_a_formula_by_hand(config_only):
    D, F, L, N, K, H, V = 64, 96, 2, 4, 2, 16, 320
    folder = config_only()
    result = plan(folder, DEVICE, max_num_seqs=3, max_model_len=200)
    layer = D * (N + 2 * K) * H + N * H * D + 3 * D * F
    decode, prefill = result["programs"]
    assert decode["flops"] == 3 * (2 * L * layer + 2 * V * D + L * 4 * N * H * 200)
    # 199 tokens are padded to 224, which have no scores.
    assert prefill["flops"] == 224 * 2 * L * layer + 2 * V * D + L * 4 * N * H * (199 * 200 // 2)


def test_a_decode_step_reads_weights_and_cache_once(config_only):
    result = plan(config_only(), DEVICE, max_num_seqs=3, max_model_len=200)
    token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, size, bytes
    least = result["memory"]["weights"] + 3 * 200 * token
    assert least <= result["programs"][0]["bytes_per_device"] < 1.1 * least


def test_a_long_prompt_reads_the_weights_once_for_each_step(config_only):
    folder = config_only(max_position_embeddings=8192)
    one, three = plan(folder, DEVICE, max_model_len=6145)["programs"][1:]
    assert one["name"] == "prefill: a prompt of 512 tokens"
    assert three["name"] == "prefill: a prompt of 6144 tokens in 3 steps"
    weights = plan(folder, DEVICE)["memory"]["weights"]
    assert three["bytes_per_device"] > 3 * weights > one["bytes_per_device"] > weights


def test_the_largest_batch_and_context_fit_and_one_more_does_not(config_only):
    folder = config_only(max_position_embeddings=1 << 16)
    small = find_device("test", memory=5e6, bandwidth=1e11, flops=1e13)
    result = plan(folder, small, max_num_seqs=2, max_model_len=512)
    planned = text_plan(describe(folder), small, max_num_seqs=2, max_model_len=512)
    assert result["largest_batch"] > 2
    assert 512 < result["largest_context"] < 1 << 16
    for name, most in (("max_num_seqs", result["largest_batch"]), ("max_model_len", result["largest_context"])):
        assert planned.cache_bytes(**{name: most}) <= planned.cache_room < planned.cache_bytes(**{name: most + 1})


def test_over_devices_weights_and_heads_are_divided(config_only):
    folder = config_only(num_hidden_layers=1)
    whole, half = (plan(folder, DEVICE, tensor_parallel_size=n) for n in (1, 2))
    norms = next(row["nbytes"] for row in whole["weights"] if row["part"] == "norms")
    assert 2 * half["memory"]["weights"] == whole["memory"]["weights"] + norms
    assert 2 * half["memory"]["cache"] == whole["memory"]["cache"]
    assert half["programs"][0]["flops"] == whole["programs"][0]["flops"]
    assert half["programs"][0]["parts_s"]["compute"] == whole["programs"][0]["parts_s"]["compute"] / 2
    # Two of four devices share a head of keys and values: each has all of its cache.
    assert plan(folder, DEVICE, tensor_parallel_size=4)["memory"]["cache"] == half["memory"]["cache"]


def test_products_of_8_bit_integers_have_their_own_rate(config_only):
    folder, device = config_only(), find_device("h100")
    inputs16, inputs8 = (plan(folder, device, quantization=q)["programs"][1] for q in ("int8", "w8a8"))
    matrices = multiplied(text_plan(describe(folder), device).model)[0]
    rows = 512  # of a prompt of 511 tokens, padded; inputs of the head and attention keep 16 bits
    saved = inputs16["parts_s"]["compute"] - inputs8["parts_s"]["compute"]
    assert saved == pytest.approx(2 * rows * matrices * (1 / device.rate("bfloat16") - 1 / device.rate("int8")))
    assert inputs8["flops"] == inputs16["flops"]


def test_the_fewest_devices_are_the_first_that_divide_the_model_and_hold_it(config_only):
    folder = config_only(num_key_value_heads=4, num_attention_heads=12, intermediate_size=96)
    whole = plan(folder, DEVICE)["memory"]
    memory = 0.6 * sum(whole.values()) / 0.9
    result = plan(folder, find_device("test", memory=memory, bandwidth=1e11, flops=1e13))
    assert (result["fits"], result["fewest_devices"]) == (False, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            r"tensor_parallel_size: model\.\S+: 32 rows, .* do not divide over 3 devices; .* divides over: 1, 2, 4$",
        ),
        ({"max_model_len": 513}, "max_model_len: expected 2 to 512 tokens"),
        ({"dtype": "float16"}, "dtype: expected one of bfloat16, float32"),
        ({"quantization": "int3"}, "quantization: expected one of int8, w8a8, int4"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: expected one of"),
        ({"num_frames": 5}, "num_frames: the plan of a model of kind text has no such option"),
    ],
)
def test_wrong_options_are_named(config_only, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        plan(config_only(), DEVICE, **options)


def test_models_that_are_not_there_or_not_decided_by_their_configuration(config_only):
    with pytest.raises(CheckpointError, match=r"nowhere: no such folder.*or one of qwen3, "):
        describe("nowhere")
    for key in ("quantization_config", "compression_config"):
        folder = config_only(**{key: {"quant_method": "gptq", "bits": 4}})
        with pytest.raises(UnsupportedModelError, match=r"its weights are quantised.*--quantization dequantize"):
            describe(folder)
    assert plan_text(describe(folder, quantization="dequantize"), DEVICE)["fits"]


ENCODER = Described("tiny", "embedding", {"model_type": "bert", **SIZES})


def test_products_of_an_encoder_are_those_of_a_formula_by_hand():
    B, T, D, F, L = 3, 20, SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_hidden_layers"]
    result = plan_embed(ENCODER, DEVICE, batch_size=B, max_length=T)
    (program,) = result["programs"]
    assert program["flops"] == B * L * (2 * T * (4 * D * D + 2 * D * F) + 4 * T * T * D)
    assert program["parts_s"]["compute"] == program["flops"] / DEVICE.rate("float32")
    assert result["fits"]
    assert {row["part"] for row in result["weights"]} == {"embedding", "attention", "feed-forward", "norms"}


def test_an_encoder_of_a_language_model_has_heads_and_windows_of_its_own():
    """With transformers' window to both sides: tokens that are half of `sliding_window` apart see each other."""
    sizes = {"head_dim": 48, "use_bidirectional_attention": True, **WINDOWED}
    flops, T = {}, 20
    for window in (10, 2 * T):
        config = tiny_config("gemma3_text", **sizes | {"sliding_window": window})
        model = Described("tiny", "embedding", config)
        flops[window] = plan_embed(model, DEVICE, batch_size=1, max_length=T)["programs"][0]["flops"]
    unseen = sum(abs(query - key) > 5 for query in range(T) for key in range(T))
    assert flops[2 * T] - flops[10] == 4 * config["num_attention_heads"] * 48 * 2 * unseen


def test_weights_on_a_cpu_are_those_of_a_loaded_encoder_with_the_rows_that_fill_panels(tmp_path):
    folder = tiny_encoder(tmp_path / "model", hidden_size=64)
    encoder = Encoder(folder, show_progress=False)
    result = plan(str(folder), CPU, batch_size=3, max_length=20)
    assert result["memory"]["weights"] == sum(array.nbytes for array in jax.tree.leaves(encoder._weights))


def test_wrong_options_of_an_encoder_are_named():
    with pytest.raises(InvalidParameterError, match="max_length: expected 1 to 64 tokens, got 65"):
        plan_embed(ENCODER, DEVICE, max_length=65)
    with pytest.raises(
        InvalidParameterError, match="devices: the plan of a model of kind embedding has no such option"
    ):
        plan("encoder-builtin", DEVICE, devices=2)


def test_numbers_on_the_command_line_replace_those_of_the_table():
    device = find_device("h100", memory=94e9, flops=500e12)
    assert (device.memory, device.bandwidth) == (94_000_000_000, 3.35e12)
    assert device.flops["int8"] == pytest.approx(1000e12, rel=1e-3)
    assert "changed" in device.source


def test_an_unknown_device_is_described_by_its_numbers():
    device = find_device("mychip", memory=48e9, bandwidth=1e12, flops=200e12)
    assert (device.rate("bfloat16"), device.rate("float32")) == (200e12, 200e12)
    with pytest.raises(InvalidParameterError, match=r"'mychip' is not in the table, .*v5e.*--bandwidth, --flops"):
        find_device("mychip", memory=48e9)
    with pytest.raises(InvalidParameterError, match="bandwidth: expected more than 0"):
        find_device("h100", bandwidth=-1.0)
    with pytest.raises(InvalidParameterError, match=r"memory: .* finite"):
        find_device("h100", memory=float("inf"))


def test_this_machine_is_not_measured_where_its_numbers_are_given(monkeypatch):
    monkeypatch.setattr("verax.machine.measure_machine", lambda: pytest.fail("measured"))
    device = find_device("cpu", bandwidth=40e9, flops=1e12)
    assert (device.platform, device.bandwidth, device.rate("float32")) == ("cpu", 40e9, 1e12)
    monkeypatch.setattr(
        "verax.machine.measure_machine",
        lambda: {
            "memory_bandwidth_gb_per_s": 20.0,
            "matmul_float32_gflop_per_s": 100,
            "matmul_bfloat16_gflop_per_s": 300,
        },
    )
    device = find_device("cpu", memory=8e9)
    assert (device.memory, device.bandwidth) == (8e9, 20e9)
    assert dict(device.flops) == {"bfloat16": 300e9, "float32": 100e9}
