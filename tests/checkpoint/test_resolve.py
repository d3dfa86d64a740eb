"""What a user may name: a folder or a hub id. The hub is never asked here: it is cached, offline, or not there."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from verax.checkpoint import Checkpoint, resolve
from verax.checkpoint.resolve import resolve_video
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import CheckpointError, InvalidParameterError

ASK = "import sys; from verax.checkpoint import resolve; print(resolve(sys.argv[1]))"
CAUGHT = f"""
from verax.errors import CheckpointError
try:
    exec({ASK!r})
except CheckpointError as error:
    print(error)
"""


def ask(model, home, **environment):
    """`resolve` in a process of its own, as the hub's settings are read once; what it prints."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    settings |= {"HF_HOME": str(home), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", CAUGHT, model], env=settings, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def cached(home):
    """A hub cache with one snapshot, laid out as huggingface_hub does."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = home / "hub" / "models--org--tiny.model-1"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["nowhere", "./no/where", "/no/where/else", "a/b/c", Path("org/name"), "../x"])
def test_the_error_of_anything_else_says_what_is_possible(model):
    with pytest.raises(CheckpointError) as caught:
        resolve(model)
    assert str(model) in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "hub id" in str(caught.value)


@pytest.mark.parametrize("find", [resolve, resolve_video])
def test_an_empty_text_is_not_the_current_folder(find):
    with pytest.raises(CheckpointError, match="model: got an empty text; expected a folder"):
        find("")


def test_a_file_is_not_a_checkpoint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: this is a file; expected a folder with config\.json"
    ):
        Checkpoint.open(file)


# Port 9 of this machine: nobody listens.
@pytest.mark.parametrize("settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_a_cached_snapshot_is_used_offline_and_when_the_hub_does_not_answer(settings, tmp_path):
    snapshot = cached(tmp_path)
    assert ask("org/tiny.model-1", tmp_path, **settings) == str(snapshot)


def test_offline_and_not_cached_is_an_error_in_one_line(tmp_path):
    said = ask("org/none", tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("org/none: no such folder here, not in the local cache")
    assert "offline" in said
    assert "config.json" in said
    assert "\n" not in said


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Arguments of the calls of the hub's client, which gives `tmp_path`."""
    seen = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: seen.append({**options, "name": name}) or tmp_path
    )
    return seen


def fetched(call, files):
    """The files that a call would fetch of a repository."""
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns")}
    return list(huggingface_hub.utils.filter_repo_objects(files, **patterns))


def test_a_revision_is_refused_where_a_folder_has_the_name_of_the_hub_id(calls, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")
    with pytest.raises(InvalidParameterError, match="revision"):
        resolve("org/name", revision="v2")
    assert not calls


def test_only_the_files_of_a_checkpoint_are_asked_for(calls, tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert resolve("org/name", revision="v2") == tmp_path
    (call,) = calls
    assert (call["name"], call["revision"]) == ("org/name", "v2")
    wanted = [
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "adapter_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "artifact.metadata",
    ]
    unwanted = ["pytorch_model.bin", "README.md", "original/model.safetensors", "onnx/config.json", "model.gguf"]
    unwanted += ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    assert fetched(call, [*wanted, *unwanted]) == wanted


def test_pickled_weights_are_asked_for_where_there_are_no_others(calls, tmp_path):
    resolve("org/name")
    wanted = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"]
    others = ["training_args.bin", "optimizer.bin", "onnx/pytorch_model.bin", "rust_model.ot"]
    assert [fetched(call, [*wanted, *others]) for call in calls] == [[], wanted]


def test_folders_of_modules_are_fetched_where_a_file_lists_them(calls, tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
    assert resolve("org/name") == tmp_path
    files = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"]
    others = ["2_Dense/onnx/model.safetensors", "onnx/model.safetensors", "onnx/config.json"]
    assert [fetched(call, [*files, *others]) for call in calls] == [[], files]


def test_of_a_video_model_either_layout_is_asked_for(calls, tmp_path):
    (tmp_path / "config.json").write_text('{"inject_sample_info": false}')
    assert resolve_video("org/SkyReels-V2-DF-14B-720P") == tmp_path
    wanted = [
        "config.json",
        "model.safetensors",
        "Wan2.1_VAE.pth",
        "google/umt5-xxl/tokenizer.json",
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
    ]
    unwanted = ["README.md", "assets/1.mp4", "xlm-roberta-large/tokenizer.json", "vae/model.fp16.safetensors", "x.bin"]
    assert fetched(calls[-1], [*wanted, *unwanted]) == wanted
    # A fetched file lies in a folder whose name says nothing about it.
    opened = VideoFolder("org/SkyReels-V2-DF-14B-720P")
    assert (opened.name, opened.pipeline) == ("SkyReels-V2-DF-14B-720P", "SkyReelsV2DiffusionForcingPipeline")


def test_no_weights_are_fetched_of_a_repository_of_single_files(calls):
    with pytest.raises(CheckpointError, match=r"org/WanVideo_comfy: .* model_index\.json"):
        resolve_video("org/WanVideo_comfy")
    files = ["wan2.1_t2v_14B.safetensors", "vae/wan_2.1_vae.safetensors", "LoRAs/config.json"]
    assert [fetched(call, files) for call in calls] == [["LoRAs/config.json"]]


def no_response(kind):
    """An error of the hub, without the HTTP response that its constructor asks for in some versions."""
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (no_response(errors.RepositoryNotFoundError), "no such model on the hub"),
        (no_response(errors.GatedRepoError), "token"),
        (no_response(errors.RevisionNotFoundError), "no revision 'v9'"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("connection closed\nTraceback\n" * 50), "could not be fetched from the hub: connection closed"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_errors_of_the_hub_become_one_line_with_the_id(error, says, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name", revision="v9")
    assert str(caught.value).startswith("org/name: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_a_hub_id_whose_weights_are_not_wanted_the_configuration_alone_is_fetched(calls, tmp_path):
    assert resolve("org/name", weights=False) == tmp_path
    assert calls[0]["allow_patterns"] == ["config.json"]


def test_files_next_to_a_gguf_file_that_are_not_models_do_not_count(tmp_path):
    for name in ("mmproj-F16.gguf", "qwen-Q4_K_M.gguf", "imatrix_unsloth.gguf"):
        (tmp_path / name).touch()
    assert resolve(tmp_path) == tmp_path / "qwen-Q4_K_M.gguf"
    (tmp_path / "qwen-Q8_0.gguf").touch()
    with pytest.raises(CheckpointError, match="several GGUF files; name one: qwen-Q4_K_M"):
        resolve(tmp_path)
