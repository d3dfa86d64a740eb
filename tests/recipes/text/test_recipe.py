"""The built-in model as shipped: unseen text, unseen sums, endings; and its recipe, for a few steps."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes.text import evaluation, recipe
from recipes.text.prediction_head import train_head
from recipes.text.recipe import next_token_loss, train_builtin
from verax import builtin
from verax.checkpoint import Checkpoint
from verax.errors import CheckpointError
from verax.models import causal_lm
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def measured():
    """Results of the shipped model, on every fourth sum."""
    with pytest.MonkeyPatch.context() as patch:
        every = evaluation.addition_exam
        patch.setattr(evaluation, "addition_exam", lambda *args, **options: list(every(*args, **options))[::4])
        return evaluation.evaluate(builtin.text_model(), samples=40)


def test_it_predicts_unseen_text(measured):
    assert measured["held_out_loss"] < 0.65


def test_it_adds_numbers_that_it_never_saw_added(measured):
    assert measured["addition_chat"] >= 0.98
    assert measured["addition_text"] >= 0.97


def test_its_answers_end_by_themselves_and_its_json_parses(measured):
    assert measured["stories_end"] >= 0.95
    assert measured["json_valid"] >= 0.95


def test_the_recipe_learns_resumes_and_exports_what_the_engine_loads(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.text.recipe.TRAINING_DOCUMENTS", 500)
        patch.setattr(recipe, "ROWS", ((4, 64), (2, 128)))
        patch.setattr(recipe, "CONFIG", {**recipe.CONFIG, "num_hidden_layers": 2})
        train_builtin(tmp_path, steps=6, stop_at=3, show_progress=False)
        with pytest.raises(CheckpointError, match="made with seed 0, now 1"):
            train_builtin(tmp_path, steps=6, seed=1, resume=True, show_progress=False)
        folder = train_builtin(tmp_path, steps=6, resume=True, show_progress=False)
    output = LLM(folder, max_num_seqs=1, max_model_len=64, use_tqdm=False).generate("Once", use_tqdm=False)[0]
    assert output.outputs[0].token_ids


def test_the_loss_is_the_mean_surprise_of_the_next_token_in_the_same_document():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 5, 7))
    tokens = rng.integers(0, 7, (2, 6))
    segments = np.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2]])
    surprises = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    got = next_token_loss(jnp.asarray(logits, jnp.float32), jnp.asarray(tokens), jnp.asarray(segments))
    np.testing.assert_allclose(got, surprises[counted].mean(), rtol=1e-5)


def test_its_prediction_head_drafts_what_it_answers():
    options = {"dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": 128, "use_tqdm": False}
    llm = LLM(speculative_config={"method": "mtp", "disable_by_batch_size": 1}, **options)
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=80, ignore_eos=True), use_tqdm=False)
    assert llm.spec_decode.num_draft_tokens > 60
    assert llm.spec_decode.acceptance_rate > 0.45


def test_the_head_is_trained_on_what_the_model_expects(tmp_path):
    exported = train_head(tmp_path, steps=2)
    assert causal_lm(Checkpoint.open(exported).config, prediction_head=True)[1].num_nextn_predict_layers == 1
    assert (exported / "tokenizer.json").is_file()
