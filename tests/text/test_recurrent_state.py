"""A hybrid model in the engine: a sequence's state is its own, from its first token on, whatever happens around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.engine import GREEDY, PROMPTS, alone, finish, generate, greedy_answer, plain_scores, tokens
from tests.support.tiny import HYBRID, tiny_checkpoint
from tests.text.conftest import make_llm
from verax.errors import InvalidParameterError
from verax.text.engine.engine_config import EngineConfig
from verax.text.step.program import new_cache
from verax.text.step.sizes import block_bytes, plan_sizes, state_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hybrid", family="qwen3_5_text", **HYBRID)


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder)


@pytest.fixture(scope="module")
def expected(llm):
    """The greedy answers of the model by itself."""
    scores = plain_scores(llm)
    return [greedy_answer(scores, prompt) for prompt in PROMPTS]


def drive(llm, ids):
    """Tokens of requests that were added."""
    done = {output.request_id: output.outputs[0].token_ids for output in finish(llm)}
    return [done[i] for i in ids]


def poison(llm):
    """NaN in every slot's state: whoever reads what another sequence left shows it in every later token."""
    runner = llm.engine.runner
    runner._cache = tuple(
        layer if type(layer) is tuple else jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), layer)
        for layer in runner._cache
    )


def states(llm):
    return [np.asarray(x) for layer in llm.engine.runner._cache if type(layer) is not tuple for x in layer]


@pytest.mark.parametrize("budget", [8, 13])
def test_every_way_of_cutting_a_prompt_gives_the_same_tokens(llm, expected, monkeypatch, budget):
    monkeypatch.setattr(llm.engine.scheduler, "max_num_batched_tokens", budget)
    assert [alone(llm, p) for p in PROMPTS] == expected
    assert tokens(generate(llm, PROMPTS)) == expected


def test_a_new_sequence_never_sees_what_its_slot_held(llm, expected):
    for prompt, answer in zip(PROMPTS[:4], expected, strict=False):  # one token of prompt is a decode step
        poison(llm)
        assert alone(llm, prompt) == answer
    poison(llm)
    assert tokens(generate(llm, PROMPTS)) == expected  # ten requests, eight slots


def test_padding_writes_to_no_slot(llm, expected):
    poison(llm)
    assert alone(llm, PROMPTS[3]) == expected[3]  # alone in mixed steps that have room for eight
    ids = [llm.add_request(p, GREEDY) for p in PROMPTS[:3]]  # three in decode steps for four
    assert drive(llm, ids) == expected[:3]
    for state in states(llm):
        used = ~np.isnan(state.reshape(len(state), -1))
        assert used.all(axis=1).tolist() == used.any(axis=1).tolist()
        assert used.all(axis=1).sum() == 3


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_an_aborted_sequence_leaves_nothing_to_the_next_one_in_its_slot(llm, expected, steps):
    staying = llm.add_request(PROMPTS[4], GREEDY)
    leaving = [llm.add_request(PROMPTS[i], GREEDY) for i in (6, 9, 3, 2, 5, 1, 0)]  # with it, all eight slots
    for _ in range(steps):
        llm.step()
    for request_id in leaving:
        llm.abort(request_id)
    coming = [llm.add_request(PROMPTS[i], GREEDY) for i in (0, 7, 8, 3, 4, 9, 1)]
    assert drive(llm, [staying, *coming]) == [expected[i] for i in (4, 0, 7, 8, 3, 4, 9, 1)]


def test_prefix_caching_is_off_and_says_why(folder, llm):
    first, second = (generate(llm, [PROMPTS[4]])[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    assert tokens([first]) == tokens([second])
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching: this model has recurrent layers"):
        make_llm(folder, enable_prefix_caching=True)


def test_states_are_part_of_the_memory_plan(llm):
    config = llm.model_config
    one = 4 * (4 * 12 * 20 + 3 * (2 * 2 * 12 + 4 * 20)) * 2  # two delta layers, float32: memory and inputs
    assert state_bytes(config) == one
    plan = plan_sizes(config, "float32", EngineConfig(block_size=4, kv_cache_memory=20 * one))
    assert plan.max_num_seqs == 10  # half of the memory
    held = sum(array.nbytes for array in jax.tree.leaves(new_cache(config, plan)))
    assert 20 * one - block_bytes(config, 4, "float32") < held <= 20 * one
    two = EngineConfig(block_size=4, kv_cache_memory=20 * one, tensor_parallel_size=2)
    assert plan_sizes(config.on_devices(2), "float32", two).max_num_seqs == 20  # each device has half of a state
    assert state_bytes(config.on_devices(3), 3) == one  # two key heads, which three devices cannot divide
    with pytest.raises(InvalidParameterError, match="in addition to the states of 20 sequences"):
        plan_sizes(config, "float32", EngineConfig(max_num_seqs=20, block_size=4, kv_cache_memory=20 * one))


def test_quantised_linears_serve_alike_alone_and_in_a_crowd(folder):
    llm = make_llm(folder, quantization="int8", max_num_seqs=2)
    assert tokens(generate(llm, PROMPTS[:4])) == [alone(llm, p) for p in PROMPTS[:4]]
