"""LoRA files, in each format: PEFT's result, added in float32 and rounded once; and errors where it does not fit."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from verax.checkpoint.checkpoint import Checkpoint
from verax.checkpoint.load import load_module
from verax.checkpoint.lora import with_lora
from verax.errors import CheckpointError

SHAPES = {
    "patch_embedding.weight": (6, 4, 1, 2, 2),
    "blocks.0.self_attn.q.weight": (6, 6),
    "blocks.0.self_attn.q.bias": (6,),
    "blocks.0.cross_attn.k_img.weight": (6, 6),
    "blocks.0.ffn.0.weight": (10, 6),
    "blocks.0.modulation": (1, 6, 6),
    "head.head.weight": (5, 6),
}
Q, FFN = "blocks.0.self_attn.q.weight", "blocks.0.ffn.0.weight"
RANK = 3


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(params=[np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def base(request, tmp_path):
    weights = {name: draw(*shape, seed=i).astype(request.param) for i, (name, shape) in enumerate(SHAPES.items())}
    (tmp_path / "base").mkdir()
    save_file(weights, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    return Checkpoint.open(tmp_path / "base")


def changed(base, tensors, path, scale=1.0, metadata=None):
    save_file(tensors, path, metadata=metadata)
    return with_lora(base, {path: scale})


def assert_sum(got, base, name, difference):
    """The weight is the base's and the difference in float32; all others are untouched."""
    expected = base.read(name).astype(np.float32) + difference
    assert got.read(name).dtype == np.float32
    np.testing.assert_allclose(got.read(name), expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(expected, base.read(name).astype(np.float32), atol=0.1)
    for other in set(SHAPES) - {name}:
        assert got.read(other).tobytes() == base.read(other).tobytes()


FORMATS = {
    "peft": ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight", None, False),
    "adapter": ("transformer.{}.lora_A.default.weight", "transformer.{}.lora_B.default.weight", None, True),
    "diffusers": ("transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight", None, True),
    "comfy": ("diffusion_model.{}.lora_A.weight", "diffusion_model.{}.lora_B.weight", None, False),
    "down_up": ("model.{}.lora_down.weight", "model.{}.lora_up.weight", "model.{}.alpha", False),
    "bare": ("{}.lora_down.weight", "{}.lora_up.weight", "{}.alpha", False),
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", "lora_unet_{}.alpha", False),
}  # fmt: skip
MODULES = {
    "blocks.0.self_attn.q": "blocks.0.attn1.to_q",
    "blocks.0.cross_attn.k_img": "blocks.0.attn2.add_k_proj",
    "blocks.0.ffn.0": "blocks.0.ffn.net.0.proj",
    "head.head": "proj_out",
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("style", FORMATS)
def test_every_implementationat_is_pefts_arithmetic(style, module, base, tmp_path):
    down, up, alpha, diffusers = FORMATS[style]
    F, D = SHAPES[f"{module}.weight"]
    A, B = draw(RANK, D, seed=50), draw(F, RANK, seed=51)
    name = MODULES[module] if diffusers else module
    name = name.replace(".", "_") if style == "kohya" else name
    tensors = {down.format(name): A, up.format(name): B}
    if alpha:
        tensors[alpha.format(name)] = np.asarray(1.5, np.float32)
    got = changed(base, tensors, tmp_path / "lora.safetensors", scale=0.7)
    # peft's LoraLayer: scaling = lora_alpha / r; get_delta_weight = (lora_B.weight @ lora_A.weight) * scaling
    scaling = (1.5 if alpha else RANK) / RANK
    assert_sum(got, base, f"{module}.weight", 0.7 * scaling * np.matmul(B, A))


def test_a_convolution_is_changed_over_all_its_inputs(base, tmp_path):
    A, B = draw(RANK, 4, 1, 2, 2, seed=1), draw(6, RANK, 1, 1, 1, seed=2)
    tensors = {"diffusion_model.patch_embedding.lora_A.weight": A, "diffusion_model.patch_embedding.lora_B.weight": B}
    got = changed(base, tensors, tmp_path / "lora.safetensors")
    assert_sum(got, base, "patch_embedding.weight", np.einsum("or,rcthw->octhw", B[:, :, 0, 0, 0], A))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("blocks.0.self_attn.q.diff", Q),
        ("blocks.0.self_attn.q.diff_b", "blocks.0.self_attn.q.bias"),
        ("blocks.0.modulation.diff", "blocks.0.modulation"),
    ],
)
def test_whole_differences_are_added(key, name, base, tmp_path):
    difference = draw(*SHAPES[name], seed=9)
    got = changed(base, {f"diffusion_model.{key}": difference}, tmp_path / "lora.safetensors", scale=2.0)
    assert_sum(got, base, name, 2 * difference)


@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_of_the_adapters_metadata_counts(rslora, base, tmp_path):
    A, B = draw(RANK, 6, seed=1), draw(6, RANK, seed=2)
    tensors = {"transformer.blocks.0.attn1.to_q.lora_A.weight": A, "transformer.blocks.0.attn1.to_q.lora_B.weight": B}
    said = {"transformer.r": RANK, "transformer.lora_alpha": 12, "transformer.use_rslora": rslora}
    metadata = {"lora_adapter_metadata": json.dumps(said)}
    got = changed(base, tensors, tmp_path / "lora.safetensors", metadata=metadata)
    assert_sum(got, base, Q, 12 / (RANK**0.5 if rslora else RANK) * B @ A)


def test_files_add_up_and_are_rounded_once_when_loaded(base, tmp_path):
    files = {}
    total = base.read(FFN).astype(np.float32)
    for i, scale in enumerate((0.3, -1.1)):
        A, B = draw(RANK, 6, seed=2 * i), draw(10, RANK, seed=2 * i + 1)
        path = tmp_path / f"{i}.safetensors"
        save_file({"blocks.0.ffn.0.lora_A.weight": A, "blocks.0.ffn.0.lora_B.weight": B}, path)
        files[path] = scale
        total += np.float32(scale) * (B @ A)

    class Linear(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros(SHAPES[FFN]))

    class Model(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Dict(ffn=nnx.List([Linear()]))])

    others = [f"^{name}$" for name in SHAPES if name != FFN]
    model = load_module(nnx.eval_shape(Model), with_lora(base, files), dtype=jnp.bfloat16, ignore=others)
    np.testing.assert_array_equal(model.blocks[0].ffn[0].weight[...], total.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.ffn.0.lora_A.weight": (3, 6), "x.ffn.0.lora_B.weight": (10, 3)}, "x.ffn.0.lora_A.weight, x.ffn"),
        ({"lora_te_text_model.lora_down.weight": (3, 6)}, "lora_te_text_model.lora_down.weight"),
        ({"blocks.0.ffn.0.lora_magnitude_vector": (10,)}, "blocks.0.ffn.0.lora_magnitude_vector"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6)}, "blocks.0.ffn.0.lora_A.weight lacks its other matrix"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6), "blocks.0.ffn.0.lora_B.weight": (10, 4)}, "shape \\[10, 6\\]"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6), "blocks.0.ffn.0.lora_B.weight": (6, 3)}, "shape \\[10, 6\\]"),
        ({"blocks.0.ffn.0.alpha": ()}, "blocks.0.ffn.0.weight lacks"),
        ({"blocks.0.ffn.0.diff": (6, 6)}, "shape \\[10, 6\\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_that_names_it(tensors, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=rf"lora\.safetensors: .*{message}"):
        changed(
            base, {key: np.ones(shape, np.float32) for key, shape in tensors.items()}, tmp_path / "lora.safetensors"
        )


def test_a_missing_file_is_named(base, tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: no such file"):
        with_lora(base, {tmp_path / "absent.safetensors": 1.0})
