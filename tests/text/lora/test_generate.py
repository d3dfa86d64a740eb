"""Requests with adapters: each gets the tokens of the model that has its adapter merged, whatever runs beside it."""

import numpy as np
import pytest

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from tests.text.conftest import make_llm
from verax import LoRARequest, checkpoint
from verax.errors import InvalidParameterError
from verax.text.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 40, 12)]
RANKS = (4, 3, 1)
"""Ranks of three adapters: that of the slots, and smaller ones."""


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Three adapters of all linear layers, the last of which changes the attention alone; and their weights."""
    root, made = tmp_path_factory.mktemp("adapters"), []
    sizes = linear_sizes(random_weights(tiny_config()))
    for number, rank in enumerate(RANKS, start=1):
        some = sizes if number < 3 else {module: size for module, size in sizes.items() if "self_attn" in module}
        weights = adapter_weights(some, seed=number, rank=rank, spread=0.5)
        folder = save_adapter(root / f"a{number}", weights, rank=rank, lora_alpha=2 * rank)
        made.append((LoRARequest(f"a{number}", number, str(folder)), weights))
    return made


@pytest.fixture(scope="module")
def lora_llm(tiny_folder):
    return make_llm(tiny_folder, enable_lora=True, max_loras=2, max_lora_rank=4)


@pytest.fixture(scope="module")
def expected(tiny_folder, llm, adapters, tmp_path_factory):
    """Greedy tokens of each prompt: of the base model, and of one with each adapter merged."""
    result = [tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))]
    for request, weights in adapters:
        folder = tmp_path_factory.mktemp(request.lora_name)
        merged = changed(random_weights(tiny_config()), weights, scale=2.0)
        checkpoint.save(merged, folder, config=tiny_config(), tokenizer_from=tiny_folder)
        result.append(tokens(make_llm(folder).generate(PROMPTS, GREEDY, use_tqdm=False)))
    assert len(set(map(tuple, result))) == 4  # the adapters do something
    return result


def test_base_and_adapters_in_one_batch_give_the_tokens_of_merged_models(lora_llm, adapters, expected):
    choice = [0, 1, 2, 1, 0, 2]
    requests = [None if i == 0 else adapters[i - 1][0] for i in choice]
    outputs = lora_llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests)
    assert tokens(outputs) == [expected[i][at] for at, i in enumerate(choice)]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_one_adapter_for_all_prompts(lora_llm, adapters, expected, number):
    request = None if number == 0 else adapters[number - 1][0]
    outputs = lora_llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=request)
    assert tokens(outputs) == expected[number]
