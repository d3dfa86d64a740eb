"""GPT-2 in verax's text engine, from outside the package: continuous batching, paged cache, sampling.

Run it with `python examples/port_gpt2/serve.py openai-community/gpt2 "Once upon a time" "The capital of France is"`,
or with any folder that transformers has saved. No sequence is longer than the learned positions, 1,024 in GPT-2.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import gpt2

import verax


def main(model: str, *prompts: str) -> None:
    """Complete the prompts, all of them in one batch."""
    verax.register_causal_lm("gpt2", gpt2.GPT2LMHeadModel, gpt2.GPT2Config)
    llm = verax.LLM(model, dtype="float32", max_num_seqs=8)
    greedy = verax.SamplingParams(temperature=0, max_tokens=50)
    for prompt, output in zip(prompts, llm.generate(list(prompts), greedy), strict=True):
        sys.stdout.write(f"{prompt}|{output.outputs[0].text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
