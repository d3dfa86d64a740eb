"""Engines with `quantization="w8a8"`: which layers round their inputs, and answers."""

import numpy as np
import pytest
from flax import nnx

from tests.support.engine import generate
from tests.support.tiny import tiny_checkpoint
from verax import LLM, SamplingParams, ops
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm, model_shapes
from verax.models import causal_lm
from verax.ops import QuantizedWeight

MOE = dict(family="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
PROMPTS = [[7, 8, 9], [11, 12, 13, 14, 15, 16, 17], list(range(20, 60)), [5]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def rounding(model):
    """Quantised weights by name: True where they round their inputs."""
    weights = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    return {name: value.rounds_inputs for name, value in weights.items() if isinstance(value, QuantizedWeight)}


@pytest.mark.parametrize("model", [{}, MOE])
def test_all_layers_but_the_head_and_experts_round_their_inputs(tmp_path, model):
    opened = Checkpoint.open(tiny_checkpoint(tmp_path, **model))
    found = rounding(load_causal_lm(opened, dtype="float32", quantization="w8a8"))
    assert {name for name, rounds in found.items() if not rounds} == {
        name for name in found if "experts" in name or name == "lm_head.weight"
    }
    assert "lm_head.weight" in found
    assert any(found.values())
    shapes = model_shapes(*causal_lm(opened.config), dtype="float32", quantization="w8a8")
    assert rounding(shapes) == found


def answers(folder, prompts, **options):
    """Tokens of each answer, and their log-probabilities."""
    llm = LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4, use_tqdm=False, **options)
    samples = [output.outputs[0] for output in generate(llm, prompts, GREEDY)]
    logprobs = [
        [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        for sample in samples
    ]
    return [sample.token_ids for sample in samples], logprobs


def test_an_answer_is_that_of_the_reference_and_does_not_depend_on_its_batch(tiny_folder):
    tokens, logprobs = answers(tiny_folder, PROMPTS, quantization="w8a8")
    for i, prompt in enumerate(PROMPTS):
        assert answers(tiny_folder, [prompt], quantization="w8a8") == (tokens[i : i + 1], logprobs[i : i + 1])
    with ops.use_implementations(linear="reference"):
        expected, theirs = answers(tiny_folder, PROMPTS, quantization="w8a8")
    assert tokens == expected
    np.testing.assert_allclose(logprobs, theirs, atol=0.02)
    assert answers(tiny_folder, PROMPTS, quantization="int8")[1] != logprobs
