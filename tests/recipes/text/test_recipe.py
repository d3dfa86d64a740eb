"""The built-in model as shipped: unseen text, unseen sums, endings; and its recipe, for a few steps."""

import pytest

from recipes.text import recipe
from recipes.text.evaluation import evaluate
from recipes.text.recipe import train_builtin
from verax import builtin
from verax.text.engine.llm import LLM


@pytest.fixture(scope="module")
def measured():
    return evaluate(builtin.text_model(), samples=40)


def test_it_predicts_unseen_text(measured):
    assert measured["held_out_loss"] < 0.65


def test_it_adds_numbers_that_it_never_saw_added(measured):
    assert measured["addition_chat"] >= 0.98
    assert measured["addition_text"] >= 0.97


def test_its_answers_end_by_themselves_and_its_json_parses(measured):
    assert measured["stories_end"] >= 0.95
    assert measured["json_valid"] >= 0.95


def test_it_is_small():
    assert sum(file.stat().st_size for file in builtin.text_model().iterdir()) < 12_000_000


def test_the_recipe_learns_resumes_and_exports_what_the_engine_loads(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.text.tokenizer.TRAINING_DOCUMENTS", 500)
        patch.setattr(recipe, "ROWS", ((4, 64), (2, 128)))
        patch.setattr(recipe, "CONFIG", {**recipe.CONFIG, "num_hidden_layers": 2})
        train_builtin(tmp_path, steps=6, stop_at=3, show_progress=False)
        folder = train_builtin(tmp_path, steps=6, resume=True, show_progress=False)
    output = LLM(folder, max_num_seqs=1, max_model_len=64, use_tqdm=False).generate("Once", use_tqdm=False)[0]
    assert output.outputs[0].token_ids
