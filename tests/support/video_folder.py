"""Tiny video model of the original layout, written without the code under test. Its tensors have odd sizes."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

D = 6
CONFIG = {"_class_name": "WanModel", "model_type": "i2v", "dim": D, "ffn_dim": 10, "freq_dim": 8, "in_dim": 36} | {
    "num_heads": 1,
    "num_layers": 2,
    "out_dim": 16,
    "text_len": 512,
    "eps": 1e-6,
    "inject_sample_info": False,
}
VAE = "Wan2.1_VAE"
T5 = "models_t5_umt5-xxl-enc-bf16"
CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14"
SHAPES = {
    "transformer": {"patch_embedding.weight": (D, 36, 1, 2, 2), "head.modulation": (1, 2, D)}
    | {f"blocks.{i}.{name}": (D, D) for i in range(2) for name in ("self_attn.q.weight", "cross_attn.k_img.weight")}
    | {f"blocks.{i}.norm3.weight": (D,) for i in range(2)},
    "vae": {"conv1.weight": (4, 4, 1, 1, 1), "decoder.head.2.bias": (3,)},
    "text_encoder": {"token_embedding.weight": (11, 4), "blocks.0.attn.q.weight": (4, 4), "norm.weight": (4,)},
    "image_encoder": {
        "visual.cls_embedding": (1, 1, 4),
        "visual.pos_embedding": (1, 5, 4),
        "visual.transformer.0.attn.to_qkv.weight": (12, 4),
        "visual.transformer.0.attn.to_qkv.bias": (12,),
        "visual.head": (4, 3),
    },
}
DTYPES = {"text_encoder": ml_dtypes.bfloat16}


def tensors(part):
    draw = np.random.default_rng(len(part))
    dtype = DTYPES.get(part, np.float32)
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in SHAPES[part].items()}


def write_original(folder, *, config=CONFIG):
    """Folder with the encoders' and the VAE's weights as safetensors under their published names."""
    (folder / "google" / "umt5-xxl").mkdir(parents=True)
    (folder / "google" / "umt5-xxl" / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors("transformer"), folder / "model.safetensors")
    for part, stem in {"vae": VAE, "text_encoder": T5, "image_encoder": CLIP}.items():
        save_file(tensors(part), folder / f"{stem}.safetensors")
    return folder
