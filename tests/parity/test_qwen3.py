"""Qwen3, Qwen2, Llama and Mistral against transformers: random weights saved by it, loaded by verax from disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.causal_lm import (
    GREEDY,
    bfloat16_errors,
    continuations,
    engine,
    logprob_errors,
    model_logits,
    relative,
    save_reference,
)
from verax._compat import make_mesh
from verax.checkpoint import Checkpoint, load_module
from verax.loading import load_causal_lm
from verax.models import causal_lm
from verax.text.engine.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    intermediate_size=152,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=1,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES = {
    "qwen3": (
        "Qwen3",
        dict(head_dim=24, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ),
    "qwen3-untied-wide-heads": ("Qwen3", dict(head_dim=40, tie_word_embeddings=False, attention_bias=True)),
    "qwen3-yarn": ("Qwen3", dict(head_dim=24, tie_word_embeddings=True, rope_parameters=YARN_ROPE)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-multi-head": ("Qwen2", dict(tie_word_embeddings=False, num_key_value_heads=6)),
    "llama": ("Llama", dict(tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)),
    "llama-biased": (
        "Llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    ),
    "qwen2-windows": (
        "Qwen2",
        dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=21, max_window_layers=1),
    ),
    "qwen3-windows": (
        "Qwen3",
        dict(
            head_dim=24,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=16, head_dim=24)),
    "mistral-no-window": ("Mistral", dict(sliding_window=None, tie_word_embeddings=True)),
    "llama-linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
}


def reference(family, folder, dtype=None):
    """A transformers model with weights of real spread, biases and norms included, saved to `folder`."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=1.5 * weight.shape[1] ** -0.5)
        else:
            weight.data.normal_(mean=0.0 if key.endswith("bias") else 1.0, std=0.3)
    return save_reference(model, folder, dtype)


def load(folder, dtype=jnp.float32):
    opened = Checkpoint.open(folder)
    architecture, config = causal_lm(opened.config)
    abstract = nnx.eval_shape(lambda: architecture(config, dtype=dtype, rngs=nnx.Rngs(0)))
    tied = (r"^lm_head\.weight$",) if config.tie_word_embeddings else ()
    return load_module(abstract, opened, dtype=dtype, ignore=(*architecture.ignored_weights, *tied))


TOKENS = np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 130))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(model_logits(load(tmp_path), TOKENS), expected) < 2e-5


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen2-windows", "mistral"])
def test_128_greedy_tokens_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist()]
    expected = continuations(theirs, prompts, 128)
    llm = engine(tmp_path)
    greedy = SamplingParams(max_tokens=128, **GREEDY)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)] == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    reference(family, tmp_path, torch.bfloat16)
    ours, theirs = bfloat16_errors(tmp_path, TOKENS)
    assert ours <= 1.1 * theirs


def test_logprobs_of_the_engine_are_close_to_those_of_transformers(tmp_path):
    theirs = reference("qwen3", tmp_path)
    prompt = TOKENS[0, :70].tolist()
    np.testing.assert_allclose(logprob_errors(engine(tmp_path), theirs, prompt), 0, atol=2e-4)


def test_bug_203_biases_are_counted_once_on_a_mesh(tmp_path):
    """A row-parallel bias added on every device was nano-vllm's pull request 203. On the devices that there are."""
    theirs = reference("llama-biased", tmp_path)
    mesh = make_mesh((len(jax.devices()),), ("tensor",))
    model = load_causal_lm(Checkpoint.open(tmp_path), dtype="float32", mesh=mesh)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(model_logits(model, TOKENS), expected) < 2e-5
