"""A server with speculative decoding: its counters."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.tiny import tiny_checkpoint
from tests.text.conftest import make_llm
from verax.text.engine.async_llm import AsyncLLM


@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("serve") / "tiny")
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    return AsyncLLM.from_llm(make_llm(folder, max_num_seqs=2, speculative_config=config))


def test_drafts_are_counted_under_vllms_names(make_api, speculating):
    api = make_api(speculating, served_names=("tiny",))
    body = {"model": "tiny", "prompt": "abc abc abc", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    api.ok("/v1/completions", {**body, "logit_bias": {"20": 50, "21": 50}})
    families = text_string_to_metric_families(api.get("/metrics").text)
    found = {(s.name, s.labels.get("position")): s.value for family in families for s in family.samples}
    prefix = "vllm:spec_decode_num_"
    drafts, drafted, accepted = (
        found[f"{prefix}{name}_total", None] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts < drafted
    assert 0 < accepted <= drafted
    by_place = [found[f"{prefix}accepted_tokens_per_pos_total", str(place)] for place in range(3)]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
