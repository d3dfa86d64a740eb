"""Text: a prompt completed, a chat answered as it comes, and what the model thought of each token.

Run it with `python examples/text.py`, or `python examples/text.py path/to/Qwen3-0.6B`.
"""

import sys

from verax import LLM, SamplingParams

# The built-in model where nothing else is named. Few sequences at once mean few programs to compile.
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=2, max_model_len=128)

params = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
for output in llm.generate(["Once upon a time, there was a", "12 + 30 ="], params, use_tqdm=False):
    completion = output.outputs[0]
    print(f"{output.prompt}|{completion.text}")
    for token, choices in zip(completion.token_ids[:3], completion.logprobs or [], strict=False):
        print("   ", {choice.decoded_token: round(choice.logprob, 3) for choice in choices.values()}, "took", token)

for piece in llm.stream([{"role": "user", "content": "What is 47 + 38?"}]):
    print(piece, end="", flush=True)
print()
