"""Text for many callers: several answers at once as they grow, one that is left early, and one in a single piece.

Run it with `python examples/async_text.py`, or `python examples/async_text.py path/to/Qwen3-0.6B`.
"""

import asyncio
import sys
from contextlib import aclosing

from verax import AsyncLLM, SamplingParams

PROMPTS = ["Once upon a time, there was a", "12 + 30 =", "7 + 8 ="]


async def show(llm: AsyncLLM, prompt: str) -> None:
    """Print the parts of an answer, and at last the whole of it."""
    parts = []
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, stop="\n")):
        parts += [part.text for part in output.outputs]
    print(f"{prompt}|{''.join(parts)}|{len(parts)} parts")


async def first_sentence(llm: AsyncLLM, prompt: str) -> str:
    """The answer up to its first full stop. Closing the generator aborts the rest."""
    text = ""
    async with aclosing(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100))) as outputs:
        async for output in outputs:
            text += output.outputs[0].text
            if "." in text:
                break
    return text.partition(".")[0] + "."


async def main() -> None:
    """Serve three prompts at once, leave one answer early, and collect one whole."""
    # The built-in model where nothing else is named. Few sequences at once mean few programs to compile.
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else None, max_num_seqs=2, max_model_len=128) as llm:
        await asyncio.gather(*(show(llm, prompt) for prompt in PROMPTS))
        print(await first_sentence(llm, PROMPTS[0]))
        answer = await llm.collect([{"role": "user", "content": "What is 47 + 38?"}])
        print(answer.outputs[0].text)


asyncio.run(main())
