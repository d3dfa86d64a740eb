"""Engines of tiny models over several devices, in a process of its own: `run(cases, folder, sizes)`."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from tests.support.devices import run_on_devices

SIZES = dict(intermediate_size=128, num_attention_heads=8, num_key_value_heads=2)
"""Changes of `tiny_config`: up to 8 devices divide it, and more than 2 share heads of keys and values."""

DELTA = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)

UNTIED = dict(tie_word_embeddings=False)
FUSED = dict(num_key_value_heads=4, head_dim=16)
FACTORS = {"type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0] * 8}
GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}

FAMILIES = {
    "qwen3": ("qwen3", {}),
    # A row-parallel bias added on every device was nano-vllm's pull request 203.
    "llama": (
        "llama",
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, num_key_value_heads=8, num_hidden_layers=1),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=10,
            query_pre_attn_scalar=16,
            tie_word_embeddings=False,  # its scaled embedding would say each token again
        ),
    ),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "num_hidden_layers": 1}),
    "phi3": ("phi3", {**FUSED, "rope_scaling": FACTORS, "original_max_position_embeddings": 64}),
    "olmo3": ("olmo3", dict(layer_types=["sliding_attention", "full_attention"], sliding_window=10, **UNTIED)),
    "smollm3": ("smollm3", dict(no_rope_layers=[0, 1])),
    "granite": (
        "granite",
        dict(embedding_multiplier=2.5, attention_multiplier=0.3, residual_multiplier=0.4, logits_scaling=3, **UNTIED),
    ),
    "ministral3": ("ministral3", dict(rope_parameters=GROWING, **UNTIED)),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64, "num_hidden_layers": 1}),
    "gpt-oss": (
        "gpt_oss",
        {**EXPERTS, "num_local_experts": 8, "intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 10},
    ),
    "gemma4": (
        "gemma4_text",
        dict(
            num_hidden_layers=3,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=10,
            global_head_dim=32,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=320,
            **UNTIED,
        ),
    ),
    # Four devices share the heads of one kind of layer, and have one each of the other's.
    "gemma4-two-kinds": (
        "gemma4_text",
        dict(
            num_key_value_heads=4,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=10,
            global_head_dim=32,
            hidden_size_per_layer_input=0,
            **UNTIED,
        ),
    ),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3-next": ("qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "two-key-heads": ("qwen3_5_text", {**DELTA, "linear_num_key_heads": 2}),
}
"""Family and changes of `tiny_config` by case."""

WIDE = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=1)
"""Changes that divide two times into the blocks of quantised weights."""

BATCHED = ("qwen3", "qwen3.5")
"""Families of which two sequences run at once. The others have fewer programs."""

FEATURES = {
    "int8": dict(quantization="int8", kv_cache_dtype="int8"),
    "int4": dict(quantization="int4"),
    "moe-int4": dict(quantization="int4"),
    "gguf": {},
    "lora": dict(enable_lora=True, max_loras=2, max_lora_rank=4),
    "ngram": dict(structured_outputs=True, speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
    "draft-model": {},
    "delta-int4": dict(quantization="int4"),
    "fused-int4": dict(quantization="int4"),
    "odd-vocabulary": {},
    "fused-lora": dict(enable_lora=True, max_loras=2, max_lora_rank=4),
    "delta-lora": dict(enable_lora=True, max_loras=2, max_lora_rank=4),
    "delta-drafts-lora": dict(
        enable_lora=True,
        max_loras=2,
        max_lora_rank=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    ),
}
"""Options of the engine by case. With `lora` tokens have log-probabilities, with `ngram` half of the answers a form.

With `delta-drafts-lora` two tokens are likely, so that answers repeat themselves.
"""

FAMILY_OF_FEATURE = {
    "moe-int4": "qwen3-moe",
    "delta-int4": "qwen3-next",
    "delta-lora": "qwen3.5",
    "delta-drafts-lora": "qwen3.5",
    "fused-int4": "phi3",
    "fused-lora": "phi3",
}
"""Families of the features that Qwen3 does not have."""

CHANGES_OF_FEATURE = {"odd-vocabulary": dict(vocab_size=321, **UNTIED)}
"""Changes of `tiny_config` by case, beyond those of all features."""

PROMPTS = [[5, 9, 200, 31], [7, 8, 9] * 15, [100, 101, 102], [40, 41]]


def run(cases, folder, sizes):
    """By case and number of devices: answers, and what `_engine` found out about the programs.

    Args:
        cases: names out of `FAMILIES` and `FEATURES`.
        folder: where models are made.
        sizes: numbers of devices, by case.
    """
    most = max(max(sizes[case]) for case in cases)
    wanted = json.dumps({case: sizes[case] for case in cases})
    found = run_on_devices(most, "tests.support.tensor_parallel", folder, wanted)
    return {case: {int(size): of for size, of in by_size.items()} for case, by_size in found.items()}


def model_of(case):
    """Family and changes of `tiny_config` of a case."""
    family, changes = FAMILIES[case if case in FAMILIES else FAMILY_OF_FEATURE.get(case, "qwen3")]
    return family, {**SIZES, **(WIDE if case in FEATURES else {}), **changes, **CHANGES_OF_FEATURE.get(case, {})}


def _model(case, folder):
    """Path of the case's model, made at the first call."""
    from tests.support.tiny import tiny_checkpoint

    family, changes = model_of(case)
    made = Path(folder) / case
    if not made.exists():
        # Rounded inputs move scores a little, which decides near ties of seed 0.
        seed = int(case in FAMILY_OF_FEATURE)
        tiny_checkpoint(made, family=family, seed=seed, **changes)
    if case != "gguf":
        return made
    from tests.support import gguf

    path = made / "model.gguf"
    if not path.exists():
        gguf.write(made, path, "Q4_K", kinds={"model.embed_tokens.weight": "Q6_K"})
    return path


def _answers(case, folder, size):
    """An engine after it answered greedy and seeded requests, its answers, and programs compiled before and after."""
    from tests.support.adapters import tiny_adapter
    from verax import LLM, SamplingParams

    model, options = _model(case, folder), FEATURES.get(case, {})
    if case == "draft-model":  # the model itself, so that its drafts hold
        options = {"speculative_config": {"model": str(model), "num_speculative_tokens": 3}}
    sizes = dict(max_model_len=96, max_num_seqs=1 + (case in BATCHED), max_num_batched_tokens=32, block_size=4)
    llm = LLM(model, dtype="float32", use_tqdm=False, tensor_parallel_size=size, **{**sizes, **options})
    before = llm.engine.runner.num_compiled()
    plain = form = dict(max_tokens=16, ignore_eos=True)
    if case == "ngram":
        form = dict(max_tokens=16, structured_outputs={"regex": "[a-f]{3} (the|fox) [0-9]{4}"})
    if case == "lora":
        plain |= dict(logprobs=2, prompt_logprobs=1, repetition_penalty=1.3, min_tokens=4, logit_bias={17: 2.0})
    if case == "delta-drafts-lora":
        plain |= dict(logit_bias={20: 9.0, 21: 9.0})
    params = [
        SamplingParams(temperature=0, **form),
        SamplingParams(temperature=0, **plain),
        SamplingParams(temperature=1.0, seed=7, **form),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=3, **plain),
    ]
    adapter = tiny_adapter(model, Path(folder) / "adapter") if case.endswith("lora") else None
    requests = dict(sampling_params=params, use_tqdm=False, lora_request=[adapter, None, adapter, None])
    outputs = llm.generate(PROMPTS, **requests)
    if case == "delta-drafts-lora":
        speculator, llm.engine.speculator = llm.engine.speculator, None
        undrafted = llm.generate(PROMPTS, **requests)
        assert [output.outputs for output in undrafted] == [output.outputs for output in outputs]
        assert speculator.totals.num_draft_tokens > speculator.totals.num_accepted_tokens > 0
    return llm, outputs, [before, llm.engine.runner.num_compiled()]


def _engine(case, folder, size):
    """Answers of an engine, and facts of its programs and arrays."""
    import jax

    llm, outputs, compiled = _answers(case, folder, size)
    runner = llm.engine.runner
    found = {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "logprobs": [_chosen(output.outputs[0].logprobs, output.outputs[0].token_ids) for output in outputs],
        "prompt_logprobs": [_chosen(output.prompt_logprobs, output.prompt_token_ids) for output in outputs],
        "compiled": compiled,
        "bytes": _bytes(runner._weights),
    }
    if case in FEATURES:
        return found
    decode = runner.config.shapes[0]
    hlo = runner._steps[decode].lower(*runner._arguments(decode)).compile().as_text()
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo.splitlines()[0])
    return {
        **found,
        "collectives": Counter(re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", hlo)),
        "native_calls": hlo.count('custom_call_target="verax_'),
        "aliased": 0 if aliased is None else len(re.findall(r"may-alias|must-alias", aliased[1])),
        "donated": len(jax.tree.leaves((runner._slots, runner._cache))),
        "heads_on_a_device": sorted({page.addressable_shards[0].data.shape[1] for page in _pages(runner)}),
        "state_bytes": _bytes(_states(runner)),
    }


def _bytes(arrays):
    """Bytes of arrays, and of the parts that one device has."""
    parts = [array.addressable_shards[0].data for array in arrays]
    return [sum(array.nbytes for array in each) for each in (arrays, parts)]


def _chosen(entries, tokens):
    """Log-probabilities of tokens; those that have none are left out."""
    return [entry[token].logprob for entry, token in zip(entries or (), tokens, strict=False) if entry]


def _pages(runner):
    """Arrays of keys and values."""
    return _cached(runner, lambda state: state is None)


def _states(runner):
    """Arrays of recurrent states."""
    return _cached(runner, lambda state: state is not None)


def _cached(runner, kept):
    """Arrays of the cache in the layers of a kind."""
    import jax

    from verax.text.step.sizes import layer_states

    states = layer_states(runner.abstract_model.config, 1)
    layers = zip(runner._cache, states, strict=True)
    return [array for arrays, state in layers if kept(state) for array in jax.tree.leaves(arrays)]


if __name__ == "__main__":
    folder, wanted = sys.argv[1:]
    found = {case: {size: _engine(case, folder, size) for size in sizes} for case, sizes in json.loads(wanted).items()}
    sys.stdout.write(json.dumps(found) + "\n")
