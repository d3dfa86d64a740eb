"""Files of examples and short runs of fine-tuning; as a program: runs on one and on several devices, compared."""

import json
import sys
from pathlib import Path

from safetensors.numpy import load_file

from tests.support.tiny import tiny_checkpoint
from verax.train.finetune import FinetuneSettings, LoraSettings, train_full, train_lora

PAIRS = [("a fox ", "river"), ("the café ", "12 + 30"), ("once upon ", "a time"), ("abc ", "def"), ("small ", "naïve")]


def write_examples(path, pairs=PAIRS):
    """A file with a prompt and a completion on each line."""
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    return path


def settings(**changes):
    """Settings of a run of six steps of four examples, in float32."""
    return FinetuneSettings(**{"learning_rate": 1e-2, "batch_size": 4, "steps": 6, "dtype": "float32", **changes})


def trained(folder):
    """Weights that a run wrote, by key."""
    (file,) = [*folder.glob("adapter/adapter_model.safetensors"), *folder.glob("model/model.safetensors")]
    return load_file(file)


def main(root):
    """Print the largest differences of losses and weights between one device and four, relative to the largest."""
    model, data = tiny_checkpoint(root / "base", num_hidden_layers=1), write_examples(root / "data.jsonl")
    differences = {}
    for kind, train in (("lora", train_lora), ("full", train_full)):
        found = {}
        for devices in (1, 4):
            options = {"lora": LoraSettings(4, 8)} if kind == "lora" else {}
            rate = 1e-2 if kind == "lora" else 1e-3
            given = settings(devices=devices, gradient_accumulation=2, learning_rate=rate)
            folder = root / f"{kind}-{devices}"
            report = train(model, data, folder, given, validation_data=data, show_progress=False, **options)
            found[devices] = report, trained(folder)
        (one, weights), (four, divided) = found[1], found[4]
        difference = max(abs(divided[key] - weights[key]).max() / abs(weights[key]).max() for key in weights)
        losses = [abs(four[key] - one[key]) / one[key] for key in ("loss", "validation_loss")]
        learned = one["validation_loss"] / one["validation_loss_before"]
        differences[kind] = {"weights": float(difference), "losses": max(losses), "learned": learned}
    print(json.dumps(differences))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
