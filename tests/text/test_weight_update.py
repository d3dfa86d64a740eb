"""New weights for a running engine, and an engine that sleeps: the tokens of an engine that was started with them."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tests.support.devices import run_on_devices
from tests.support.engine import GREEDY, PROMPTS, alone, generate, nothing_compiles, tokens
from tests.support.tiny import tiny_checkpoint, tiny_config
from verax import LLM, checkpoint
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError
from verax.loading import load_causal_lm
from verax.models import causal_lm

SIZES = dict(max_model_len=128, max_num_seqs=4, kv_cache_memory=1 << 22, use_tqdm=False)
COMMON = [5, 9, 2] * 12


def module(seed, **changes):
    architecture, sizes = causal_lm(tiny_config(**changes))
    return architecture(sizes, dtype=jnp.float32, rngs=nnx.Rngs(seed))


def by_name(model):
    return {
        ".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


@pytest.fixture(scope="module")
def llm():
    return LLM.from_module(module(0), **SIZES)


@pytest.fixture(scope="module")
def expected():
    """Tokens of the engines of two models."""
    return [tokens(generate(LLM.from_module(module(seed), **SIZES), [COMMON, *PROMPTS[:4]])) for seed in (0, 1)]


@pytest.mark.parametrize("form", [lambda model: model, nnx.state, by_name])
def test_updated_weights_give_the_tokens_of_an_engine_of_them_and_compile_nothing(form, llm, expected):
    llm.update_weights(form(module(0)))
    assert tokens(generate(llm, [COMMON, *PROMPTS[:4]])) == expected[0]
    other = module(1)
    llm.update_weights(form(other))
    for leaf in jax.tree.leaves(nnx.state(other)):
        leaf.delete()  # as by a training step that takes them as donated
    with nothing_compiles(llm):
        assert tokens(generate(llm, [COMMON, *PROMPTS[:4]])) == expected[1]
        assert generate(llm, [COMMON])[0].num_cached_tokens > 0


def test_a_loaded_checkpoint_takes_the_weights_of_another(tmp_path):
    for seed in (0, 1):
        tiny_checkpoint(tmp_path / str(seed), seed=seed)
    first, second = (LLM(tmp_path / name, dtype="float32", **SIZES) for name in "01")
    trained = load_causal_lm(Checkpoint.open(tmp_path / "1"), dtype=jnp.float32)
    assert alone(first, COMMON) != alone(second, COMMON)
    first.update_weights(trained)
    assert alone(first, COMMON) == alone(second, COMMON)
    with pytest.raises(InvalidParameterError, match="weights are quantised; load it without quantization"):
        LLM(tmp_path / "0", quantization="int8", **SIZES).update_weights(trained)


def test_a_head_that_the_weights_have_in_spite_of_the_config_is_updated_too(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    weights = [load_file(folder / "model.safetensors") for _ in range(2)]
    for scale, arrays in zip((1.0, -1.0), weights, strict=True):
        arrays["lm_head.weight"] = scale * arrays["model.embed_tokens.weight"][::-1]
        checkpoint.save(arrays, tmp_path / str(scale), config=tiny_config())
    first, second = (
        LLM(tmp_path / str(scale), dtype="float32", skip_tokenizer_init=True, **SIZES) for scale in (1.0, -1.0)
    )
    assert alone(first, COMMON) != alone(second, COMMON)
    first.update_weights(weights[1])
    assert alone(first, COMMON) == alone(second, COMMON)


def test_weights_that_do_not_fit_are_refused_by_name(llm):
    weights, name = by_name(module(0)), "model.layers.1.mlp.down_proj.weight"
    before = alone(llm, COMMON)
    for change, says in (
        ({name: weights[name].T}, rf"{name}: expected shape \(.*\), got \(.*\)"),
        ({name: weights[name].astype(np.float16)}, f"{name}: expected dtype float32, got float16"),
        ({"model.x": weights[name]}, "the weights have model.x, which the model does not have"),
    ):
        with pytest.raises(InvalidParameterError, match=says):
            llm.update_weights({**weights, **change})
    del weights[name]
    with pytest.raises(InvalidParameterError, match=f"the weights lack {name}"):
        llm.update_weights(weights)
    assert alone(llm, COMMON) == before


def test_an_engine_that_slept_gives_the_same_tokens_and_compiles_nothing(llm):
    before = tokens(generate(llm, PROMPTS[:4]))
    runner = llm.engine.runner
    llm.sleep()
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((runner._weights, runner._cache)))
    with pytest.raises(InvalidParameterError, match=r"the engine sleeps: call wake_up\(\)"):
        generate(llm, PROMPTS[:1])
    llm.wake_up()
    with nothing_compiles(llm):
        assert tokens(generate(llm, PROMPTS[:4])) == before
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(InvalidParameterError, match=r"dropped the weights: call update_weights\(\)"):
        generate(llm, PROMPTS[:1])
    llm.update_weights(module(1))
    with nothing_compiles(llm):
        assert generate(llm, [COMMON])[0].num_cached_tokens == 0
    with pytest.raises(InvalidParameterError, match=r"level: expected 1 .* or 2 .*, got 3"):
        llm.sleep(level=3)


def test_requests_on_their_way_are_not_interrupted(llm):
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    for call in (llm.sleep, lambda: llm.update_weights(module(0))):
        with pytest.raises(InvalidParameterError, match="1 requests are unfinished"):
            call()
    llm.abort(request_id)


def divided():
    """Tokens of an engine on two devices that got the weights of another model, and slept."""
    llm = LLM.from_module(module(0), tensor_parallel_size=2, **SIZES)
    count = llm.engine.runner.num_compiled()
    llm.update_weights(module(1))
    llm.sleep()
    llm.wake_up()
    got = tokens(generate(llm, [COMMON, *PROMPTS[:4]]))
    sys.stdout.write(json.dumps([got, llm.engine.runner.num_compiled() - count]) + "\n")


def test_weights_are_divided_over_a_mesh(expected):
    got, compiled = run_on_devices(2, __name__)
    assert [*map(tuple, got)] == expected[1]
    assert compiled == 0


if __name__ == "__main__":
    divided()
