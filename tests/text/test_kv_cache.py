"""Layouts of the cache: int8 and fp8, and small heads side by side in a page, as engines on a TPU have them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.engine import PROMPTS, alone, generate, tokens
from tests.support.invariants import check_engine
from tests.support.tiny import tiny_config
from tests.text.conftest import make_llm
from verax import ops
from verax.models import causal_lm
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step import sizes
from verax.text.step.program import new_cache
from verax.text.step.sizes import block_bytes, plan_sizes

DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}


@pytest.fixture(scope="module", params=DTYPES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def quantized_llm(name, tiny_folder, llm):
    """31 blocks of 4 tokens: long sequences preempt each other."""
    memory = 32 * block_bytes(llm.model_config, 4, DTYPES[name])
    return make_llm(tiny_folder, kv_cache_dtype=name, kv_cache_memory=memory)


def test_neither_preemption_nor_prefix_hits_change_a_token_and_they_follow_floats_for_a_while(quantized_llm, llm, name):
    expected = [alone(quantized_llm, prompt) for prompt in PROMPTS]
    _, again = (generate(quantized_llm, [PROMPTS[6]])[0] for _ in range(2))
    quantized_llm.engine.scheduler.blocks.reset_prefix_cache()
    before = quantized_llm.engine.scheduler.num_preemptions
    assert tokens(generate(quantized_llm, PROMPTS)) == expected
    assert quantized_llm.engine.scheduler.num_preemptions > before
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == expected[6]
    check_engine(quantized_llm.engine)
    equal = [
        next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), 20)
        for ours, theirs in zip(expected, tokens(generate(llm, PROMPTS)), strict=True)
    ]
    assert np.mean(equal) > {"int8": 10, "fp8": 5}[name]  # a random model's best tokens are near each other


def test_nearly_four_times_the_tokens_of_float32_fit_and_the_cache_says_so(llm, quantized_llm, name):
    # Heads of 16: 16 + 4 bytes a token, where float32 takes 64.
    assert block_bytes(llm.model_config, 4, "float32") / block_bytes(llm.model_config, 4, "int8") == 3.2
    assert quantized_llm.kv_cache.startswith(f"{DTYPES[name]}, 124 tokens in ")
    assert quantized_llm.engine.runner.cache_bytes == 32 * block_bytes(llm.model_config, 4, "int8")
    assert llm.kv_cache.startswith("float32, ")


def joined(platform="tpu", H=64, K=4, **options):
    """Heads of a page that are joined, and the shape of a page."""
    config = causal_lm(tiny_config("qwen3", head_dim=H, num_key_value_heads=K, num_attention_heads=K))[1]
    with ops.use_target(platform):
        plan = plan_sizes(config, jnp.bfloat16, EngineConfig(kv_cache_memory=1 << 24, **options))
    return plan.joined_heads, new_cache(config, plan)[0][0].shape[1:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, (2, 16, 128))),
        ({"H": 32}, (4, (1, 16, 128))),
        ({"H": 128}, (1, (4, 16, 128))),
        ({"K": 3}, (1, (3, 16, 64))),
        ({"tensor_parallel_size": 2}, (2, (2, 16, 128))),
        ({"tensor_parallel_size": 4}, (1, (4, 16, 64))),
        ({"kv_cache_dtype": "int8"}, (1, (4, 16, 64))),
        ({"kv_cache_dtype": "fp8"}, (1, (4, 16, 64))),
        ({"platform": "gpu"}, (1, (4, 16, 64))),
    ],
)
def test_heads_of_a_tpus_pages_fill_its_registers(options, expected):
    assert joined(**options) == expected


def test_an_engine_with_joined_heads_gives_the_same_tokens_and_scores(tiny_folder, llm, monkeypatch):
    monkeypatch.setattr(sizes, "_joined_heads", lambda *_: 2)
    other = make_llm(tiny_folder)
    assert other.engine.runner.config.joined_heads == 2
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    for mine, theirs in zip(*(generate(x, PROMPTS[::4], params) for x in (other, llm)), strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        found, expected = ([[p.logprob for p in at.values()] for at in x.outputs[0].logprobs] for x in (mine, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-4)
