"""Commands on Gemma 3 270M's file as it stands."""

import pytest

from tests.cli.conftest import few_programs as few_programs
from tests.cli.conftest import run as run
from tests.support.published import gemma_file, minilm_folder

SMALL = ("--max-model-len", 128, "--max-tokens", 8, "--temperature", 0)


@pytest.fixture(scope="module")
def path():
    return gemma_file()


def test_chat_answers_by_a_template_since_a_base_model_has_none(run, few_programs, path, tmp_path):
    template = tmp_path / "questions.jinja"
    template.write_text("{% for message in messages %}Q: {{ message.content }}\nA: {% endfor %}")
    arguments = ("chat", "--model", path, *SMALL, "--message", "What is the capital of France?")
    assert "--chat-template" in run(*arguments).err
    done = run(*arguments, "--chat-template", template)
    assert done.status == 0
    assert done.out.strip()


def test_compare_finds_every_layer_equal_to_transformers(run, path):
    pytest.importorskip("accelerate")
    done = run("compare", path, "--tokens", 24)
    assert done.status == 0


def test_the_demo_runs_the_published_models(capsys):
    from verax.cli import demo
    from verax.published import INSTALL

    gemma_file(), minilm_folder()
    made = demo._published(demo._Transcript())
    assert made["gemma"].startswith(f"{demo.PUBLISHED} there lived")
    assert list(made["minilm"].values()) == [demo.PARAPHRASES[i] for i in (3, 0, 5, 2)]
    out = capsys.readouterr().out
    assert made["gemma"] in out
    assert INSTALL not in out
