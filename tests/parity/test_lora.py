"""Requests with LoRA adapters against PEFT: weights are random, adapters change much, and all run in one batch."""

import copy
import json
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.parity import test_causal_lm as causal_lm
from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.causal_lm import GREEDY, continuations, engine, logprob_errors, relative
from verax import LoRARequest
from verax.checkpoint import Checkpoint
from verax.checkpoint.lora import Adapter
from verax.errors import VeraxError
from verax.loading import load_causal_lm
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import AdaptedLayers, AdapterLoader
from verax.text.step.program import AbstractModel
from verax.text.step.runner import DeviceAdapters

FAMILIES = {
    "qwen3": {},
    "llama": {"attention_bias": True},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = np.random.default_rng(0).integers(2, causal_lm.SIZES["vocab_size"], (3, 60))
PROMPTS = [TOKENS[0, :37].tolist(), TOKENS[1, :5].tolist(), TOKENS[2, :19].tolist()]


def reference(family, folder):
    return causal_lm.reference(family, folder, num_hidden_layers=2, pad_token_id=None, **FAMILIES[family])


def write_adapters(family, model, root):
    """Two adapters: one of attention by root of the rank with patterns, one of all linear layers."""
    weights = {key: value for key, value in model.state_dict().items() if value.ndim == 2}
    attention = linear_sizes(weights, ("q_proj", "v_proj", "o_proj"))
    ranks = {module: 2 for module in attention if "layers.1." in module and module.endswith("v_proj")}
    first = save_adapter(
        root / "first",
        adapter_weights(attention, seed=1, rank=5, ranks=ranks, spread=0.4),
        rank=5,
        lora_alpha=3,
        use_rslora=True,
        rank_pattern={r"layers\.1\.self_attn\.v_proj": 2},
        alpha_pattern={"o_proj": 4},
        target_modules=["q_proj", "v_proj", "o_proj"],
    )
    every = linear_sizes(weights)
    second = save_adapter(root / "second", adapter_weights(every, seed=2, rank=8, spread=0.4), rank=8, lora_alpha=12)
    return first, second


def with_adapter(model, folder):
    """A copy of a transformers model that goes through an adapter."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def adapted_logits(folder, adapters, tokens):
    """Scores `[B, T, V]` of tokens `[B, T]`: the first row through the base, each other through an adapter."""
    model = load_causal_lm(Checkpoint.open(folder), dtype="float32")
    abstract = AbstractModel.from_module(model)
    layers = AdaptedLayers.of(abstract.build, abstract.weights, max_loras=len(adapters), max_rank=8)
    device, loader = DeviceAdapters(layers), AdapterLoader(layers, 1)
    for slot, adapter in enumerate(adapters):
        device.place(loader.load(LoRARequest(adapter.name, slot + 1, adapter)), slot)
    slots = jnp.repeat(jnp.arange(len(tokens)) - 1, tokens.shape[1])

    @jax.jit
    def scores(weights, arrays):
        model = replace(abstract, adapted=layers).build((*weights, *arrays), slots)
        return model.logits(model(jnp.asarray(tokens)))

    return np.asarray(scores(tuple(jax.tree.leaves(nnx.state(model))), device.arrays), np.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_base_and_two_adapters_in_one_batch_match_the_reference(family, tmp_path):
    base = reference(family, tmp_path / "base")
    folders = write_adapters(family, base, tmp_path)
    got = adapted_logits(tmp_path / "base", folders, TOKENS)
    for row, model in enumerate([base, *(with_adapter(base, folder) for folder in folders)]):
        with torch.no_grad():
            expected = model(torch.tensor(TOKENS[row : row + 1])).logits.numpy()[0]
            others = base(torch.tensor(TOKENS[row : row + 1])).logits.numpy()[0]
        assert relative(got[row], expected) < 2e-5
        assert row == 0 or relative(others, expected) > 0.1  # the adapter changes much


def test_the_engine_gives_the_tokens_and_log_probabilities_of_the_reference(tmp_path):
    base = reference("qwen3", tmp_path / "base")
    folders = write_adapters("qwen3", base, tmp_path)
    theirs = [base, *(with_adapter(base, folder) for folder in folders)]
    llm = engine(tmp_path / "base", enable_lora=True, max_loras=2, max_lora_rank=8)
    requests = [None, *(LoRARequest(folder.name, i, folder) for i, folder in enumerate(folders, start=1))]
    params = SamplingParams(max_tokens=64, **GREEDY)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=requests)
    expected = [continuations(model, [prompt], 64)[0] for model, prompt in zip(theirs, PROMPTS, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for request, model in zip(requests, theirs, strict=True):
        errors = logprob_errors(llm, model, PROMPTS[0], lora_request=request)
        np.testing.assert_allclose(errors, 0, atol=2e-4)


# fmt: off
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules",
    "lora_dropout", "init_lora_weights", "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
}
# fmt: on
"""Keys of adapter_config.json for training, or that say what the file's keys say; names of initialisations that change
the base are refused."""


def test_a_change_of_any_key_of_a_configuration_changes_the_adapter_or_is_refused(tmp_path):
    weights = adapter_weights({"model.layers.0.mlp.up_proj": (24, 16)}, rank=4, spread=0.1)
    path = save_adapter(tmp_path, weights, rank=4, lora_alpha=8) / "adapter_config.json"
    config = json.loads(path.read_text())

    def read(**changes):
        path.write_text(json.dumps({**config, **changes}))
        try:
            adapter = Adapter.open(tmp_path)
        except VeraxError:
            return None
        return adapter.pairs, adapter.fan_in_fan_out, adapter.base

    others, expected = (True, 3, 0.5, "x", ["x"], {"up_proj": 2}, {"x": 1}), read()
    names = {field.name for field in fields(peft.LoraConfig)} - WITHOUT_EFFECT
    assert {name for name in names if all(read(**{name: other}) == expected for other in others)} == set()
