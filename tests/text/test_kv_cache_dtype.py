"""A cache of int8 or fp8: the same tokens whatever happens around a request, more of them in memory, clear refusals."""

import numpy as np
import pytest

from tests.text.conftest import make_llm
from verax.errors import InvalidParameterError
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step.sizes import block_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 64, 7, 40, 12, 3, 50)]


DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}


@pytest.fixture(scope="module", params=DTYPES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def quantized_llm(name, tiny_folder, llm):
    """31 blocks of 4 tokens: long sequences preempt each other."""
    memory = 32 * block_bytes(llm.model_config, 4, DTYPES[name])
    return make_llm(tiny_folder, kv_cache_dtype=name, kv_cache_memory=memory)


def tokens(llm, prompts):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_neither_preemption_nor_prefix_hits_change_a_token(quantized_llm):
    alone = [tokens(quantized_llm, [prompt])[0] for prompt in PROMPTS]
    _, again = (quantized_llm.generate([PROMPTS[6]], GREEDY, use_tqdm=False)[0] for _ in range(2))
    quantized_llm.engine.scheduler.blocks.reset_prefix_cache()
    before = quantized_llm.engine.scheduler.num_preemptions
    assert tokens(quantized_llm, PROMPTS) == alone
    assert quantized_llm.engine.scheduler.num_preemptions > before
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == alone[6]
    quantized_llm.engine.check()


def test_it_follows_the_cache_in_floats_for_a_while(llm, quantized_llm, name):
    expected, got = tokens(llm, PROMPTS), tokens(quantized_llm, PROMPTS)
    first = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), 20)
        for a, b in zip(expected, got, strict=True)
    ]
    assert np.mean(first) > {"int8": 10, "fp8": 5}[name]  # a random model's best tokens are near each other


def test_nearly_four_times_the_tokens_of_float32_fit_and_the_cache_says_so(llm, quantized_llm, name):
    # Heads of 16: 16 + 4 bytes a token, where float32 takes 64.
    assert block_bytes(llm.model_config, 4, "float32") / block_bytes(llm.model_config, 4, "int8") == 3.2
    assert quantized_llm.kv_cache.startswith(f"{DTYPES[name]}, 124 tokens in ")
    assert quantized_llm.engine.runner.cache_bytes == 32 * block_bytes(llm.model_config, 4, "int8")
    assert llm.kv_cache.startswith("float32, ")


def test_another_dtype_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"kv_cache_dtype: expected one of auto, .*int8, fp8, got 'fp4'"):
        make_llm(tmp_path, kv_cache_dtype="fp4")
