"""The callable of Ray Data without Ray: rows in, rows out, whatever is in them."""

import asyncio

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from verax.errors import EngineDeadError
from verax.ray import generate as module
from verax.ray.generate import Generate

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


def column(*values):
    found = np.empty(len(values), object)
    found[:] = values
    return found


def test_each_row_gets_its_answer_and_a_bad_one_its_reason(generate):
    params = column(None, '{"max_tokens": 2}', None, '{"max_tokens": 0}', "{", {"max_tokens": 3, "stop": None}, None)
    batch = {
        "custom_id": np.arange(7),
        "prompt": column("abc", "abc", "abc " * 100, "abc", "abc", [5, 6, 7], None),
        "sampling_params": params,
    }
    found = asyncio.run(generate(batch))
    assert found["custom_id"].tolist() == list(range(7))
    assert [n if e is None else e for n, e in zip(found["num_output_tokens"], found["error"], strict=True)][:2] == [
        4,
        2,
    ]
    assert found["text"][0].startswith(found["text"][1])
    assert found["num_output_tokens"][5] == 3
    assert found["num_prompt_tokens"][5] == 3
    reasons = [error and error.split(" ")[0] for error in found["error"]]
    assert reasons == [None, None, "prompt:", "max_tokens:", "Input", None, "prompt:"]
    assert [found["text"][i] for i in (2, 3, 4, 6)] == [None] * 4


def test_a_dead_engine_ends_the_actor(generate, monkeypatch):
    ended = []

    def end(error):
        ended.append(error)
        raise SystemExit

    async def dead(*arguments):
        raise EngineDeadError("the engine has failed")

    monkeypatch.setattr(module, "end_actor", end)
    monkeypatch.setattr(generate._llm, "collect", dead)
    with pytest.raises(SystemExit):
        asyncio.run(generate({"prompt": column("abc")}))
    assert len(ended) == 1
