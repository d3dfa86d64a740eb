"""Programs of steps: lowered without weights for a device that is not there, and written to a folder and loaded.

What is lowered is what the runner compiles. A start with a folder traces nothing and gives the same tokens.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.support import gguf
from tests.support.engine import alone, generate, tokens
from tests.support.tiny import WINDOWED, tiny_checkpoint, tiny_config
from tests.text.conftest import make_llm
from verax import LLM, SamplingParams, ops
from verax.errors import InvalidParameterError
from verax.files import read_json, write_json
from verax.models import causal_lm
from verax.ops._target import DeviceMemory, Target
from verax.text.engine.blocks import most_blocks
from verax.text.engine.engine_config import EngineConfig
from verax.text.step import runner
from verax.text.step.program import CompiledPrograms, check_supported, new_cache
from verax.text.step.sizes import block_bytes, plan_sizes
from verax.text.step.slots import new_slots


def test_the_cache_takes_what_weights_and_reserve_leave_of_an_accelerator(monkeypatch):
    # As Qwen3-0.6B, as far as the cache depends on it.
    sizes = dict(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    _, config = causal_lm(tiny_config(max_position_embeddings=40960, **sizes))
    in_use, total = 2_000_000_000, 10_000_000_000
    device = Target(
        "gpu", read_memory=lambda _: DeviceMemory(free=total - in_use, total=total), device_kind="NVIDIA L4"
    )
    monkeypatch.setattr(ops, "target", lambda: device)
    sizes = plan_sizes(config, jnp.bfloat16, EngineConfig())
    one = block_bytes(config, sizes.block_size, jnp.bfloat16)
    slots = jax.tree.leaves(jax.eval_shape(lambda: new_slots(*sizes.slot_sizes)))
    free = 0.9 * total - in_use - sum(x.size * x.dtype.itemsize for x in slots)
    assert free - one - 4 * 257 < sizes.groups[0].num_blocks * one <= free


@pytest.mark.parametrize("context", [None, 2048])
def test_cache_and_slots_fit_into_what_is_free_together(context):
    config = causal_lm(tiny_config(max_position_embeddings=1 << 20, num_hidden_layers=1))[1]
    with ops.use_target("cpu", memory=1 << 26):
        sizes = plan_sizes(config, jnp.bfloat16, EngineConfig(max_num_seqs=64, max_model_len=context))
    slots, cache = jax.eval_shape(lambda: (new_slots(*sizes.slot_sizes), new_cache(config, sizes)))
    slots, cache = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (slots, cache))
    assert slots > 64 * 4 * sizes.max_model_len
    assert 0.99 * (1 << 24) < cache + slots <= 1 << 24  # a quarter


MIB = 1 << 20
GEMMA = dict(num_hidden_layers=18, hidden_size=640, num_attention_heads=4, num_key_value_heads=1, head_dim=256) | dict(
    model_type="gemma3_text", sliding_window=512, intermediate_size=2048, max_position_embeddings=32768
)
"""config.json of Gemma 3 270M, as far as the cache depends on it."""


def held(config, plan):
    """Bytes of the arrays of a cache."""
    shapes = jax.tree.leaves(jax.eval_shape(lambda: new_cache(config, plan)))
    return sum(array.size * array.dtype.itemsize for array in shapes)


def test_a_context_that_is_not_given_is_the_longest_that_fits():
    config = causal_lm(GEMMA)[1]
    options = dict(max_num_seqs=4, max_num_batched_tokens=512, kv_cache_memory=64 * MIB)
    plan = plan_sizes(config, jnp.bfloat16, EngineConfig(**options))
    # Full attention has 3 KiB a token, and windows of 512 with a chunk of 512 take 15 MiB.
    assert plan.max_model_len == 16544
    with pytest.raises(InvalidParameterError, match="64 MiB hold 16544 tokens, but a context of 17000 needs 65 MiB"):
        plan_sizes(config, jnp.bfloat16, EngineConfig(**options, max_model_len=17000))


def test_memory_is_not_exceeded_and_one_sequence_always_fits():
    config = causal_lm(tiny_config(**WINDOWED))[1]
    for memory in range(30_000, 400_000, 7_001):
        plan = plan_sizes(config, "float32", EngineConfig(max_num_seqs=3, block_size=4, kv_cache_memory=memory))
        assert held(config, plan) <= memory
        for group in plan.groups:
            most = most_blocks(plan.max_model_len, group.window, plan.max_num_batched_tokens, 4)
            assert group.num_blocks - 1 >= most


def counted_norm():
    """An implementation of `ops.rms_norm` that counts how often it is traced."""
    traced = []

    def rms_norm(*args, **kwargs):
        traced.append(args)
        return ops.operations()["rms_norm"].reference(*args, **kwargs)

    return rms_norm, traced


def test_an_engine_of_an_equal_model_compiles_nothing(tmp_path):
    folder, other = tiny_checkpoint(tmp_path / "first"), tiny_checkpoint(tmp_path / "other", seed=1)
    rms_norm, traced = counted_norm()
    with ops.use_implementations(rms_norm=rms_norm):
        first = make_llm(folder, max_num_seqs=1)
        traces = len(traced)
        assert traces
        tokens = alone(first, "abc")
        # The programs take the weights as arguments: another checkpoint of the same shapes has its own answers.
        assert alone(make_llm(other, max_num_seqs=1), "abc") != tokens
        assert len(traced) == traces
    assert alone(first, "abc") == tokens
    assert alone(make_llm(folder, max_num_seqs=1), "abc") == tokens
    assert len(traced) == traces, "outside of the choice, its implementation must not run"


SIZES = dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=32)
PARAMS = [SamplingParams(temperature=t, max_tokens=6, seed=3, ignore_eos=True) for t in (0, 0.8)]


def start(folder, **options):
    return LLM(folder, use_tqdm=False, **options)


def answers(llm):
    return tokens(generate(llm, ["abc", "once upon"], PARAMS))


@pytest.fixture(scope="module")
def compiled(tiny_folder, tmp_path_factory):
    """Folder of programs, and the tokens of the engine that wrote them."""
    llm = start(tiny_folder, structured_outputs=True, **SIZES)
    folder = tmp_path_factory.mktemp("programs") / "programs"
    assert {path.name for path in llm.write_programs(folder)} == {path.name for path in folder.glob("*.bin")}
    return folder, answers(llm)


def no_tracing(*arguments, **options):
    raise AssertionError("traced")


def test_a_start_with_programs_traces_nothing_and_gives_the_same_tokens(tiny_folder, compiled, monkeypatch):
    folder, expected = compiled
    monkeypatch.setattr(runner, "compile_program", no_tracing)
    monkeypatch.setattr(runner, "jitted_programs", no_tracing)
    llm = start(tiny_folder, programs=folder, structured_outputs=True)
    before = llm.engine.runner.num_compiled()
    assert answers(llm) == expected
    assert llm.engine.runner.num_compiled() == before == len(list(folder.glob("*.bin")))
    assert llm.max_model_len == 64  # sizes that no option names come from the folder
    # Programs for structured output may be left over.
    assert answers(start(tiny_folder, programs=str(folder), max_num_seqs=2)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_num_seqs=4), r"max_num_seqs: the programs of .* were compiled for 2, got 4"),
        (dict(kv_cache_dtype="int8"), r"cache_dtype: .* were compiled for bfloat16, got int8"),
        (dict(kv_cache_dtype="fp8"), r"cache_dtype: .* were compiled for bfloat16, got float8_e4m3fn"),
        (dict(kv_cache_memory=1 << 20, max_model_len=32), "kv_cache_memory: the cache of"),
        (dict(dtype="float32", kv_cache_dtype="bfloat16"), r"programs: .* was compiled for weights "),
        (dict(speculative_config={"method": "ngram", "num_speculative_tokens": 2}), "speculative_config: programs"),
    ],
)
def test_options_of_another_engine_are_named(tiny_folder, compiled, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        start(tiny_folder, programs=compiled[0], **options)


def test_a_prefix_cache_of_states_is_refused_where_no_program_keeps_them(hybrid_llm):
    planned = hybrid_llm.engine.runner.config
    compiled = CompiledPrograms(Path("programs"), {}, replace(planned, num_kept_states=0), {})
    assert compiled.sizes_for(planned, EngineConfig()).num_kept_states == 0
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching: programs has no programs that keep"):
        compiled.sizes_for(planned, EngineConfig(enable_prefix_caching=True))


def test_another_model_is_named_by_the_first_difference(compiled, tmp_path):
    other = tiny_checkpoint(tmp_path, intermediate_size=64)
    with pytest.raises(InvalidParameterError, match=r"compiled for model.intermediate_size 96, but here it is 64"):
        start(other, programs=compiled[0])


def test_blocks_of_another_format_are_refused_though_their_arrays_are_alike(tmp_path):
    model, folder = tiny_checkpoint(tmp_path / "model"), tmp_path / "programs"
    for kind in ("Q4_0", "IQ4_NL"):
        gguf.write(model, tmp_path / f"{kind}.gguf", kind)
    start(tmp_path / "Q4_0.gguf", **SIZES).write_programs(folder)
    with pytest.raises(InvalidParameterError, match=r"programs: .* was compiled for weights "):
        start(tmp_path / "IQ4_NL.gguf", programs=folder)


def test_other_implementations_are_refused(tiny_folder, compiled):
    with (
        ops.use_implementations(sample="bisect"),
        pytest.raises(InvalidParameterError, match=r"implementations.sample"),
    ):
        start(tiny_folder, programs=compiled[0])


def test_another_precision_of_products_is_refused(tiny_folder, compiled):
    with (
        jax.default_matmul_precision("bfloat16"),
        pytest.raises(InvalidParameterError, match="compiled for matmul_precision None, but here it is bfloat16"),
    ):
        start(tiny_folder, programs=compiled[0])


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("sizes", "structured_outputs", False, r"has no programs for them; compile with --structured-outputs"),
        *(
            ("made_for", key, "another", rf"was compiled for {key} another, but here it is")
            for key in ("jaxlib", "platform", "device", "processor", "source")
        ),
    ],
)
def test_programs_without_forms_and_of_another_version_or_machine_are_refused(
    tiny_folder, compiled, tmp_path, section, key, value, message
):
    folder = shutil.copytree(compiled[0], tmp_path / "programs")
    manifest = read_json(folder / "programs.json")
    manifest[section][key] = value
    write_json(folder / "programs.json", manifest)
    with pytest.raises(InvalidParameterError, match=message):
        start(tiny_folder, programs=folder, structured_outputs=True)


def test_a_damaged_folder_is_an_error_that_names_it(tiny_folder, compiled, tmp_path):
    with pytest.raises(InvalidParameterError, match=r"programs: .* verax compile -o FOLDER makes one"):
        start(tiny_folder, programs=tmp_path)
    folder = shutil.copytree(compiled[0], tmp_path / "programs")
    program = (folder / "decode_1x1.bin").read_bytes()
    for changed in (b"no pickle", program[:-1], program[:25] + b"?" + program[26:], None):
        (folder / "decode_1x1.bin").unlink()
        if changed is not None:
            (folder / "decode_1x1.bin").write_bytes(changed)
        with pytest.raises(InvalidParameterError, match=r"decode_1x1.bin cannot be loaded"):
            start(tiny_folder, programs=folder)


def test_a_program_of_another_folder_is_refused(compiled, tmp_path):
    """Of a model of the same shapes with another base of rotation, it takes the same arguments."""
    other = tiny_checkpoint(tmp_path / "model", rope_theta=500.0)
    folder = tmp_path / "programs"
    start(other, structured_outputs=True, **SIZES).write_programs(folder)
    shutil.copy(compiled[0] / "decode_1x1.bin", folder)
    with pytest.raises(InvalidParameterError, match=r"decode_1x1.bin cannot be loaded \(it is not the file that was"):
        start(other, programs=folder)


@pytest.mark.parametrize("option", [{"enable_lora": True}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_an_engine_with_further_programs_is_refused(option):
    with pytest.raises(InvalidParameterError, match=f"{next(iter(option))}: programs are not written"):
        check_supported(EngineConfig(**option))
