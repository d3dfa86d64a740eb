"""`verax generate`: arguments and pipes in, texts and JSON out, errors as one line; with adapters and with programs."""

import json
import re

import pytest

from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.usefixtures("few_programs")

QUICK = ("--dtype", "float32", "--max-tokens", "6", "--max-num-seqs", "2", "--ignore-eos")


def test_one_prompt_is_shown_with_its_continuation(run, folder):
    done = run("generate", "abc def", "-m", folder, "--temperature", "0", *QUICK)
    assert done.status == 0
    assert done.out.startswith("abc def")
    assert done.out.endswith("\n")
    assert "6 tokens" in done.err


def test_json_has_a_line_for_each_prompt_in_order(run, folder):
    done = run("generate", "abc", "once upon", "-m", folder, "--json", "-n", "2", "--logprobs", "2", *QUICK)
    records = [json.loads(line) for line in done.out.splitlines()]
    assert [record["prompt"] for record in records] == ["abc", "once upon"]
    for record in records:
        assert [len(sample["token_ids"]) for sample in record["outputs"]] == [6, 6]
        assert all(len(step) >= 2 for step in record["outputs"][0]["logprobs"])


def test_prompts_come_from_a_file_and_from_a_pipe(run, folder, tmp_path):
    lines = "abc def\n\nonce upon a time\n"
    (tmp_path / "prompts.txt").write_text(lines)
    common = ("-m", folder, "--temperature", "0", "--json", *QUICK)
    from_file = run("generate", "--file", tmp_path / "prompts.txt", *common)
    piped = run("generate", *common, stdin=lines)
    assert len(from_file.out.splitlines()) == 2
    strip = lambda out: [json.loads(line)["outputs"] for line in out.splitlines()]
    assert strip(from_file.out) == strip(piped.out)


def test_drafts_change_no_text_and_are_counted(run, folder):
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}'
    command = ("generate", "abc abc abc abc", "-m", folder, "--temperature", "0", *QUICK)
    plain, drafted = run(*command), run(*command, "--speculative-config", drafts)
    assert drafted.status == 0
    assert drafted.out == plain.out
    assert "drafts held" in drafted.err
    assert "drafts held" not in plain.err


def test_a_missing_model_is_one_line_with_a_traceback_for_debug_only(run):
    plain = run("generate", "-m", "/no/such/model", "abc")
    assert plain.status == 1
    assert plain.err == (
        "verax: error: /no/such/model: no such folder; expected a folder with config.json and weights, "
        "a .gguf file, or a hub id (organisation/name)\n"
    )
    for arguments in (["--debug", "generate"], ["generate", "--debug"]):
        debug = run(*arguments, "-m", "/no/such/model", "abc")
        assert debug.status == 1
        assert "Traceback" in debug.err


def test_an_unknown_architecture_names_what_is_known(run, tmp_path):
    tiny_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    done = run("generate", "-m", tmp_path, "abc")
    assert done.status == 1
    assert "'mamba'; language models supported are qwen3" in done.err


def test_token_ids_serve_a_checkpoint_without_tokenizer(run, tmp_path):
    folder = tiny_checkpoint(tmp_path / "ids", max_position_embeddings=128)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    common = ("-m", folder, "--skip-tokenizer-init", "--temperature", "0", *QUICK)
    lines = [list(map(int, line.split())) for line in run("generate", "5 6 7", "8,9", *common).out.splitlines()]
    records = [json.loads(line) for line in run("generate", "5 6 7", "8,9", "--json", *common).out.splitlines()]
    assert lines == [record["outputs"][0]["token_ids"] for record in records]
    wrong = run("generate", "five", *common)
    assert wrong.status == 2
    assert "--skip-tokenizer-init" in wrong.err


FORMS = {
    "choice": (["--choice", "yes", "--choice", "no"], r"yes|no"),
    "regex": (["--regex", "[0-9]{2}/[0-9]{2}"], r"[0-9]{2}/[0-9]{2}"),
    "json-schema": (["--json-schema", "schema.json"], r"12|42"),
    "grammar": (["--grammar", "grammar.gbnf"], r"<(a|b)>"),
}


@pytest.mark.parametrize(("arguments", "pattern"), FORMS.values(), ids=FORMS)
def test_an_answer_has_the_form_that_an_option_asks_for(run, folder, tmp_path, monkeypatch, arguments, pattern):
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'verax[server]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text('{"enum": [12, 42]}')
    (tmp_path / "grammar.gbnf").write_text('root ::= "<" ("a" | "b") ">"')
    done = run("generate", "Q: ", "-m", folder, "--max-tokens", "20", "--max-num-seqs", "1", *arguments)
    assert done.status == 0, done.err
    assert re.fullmatch(pattern, done.out.removeprefix("Q: ").removesuffix("\n"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    sizes = linear_sizes(random_weights(tiny_config(max_position_embeddings=128)))
    weights = adapter_weights(sizes, rank=20, spread=0.5)  # above the engine's default rank
    return save_adapter(tmp_path_factory.mktemp("adapters") / "fox", weights, rank=20, lora_alpha=30)


def test_generate_and_chat_go_through_an_adapter_as_if_it_were_merged(run, folder, adapter, tmp_path):
    done = run("convert", folder, tmp_path / "merged", "--lora", adapter)
    assert done.status == 0
    assert "14 weights changed" in done.out
    models = [("-m", folder, "--lora", adapter), ("-m", tmp_path / "merged"), ("-m", folder)]
    shown = [run("generate", "abc def", *model, "--temperature", "0", *QUICK).out for model in models]
    assert shown[0] == shown[1] != shown[2]
    chat = ("chat", "--message", "abc", "--dtype", "float32", "--max-tokens", "6", "--temperature", "0")
    assert run(*chat, *models[0]).out == run(*chat, *models[1]).out


def test_info_says_what_an_adapter_is(run, adapter):
    facts = json.loads(run("info", adapter, "--json").out)
    expected = {"adapter": "LoRA", "base_model": "somebody/tiny", "rank": ["20"], "scale": ["1.5"]}
    assert expected.items() <= facts.items()
    assert facts["modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert "somebody/tiny" in run("info", adapter).out


def test_a_command_starts_with_the_programs_of_another(run, folder, tmp_path):
    programs = tmp_path / "programs"
    sizes = ["--max-num-seqs", 2, "--max-model-len", 64, "--max-num-batched-tokens", 32]
    done = run("compile", folder, "-o", programs, "--device", "cpu", *sizes)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"{programs}: 6 programs, ")  # two that decode several tokens
    options = ["--model", folder, "--max-tokens", 4, "-t", 0, "--ignore-eos", "--programs", programs]
    done = run("generate", "abc", *options)
    assert done.status == 0
    assert done.out.startswith("abc")


def test_another_device_than_the_attached_one_is_refused(run, tmp_path):
    done = run("compile", "-o", tmp_path / "programs", "--device", "h100")
    assert done.status == 1
    assert "h100 is 'NVIDIA H100 80GB HBM3', attached is 'cpu'" in done.err
    assert not (tmp_path / "programs").exists()
