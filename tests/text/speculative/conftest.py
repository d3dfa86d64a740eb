"""Engines with and without drafts on the same tiny model."""

import pytest

from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm as make_large_llm

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def make_llm(folder, **options):
    """An engine of three sequences at once, which has fewer programs to compile."""
    return make_large_llm(folder, **{"max_num_seqs": 3, **options})


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("speculative") / "qwen3")


@pytest.fixture(scope="session")
def plain(folder):
    return make_llm(folder, structured_outputs=True)


@pytest.fixture(scope="session")
def ngram(folder):
    return make_llm(folder, structured_outputs=True, speculative_config=NGRAM)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """A smaller model with other weights and the same vocabulary."""
    return tiny_checkpoint(tmp_path_factory.mktemp("speculative") / "draft", seed=1, num_hidden_layers=1)


def draft_config(folder, count=4):
    return {"model": str(folder), "num_speculative_tokens": count}
