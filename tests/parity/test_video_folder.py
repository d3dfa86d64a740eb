"""Folders that diffusers saves: read by the original's names, converted both ways bit for bit, loaded by diffusers."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from safetensors.torch import load_file
from transformers import CLIPVisionModel, CLIPVisionModelWithProjection, UMT5EncoderModel

from tests.support.tiny_video import diffusers_pipeline, transformer_class
from verax.checkpoint.video.convert import convert
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import EXPERTS


@pytest.fixture(scope="module", params=["i2v", "df", "i2v-a14b", "flf2v", "vace", "ti2v"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """A random pipeline as diffusers saves it, with settings and a dtype that are not the published ones."""
    path = tmp_path_factory.mktemp(kind) / "diffusers"
    pipeline = diffusers_pipeline(kind, path)
    for transformer in (pipeline.components.get(name) for name in EXPERTS):
        if transformer is not None:
            transformer.register_to_config(rope_max_seq_len=32)
    pipeline.scheduler.register_to_config(flow_shift=7.0)
    pipeline.text_encoder.bfloat16()
    pipeline.save_pretrained(path)
    (path / "tokenizer" / "spiece.model").write_bytes(b"\0\1\2")
    return path


@pytest.fixture(scope="module")
def there(folder):
    """The models in the original layout."""
    return convert(VideoFolder(folder), folder.parent / "original", "original")


@pytest.fixture(scope="module")
def back(there):
    """And back in diffusers'."""
    return convert(VideoFolder(there), there.parent / "again", "diffusers")


def weights(folder):
    """All of a folder's parts by name, as stored."""
    return {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")}


def assert_equal(got, expected):
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert (name, got[name].dtype, got[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(got[name], tensor), name


def test_there_and_back_every_bit_is_the_same(folder, there, back, tmp_path):
    again = convert(VideoFolder(back), tmp_path / "third", "original")
    expected, got = weights(folder), weights(back)
    assert set(got) == set(expected)
    for path, tensors in expected.items():
        # transformers 5 saves CLIPVisionModel without the prefix that published files have.
        bare = "image_encoder" in path and not any(name.startswith("vision_model.") for name in tensors)
        assert_equal({name.removeprefix("vision_model." if bare else ""): t for name, t in got[path].items()}, tensors)
    for path, tensors in weights(there).items():
        assert_equal(weights(again)[path], tensors)


def test_there_and_back_all_else_is_the_same(folder, back):
    assert (back / "tokenizer/spiece.model").read_bytes() == (folder / "tokenizer/spiece.model").read_bytes()
    configs = [path.relative_to(folder) for path in folder.glob("*/*config.json")]
    assert len(configs) >= 4
    for path in configs:
        ours, theirs = (json.loads((at / path).read_text()) for at in (back, folder))
        assert all(key.startswith("_") or ours[key] == theirs[key] for key in theirs), path
    for name in ("pipeline", "boundary_ratio", "expand_timesteps"):
        assert getattr(VideoFolder(back), name) == getattr(VideoFolder(folder), name)


def test_diffusers_loads_what_is_converted_back(kind, folder, back):
    transformers = {name: transformer_class(kind) for name in EXPERTS if name in VideoFolder(folder)}
    for name, class_name in {**transformers, "vae": "AutoencoderKLWan"}.items():
        architecture = getattr(diffusers, class_name)
        model = architecture.from_config(architecture.load_config(back / name))
        model.load_state_dict(load_file(back / name / "diffusion_pytorch_model.safetensors"), strict=True)
        assert_equal(model.state_dict(), load_file(folder / name / "diffusion_pytorch_model.safetensors"))
    ours, theirs = (UMT5EncoderModel.from_pretrained(at / "text_encoder", dtype="auto") for at in (back, folder))
    assert_equal(ours.state_dict(), theirs.state_dict())
    if (folder / "image_encoder").is_dir():
        vision = CLIPVisionModel if kind == "flf2v" else CLIPVisionModelWithProjection
        ours, theirs = (vision.from_pretrained(at / "image_encoder") for at in (back, folder))
        assert_equal(ours.state_dict(), theirs.state_dict())


def test_the_originals_pth_files_give_the_same_weights(there, tmp_path):
    plain = VideoFolder(there)
    shutil.copytree(there, tmp_path / "pickled")
    names = [name for name in ("vae", "text_encoder", "image_encoder") if name in plain]
    for path in (tmp_path / "pickled").glob("*.safetensors"):
        if not path.name.startswith("diffusion"):
            more = {"textual.token.weight": torch.ones(2), "log_scale": torch.ones(())} if "clip" in path.name else {}
            torch.save({**load_file(path), **more}, path.with_suffix(".pth"))
            path.unlink()
    pickled = VideoFolder(tmp_path / "pickled")
    for name in names:
        ours, expected = pickled.checkpoint(name), plain.checkpoint(name)
        assert sorted(ours.names()) == sorted(expected.names())
        for key in expected.names():
            assert ours.read(key).tobytes() == expected.read(key).tobytes(), key
        assert pickled.config(name) == plain.config(name)
