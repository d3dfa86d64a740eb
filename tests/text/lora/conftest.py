"""Three adapters of the tiny model, an engine with two slots for them, and the tokens of models with each merged."""

from contextlib import contextmanager

import jax.numpy as jnp
import pytest

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_config
from tests.text.conftest import make_llm
from verax import LoRARequest
from verax.checkpoint import Checkpoint, save
from verax.loading import load_causal_lm
from verax.nn import pack_linear_weights

RANKS = (4, 3, 1)
"""Ranks of the adapters: the rank of the slots, and smaller ones."""


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Adapters 1, 2 of all linear layers and 3 of the attention alone, each with its weights."""
    root, made = tmp_path_factory.mktemp("adapters"), []
    sizes = linear_sizes(random_weights(tiny_config()))
    for number, rank in enumerate(RANKS, start=1):
        some = sizes if number < 3 else {module: size for module, size in sizes.items() if "self_attn" in module}
        weights = adapter_weights(some, seed=number, rank=rank, spread=0.5)
        folder = save_adapter(root / f"a{number}", weights, rank=rank, lora_alpha=2 * rank)
        made.append((LoRARequest(f"a{number}", number, str(folder)), weights))
    return made


@pytest.fixture(scope="session")
def lora_llm(tiny_folder):
    return make_llm(tiny_folder, max_num_seqs=4, enable_lora=True, max_loras=2, max_lora_rank=4)


@pytest.fixture(scope="session")
def merged(adapters, tmp_path_factory):
    """`with merged(llm, number)`: an engine whose weights have that adapter's changes added; its own weights for 0."""
    folders = []
    for _, weights in adapters:
        config = tiny_config()
        folders.append(tmp_path_factory.mktemp("merged"))
        save(changed(random_weights(config), weights, scale=2.0), folders[-1], config=config)

    @contextmanager
    def put(llm, number):
        runner = llm.engine.runner
        own = runner._weights
        llm.engine.scheduler.blocks.reset_prefix_cache()
        if number:
            model = load_causal_lm(Checkpoint.open(folders[number - 1]), dtype=jnp.float32)
            pack_linear_weights(model, few_rows=True)
            runner._weights = type(runner)(model, runner.config)._weights
        try:
            yield
        finally:
            runner._weights = own
            llm.engine.scheduler.blocks.reset_prefix_cache()

    return put
