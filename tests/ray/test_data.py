"""Callables of Ray Data without Ray: rows in, rows out, whatever is in them."""

import asyncio

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax.errors import EngineDeadError, InvalidParameterError
from verax.ray import data as module
from verax.ray.data import Clips, Embed, Generate

ENGINE = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "set_threads", lambda: None)
        patch.setenv("VERAX_CACHE_DIR", str(folder))
        made = Generate(
            str(tiny_checkpoint(folder / "tiny")), sampling_params={"temperature": 0, "max_tokens": 4}, **ENGINE
        )
    yield made
    asyncio.run(made._llm.shutdown())


def batch(**columns):
    return {name: np.array(values, object) for name, values in columns.items()}


async def test_each_row_gets_its_answer_and_a_bad_one_its_reason(generate):
    params = [None, '{"max_tokens": 2}', None, '{"max_tokens": 0}', "{", {"max_tokens": 3, "stop": None}, None]
    prompts = ["abc", "abc", "abc " * 100, "abc", "abc", [5, 6, 7], None]
    answers = await generate(batch(custom_id=range(7), prompt=prompts, sampling_params=params))
    assert answers["custom_id"].tolist() == list(range(7))
    reasons = [error and error.split(" ")[0] for error in answers["error"]]
    assert reasons == [None, None, "prompt:", "max_tokens:", "Input", None, "prompt:"]
    assert answers["num_output_tokens"].tolist() == [4, 2, 0, 0, 0, 3, 0]
    assert answers["text"][0].startswith(answers["text"][1])
    assert answers["num_prompt_tokens"][5] == 3
    assert [answers["text"][i] for i in (2, 3, 4, 6)] == [None] * 4


def test_a_row_has_lists_where_ray_has_arrays_in_objects_and_nothing_where_it_has_nan():
    def array(*items):
        made = np.empty(len(items), object)
        made[:] = items
        return made

    call = {"function": {"name": "f", "arguments": {"ids": np.arange(2)}}}
    messages = array(
        {"role": "user", "content": array({"type": "text", "text": "a"})}, {"tool_calls": array(call, call)}
    )
    picture = np.zeros((2, 2, 3), np.uint8)
    (row,) = module.rows_of({"messages": array(messages), "seed": np.array([np.nan]), "image": array(picture)})
    plain = {"function": {"name": "f", "arguments": {"ids": [0, 1]}}}
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"tool_calls": [plain, plain]},
    ]
    assert row["seed"] is None
    assert row["image"] is picture


async def test_a_dead_engine_ends_the_actor(generate, monkeypatch):
    ended = []

    def end(error):
        ended.append(error)
        raise RuntimeError("the process has ended")

    async def dead(*arguments):
        raise EngineDeadError("the engine has failed")

    monkeypatch.setattr(module, "end_actor", end)
    monkeypatch.setattr(generate._llm, "collect", dead)
    with pytest.raises(RuntimeError, match="has ended"):
        await generate(batch(prompt=["abc"]))
    assert len(ended) == 1


def test_each_text_gets_its_vector_and_a_bad_one_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "set_threads", lambda: None)
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    folder = tiny_encoder(tmp_path / "encoder")
    sentence_files(folder, max_seq_length=16)
    embed = Embed(str(folder), output="vector")
    texts = np.array(["a dog", None, "a cat"], object)
    rows = embed({"text": texts, "custom_id": np.arange(3)})
    assert rows["vector"].shape == (3, embed._encoder.dimension)
    assert rows["vector"].dtype == np.float32
    assert rows["error"].tolist() == [None, "text: expected a text, got None", None]
    assert not rows["vector"][1].any()
    alone = embed({"text": np.array(["a cat"], object)})
    assert alone["vector"][0] == pytest.approx(rows["vector"][2], abs=1e-5)


class Pipeline:
    """A pipeline that writes what it was asked for."""

    made = []

    def __call__(self, prompt, **options):
        if prompt == "refused":
            raise InvalidParameterError("num_frames: expected 5")
        self.made.append((prompt, options))
        return self

    def save(self, path):
        path.write_text("clip")


@pytest.fixture
def clips(monkeypatch, tmp_path):
    from verax.video.pipeline import VideoPipeline

    monkeypatch.setattr(module, "set_threads", lambda: None)
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(VideoPipeline, "from_pretrained", lambda *a, **o: Pipeline())
    monkeypatch.setattr(Pipeline, "made", [])
    return Clips(tmp_path / "clips", request={"num_frames": 5, "seed": 1})


def test_each_row_is_a_file_by_its_id_and_a_bad_one_has_its_reason(clips, tmp_path):
    rows = batch(custom_id=["a-1", "../b", "c"], prompt=["one", "two", "refused"], seed=[None, 7, None])
    made = clips(rows)
    assert made["path"][0] == str(tmp_path / "clips" / "a-1.mp4")
    assert made["path"][2] is None
    assert made["error"].tolist() == [None, None, "num_frames: expected 5"]
    assert all((tmp_path / "clips") in path.parents for path in (tmp_path / "clips").iterdir())
    assert len(list((tmp_path / "clips").iterdir())) == 2
    assert Pipeline.made == [("one", {"num_frames": 5, "seed": 1}), ("two", {"num_frames": 5, "seed": 7})]


def test_whole_numbers_of_a_column_that_lacks_some_are_whole(clips):
    """Ray makes floats of them."""
    clips({**batch(custom_id=["a", "b"], prompt=["one", "two"]), "seed": np.array([7.0, np.nan])})
    assert [(options["seed"], type(options["seed"])) for _, options in Pipeline.made] == [(7, int), (1, int)]


def test_a_clip_that_is_there_is_not_made_again(clips):
    rows = batch(custom_id=["a"], prompt=["one"])
    assert clips(rows)["path"] == clips(rows)["path"]
    assert len(Pipeline.made) == 1
