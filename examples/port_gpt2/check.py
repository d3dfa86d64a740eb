"""The proof of `gpt2.py`: random weights in transformers' GPT-2 and in ours, compared layer by layer.

Run it with `python examples/port_gpt2/check.py`; it exits with 1 if anything is off. With the argument `bfloat16` both
run in it, and PyTorch in float32 says which side is nearer to the truth. Needs `pip install 'verax[parity]'`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import MISSING, fields
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jaxtyping import Array, Float, Int

sys.path.insert(0, str(Path(__file__).parent))
import gpt2

from verax.compare import Case, Side, compare_case
from verax.compare.outputs import candidates, compare_logits, first_difference

SIZES = dict(vocab_size=97, n_positions=64, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
"""Small enough for a second, and a vocabulary that is not a power of two."""


def reference(folder: Path) -> transformers.GPT2LMHeadModel:
    """transformers' model, saved into a folder. Its own random weights are so small that errors would hide in them."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=0.5 if name.endswith(("wte.weight", "wpe.weight")) else weight.shape[0] ** -0.5)
        else:
            weight.data.normal_(mean=1.0 if ".ln_" in name and name.endswith("weight") else 0.0, std=0.3)
    model.save_pretrained(folder)
    return model


def scores_of(model: gpt2.GPT2LMHeadModel, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Scores of the token after each."""
    return model.logits(model(tokens))


def other_defaults() -> list[str]:
    """Sizes and options that we take otherwise than transformers where config.json says nothing."""
    theirs = transformers.GPT2Config()
    known = [field for field in fields(gpt2.GPT2Config) if field.default is not MISSING]
    return [field.name for field in known if getattr(theirs, field.name) != field.default]


def main(dtype: str = "float32") -> int:
    """Compare layers, logits and greedy tokens; 0 if all agree."""
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs = reference(folder)
        case = Case(
            "GPT-2",
            lambda dtype: Side(theirs.to(getattr(torch, dtype)), (tokens,), {"use_cache": False}),
            lambda dtype: Side(
                gpt2.load(folder, dtype=getattr(jnp, dtype)), (tokens.astype(np.int32),), call=scores_of
            ),
        )
        layers = compare_case(case, dtype=dtype)
        ours = gpt2.load(folder)
        theirs.transformer.save_pretrained(folder / "bare")  # keys without a prefix, as OpenAI published them
        bare = gpt2.load(folder / "bare")
    worst = max(layers.rows, key=lambda row: row.errors.l2)
    print(f"{len(layers.rows)} layers in {dtype}; the worst is {worst.name}, relative error {worst.errors.l2:.1e}")
    if layers.first is not None:
        print(f"the first that is off: {layers.first.name}")
    if dtype != "float32":
        print(f"our error over PyTorch's, both against float32: {layers.output.ratio:.2f}")
        return 0 if layers.passed else 1

    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits[0].numpy()
        made = theirs.generate(
            torch.from_numpy(tokens[:1]),
            attention_mask=torch.ones(1, tokens.shape[1], dtype=torch.long),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = compare_logits(expected, scores_of(bare, jnp.asarray(tokens))[0])
    print(f"logits: relative error {logits.relative_l2:.1e}, KL at most {logits.max_kl:.1e} nats")

    found, scores = gpt2.greedy(ours, tokens[0].tolist(), 32)
    answer = made.sequences[0, tokens.shape[1] :].tolist()
    parted = first_difference(answer, found, candidates(torch.cat(made.logits).numpy()), candidates(scores))
    print("32 greedy tokens: the same" if parted is None else f"greedy tokens part: {parted}")

    strange = other_defaults()
    print(f"defaults of config.json: {', '.join(strange) or 'none'} differ")
    return 0 if layers.passed and logits.relative_l2 < 1e-5 and parted is None and not strange else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
