"""Small heads of keys and values side by side in the pages of a cache, as engines on a TPU have them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiny import tiny_config
from tests.text.conftest import make_llm
from verax import ops
from verax.models import causal_lm
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.step import sizes
from verax.text.step.program import new_cache
from verax.text.step.sizes import plan_sizes


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
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 200, n).tolist() for n in (1, 50, 17)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    for mine, theirs in zip(*(x.generate(prompts, params, use_tqdm=False) for x in (other, llm)), strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        found, expected = ([[p.logprob for p in at.values()] for at in x.outputs[0].logprobs] for x in (mine, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-4)
