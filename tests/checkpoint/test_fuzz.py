"""Damaged files of checkpoints give a `VeraxError` that names the file, or open; never another error."""

import copy
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from tests.checkpoint.formats.test_pth import archive, dictionary, tensor
from tests.support import gguf as gguf_files
from tests.support.adapters import adapter_weights, save_adapter
from tests.support.packing import awq, float8, gptq, mxfp4
from tests.support.tiny import tiny_checkpoint
from verax.checkpoint import Checkpoint
from verax.checkpoint.formats.gguf import GGUFWeights
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.safetensors import SafetensorsFile
from verax.checkpoint.lora import Adapter
from verax.checkpoint.video.folder import VideoFolder
from verax.embed.modules import load_modules
from verax.embed.settings import EncoderSettings
from verax.errors import VeraxError
from verax.models import causal_lm, encoder
from verax.models.clip import CLIPVisionConfig
from verax.models.umt5 import UMT5Config
from verax.models.wan.family import read_settings
from verax.models.wan.model import WanConfig
from verax.models.wan.vae import WanVaeConfig
from verax.text.engine.sampling_params import SamplingParams
from verax.text.tokens.gguf import read_gguf_tokenizer
from verax.text.tokens.tokenizer import Tokenizer
from verax.video.files import write_clip
from verax.video.images import read_clip

# fmt: off
EXTREMES = [
    None, True, False, 0, -1, 1, 3, 10**12, 10**30, -(2**63), 0.0, -0.5, 1e-320, 1e30, 1e308, float("nan"),
    float("inf"), "", "x", "4", "\0", "../../x", "\ud800", "x" * 10_000, [], [[]], [0], [None], ["x"], [-1, 1e30],
    [1, 2, 3], [True], [{}], {}, {"x": 1}, {"content": 5}, {"rope_type": []}, {"type": "default"},
]
OPTIONAL = [
    "rope_scaling", "layer_types", "quantization_config", "text_config", "vision_config", "use_sliding_window", "path",
    "partial_rotary_factor", "num_experts", "added_tokens_decoder", "extra_special_tokens", "attn_scales", "kind",
    "top_k", "additional_special_tokens", "temperature", "do_sample", "pooling_mode", "pooling_mode_cls_token",
    "max_seq_length", "pipeline", "inject_sample_info", "window_size", "model_type", "is_decoder",
]
"""Keys that the readers take and the built-in files lack."""
# fmt: on


def places(value, path=()):
    """Paths of all values within a JSON value."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield from places(one, (*path, key))


def mutate_json(text, rng):
    """A JSON text with one value, key or piece of text changed; bytes."""
    value = json.loads(text)
    kind = rng.integers(10)
    if kind >= 8:
        return mutate_bytes(text.encode(), rng)
    if kind == 7:
        depth = int(rng.choice([3, 100, 100_000]))
        return text.replace(": ", ": " + "[" * depth, 1).encode()
    value = copy.deepcopy(value)
    path = list(places(value))[rng.integers(len(list(places(value))))]
    if not path:
        return json.dumps(EXTREMES[rng.integers(len(EXTREMES))]).encode()
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, new = path[-1], EXTREMES[rng.integers(len(EXTREMES))]
    if kind == 6:
        del parent[key]
    elif kind == 5 and isinstance(parent, dict):
        added = [*OPTIONAL, f"{key}_"]
        parent[added[rng.integers(len(added))]] = new
    elif kind == 4 and isinstance(parent, list):
        parent.extend([parent[key]] * int(rng.choice([1, 50])))
    else:
        parent[key] = new
    return json.dumps(value).encode()


def mutate_bytes(content, rng):
    """Bytes with a cut, flips, a piece left out or repeated, or a number set to an extreme."""
    content = bytearray(content)
    at = int(rng.integers(len(content)))
    kind = rng.integers(6)
    if kind == 0:
        return bytes(content[:at])
    if kind == 1:
        for place in rng.integers(0, len(content), int(rng.integers(1, 6))):
            content[place] ^= int(rng.integers(1, 256))
    elif kind == 2:
        del content[at : at + int(rng.integers(1, 40))]
    elif kind == 3:
        content[at:at] = content[at : at + int(rng.integers(1, 40))]
    elif kind == 4:
        width = int(rng.choice([1, 2, 4, 8]))
        number = int(rng.choice([0, 1, 2, 127, 255])) if rng.integers(2) else 256**width - 1 - int(rng.integers(3))
        content[at : at + width] = (number % 256**width).to_bytes(width, "little")
    else:
        content[at : at + 8] = (int(rng.integers(2**62))).to_bytes(8, "little")
    return bytes(content)


BUILTIN = Path(__file__).parents[2] / "src/verax/builtin"
PARTS = {"transformer": WanConfig, "vae": WanVaeConfig, "text_encoder": UMT5Config, "image_encoder": CLIPVisionConfig}
EXTRA = {
    "generation_config.json": {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [1, 2],
        "do_sample": True,
    },
    "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}},
    "added_tokens.json": {"<new>": 5000, "<other>": 5001},
    "modules.json": [
        {"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""},
        {"idx": 1, "type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
}
"""Files of text models and encoders that the built-in ones lack."""


def describe_text(folder, changed):
    opened = Checkpoint.open(folder)
    causal_lm(opened.config)
    SamplingParams.from_generation_config(opened.generation_config)
    if changed not in ("config.json", "generation_config.json"):
        Tokenizer.from_checkpoint(opened)


def describe_encoder(folder, changed):
    opened = Checkpoint.open(folder)
    config = encoder(opened.config)[1]
    load_modules(folder, config.hidden_size, dtype=np.float32)
    EncoderSettings.from_folder(folder, positions=config.max_position_embeddings)
    if changed == "tokenizer_config.json":
        Tokenizer.from_folder(folder)


def describe_video(path, changed):
    folder = VideoFolder(path)
    read_settings(folder, folder.flow_shift, kind=None, negative_prompts={})
    part = changed.split("/")[0]
    if part in PARTS:
        PARTS[part].from_hf(folder.config(part))
        folder.checkpoint(part).names()
    if part == "tokenizer":
        Tokenizer.from_folder(folder.tokenizer)


def describe_gguf(path):
    file = GGUFWeights(path)
    causal_lm(file.config)
    SamplingParams.from_generation_config(file.generation_config())
    read_gguf_tokenizer(file.metadata, path)
    opened = Checkpoint.open(path)
    for name in opened.names():
        opened.shape(name), opened.kind(name), opened.size(name)


def describe_weights(folder, changed=None):
    opened = Checkpoint.open(folder)
    for name in opened.names():
        opened.shape(name), opened.kind(name), opened.size(name), opened.place(name)


def describe_tensors(file):
    for name, info in file.tensors.items():
        assert file.read(name).shape == info.shape


def refused(describe, *arguments):
    """True if the file is refused; any error but a `VeraxError` fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            describe(*arguments)
        except VeraxError:
            return True
    return False


def json_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json") if path.name != "tokenizer.json")


def count_refused(describe, path, mutate, seeds, *arguments):
    """Number of a file's mutations that are refused."""
    content, count = path.read_bytes(), 0
    for seed in seeds:
        path.write_bytes(mutate(content, np.random.default_rng(seed)))
        try:
            count += refused(describe, *arguments)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {path.name} was {path.read_bytes()[:2000]}") from error
    path.write_bytes(content)
    return count


def fuzz_folder(describe, folder, seeds):
    """Number of refused mutations of the JSON files of a folder."""
    files = json_files(folder)
    mutate = lambda content, rng: mutate_json(content.decode(), rng)
    return sum(
        count_refused(describe, folder / name, mutate, seeds[i :: len(files)], folder, name)
        for i, name in enumerate(files)
    )


def fuzz_file(describe, path, seeds, head):
    """Number of refused mutations of a file, of which the first `head` bytes are changed."""
    mutate = lambda content, rng: mutate_bytes(content[:head], rng) + content[head:]
    return count_refused(describe, path, mutate, seeds, path)


def copy_builtin(name, target):
    shutil.copytree(BUILTIN / name, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in (BUILTIN / name).rglob("*.safetensors"):
        (target / path.relative_to(BUILTIN / name)).symlink_to(path)
    return target


@pytest.mark.parametrize(
    ("name", "describe"), [("text", describe_text), ("encoder", describe_encoder), ("video", describe_video)]
)
def test_damaged_json_files_are_refused_or_read(name, describe, tmp_path):
    folder = copy_builtin(name, tmp_path / name)
    extra = {"text": [*EXTRA][:3], "encoder": [*EXTRA][3:], "video": []}[name]
    for file in extra:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(EXTRA[file]))
    assert not refused(describe, folder, "vae")
    assert 100 < fuzz_folder(describe, folder, range(400)) < 400


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}
QUANTIZED = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": None}),
    "fp8": (float8, {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]}),
    "mxfp4": (mxfp4, {**COMPRESSED, "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_damaged_quantised_checkpoints_are_refused_or_read(name, tmp_path):
    pack, scheme = QUANTIZED[name]
    path = tmp_path / "model.safetensors"
    save_file({f"up.{last}": array for last, array in pack(np.random.default_rng(0), 40, 96)[0].items()}, path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    assert not refused(describe_weights, tmp_path)
    assert 10 < fuzz_folder(describe_weights, tmp_path, range(150)) < 150
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert 50 < fuzz_file(lambda path: describe_weights(path.parent), path, range(150), head) <= 150


def write_safetensors(path):
    save_file({"a.b": np.arange(6, dtype=np.int16).reshape(2, 3), "c": np.ones(5, np.float32)}, path)
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def write_gguf(path):
    gguf_files.write(tiny_checkpoint(path.with_suffix(""), num_hidden_layers=1), path, "Q8_0", pre="qwen2")
    return min(tensor.start for tensor in GGUFWeights(path).tensors.values())


def write_pth(path):
    archive(path, dictionary(x=tensor(), y=tensor(offset=1, shape=(5,), strides=(1,))))
    return path.stat().st_size


@pytest.mark.parametrize(
    ("write", "describe", "fewest"),
    [
        (write_safetensors, lambda path: describe_tensors(SafetensorsFile(path)), 100),
        (write_gguf, describe_gguf, 100),
        (write_pth, lambda path: describe_tensors(PthFile(path)), 50),
    ],
)
def test_damaged_files_of_weights_are_refused_or_read(write, describe, fewest, tmp_path):
    path = tmp_path / "a.gguf"
    head = write(path)
    assert not refused(describe, path)
    assert fewest < fuzz_file(describe, path, range(300), head) <= 300


def test_damaged_adapters_are_refused_or_read(tmp_path):
    sizes = {"model.layers.0.mlp.up_proj": (24, 16), "model.layers.1.mlp.up_proj": (24, 16)}
    patterns = dict(rank_pattern={"layers.1.mlp.up_proj": 4}, alpha_pattern={r"layers\.0.*": 3.0})
    save_adapter(tmp_path, adapter_weights(sizes, rank=4, spread=0.1), rank=4, lora_alpha=8, **patterns)
    describe = lambda folder, changed=None: [Adapter.open(folder).read(module) for module in sizes]
    assert not refused(describe, tmp_path)
    assert 30 < fuzz_folder(describe, tmp_path, range(150)) < 150
    path = tmp_path / "adapter_model.safetensors"
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert 50 < fuzz_file(lambda path: describe(path.parent), path, range(150), head) <= 150


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp", "avif", "tif", "bmp", "mp4"])
def test_damaged_pictures_and_clips_are_refused_or_read(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    frames = np.random.default_rng(0).integers(0, 255, (3, 16, 24, 3), np.uint8)
    if suffix == "mp4":
        write_clip(frames, path, fps=8)
    else:
        first, *rest = (Image.fromarray(frame) for frame in frames)
        first.save(path, **({} if suffix in ("jpg", "bmp") else {"save_all": True, "append_images": rest}))
    assert not refused(read_clip, path)
    assert fuzz_file(read_clip, path, range(200), path.stat().st_size) <= 200
