"""Fine-tuning against PyTorch: gradients of weights and of adapters, and results that transformers and PEFT load."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.parity import test_causal_lm as causal_lm
from tests.support.causal_lm import logits, relative
from tests.support.finetune import settings, write_examples
from tests.support.tiny import tiny_tokenizer
from verax import ops
from verax.checkpoint import Checkpoint
from verax.checkpoint.lora import Adapter, merge
from verax.loading import load_causal_lm
from verax.text.step.program import AbstractModel
from verax.train.finetune import LoraSettings, train_full, train_lora
from verax.train.finetune.data import validation_batches
from verax.train.finetune.run import Job, TrainedAdapter, batch_loss, recompute_layers

FAMILIES = {"qwen3": {}, "gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}
TOWER = "gemma3 with a vision tower"

RNG = np.random.default_rng(0)
LENGTHS = [40, 23, 31]


def reference(family, folder):
    if family == "gemma4":
        return causal_lm.reference(family, folder, pad_token_id=None)
    if family == TOWER:
        text = {**causal_lm.GEMMA, **FAMILIES["gemma3"], "num_hidden_layers": 2}
        options = dict(vision_config=causal_lm.TOWER, mm_tokens_per_image=4, pad_token_id=None)
        model = causal_lm.with_tower("Gemma3", folder, text, **options)
        tiny_tokenizer(folder, causal_lm.SIZES["vocab_size"])
        return model
    return causal_lm.reference(family, folder, num_hidden_layers=2, pad_token_id=None, **FAMILIES[family])


def batch():
    """Rows of three lengths, in each of which some tokens are trained."""
    tokens, targets = RNG.integers(2, causal_lm.SIZES["vocab_size"], (2, 3, 48), dtype=np.int32)
    trained = RNG.random(tokens.shape) < 0.5
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = targets[row, length:] = trained[row, length:] = 0
    return {"tokens": tokens, "targets": targets, "weights": (trained / trained.sum()).astype(np.float32)}


def arrays(batch):
    """The batch as the training step takes it."""
    return jax.tree.map(jnp.asarray, batch)


def torch_loss(model, batch):
    """The loss by single rows without padding."""
    total = 0.0
    for row, length in enumerate(batch.get("lengths", LENGTHS)):
        scores = model(torch.tensor(batch["tokens"][row : row + 1, :length])).logits[0]
        targets = torch.tensor(batch["targets"][row, :length], dtype=torch.long)
        losses = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        total = total + (losses * torch.tensor(batch["weights"][row, :length])).sum()
    return total


def reference_operations():
    """Every operation's reference, as on machines without a faster implementation."""
    return ops.use_implementations(**dict.fromkeys(ops.operations(), "reference"))


@pytest.mark.parametrize(
    ("family", "way"), [("qwen3", nullcontext), ("gemma3", reference_operations), ("gemma4", nullcontext)]
)
def test_gradients_of_all_weights_match_pytorch(family, way, tmp_path):
    theirs, given = reference(family, tmp_path), batch()
    graph, params = nnx.split(load_causal_lm(Checkpoint.open(tmp_path), dtype="float32"))
    with way():
        value, gradient = jax.jit(jax.value_and_grad(lambda p: batch_loss(nnx.merge(graph, p), arrays(given))))(params)
    expected = torch_loss(theirs, given)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    found = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(gradient)}
    parameters, buffers = dict(theirs.named_parameters()), dict(theirs.named_buffers())
    assert found.keys() - parameters.keys() <= buffers.keys()
    assert not any(np.asarray(found[name]).any() for name in found.keys() & buffers.keys())
    for name, weight in parameters.items():
        assert relative(np.asarray(found[name]), weight.grad.numpy()) < 5e-5, name


def test_short_examples_have_the_rotation_of_short_contexts(tmp_path):
    """Of LongRoPE, as in transformers."""
    theirs = causal_lm.reference("phi3-long", tmp_path / "base").eval()
    tiny_tokenizer(tmp_path / "base", causal_lm.SIZES["vocab_size"])
    data = write_examples(tmp_path / "data.jsonl")
    run = Job(tmp_path / "base", data, None, settings(max_length=60), tmp_path / "run", False, False)
    given = next(validation_batches(run.examples.items, rows=len(run.examples), max_length=60))
    with torch.no_grad():
        expected = torch_loss(theirs, given)
    np.testing.assert_allclose(batch_loss(run.load("float32"), arrays(given)), expected.item(), rtol=1e-5)


@pytest.mark.parametrize(("family", "way"), [("qwen3", reference_operations), ("gemma3", nullcontext)])
def test_gradients_of_an_adapter_match_peft(family, way, tmp_path):
    theirs, given = reference(family, tmp_path), batch()
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    base = load_causal_lm(Checkpoint.open(tmp_path), dtype="float32")
    adapter = TrainedAdapter.of(AbstractModel.from_module(base), LoraSettings(rank=4, alpha=8))
    start = jax.tree.map(lambda m: jnp.asarray(RNG.standard_normal(m.shape), jnp.float32) / 8, adapter.initial(0))
    parameters = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    names = {f"base_model.model.{path}.{role}.default.weight": (path, role) for path in start for role in start[path]}
    assert parameters.keys() == names.keys()
    for name, (path, role) in names.items():
        parameters[name].data = torch.tensor(np.asarray(start[path][role]))
    weights = tuple(jax.tree.leaves(nnx.state(base)))

    def loss(matrices):
        return batch_loss(adapter.model(weights, matrices, given["tokens"].size), arrays(given))

    with way():
        value, gradient = jax.jit(jax.value_and_grad(loss))(start)
    expected = torch_loss(theirs, given)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    for name, (path, role) in names.items():
        assert relative(np.asarray(gradient[path][role]), parameters[name].grad.numpy()) < 5e-5, name


def test_layers_that_are_computed_again_give_the_same_gradients(tmp_path):
    reference("gemma3", tmp_path)
    given = arrays(batch())
    graph, params = nnx.split(load_causal_lm(Checkpoint.open(tmp_path), dtype="float32"))

    def compute(params, recompute):
        model = nnx.merge(graph, params)
        return batch_loss(recompute_layers(model) if recompute else model, given)

    plain, again = (jax.jit(jax.grad(lambda p, on=on: compute(p, on)))(params) for on in (False, True))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert relative(np.asarray(other), np.asarray(one)) < 1e-5
    forward = str(jax.make_jaxpr(jax.grad(lambda p: compute(p, True)))(params))
    assert forward.count("prevent_cse=True") >= 2


@pytest.mark.parametrize("family", [*FAMILIES, TOWER])
def test_peft_runs_a_trained_adapter_as_verax_does(family, tmp_path, recwarn):
    theirs = reference(family, tmp_path / "base")
    data, tokens = write_examples(tmp_path / "data.jsonl"), RNG.integers(2, causal_lm.SIZES["vocab_size"], (2, 30))
    lora = LoraSettings(rank=4, alpha=8)
    report = train_lora(tmp_path / "base", data, tmp_path / "run", settings(), lora, show_progress=False)
    model = peft.PeftModel.from_pretrained(theirs, report["folder"]).eval()
    assert not [warning for warning in recwarn if "adapter keys" in str(warning.message)]
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    merged = merge(Checkpoint.open(tmp_path / "base"), Adapter.open(report["folder"]), tmp_path / "merged")
    assert relative(logits(merged, tokens), expected) < 2e-5
    assert relative(logits(tmp_path / "base", tokens), expected) > 1e-2


@pytest.mark.parametrize("family", [*FAMILIES, TOWER])
def test_transformers_loads_a_trained_checkpoint(family, tmp_path):
    reference(family, tmp_path / "base")
    data, tokens = write_examples(tmp_path / "data.jsonl"), RNG.integers(2, causal_lm.SIZES["vocab_size"], (2, 30))
    given = settings(learning_rate=1e-3)
    folder = train_full(tmp_path / "base", data, tmp_path / "run", given, show_progress=False)["folder"]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    assert relative(logits(folder, tokens), expected) < 2e-5
    assert relative(logits(tmp_path / "base", tokens), expected) > 1e-3
    assert transformers.AutoTokenizer.from_pretrained(folder)("a fox")["input_ids"]
