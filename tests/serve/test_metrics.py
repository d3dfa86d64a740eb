"""`/metrics`: vLLM's names, fed by the engine."""

import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def read(make_api):
    api = make_api()

    def samples():
        text = api.get("/metrics").text
        return {
            (sample.name, sample.labels.get("le") or sample.labels.get("finished_reason")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    samples.api = api
    return samples


def test_requests_are_counted_and_timed(read):
    before = read()
    read.api.ok("/v1/completions", {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 2})
    after = read()

    def grown(name, label=None):
        return after[name, label] - before[name, label]

    assert grown("vllm:generation_tokens_total") == 10
    assert grown("vllm:prompt_tokens_total") > 0
    assert grown("vllm:request_success_total", "length") == 2
    assert grown("vllm:iteration_tokens_total_sum") > 0
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert grown(f"vllm:{name}_count") == 1, name


def test_the_engines_state_is_there_under_vllms_names(read):
    names = {name for name, _ in read()}
    state = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"}
    caches = {"prefix_cache_queries_total", "prefix_cache_hits_total"}
    assert {f"vllm:{name}" for name in state | caches} <= names
    assert 'model_name="tiny"' in read.api.get("/metrics").text
