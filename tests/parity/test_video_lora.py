"""LoRA files of Wan in the formats that diffusers reads too: the merged weights of both."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

from safetensors.numpy import save_file

from tests.support.tiny_video import diffusers_pipeline
from verax.checkpoint.lora import with_lora
from verax.checkpoint.video.folder import VideoFolder
from verax.checkpoint.video.parts import WAN

RANK, ALPHA, SCALE = 3, 1.5, 0.7
MODULES = [f"{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in "qkvo"] + ["ffn.0", "ffn.2"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t2v")
    return diffusers_pipeline("t2v-a14b", folder), folder


def theirs_name(name):
    return (WAN.forward(name) or (name,))[0]


def matrices(checkpoint):
    """A and B of every linear module of the blocks, and a bias, by the original's name of the module."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    for block in range(2):
        for module in MODULES:
            name = f"blocks.{block}.{module}"
            F, D = checkpoint.shape(f"{name}.weight")
            yield name, draw(RANK, D), draw(F, RANK), draw(F)


def comfy(name, down, up, bias):
    prefix = f"diffusion_model.{name}"
    return {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}


def lightx2v(name, down, up, bias):
    prefix = f"diffusion_model.{name}"
    alpha = np.asarray(ALPHA, np.float32)
    matrices = {f"{prefix}.lora_down.weight": down, f"{prefix}.lora_up.weight": up, f"{prefix}.alpha": alpha}
    return {**matrices, f"{prefix}.diff_b": bias}


def musubi(name, down, up, bias):
    prefix = f"lora_unet_{name.replace('.', '_')}"
    alpha = np.asarray(ALPHA, np.float32)
    return {f"{prefix}.lora_down.weight": down, f"{prefix}.lora_up.weight": up, f"{prefix}.alpha": alpha}


def native(name, down, up, bias):
    prefix = f"transformer.{theirs_name(name)}"
    return {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up, f"{prefix}.lora_B.bias": bias}


@pytest.mark.parametrize("style", [comfy, lightx2v, musubi, native])
def test_merged_weights_are_those_of_diffusers(style, pipeline, tmp_path):
    theirs, folder = pipeline
    checkpoint = VideoFolder(folder).checkpoint("transformer")
    tensors = {}
    for module in matrices(checkpoint):
        tensors |= style(*module)
    metadata = None
    if style is native:
        settings = {"r": RANK, "lora_alpha": ALPHA, "lora_bias": True, "target_modules": [theirs_name(MODULES[0])]}
        metadata = {
            "lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in settings.items()})
        }
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path, metadata=metadata)
    before = {name: value.clone() for name, value in theirs.transformer.state_dict().items()}
    try:
        if style is native:
            state = {key: torch.from_numpy(value) for key, value in tensors.items()}
            targets = sorted({key.split(".lora_")[0].removeprefix("transformer.") for key in tensors})
            config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_bias=True, target_modules=targets)
            theirs.transformer.add_adapter(config)
            own = {key.removeprefix("transformer."): value for key, value in state.items()}
            peft.set_peft_model_state_dict(theirs.transformer, own)
        else:
            theirs.load_lora_weights(str(tmp_path), weight_name=path.name)
        theirs.fuse_lora(components=["transformer"], lora_scale=SCALE)
        merged = {name.replace(".base_layer", ""): value for name, value in theirs.transformer.state_dict().items()}
        ours, changed = with_lora(checkpoint, {path: SCALE}), 0
        for name in checkpoint.names():
            want = merged[theirs_name(name)].numpy()
            np.testing.assert_allclose(ours.read(name), want, atol=1e-5, err_msg=name)
            changed += not np.allclose(want, before[theirs_name(name)].numpy(), atol=1e-3)
        assert changed == 2 * len(MODULES) * (2 if any("bias" in key or "diff_b" in key for key in tensors) else 1)
    finally:
        theirs.unfuse_lora(components=["transformer"])
        theirs.unload_lora_weights()
