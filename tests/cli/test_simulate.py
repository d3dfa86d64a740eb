"""`verax simulate`: a table or JSON, and one line for what cannot be."""

import json

import pytest
from typer.testing import CliRunner

from verax.cli import app

QUICK = ["text-builtin", "--device", "l4", "--input-tokens", "32", "--output-tokens", "8", "--num-requests", "20"]


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_fleets_are_compared_as_json():
    result = run(*QUICK, "--concurrency", "8", "--replicas", "1,4", "--efficiency", "0.5", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    one, four = found["fleets"]
    assert (one["replicas"], four["devices"], found["settings"]["efficiency"]) == (1, 4, 0.5)
    assert four["latency_ms"]["tpot"]["p50"] <= one["latency_ms"]["tpot"]["p50"]
    assert found["settings"]["context"] == 40
    assert "nothing was measured" in found["settings"]["times"]


def test_overheads_are_options_and_none_is_the_default():
    host = ["--overhead-ms", "1", "--overhead-per-token-us", "50", "--overhead-per-request-ms", "2"]
    free, slower = (
        json.loads(run(*QUICK, "--concurrency", "8", *overheads, "--json").stdout) for overheads in ([], host)
    )
    names = ["overhead_s", "overhead_per_token_s", "overhead_per_request_s", "contention"]
    assert [free["settings"][name] for name in names] == [0, 0, 0, 0]
    assert [slower["settings"][name] for name in names] == pytest.approx([1e-3, 5e-5, 2e-3, 0])
    free, slower = free["fleets"][0], slower["fleets"][0]
    assert slower["latency_ms"]["ttft"]["p50"] > free["latency_ms"]["ttft"]["p50"] + 2
    assert slower["output_tokens_per_s"] < free["output_tokens_per_s"]


def test_a_table_has_a_row_for_each_fleet():
    result = run(*QUICK, "--request-rate", "100", "--replicas", "1,100", "--mtbf", "0.0001", "--restart", "1")
    assert result.exit_code == 0, result.output
    assert "16 of them simulated" in " ".join(result.output.split())
    assert "failures" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--concurrency"),
        (["--concurrency", "4", "--replicas", "one"], "--replicas"),
        (["--concurrency", "4", "--efficiency", "2"], "--efficiency"),
        (["--concurrency", "4", "--context", "20"], "--context"),
        (["--concurrency", "4", "--router", "dice"], "--router"),
        (["--concurrency", "4", "--goodput", "speed:1"], "--goodput"),
    ],
)
def test_wrong_options_are_named_with_status_2(arguments, message):
    result = run(*QUICK, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_model_of_another_kind_is_refused():
    result = run("minilm", "--device", "l4", "--concurrency", "4")
    assert result.exit_code == 2
    assert "expected a language model" in " ".join(result.output.replace("│", "").split())
