"""Outputs as callers read them, and as JSON."""

import dataclasses
import json

import pytest

from verax.text.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

BEST = {5: Logprob(-0.25, 1, "a"), 7: Logprob(float("-inf"), 2, "é")}
COMPLETION = CompletionOutput(0, "a", (5,), -0.25, [BEST], "stop", "END")
OUTPUT = RequestOutput("r", "hi", (1, 2), [None, BEST], [COMPLETION], True, 0, RequestMetrics(10.0, 10.5, 12.0))


def test_a_completion_is_finished_once_it_has_a_reason():
    running = CompletionOutput(0, "a", (5,), None, None)
    assert not running.finished
    assert dataclasses.replace(running, finish_reason="abort").finished


def test_times_count_from_arrival_and_are_none_until_they_happen():
    metrics = RequestMetrics(10.0, 10.5, 12.0)
    assert (metrics.time_to_first_token, metrics.total_time) == (0.5, 2.0)
    waiting = RequestMetrics(10.0, None, None)
    assert (waiting.time_to_first_token, waiting.total_time) == (None, None)


def test_the_dictionary_is_strict_json_without_infinities():
    back = json.loads(json.dumps(OUTPUT.to_dict(), allow_nan=False))
    assert back["outputs"][0]["logprobs"] == [
        {
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": None, "rank": 2, "decoded_token": "é"},
        }
    ]
    assert back["prompt_logprobs"][0] is None
    assert back["prompt_token_ids"] == [1, 2]
    assert (back["outputs"][0]["finish_reason"], back["outputs"][0]["stop_reason"]) == ("stop", "END")
    times = {"time_to_first_token": 0.5, "total_time": 2.0}
    assert back["metrics"] == {**times, "num_draft_tokens": 0, "num_accepted_tokens": 0}


def test_an_output_without_metrics_has_none_in_json():
    assert dataclasses.replace(OUTPUT, metrics=None).to_dict()["metrics"] is None


def test_outputs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OUTPUT.finished = False
