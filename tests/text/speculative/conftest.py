"""Engines with and without drafts on the same tiny model."""

import pytest

from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("speculative") / "qwen3")


@pytest.fixture(scope="session")
def plain(folder):
    return make_llm(folder, structured_outputs=True)


@pytest.fixture(scope="session")
def ngram(folder):
    return make_llm(folder, structured_outputs=True, speculative_config=NGRAM)
