"""A model's programs compiled as a part of its plan, by this machine's own compiler in the place of another's."""

import pytest

from tests.support.tiny import HYBRID, tiny_config
from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.plan.compiled import programs, run
from verax.plan.compiled.programs import programs_of
from verax.plan.compiled.topology import Compiler
from verax.plan.devices import find_device
from verax.plan.model import Described, describe

HERE = find_device("cpu", memory=4e9, bandwidth=1e10, flops=1e12)
TINY = Described("tiny", "text", tiny_config("qwen3"))
SMALL = dict(max_num_seqs=2, context=32, dtype="float32")


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setattr(run, "compiler_of", lambda device: Compiler("jaxlib", "jaxlib", "", {}))
    monkeypatch.setattr(run, "topology_mesh", lambda device, count: make_mesh((count,), ("tensor",)))


def test_a_language_models_decode_and_mixed_step_are_compiled():
    found = run.compile_model(TINY, HERE, **SMALL)
    assert [row["name"].partition(":")[0] for row in found["programs"]] == ["decode step", "mixed step"]
    assert all(row["findings"]["host_transfers"] == 0 for row in found["programs"])
    assert (found["devices"], found["depth"], found["fits"]) == (1, None, True)


def test_a_program_larger_than_the_device_does_not_fit():
    small = find_device("cpu", memory=1e5, bandwidth=1e10, flops=1e12)
    assert run.compile_model(TINY, small, **SMALL)["fits"] is False


def test_an_encoder_and_a_video_model_have_one_program_each():
    encoder = run.compile_model(describe("encoder-builtin"), HERE, sentences=2, tokens=16, depth=1)
    assert [row["name"] for row in encoder["programs"]] == ["2 sentences of 16 tokens"]
    video = run.compile_model(describe("video-builtin"), HERE, num_frames=5, height=32, width=32, depth=1)
    assert [row["name"] for row in video["programs"]] == [
        "denoising step, prompt and negative prompt: 5 frames of 32 x 32"
    ]


@pytest.mark.parametrize("model", [TINY, Described("tiny", "text", tiny_config("qwen3_5_text", **HYBRID))])
def test_a_depth_cuts_layers_and_the_lists_that_have_an_entry_for_each(model):
    mesh = make_mesh((1,), ("tensor",))

    def weights(depth):
        return len(programs_of(model, HERE, mesh, depth=depth, **SMALL)[0].arguments[0])

    assert weights(1) < weights(2) <= weights(None)


def test_a_configuration_of_text_within_another_is_cut_too():
    nested = {"text_config": {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]}}
    assert programs._cut(nested, 2)["text_config"] == {"num_hidden_layers": 2, "layer_types": ["a", "b"]}


def test_a_gguf_file_cannot_be_cut():
    opened = TINY._replace(opened=object())
    with pytest.raises(InvalidParameterError, match="depth: a GGUF file"):
        programs_of(opened, HERE, make_mesh((1,), ("tensor",)), depth=1)
