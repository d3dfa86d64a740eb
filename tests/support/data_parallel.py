"""Replicas of a tiny model on virtual devices: what they answered, and where, as JSON."""

import asyncio
import json
import sys

from tests.support.invariants import check_engine

SIZES = dict(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=32, block_size=4)
FORM = {"regex": "[a-f]{3} (the|fox) [0-9]{4}"}


def _facts(llm, prompts, params, adapters):
    """Answers of the synchronous and of the asynchronous engine, and facts of each replica."""
    from verax import AsyncLLM

    before = [engine.runner.num_compiled() for engine in llm.engines]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)

    async def collect_all():
        async with AsyncLLM.from_llm(llm) as served:
            requests = zip(prompts, params, adapters, strict=True)
            return await asyncio.gather(*(served.collect(*each[:2], lora_request=each[2]) for each in requests))

    generated = [engine.num_generated_tokens for engine in llm.engines]
    collected = asyncio.run(collect_all())
    for engine in llm.engines:
        check_engine(engine)
    return {
        "answers": [_answer(output) for output in outputs],
        "collected": [_answer(output) for output in collected],
        "generated": generated,
        "generated_later": [engine.num_generated_tokens for engine in llm.engines],
        "compiled": [before, [engine.runner.num_compiled() for engine in llm.engines]],
        "devices": [sorted(device.id for device in engine.runner._weights[0].devices()) for engine in llm.engines],
        "cache_devices": [_cache_devices(engine.runner) for engine in llm.engines],
        "cache": llm.kv_cache,
        "slots": llm.max_num_seqs,
    }


def _cache_devices(runner):
    import jax

    return sorted({device.id for array in jax.tree.leaves(runner._cache) for device in array.devices()})


def _answer(output):
    (sample,) = output.outputs
    logprobs = None if sample.logprobs is None else [round(sample.cumulative_logprob, 4)]
    return [output.prompt, sample.token_ids, sample.text, sample.finish_reason, logprobs]


def main(folder):
    """Print the facts of one engine, of two replicas, of two replicas of two devices each, and of loaded programs."""
    from pathlib import Path

    from tests.support.adapters import tiny_adapter
    from tests.support.tiny import tiny_checkpoint
    from verax import LLM, SamplingParams

    model = tiny_checkpoint(Path(folder) / "model")
    adapter = tiny_adapter(model, Path(folder) / "adapter")
    plain = dict(max_tokens=16, ignore_eos=True)
    cases = [
        ([5, 9, 200, 31], SamplingParams(temperature=0, **plain), None),
        ("once upon a time", SamplingParams(temperature=1.0, seed=7, **plain), None),
        ([100, 101, 102], SamplingParams(temperature=1.0, **plain), None),  # seeds of the engine's own
        ([100, 101, 102], SamplingParams(temperature=1.0, **plain), None),
        ([7, 8, 9] * 15, SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=3, logprobs=2, **plain), None),
        ([40, 41], SamplingParams(temperature=0, **plain), adapter),
        ([42, 43], SamplingParams(temperature=0, **plain), adapter),
        ([5, 6], SamplingParams(temperature=1.0, seed=1, max_tokens=20, structured_outputs=FORM), None),
        ([5, 7], SamplingParams(temperature=1.0, seed=2, max_tokens=20, structured_outputs=FORM), None),
    ]

    def facts(cases, **options):
        llm = LLM(model, dtype="float32", use_tqdm=False, **SIZES, **options)
        return _facts(llm, *map(list, zip(*cases, strict=True)))

    folder = Path(folder) / "programs"
    LLM(model, dtype="float32", use_tqdm=False, **SIZES).write_programs(folder)
    features = dict(enable_lora=True, max_lora_rank=4, structured_outputs=True)
    found = {
        "one": facts(cases, **features),
        "two": facts(cases, data_parallel_size=2, **features),
        "two of two": facts(cases[:5], data_parallel_size=2, tensor_parallel_size=2),
        "from a folder": facts(cases[:5], programs=folder),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
