"""Tiny random models of each kind of layer with their own tokenizer, loaded once."""

import pytest

from tests.support.tiny import HYBRID, WINDOWED, tiny_checkpoint
from verax.text.engine.llm import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def llm(tiny_folder):
    """An engine with few blocks: eight sequences share 40 blocks of 4 tokens, so long ones preempt each other."""
    return make_llm(tiny_folder)


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hybrid", family="qwen3_5_text", **HYBRID)


@pytest.fixture(scope="session")
def hybrid_llm(hybrid_folder):
    return make_llm(hybrid_folder)


@pytest.fixture(scope="session")
def windowed_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "windowed", **WINDOWED)


@pytest.fixture(scope="session")
def windowed_llm(windowed_folder):
    """An engine with layers that see 10, 96 and 10 tokens."""
    return make_llm(windowed_folder)


def make_llm(folder, **options):
    sizes = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, **options}
    return LLM(folder, dtype="float32", use_tqdm=False, **sizes)
