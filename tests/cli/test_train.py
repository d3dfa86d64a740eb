"""`verax train`: which arguments reach the recipes, and what is printed. The recipes have their own tests."""

import pytest


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Calls of the recipes, which here only make their folder."""
    calls = []

    def train_builtin(output, **options):
        calls.append((output, options))
        (output / "model").mkdir(parents=True)
        return output / "model"

    for kind in ("text", "encoder", "video"):
        monkeypatch.setattr(f"verax.train.{kind}.recipe.train_builtin", train_builtin)
        if kind != "text":
            monkeypatch.setattr(f"verax.train.{kind}.evaluation.evaluate", lambda folder: {"unseen_words": 0.5})
    return calls


@pytest.mark.parametrize("kind", ["text", "encoder", "video"])
def test_the_options_reach_the_recipe(run, trained, tmp_path, kind):
    done = run("train", f"{kind}-builtin", "-o", tmp_path / "run", "--steps", 7, "--seed", 3, "--resume")
    ((output, options),) = trained
    assert done.status == 0
    assert output == tmp_path / "run"
    assert {name: options[name] for name in ("steps", "seed", "resume")} == {"steps": 7, "seed": 3, "resume": True}
    assert done.out.endswith(f"trained: {tmp_path / 'run' / 'model'}\n")
    assert ("unseen words: 0.500\n" in done.out) == (kind != "text")


def test_the_recipes_own_schedule_is_the_default(run, trained, tmp_path):
    run("train", "text-builtin", "-o", tmp_path / "run")
    assert trained[0][1] == {"steps": None, "seed": 0, "resume": False}


def test_evaluate_measures_a_video_model_and_trains_nothing(run, trained, tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    done = run("train", "video-builtin", "-o", tmp_path / "run", "--evaluate")
    assert trained == []
    assert done.out == f"unseen words: 0.500\nmeasured: {tmp_path / 'run' / 'model'}\n"
