"""`verax train`: which arguments reach fine-tuning, and what is printed. Fine-tuning has its own tests."""

import json
from pathlib import Path

import pytest

from verax.train.finetune import FinetuneSettings, LoraSettings


@pytest.fixture
def finetuned(monkeypatch):
    """Calls of fine-tuning, which here only reports."""
    calls = []

    def train(*given, **options):
        calls.append((given, options))
        report = {"folder": "runs/x/adapter", "steps": 4, "examples": 9, "cut": 1, "left_out": 0}
        return report | {"parameters": 1234, "loss": 0.25, "validation_loss_before": 2.0, "validation_loss": 0.5}

    monkeypatch.setattr("verax.train.finetune.train_lora", train)
    monkeypatch.setattr("verax.train.finetune.train_full", train)
    return calls


OPTIONS = "--batch-size 4 --gradient-accumulation 2 --steps 9 --max-length 77 --warmup-steps 3 --weight-decay 0.1"
SETTINGS = FinetuneSettings(0.5, 4, 2, 3.0, 9, 77, 3, 0.1, 5, "float32", True, True, 2, 11)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_options_reach_fine_tuning(run, finetuned, kind):
    more = "--learning-rate 0.5 --seed 5 --dtype float32 --dequantize --gradient-checkpointing --devices 2"
    own = "--rank 3 --alpha 6 --target-modules q_proj" if kind == "lora" else ""
    files = "--model m --data d.jsonl --validation-data v.jsonl -o out"
    done = run("train", kind, *f"{files} {OPTIONS} {more} {own} --save-every 11 --resume".split())
    ((given, options),) = finetuned
    adapter = (LoraSettings(3, 6.0, "q_proj"),) if kind == "lora" else ()
    assert given == ("m", Path("d.jsonl"), Path("out"), SETTINGS, *adapter)
    assert options == {"validation_data": Path("v.jsonl"), "resume": True}
    assert done.out.splitlines() == [
        "9 examples, 4 steps, 1,234 trained parameters",
        "loss of the last batch: 0.250",
        "validation loss: 2.000 before, 0.500 now",
        "trained: runs/x/adapter",
    ]
    assert done.err == "1 examples are longer than --max-length and lost their ends\n"


def test_the_built_in_model_and_an_adapter_of_rank_16_are_the_defaults(run, finetuned):
    done = run("train", "lora", "--data", "d.jsonl", "-o", "out", "--json")
    ((given, _),) = finetuned
    assert given == (None, Path("d.jsonl"), Path("out"), FinetuneSettings(2e-4), LoraSettings())
    assert json.loads(done.out)["validation_loss"] == 0.5
