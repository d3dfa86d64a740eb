"""`verax convert`: either layout to either, whole or not at all; `verax quantize`: as quantised while loading."""

import json
import os
import shutil

import ml_dtypes
import pytest

from tests.support.tiny_encoder import sentence_files
from tests.support.video_folder import CONFIG, SHAPES, VAE, tensors, write_original
from verax import Encoder
from verax.checkpoint import Checkpoint
from verax.checkpoint.video import convert as video_convert
from verax.checkpoint.video.folder import VideoFolder
from verax.text.engine.llm import LLM
from verax.text.engine.sampling_params import SamplingParams


@pytest.fixture
def source(tmp_path):
    return write_original(tmp_path / "source")


def check_written(folder, parts):
    """Check that the weights of a folder's parts are these to the bit."""
    opened = VideoFolder(folder)
    for part, arrays in parts.items():
        checkpoint = opened.checkpoint(part)
        assert sorted(checkpoint.names()) == sorted(arrays)
        for name, array in arrays.items():
            assert checkpoint.read(name).tobytes() == array.tobytes(), name


def test_there_and_back(run, source, tmp_path):
    (source / "verax.json").write_text('{"num_frames": 17}')
    done = run("convert", source, tmp_path / "there", "--to", "diffusers")
    assert done.status == 0
    assert "MB in the layout of diffusers" in done.out
    done = run("convert", tmp_path / "there", tmp_path / "back", "--to", "original")
    assert done.status == 0
    assert (tmp_path / "back" / f"{VAE}.safetensors").is_file()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert (tmp_path / "back" / "verax.json").read_text() == '{"num_frames": 17}'
    check_written(tmp_path / "back", {part: tensors(part) for part in SHAPES})
    assert sorted(os.listdir(tmp_path)) == ["back", "source", "there"]


def test_a_dtype_rounds_the_transformer_and_leaves_the_vae(run, source, tmp_path):
    assert run("convert", source, tmp_path / "half", "--to", "diffusers", "--dtype", "bfloat16").status == 0
    expected = {part: tensors(part) for part in SHAPES}
    for part in SHAPES.keys() - {"vae"}:
        expected[part] = {name: array.astype(ml_dtypes.bfloat16) for name, array in expected[part].items()}
    check_written(tmp_path / "half", expected)


def test_large_weights_are_written_in_numbered_files(source, tmp_path):
    target = video_convert.convert(VideoFolder(source), tmp_path / "out", "diffusers", max_shard_bytes=300)
    folder = target / "transformer"
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors("transformer").values())
    check_written(target, {"transformer": tensors("transformer")})


def test_an_existing_target_is_replaced_only_when_asked(run, source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("x")
    done = run("convert", source, target, "--to", "diffusers")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert "exists already" in done.err
    assert os.listdir(target) == ["mine"]
    assert run("convert", source, target, "--to", "diffusers", "--force").status == 0
    assert not (target / "mine").exists()
    assert VideoFolder(target).layout == "diffusers"
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.parametrize("place", [".", ".."])
def test_the_model_itself_is_not_overwritten(place, run, source):
    done = run("convert", source, source / place, "--to", "diffusers", "--force")
    assert done.status == 1
    assert "that is the model itself" in done.err
    assert (source / "config.json").is_file()


def test_a_failure_on_the_way_leaves_nothing(source, tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    (tmp_path / "target").mkdir()
    with pytest.raises(KeyboardInterrupt):
        video_convert.convert(VideoFolder(source), tmp_path / "target", "diffusers", force=True, progress=stop)
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    assert os.listdir(tmp_path / "target") == []


def test_what_is_missing_is_named_before_anything_is_written(run, source, tmp_path):
    (source / f"{VAE}.safetensors").unlink()
    done = run("convert", source, tmp_path / "out", "--to", "diffusers")
    assert (done.status, done.err.count("\n")) == (1, 1)
    assert f"expected {VAE}.pth" in done.err
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_without_a_layout_or_an_adapter_both_are_named(run, source, tmp_path):
    done = run("convert", source, tmp_path / "out")
    assert done.status == 1
    assert "--to" in done.err
    assert "--lora" in done.err


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(model, **options):
    llm = LLM(
        model, dtype="float32", max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, use_tqdm=False, **options
    )
    return llm.generate([[5, 6, 7, 8]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_rounded_inputs_are_written_and_the_head_stays_as_it_is(run, folder, tmp_path):
    done = run("quantize", tmp_path / "out", "--model", folder, "--bits", 8, "--round-inputs", "--dtype", "float32")
    assert done.status == 0
    opened = Checkpoint.open(tmp_path / "out")
    linear = [name for name in opened.names() if name.endswith("_proj.weight")]
    assert linear
    assert all(opened.read(name).rounds_inputs for name in linear)
    assert {name: opened.kind(name) for name in opened.names() if "embed" in name or "lm_head" in name} == {
        name: "float32" for name in Checkpoint.open(folder).names() if "embed" in name or "lm_head" in name
    }
    assert answer(tmp_path / "out") != answer(folder, quantization="int4")


@pytest.mark.parametrize("options", [["--bits", 4], ["--bits", 8, "--group-size", 32]])
def test_rounded_inputs_need_8_bits_and_a_scale_for_a_row(run, folder, tmp_path, options):
    done = run("quantize", tmp_path / "out", "--model", folder, "--round-inputs", *options)
    assert done.status == 1
    assert "round_inputs: it needs --bits 8" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "value"), [("bits", 3), ("group_size", 48)])
def test_a_precision_that_there_is_not_is_refused_before_the_model_is_read(run, tmp_path, option, value):
    done = run("quantize", tmp_path / "out", "--model", tmp_path / "none", f"--{option.replace('_', '-')}", value)
    assert done.status == 1
    assert f"error: {option}: expected" in done.err


def test_the_written_checkpoint_is_the_model_quantised_while_loading(run, folder, tmp_path):
    for bits in (8, 4):
        output = tmp_path / str(bits)
        done = run("quantize", output, "--model", folder, "--bits", bits, "--dtype", "float32")
        assert done.status == 0
        assert "MB" in done.out
        assert answer(output) == answer(folder, quantization=f"int{bits}")


def test_an_embedding_model_keeps_its_pooling_and_prompts(run, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "base")
    sentence_files(tmp_path / "base", prompts={"query": "abc "})
    base = Encoder(tmp_path / "base")
    assert run("quantize", tmp_path / "out", "--model", tmp_path / "base", "--bits", 8).status == 0
    written = Encoder(tmp_path / "out")
    expected, got = (model.encode(["once upon"], prompt_name="query")[0] for model in (base, written))
    assert got @ expected > 0.99  # 0.2 by the last token, which is the default of language models
