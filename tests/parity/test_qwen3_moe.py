"""Mixtures of experts against transformers: random weights saved by it, loaded by verax from disk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_5_moe")

from tests.support.tiny import tiny_tokenizer
from verax import checkpoint
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm
from verax.text.llm import LLM
from verax.text.sampling_params import SamplingParams

SIZES = dict(
    vocab_size=301,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    moe_intermediate_size=40,
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    eos_token_id=1,
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=20,
    linear_value_head_dim=28,
    shared_expert_intermediate_size=56,
)
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", dict(norm_topk_prob=True)),
    "qwen3_moe-in-part": (
        "Qwen3Moe",
        "Qwen3Moe",
        dict(intermediate_size=152, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False, num_experts=7),
    ),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", dict(**DELTA, intermediate_size=152, mlp_only_layers=[1])),
    "qwen3_5_moe": ("Qwen3_5MoeText", "Qwen3_5Moe", DELTA),
}


def spread(model):
    """Weights of real spread; routers that choose clearly, so that rounding seldom changes the choice."""
    torch.manual_seed(0)
    for key, weight in model.named_parameters():
        if key.endswith("A_log"):
            weight.data.normal_(mean=-3.0, std=2.0)
        elif key.endswith("mlp.gate.weight"):
            weight.data.normal_(std=4 * weight.shape[1] ** -0.5)
        elif weight.ndim > 1:
            weight.data.normal_(std=1.5 * weight.shape[-1] ** -0.5)
        else:
            plain = model.config.model_type == "qwen3_moe" or key.endswith("linear_attn.norm.weight")
            weight.data.normal_(mean=1.0 if plain else 0.0, std=0.3)
    return model.eval()


def reference(family, folder, dtype=None, **changes):
    """A transformers model, saved to `folder`."""
    config, model, options = FAMILIES[family]
    config = getattr(transformers, f"{config}Config")(**{**SIZES, **options, **changes})
    model = spread(getattr(transformers, f"{model}ForCausalLM")(config))
    model.to(dtype or torch.float32).save_pretrained(folder)
    tiny_tokenizer(folder, vocab_size=SIZES["vocab_size"])
    return model


def logits(folder, tokens, dtype="float32"):
    model = load_causal_lm(Checkpoint.open(folder), dtype=dtype)
    return np.asarray(jax.jit(lambda t: model.logits(model(t)))(jnp.asarray(tokens)), np.float64)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


TOKENS = np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 131))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert relative(logits(tmp_path, TOKENS), expected) < 2e-5


def engine(folder, **options):
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)
    return LLM(folder, use_tqdm=False, **{"dtype": "float32", **sizes, **options})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_64_greedy_tokens_are_those_of_transformers(family, tmp_path):
    theirs = reference(family, tmp_path)
    prompts = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist()]
    expected = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
        )
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    # min_new_tokens of transformers forbids the end of text; a bias does that here.
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logit_bias={1: -100.0})
    outputs = engine(tmp_path).generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected


UNEXPLAINED = pytest.mark.xfail(
    reason="1.1 to 1.6 times the error of transformers was seen, not explained yet", strict=False
)


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=UNEXPLAINED), "qwen3_5_moe"])
def test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16(family, tmp_path):
    # The weights are rounded to bfloat16 first, so that the float32 run is the truth of both. Every expert is chosen:
    # rounding turns choices among some of them over, on either side, and such a position then differs as a whole.
    rounded = reference(family, tmp_path, torch.bfloat16, num_experts_per_tok=SIZES["num_experts"])
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        theirs = rounded(tokens).logits.float().numpy()
        truth = rounded.float()(tokens).logits.numpy()
    ours = logits(tmp_path, TOKENS, "bfloat16")
    assert relative(ours, truth) <= 1.1 * relative(theirs, truth)


def test_a_checkpoint_with_a_vision_tower_answers_texts_in_both_layouts_of_experts(tmp_path):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=96)
    config = transformers.Qwen3_5MoeConfig(
        text_config={**SIZES, **DELTA},
        vision_config={**vision, "num_position_embeddings": 16},
        tie_word_embeddings=True,
    )
    theirs = spread(transformers.Qwen3_5MoeForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path / "single")
    arrays = {name: weight.numpy() for name, weight in theirs.state_dict().items()}
    checkpoint.save(arrays, tmp_path / "stacked", config=json.loads(theirs.config.to_json_string()))
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    layer = "model.language_model.layers.0.mlp.experts"
    for layout, key in (("single", f"{layer}.7.up_proj.weight"), ("stacked", f"{layer}.gate_up_proj")):
        assert key in Checkpoint.open(tmp_path / layout).names()
        assert relative(logits(tmp_path / layout, TOKENS), expected) < 2e-5


def test_int8_weights_answer_nearly_as_the_model_does(tmp_path):
    theirs = reference("qwen3_moe", tmp_path)
    prompt = TOKENS[0, :70].tolist()
    llm = engine(tmp_path, quantization="int8")
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    with torch.no_grad():
        exact = torch.log_softmax(theirs(torch.tensor([prompt])).logits[0].double(), -1).numpy()
    errors = [output.prompt_logprobs[i][prompt[i]].logprob - exact[i - 1, prompt[i]] for i in range(1, 70)]
    assert np.median(np.abs(errors)) < 0.1
