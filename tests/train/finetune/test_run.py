"""Fine-tuning a tiny model: it learns, resumes exactly, divides over devices, and the engine loads its results."""

import json
import shutil
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.devices import run_on_devices
from tests.support.finetune import PAIRS, settings, trained, write_examples
from tests.support.tiny import CHAT_TEMPLATE, tiny_checkpoint, tiny_tokenizer
from verax import LLM, LoRARequest, SamplingParams
from verax.checkpoint import Checkpoint, save
from verax.checkpoint.lora import Adapter
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm
from verax.text.step.program import AbstractModel
from verax.text.tokens.tokenizer import Tokenizer
from verax.train.finetune import FinetuneSettings, LoraSettings, train_full, train_lora
from verax.train.finetune.data import read_examples
from verax.train.finetune.run import Job, TrainedAdapter
from verax.train.loop import RunStates

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENGINE = dict(dtype="float32", max_num_seqs=1, max_num_batched_tokens=32, max_model_len=32, use_tqdm=False)
SMALL = LoraSettings(rank=4, alpha=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_examples(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="module")
def whole(base, data, tmp_path_factory):
    """Folder and report of an undisturbed run of LoRA."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train_lora(base, data, folder, settings(), SMALL, validation_data=data, show_progress=False)


def answers(llm, **options):
    outputs = llm.generate([prompt for prompt, _ in PAIRS], GREEDY, use_tqdm=False, **options)
    return [output.outputs[0].text for output in outputs]


def test_an_adapter_learns_its_examples_and_the_engine_gives_them_back(base, data, tmp_path):
    given = settings(steps=60, batch_size=5, save_every=30)
    report = train_lora(base, data, tmp_path, given, LoraSettings(8, 16), validation_data=data, show_progress=False)
    assert report["validation_loss"] < 0.05 * report["validation_loss_before"]
    llm = LLM(base, enable_lora=True, max_lora_rank=8, **ENGINE)
    completions = [completion for _, completion in PAIRS]
    assert answers(llm, lora_request=LoRARequest("mine", 1, report["folder"])) == completions
    assert answers(llm) != completions
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if "validation_loss" in entry] == [0, 30, 60]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_all_weights_learn_and_the_checkpoint_has_the_layout_of_its_base(base, data, tmp_path):
    given = settings(steps=40, batch_size=5, learning_rate=3e-3, gradient_checkpointing=True)
    report = train_full(base, data, tmp_path, given, show_progress=False)
    opened = Checkpoint.open(report["folder"])
    model = load_causal_lm(opened, dtype="float32")
    for tokens, learned in read_examples(data, Tokenizer.from_checkpoint(opened), max_length=32).items:
        found = np.asarray(model.logits(model(jnp.asarray(tokens[None]))))[0].argmax(-1)
        np.testing.assert_array_equal(found[:-1][learned[1:]], tokens[learned])
    assert sorted(opened.names()) == sorted(Checkpoint.open(base).names())
    assert (opened.config["torch_dtype"], opened.generation_config) == ("float32", {"temperature": 0.7})


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_have_the_layout_of_their_base(stacked, data, tmp_path):
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=1)
    whole = Checkpoint.open(tiny_checkpoint(tmp_path / "stacks", family="qwen3_moe", **sizes))
    model = load_causal_lm(whole, dtype="float32")
    base = save(model, tmp_path / "base", config=whole.config, tokenizer_from=whole.folder, stacked=stacked)
    report = train_full(base, data, tmp_path / "run", settings(steps=1), show_progress=False)
    assert sorted(Checkpoint.open(report["folder"]).names()) == sorted(Checkpoint.open(base).names())


def test_a_resumed_run_gives_the_bits_of_an_undisturbed_one(base, data, whole, tmp_path, monkeypatch):
    save_state = RunStates.save

    def save_and_stop(states, state, step):
        save_state(states, state, step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunStates, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train_lora(base, data, tmp_path, settings(save_every=3), SMALL, show_progress=False)
    assert not (tmp_path / "adapter").exists()
    train_lora(base, data, tmp_path, settings(), SMALL, resume=True, show_progress=False)
    expected = trained(whole[0])
    assert expected
    for key, weight in trained(tmp_path).items():
        np.testing.assert_array_equal(weight, expected[key])


@pytest.mark.parametrize("at_first", [True, False])
def test_a_validation_loss_of_another_step_is_not_reported(base, data, tmp_path, monkeypatch, at_first):
    """The first part of the run has validation data, or the second."""

    def part(has_data, **options):
        options["validation_data"] = data if has_data else None
        return train_lora(base, data, tmp_path, settings(save_every=3), SMALL, show_progress=False, **options)

    def stop(states, state, step):
        save_state(states, state, step)
        raise KeyboardInterrupt

    save_state = RunStates.save
    with monkeypatch.context() as patch:
        patch.setattr(RunStates, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            part(at_first)
    report = part(not at_first, resume=True)
    assert report["loss"] > 0
    assert "validation_loss" not in report


def test_a_step_of_two_parts_equals_one_batch(base, data, whole, tmp_path):
    """Though the parts have different numbers of trained tokens."""
    train_lora(base, data, tmp_path, settings(batch_size=2, gradient_accumulation=2), SMALL, show_progress=False)
    parts, one = trained(tmp_path), trained(whole[0])
    for key, weight in one.items():
        np.testing.assert_allclose(parts[key], weight, atol=2e-4 * abs(weight).max())


def test_four_devices_train_as_one_does(tmp_path):
    for found in run_on_devices(4, "tests.support.finetune", tmp_path).values():
        assert found["weights"] < 1e-3
        assert found["losses"] < 1e-4
        assert found["learned"] < 0.9


def test_chosen_layers_alone_get_an_adapter(tmp_path):
    opened = Checkpoint.open(tiny_checkpoint(tmp_path / "base"))
    abstract = AbstractModel.from_module(load_causal_lm(opened, dtype="float32"))
    chosen = TrainedAdapter.of(abstract, LoraSettings(2, 4, "q_proj, layers.1.mlp.up_proj"))
    chosen.save(chosen.initial(0), tmp_path / "adapter", opened, "somebody/tiny")
    adapter = Adapter.open(tmp_path / "adapter")
    layers = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    assert sorted(adapter.pairs) == sorted(layers)
    assert adapter.settings["target_modules"] == ["model.layers.1.mlp.up_proj", "q_proj"]


def test_a_run_continues_with_its_own_settings_only(base, data, whole):
    folder, _ = whole
    for changes, lora, problem in (
        ({}, SMALL, "a run has its state here; resume it"),
        ({"seed": 1}, SMALL, "made with seed 0, now 1"),
        ({"learning_rate": 3e-2}, SMALL, "made with peak_learning_rate 0.01, now 0.03"),
        ({}, LoraSettings(4, 9), "made with lora"),
    ):
        resume = bool(changes) or lora is not SMALL
        with pytest.raises(CheckpointError, match=problem):
            train_lora(base, data, folder, settings(**changes), lora, resume=resume, show_progress=False)


def test_a_run_continues_with_its_own_base_and_examples_only(base, data, whole, tmp_path):
    other = tiny_checkpoint(tmp_path / "base", num_hidden_layers=1, seed=1)
    pairs = write_examples(tmp_path / "pairs.jsonl", [("a fox", "12")])
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a fox12"}))  # the same tokens, of which more are trained
    train_lora(base, pairs, tmp_path / "run", settings(steps=1), SMALL, show_progress=False)
    for model, examples, folder, problem in (
        (other, data, whole[0], "made with base"),
        (base, texts, tmp_path / "run", "made with data"),
    ):
        given = settings() if folder == whole[0] else settings(steps=1)
        with pytest.raises(CheckpointError, match=problem):
            train_lora(model, examples, folder, given, SMALL, resume=True, show_progress=False)


def test_a_run_with_a_template_that_writes_the_date_continues_at_another_time(base, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a fox"}, {"role": "assistant", "content": "river"}]})
    )
    dated = tmp_path / "base"
    shutil.copytree(base, dated)
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + CHAT_TEMPLATE)
    train = partial(train_lora, dated, tmp_path / "data.jsonl", tmp_path / "run", show_progress=False)
    train(settings(steps=1), SMALL)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    train(settings(steps=1), SMALL, resume=True)
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_quantised_weights_are_trained_as_floats_only_on_request(data, tmp_path):
    plain = tiny_checkpoint(tmp_path / "plain")
    opened = Checkpoint.open(plain)
    config = {**opened.config, "tie_word_embeddings": False}
    model = load_causal_lm(opened, dtype="float32", quantization=(8, None))
    quantized = save(model, tmp_path / "quantized", config=config, tokenizer_from=plain)
    with pytest.raises(CheckpointError, match=r"quantised, and training needs floats.*--dequantize"):
        train_lora(quantized, data, tmp_path / "run", settings(), show_progress=False)
    given = settings(dequantize=True)
    job = Job(quantized, data, None, given, tmp_path / "run", resume=False, show_progress=False)
    floats, exact = job.load("float32"), load_causal_lm(opened, dtype="float32")
    tokens = jnp.arange(2, 30)[None]
    difference = floats(tokens) - exact(tokens)
    assert jnp.linalg.norm(difference) < 0.05 * jnp.linalg.norm(exact(tokens))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
        ({"batch_size": 3, "devices": 2}, "batch_size: 3 examples do not divide over 2 devices"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number of more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number of more than 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected a number of at least 0"),
        ({"dtype": "float16"}, "dtype: expected one of"),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"max_length": 1}, "max_length: expected a whole number of at least 2"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes, problem):
    with pytest.raises(InvalidParameterError, match=problem):
        FinetuneSettings(**{"learning_rate": 1e-3, **changes})


def test_target_modules_that_are_not_a_text_are_refused():
    with pytest.raises(InvalidParameterError, match=r"target_modules: expected .* got \['q_proj'\]"):
        LoraSettings(target_modules=["q_proj"])


def test_what_does_not_fit_the_model_or_the_machine_is_refused(base, data, tmp_path):
    def attempt(lora=SMALL, **changes):
        train_lora(base, data, tmp_path / "run", settings(**changes), lora, show_progress=False)

    with pytest.raises(InvalidParameterError, match="max_length: the model reads 512 tokens at most, got 600"):
        attempt(max_length=600)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameterError, match=r"output: .*file is a file; expected a folder"):
        train_lora(base, data, tmp_path / "file", settings(), SMALL, show_progress=False)
    with pytest.raises(InvalidParameterError, match="warmup_steps: expected fewer than the 6 steps, got 6"):
        attempt(warmup_steps=6)
    with pytest.raises(InvalidParameterError, match="devices: 64 are asked for"):
        attempt(devices=64, batch_size=64)
    with pytest.raises(InvalidParameterError, match="no linear layer is named 'lm_head'; expected all-linear, or some"):
        attempt(LoraSettings(4, 8, "q_proj,lm_head"))
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_run_whose_loss_is_not_finite_ends_before_it_writes_a_state(base, data, tmp_path):
    given = settings(learning_rate=1e30, save_every=4)
    with pytest.raises(InvalidParameterError, match="learning_rate: the loss was nan at step 2"):
        train_lora(base, data, tmp_path, given, SMALL, show_progress=False)
    assert RunStates(tmp_path, {}).step is None
    assert not (tmp_path / "adapter").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(data, tmp_path):
    base = tiny_checkpoint(tmp_path / "base", num_hidden_layers=1, vocab_size=300)
    tiny_tokenizer(base, vocab_size=320)
    with pytest.raises(CheckpointError, match=r"its tokenizer gives .* the number 3\d\d, and the model has 300 tokens"):
        train_lora(base, data, tmp_path / "run", settings(), SMALL, show_progress=False)


def test_a_loss_of_the_experts_balance_is_refused(data, tmp_path):
    base = tiny_checkpoint(tmp_path / "base", num_hidden_layers=1)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    with pytest.raises(UnsupportedModelError, match="output_router_logits is not supported"):
        train_lora(base, data, tmp_path / "run", settings(), SMALL, show_progress=False)


def test_epochs_become_steps():
    assert FinetuneSettings(1e-3, batch_size=4, epochs=2).schedule(10).steps == 5
    assert FinetuneSettings(1e-3, batch_size=4, gradient_accumulation=2, epochs=3).schedule(10).steps == 4
    schedule = FinetuneSettings(1e-3, batch_size=1, epochs=1).schedule(100)
    assert (schedule.steps, schedule.warmup_steps) == (100, 5)
    assert FinetuneSettings(1e-3, steps=7).schedule(1).warmup_steps == 0
