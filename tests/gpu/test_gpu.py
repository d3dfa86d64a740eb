"""On an NVIDIA GPU: cuDNN's attention against the reference; the engine's tokens, all compiled at the start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from verax import ops
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    ("T", "S", "H", "causal"), [(300, 300, 128, False), (300, 300, 128, True), (130, 77, 64, False)]
)
def test_cudnns_attention_equals_the_reference_but_for_rounding(T, S, H, causal):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 4, H)), jnp.bfloat16) for n in (T, S, S))
    assert ops.attention.select(q, k, v, causal=causal).name == "cudnn"
    plain = ops.attention.reference(*(x.astype(jnp.float32) for x in (q, k, v)), causal=causal)
    np.testing.assert_allclose(ops.attention(q, k, v, causal=causal), plain, atol=0.03)


PROMPTS = [np.random.default_rng(i).integers(3, 200, 5 + 9 * i).tolist() for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def generate(folder, **options):
    llm = LLM(folder, dtype="float32", max_num_seqs=8, max_model_len=128, use_tqdm=False, **options)
    before = llm.engine.runner.num_compiled()
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert llm.engine.runner.num_compiled() == before
    return tokens


def test_the_gpu_gives_the_tokens_of_the_cpu_by_one_and_by_several_a_step(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    on_gpu = generate(folder)
    assert generate(folder, num_scheduler_steps=1) == on_gpu
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = generate(folder)
    assert on_gpu == on_cpu
