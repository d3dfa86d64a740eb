"""LoRA: adapters in PEFT's format, and files for video models; each with one clear error for all else."""

import json
import math
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from verax.checkpoint import Checkpoint, save
from verax.checkpoint.load import load_module
from verax.checkpoint.lora import Adapter, lora_fingerprint, merge, with_lora
from verax.errors import CheckpointError, UnsupportedModelError, VeraxError
from verax.loading import load_causal_lm

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj"
SIZES = {Q: (6, 8), UP: (10, 8)}


@pytest.fixture
def make(tmp_path):
    """Open an adapter of two modules, with these settings; `ranks` by module."""

    def opened(ranks=None, **settings):
        weights = adapter_weights(SIZES, ranks=ranks)
        return Adapter.open(save_adapter(tmp_path, weights, **settings)), weights

    return opened


def test_matrices_are_float32_with_the_scale_in_the_second(make):
    adapter, weights = make(lora_alpha=10)
    assert set(adapter.pairs) == set(SIZES)
    a, b = adapter.read(Q)
    np.testing.assert_array_equal(a, weights[f"base_model.model.{Q}.lora_A.weight"])
    np.testing.assert_array_equal(b, np.float32(2.5) * weights[f"base_model.model.{Q}.lora_B.weight"])
    assert a.dtype == b.dtype == np.float32
    assert (adapter.rank, adapter.num_parameters, adapter.base) == (4, 4 * (14 + 18), "somebody/tiny")


def test_the_scale_is_by_rank_or_by_its_root(make):
    assert make(lora_alpha=6)[0].pairs[Q].scale == 6 / 4
    assert make(lora_alpha=6, use_rslora=True)[0].pairs[Q].scale == 6 / math.sqrt(4)


def test_patterns_match_ends_of_names_as_in_peft(make):
    adapter, _ = make(
        {UP: 2}, rank_pattern={"p_proj": 9, "mlp.up_proj": 2}, alpha_pattern={r"model\.layers\.\d+\.mlp\.up_proj": 7}
    )
    assert (adapter.pairs[UP].rank, adapter.pairs[UP].scale) == (2, 3.5)
    assert (adapter.pairs[Q].rank, adapter.pairs[Q].scale) == (4, 1.0)


def test_keys_with_the_adapters_name_are_read_too(tmp_path):
    weights = {key.replace(".weight", ".default.weight"): value for key, value in adapter_weights(SIZES).items()}
    assert set(Adapter.open(save_adapter(tmp_path, weights)).pairs) == set(SIZES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is not supported"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' is not supported: it changes the base's weights"),
        ({"r": 0}, "r: expected a whole number of 1"),
        ({"r": 5}, r"not the matrices of rank 5 that adapter_config\.json says"),
        ({"lora_alpha": "8"}, "lora_alpha: expected"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected"),
        ({"alpha_pattern": {"(": 2}}, "malformed"),
        ({"use_rslora": 1}, "use_rslora: expected true or false"),
    ],
)
def test_what_is_not_plain_lora_or_makes_no_sense_is_refused_by_name(make, settings, says):
    with pytest.raises(UnsupportedModelError if "not supported" in says else CheckpointError, match=says):
        make(**settings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(f"base_model.model.{Q}.lora_B.weight"), "lora_A.weight lacks its other matrix"),
        (
            lambda w: w.update({f"base_model.model.{Q}.lora_B.b.weight": w[f"base_model.model.{Q}.lora_B.weight"]}),
            rf"{Q}\.lora_B\..*{Q}\.lora_B\..* are of two adapters",
        ),
        (lambda w: w.clear(), "has no matrices"),
        (lambda w: w.update({"base_model.model.lm_head.weight": np.zeros((2, 2), np.float32)}), r"lm_head\.weight"),
        (lambda w: w.update({f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(6, np.float32)}), "magnitude"),
        (lambda w: w.update({f"{Q}.lora_A.weight": np.zeros((4, 8), np.float32)}), "keys begin with base_model.model."),
        (lambda w: w.update({f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 8, 1), np.float32)}), "rank 4"),
        (lambda w: w.update({f"base_model.model.{Q}.lora_A.weight": np.zeros((4, 8), np.int32)}), "expected floats"),
    ],
)
def test_files_with_other_tensors_are_refused_with_their_keys(tmp_path, change, says):
    weights = adapter_weights(SIZES)
    save_adapter(tmp_path, weights)
    change(weights)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        Adapter.open(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    weights = adapter_weights(SIZES)
    weights[f"base_model.model.{UP}.lora_A.weight"][1, 2] = value
    with pytest.raises(CheckpointError, match=r"up_proj\.lora_A\.weight has numbers that are not finite"):
        Adapter.open(save_adapter(tmp_path, weights)).read(UP)


def test_a_pickled_file_is_read_without_running_it(make, tmp_path):
    make()
    (tmp_path / "adapter_model.safetensors").unlink()
    with zipfile.ZipFile(tmp_path / "adapter_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        Adapter.open(tmp_path)


@pytest.fixture(scope="module")
def weights():
    return random_weights(tiny_config())


@pytest.fixture
def adapter(weights, tmp_path):
    """An adapter of all linear layers, with its weights, whose scale is 3 / 4."""
    made = adapter_weights(linear_sizes(weights), spread=0.5)
    return Adapter.open(save_adapter(tmp_path / "adapter", made, lora_alpha=3)), made


def read(folder):
    opened = Checkpoint.open(folder)
    return {name: opened.read(name) for name in opened.names()}


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_sums_are_made_in_float32_and_rounded_once(weights, adapter, tmp_path, base, dtype):
    tiny_checkpoint(tmp_path / "base", dtype=base)
    merge(Checkpoint.open(tmp_path / "base"), adapter[0], tmp_path / "merged", dtype=dtype)
    stored = {name: np.asarray(weight).astype(np.float32) for name, weight in read(tmp_path / "base").items()}
    written = np.dtype(getattr(ml_dtypes, dtype or base, None) or (dtype or base))
    got = read(tmp_path / "merged")
    for name, weight in changed(stored, adapter[1], scale=0.75).items():
        assert got[name].dtype == written
        # A sum that lies between two numbers of bfloat16 may be rounded to either.
        tolerance = dict(atol=1e-6) if written == np.float32 else dict(rtol=2**-7)
        rounded = weight.astype(written).astype(np.float32)
        np.testing.assert_allclose(got[name].astype(np.float32), rounded, **tolerance)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {"temperature": 0.7}


def test_weights_that_lie_the_other_way_round_get_the_transpose(tmp_path):
    config = {"model_type": "gpt2"}
    save({"h.0.c_fc.weight": np.zeros((3, 5), np.float32)}, tmp_path / "base", config=config)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    made = adapter_weights({"transformer.h.0.c_fc": (5, 3)}, rank=2)
    opened = Adapter.open(save_adapter(tmp_path / "adapter", made, rank=2, fan_in_fan_out=True))
    aliases = ((r"^transformer\.", ""),)
    merge(Checkpoint.open(tmp_path / "base"), opened, tmp_path / "merged", aliases=aliases)
    expected = changed({"transformer.h.0.c_fc.weight": np.zeros((5, 3), np.float32)}, made)
    got = read(tmp_path / "merged")["h.0.c_fc.weight"]
    np.testing.assert_allclose(got, expected["transformer.h.0.c_fc.weight"].T, rtol=1e-6)


def test_a_base_in_another_layout_has_the_same_modules(adapter, weights, tmp_path):
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    tiny_checkpoint(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    save(renamed, tmp_path / "base", config=tiny_config())
    aliases = ((r"^model\.", "model.language_model."),)
    merge(Checkpoint.open(tmp_path / "base"), adapter[0], tmp_path / "merged", aliases=aliases)
    expected = changed(weights, adapter[1], scale=0.75)[f"{Q}.weight"]
    got = read(tmp_path / "merged")["model.language_model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_changed_output_head_becomes_a_weight_of_its_own(tmp_path, tied):
    """PEFT writes a copy of the base's head next to the matrices that change it."""
    tiny_checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    base = read(tmp_path / "base")
    head = base["model.embed_tokens.weight" if tied else "lm_head.weight"]
    made = adapter_weights({"lm_head": head.shape})
    copy = {"base_model.model.lm_head.base_layer.weight": np.ascontiguousarray(head)}
    opened = Adapter.open(save_adapter(tmp_path / "adapter", {**made, **copy}))
    head_of = {"lm_head.weight": "model.embed_tokens.weight"}
    merge(Checkpoint.open(tmp_path / "base"), opened, tmp_path / "merged", tied=head_of)
    got = read(tmp_path / "merged")
    expected = changed({"lm_head.weight": head}, made)["lm_head.weight"]
    np.testing.assert_allclose(got["lm_head.weight"], expected, atol=1e-6)
    np.testing.assert_array_equal(got["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert Checkpoint.open(tmp_path / "merged").config["tie_word_embeddings"] is False


def test_a_quantised_base_becomes_floats(adapter, tmp_path):
    tiny_checkpoint(tmp_path / "base")
    opened = Checkpoint.open(tmp_path / "base")
    quantized = load_causal_lm(opened, dtype="float32", quantization="int8")
    config = {**opened.config, "tie_word_embeddings": False, "compression_config": {"quant_method": "gptq"}}
    save(quantized, tmp_path / "int8", config=config, tokenizer_from=opened.folder)
    merge(Checkpoint.open(tmp_path / "int8"), adapter[0], tmp_path / "merged", dtype="float32")
    dequantized = load_causal_lm(Checkpoint.open(tmp_path / "int8"), dtype="float32", quantization="dequantize")
    stored = {f"{Q}.weight": np.asarray(dequantized.model.layers[0].self_attn.q_proj.weight[...])}
    expected = changed({**read(tmp_path / "base"), **stored}, adapter[1], scale=0.75)[f"{Q}.weight"]
    merged = Checkpoint.open(tmp_path / "merged")
    assert not merged.packed
    assert merged.config.keys().isdisjoint({"quantization_config", "compression_config"})
    assert merged.config["torch_dtype"] == "float32"
    np.testing.assert_allclose(merged.read(f"{Q}.weight"), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"model.layers.7.self_attn.q_proj": (64, 64)}, r"has no weights of model\.layers\.7.*trained for"),
        ({Q: (64, 32)}, r"another base than .*adapter \[64, 32\], base \[64, 64\]"),
    ],
)
def test_an_adapter_of_another_base_is_refused_before_anything_is_written(tmp_path, sizes, says):
    tiny_checkpoint(tmp_path / "base")
    made = Adapter.open(save_adapter(tmp_path / "adapter", adapter_weights(sizes)))
    with pytest.raises(CheckpointError, match=says):
        merge(Checkpoint.open(tmp_path / "base"), made, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


SHAPES = {
    "patch_embedding.weight": (6, 4, 1, 2, 2),
    "blocks.0.self_attn.q.weight": (6, 6),
    "blocks.0.self_attn.q.bias": (6,),
    "blocks.0.cross_attn.k_img.weight": (6, 6),
    "blocks.0.ffn.0.weight": (10, 6),
    "blocks.0.modulation": (1, 6, 6),
    "head.head.weight": (5, 6),
}
Q_WEIGHT, FFN = "blocks.0.self_attn.q.weight", "blocks.0.ffn.0.weight"
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


def with_file(base, tensors, path, scale=1.0, metadata=None):
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
    "kohya_dots": ("lora_unet.{}.lora_down.weight", "lora_unet.{}.lora_up.weight", "lora_unet.{}.alpha", False),
    "fun": ("lora_unet__{}.lora_down.weight", "lora_unet__{}.lora_up.weight", "lora_unet__{}.alpha", False),
    "kohya_diffusers": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight", "lora_unet_{}.alpha", True),
    "diffsynth": ("pipe.dit.{}.lora_A.default.weight", "pipe.dit.{}.lora_B.default.weight", None, False),
    "old_diffusers": ("unet.{}.lora.down.weight", "unet.{}.lora.up.weight", "unet.{}.alpha", True),
    "processors": ("{}_lora.down.weight", "{}_lora.up.weight", "{}.alpha", True),
    "bare_matrices": ("transformer.{}.lora_A", "transformer.{}.lora_B", None, True),
    "lycoris": ("lycoris_{}.lora_down.weight", "lycoris_{}.lora_up.weight", "lycoris_{}.alpha", False),
    "compiled": ("_orig_mod.module.{}.lora_A.weight", "_orig_mod.module.{}.lora_B.weight", None, False),
    "within": ("diffusion_model._orig_mod.{}.lora_A.weight", "diffusion_model._orig_mod.{}.lora_B.weight", None, False),
    "several": ("base_model.model.dit.{}.lora_A.weight", "base_model.model.dit.{}.lora_B.weight", None, False),
}  # fmt: skip
UNDERSCORES = ("kohya", "fun", "kohya_diffusers", "lycoris")
MODULES = {
    "blocks.0.self_attn.q": "blocks.0.attn1.to_q",
    "blocks.0.cross_attn.k_img": "blocks.0.attn2.add_k_proj",
    "blocks.0.ffn.0": "blocks.0.ffn.net.0.proj",
    "head.head": "proj_out",
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("style", FORMATS)
def test_every_format_is_pefts_arithmetic(style, module, base, tmp_path):
    down, up, alpha, diffusers = FORMATS[style]
    F, D = SHAPES[f"{module}.weight"]
    A, B = draw(RANK, D, seed=50), draw(F, RANK, seed=51)
    name = MODULES[module] if diffusers else module
    name = name.replace(".", "_") if style in UNDERSCORES else name
    tensors = {down.format(name): A, up.format(name): B}
    if alpha:
        tensors[alpha.format(name)] = np.asarray(1.5, np.float32)
    got = with_file(base, tensors, tmp_path / "lora.safetensors", scale=0.7)
    # peft's LoraLayer: scaling = lora_alpha / r; get_delta_weight = (lora_B.weight @ lora_A.weight) * scaling
    scaling = (1.5 if alpha else RANK) / RANK
    assert_sum(got, base, f"{module}.weight", 0.7 * scaling * np.matmul(B, A))


def test_a_convolution_is_changed_over_all_its_inputs(base, tmp_path):
    A, B = draw(RANK, 4, 1, 2, 2, seed=1), draw(6, RANK, 1, 1, 1, seed=2)
    tensors = {"diffusion_model.patch_embedding.lora_A.weight": A, "diffusion_model.patch_embedding.lora_B.weight": B}
    got = with_file(base, tensors, tmp_path / "lora.safetensors")
    assert_sum(got, base, "patch_embedding.weight", np.einsum("or,rcthw->octhw", B[:, :, 0, 0, 0], A))


def product(a, b):
    return a.astype(np.float64) @ b.astype(np.float64)


def tucker(core, a, b):
    """LyCORIS' rebuild_tucker: `i j ..., i p, j r -> p r ...`."""
    return np.einsum("ij...,ip,jr->pr...", *(array.astype(np.float64) for array in (core, a, b)))


HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def lycoris_cases():
    """Tensors, alpha's divisor (None where alpha does not count), and the product in float64, by LyCORIS' functions."""
    w1, w2 = draw(5, 3, seed=20), draw(2, 2, seed=21)
    a1, b1, a2, b2 = draw(5, 2, seed=22), draw(2, 3, seed=23), draw(2, 4, seed=24), draw(4, 2, seed=25)
    sides = [draw(*((10, 3) if name.endswith("a") else (3, 6)), seed=i) for i, name in enumerate(HADA)]
    yield "loha", FFN, dict(zip(HADA, sides, strict=True)), 3, product(*sides[:2]) * product(*sides[2:])
    yield "lokr", FFN, {"lokr_w1": w1, "lokr_w2": w2}, None, np.kron(w1.astype(np.float64), w2)
    yield "lokr_b", FFN, {"lokr_w1": w1, "lokr_w2_a": a2, "lokr_w2_b": b2}, 4, np.kron(w1, product(a2, b2))
    yield "lokr_a", FFN, {"lokr_w1_a": a1, "lokr_w1_b": b1, "lokr_w2": w2}, 2, np.kron(product(a1, b1), w2)
    both = {"lokr_w1_a": a1, "lokr_w1_b": b1, "lokr_w2_a": a2, "lokr_w2_b": b2}
    yield "lokr_ab", FFN, both, 4, np.kron(product(a1, b1), product(a2, b2))
    # A convolution [6, 4, 1, 2, 2], whose kernel is in Tucker's core or in the second matrix.
    patch = "patch_embedding.weight"
    c1, core, ta, tb = draw(3, 2, seed=30), draw(2, 2, 1, 2, 2, seed=31), draw(2, 2, seed=32), draw(2, 2, seed=33)
    tensors = {"lokr_w1": c1, "lokr_w2_a": ta, "lokr_w2_b": tb, "lokr_t2": core}
    yield "lokr_t2", patch, tensors, 2, np.kron(c1[..., None, None, None], tucker(core, ta, tb))
    flat = draw(2, 2 * 4, seed=34)
    whole = (ta.astype(np.float64) @ flat).reshape(2, 2, 1, 2, 2)
    tensors = {"lokr_w1": c1, "lokr_w2_a": ta, "lokr_w2_b": flat}
    yield "lokr_conv", patch, tensors, 2, np.kron(c1[..., None, None, None], whole)
    t1, t2 = draw(2, 2, 1, 2, 2, seed=35), draw(2, 2, 1, 2, 2, seed=36)
    sides = [draw(2, n, seed=40 + i) for i, n in enumerate((6, 4, 6, 4))]
    tensors = dict(zip(HADA, sides, strict=True)) | {"hada_t1": t1, "hada_t2": t2}
    yield "loha_t", patch, tensors, 2, tucker(t1, *sides[:2]) * tucker(t2, *sides[2:])
    up, down = draw(6, 2, 1, 1, 1, seed=50), draw(2, 4, 1, 1, 1, seed=51)
    tensors = {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": core}
    yield "locon", patch, tensors, 2, tucker(core, up[:, :, 0, 0, 0].T, down[:, :, 0, 0, 0])


@pytest.mark.parametrize("prefix", ["lycoris_", "lora_unet_", "diffusion_model."])
@pytest.mark.parametrize("case", [*lycoris_cases()], ids=lambda case: case[0])
def test_lycoris_products_are_its_functions(case, prefix, base, tmp_path):
    _, name, tensors, rank, expected = case
    module = name.removesuffix(".weight")
    module = prefix + (module if prefix.endswith(".") else module.replace(".", "_"))
    file = {f"{module}.{key}": array for key, array in tensors.items()}
    file[f"{module}.alpha"] = np.asarray(1.5, np.float32)
    got = with_file(base, file, tmp_path / "lora.safetensors", scale=-0.5)
    assert_sum(got, base, name, -0.5 * (1.0 if rank is None else 1.5 / rank) * expected)


def test_the_bias_of_b_has_the_factor_of_the_matrices_and_a_difference_has_not(base, tmp_path):
    A, B, bias = draw(RANK, 6, seed=1), draw(6, RANK, seed=2), draw(6, seed=3)
    module = "blocks.0.self_attn.q"
    pair = {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B, f"{module}.alpha": np.float32(1.5)}
    for key, factor in ((f"{module}.lora_B.bias", 1.5 / RANK), (f"{module}.diff_b", 1.0)):
        tensors = {name: np.asarray(array) for name, array in {**pair, key: bias}.items()}
        got = with_file(base, tensors, tmp_path / "lora.safetensors", scale=0.7)
        before = base.read(f"{module}.bias").astype(np.float64)
        np.testing.assert_allclose(got.read(f"{module}.bias"), before + 0.7 * factor * bias, atol=1e-6)
        before = base.read(f"{module}.weight").astype(np.float64)
        np.testing.assert_allclose(got.read(f"{module}.weight"), before + 0.7 * 0.5 * product(B, A), atol=1e-5)


def test_matrices_and_a_difference_of_one_weight_add_up(base, tmp_path):
    A, B, more = draw(RANK, 6, seed=1), draw(10, RANK, seed=2), draw(10, 6, seed=3)
    module = "blocks.0.ffn.0"
    tensors = {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B, f"{module}.diff": more}
    assert_sum(with_file(base, tensors, tmp_path / "lora.safetensors"), base, FFN, B @ A + more)


def test_numbers_of_a_file_that_are_not_finite_are_refused_with_their_keys(base, tmp_path):
    got = with_file(base, {"blocks.0.ffn.0.diff": np.full((10, 6), np.nan, np.float32)}, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.ffn\.0\.diff .* not finite"):
        got.read(FFN)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("blocks.0.self_attn.q.w_norm", Q_WEIGHT),
        ("blocks.0.self_attn.q.b_norm", "blocks.0.self_attn.q.bias"),
        ("blocks.0.diff_m", "blocks.0.modulation"),
        ("blocks.0.self_attn.q.diff", Q_WEIGHT),
        ("blocks.0.self_attn.q.diff_b", "blocks.0.self_attn.q.bias"),
        ("blocks.0.modulation.diff", "blocks.0.modulation"),
    ],
)
def test_whole_differences_are_added(key, name, base, tmp_path):
    difference = draw(*SHAPES[name], seed=9)
    got = with_file(base, {f"diffusion_model.{key}": difference}, tmp_path / "lora.safetensors", scale=2.0)
    assert_sum(got, base, name, 2 * difference)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "lora_unet_"])
def test_keys_of_an_image_encoder_are_left_out_for_a_transformer_without_one(prefix, base, tmp_path, caplog):
    def key(name):
        return prefix + (name if prefix.endswith(".") else name.replace(".", "_"))

    images = {
        f"{key('blocks.0.cross_attn.k_img')}.lora_down.weight": draw(RANK, 6),
        f"{key('blocks.0.cross_attn.k_img')}.lora_up.weight": draw(6, RANK),
        f"{key('blocks.0.cross_attn.v_img')}.diff_b": draw(6),
        f"{key('blocks.0.cross_attn.norm_k_img')}.diff": draw(6),
        f"{key('img_emb.proj.1')}.diff": draw(6, 6),
    }
    query, path = {f"{key('blocks.0.self_attn.q')}.diff": draw(6, 6, seed=9)}, tmp_path / "lora.safetensors"
    with pytest.raises(CheckpointError, match=r"no weight of the transformer for .*v_img"):
        with_file(base, query | images, path)  # a transformer with k_img, whose v_img is missing
    weights = {name: base.read(name) for name in SHAPES if "_img" not in name}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    plain = Checkpoint.open(tmp_path / "base")
    got = with_file(plain, query | images, path)
    np.testing.assert_array_equal(got.read(Q_WEIGHT), plain.read(Q_WEIGHT).astype(np.float32) + draw(6, 6, seed=9))
    assert [f"{path}: 5 keys are for an image encoder" in text for text in caplog.messages] == [True]
    with pytest.raises(CheckpointError, match=r"no weight of the transformer for .*k_img"):
        with_file(plain, images, path)


@pytest.mark.parametrize(
    ("said", "factor"),
    [
        ({"lora_alpha": 12}, 12 / RANK),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / RANK**0.5),
        ({"lora_alpha": 12, "alpha_pattern": {r"blocks\.\d+\.attn1\.to_q": 6, "to_k": 3}}, 6 / RANK),
        ({"lora_alpha": 12, "alpha_pattern": {"ttn1.to_q": 6}}, 12 / RANK),
    ],
)
def test_alpha_of_the_adapters_metadata_counts(said, factor, base, tmp_path):
    A, B = draw(RANK, 6, seed=1), draw(6, RANK, seed=2)
    tensors = {"transformer.blocks.0.attn1.to_q.lora_A.weight": A, "transformer.blocks.0.attn1.to_q.lora_B.weight": B}
    settings = {f"transformer.{name}": value for name, value in {"r": RANK, **said}.items()}
    metadata = {"lora_adapter_metadata": json.dumps(settings)}
    got = with_file(base, tensors, tmp_path / "lora.safetensors", metadata=metadata)
    assert_sum(got, base, Q_WEIGHT, factor * B @ A)
    for name, wrong in {"use_dora": True, "alpha_pattern": ["to_q"], "lora_alpha": "12"}.items():
        metadata = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": wrong})}
        with pytest.raises(VeraxError, match=name):
            with_file(base, tensors, tmp_path / "lora.safetensors", metadata=metadata)


@pytest.mark.parametrize("place", ["header", "config", "folder", "both"])
def test_alpha_alone_in_the_header_or_in_pefts_folder_counts(place, base, tmp_path):
    A, B = draw(RANK, 6, seed=1), draw(6, RANK, seed=2)
    prefix = "base_model.model.blocks.0.self_attn.q"
    tensors = {f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}
    path = tmp_path / "adapter_model.safetensors"

    def write(alpha):
        save_file(tensors, path, metadata={"alpha": str(alpha)} if place in ("header", "both") else None)
        if place != "header":
            settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 5 if place == "both" else alpha}
            (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return lora_fingerprint(path)

    assert write(6) != write(12) == lora_fingerprint(tmp_path if place == "folder" else path)
    got = with_lora(base, {tmp_path if place == "folder" else path: 1.0})
    assert_sum(got, base, Q_WEIGHT, 12 / RANK * B @ A)
    with pytest.raises(CheckpointError, match="its alpha not a number"):
        with_file(base, tensors, path, metadata={"alpha": "twelve"})


def test_a_folder_of_diffusers_stands_for_its_file(base, tmp_path):
    path, (A, B) = tmp_path / "pytorch_lora_weights.safetensors", (draw(RANK, 6, seed=1), draw(6, RANK, seed=2))
    prefix = "transformer.blocks.0.attn1.to_q"
    save_file({f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}, path)
    assert_sum(with_lora(base, {tmp_path: 1.0}), base, Q_WEIGHT, B @ A)
    assert lora_fingerprint(tmp_path) == lora_fingerprint(path)


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
        ({"x.ffn.0.lora_A.weight": (3, 6), "x.ffn.0.lora_B.weight": (10, 3)}, "x.ffn.0.lora_A.weight .nearest"),
        ({"lora_te_text_model.lora_down.weight": (3, 6)}, "lora_te_text_model.lora_down.weight"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6)}, "blocks.0.ffn.0.lora_A.weight lacks its other matrix"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6), "blocks.0.ffn.0.lora_B.weight": (10, 4)}, "shape \\[10, 6\\]"),
        ({"blocks.0.ffn.0.lora_A.weight": (3, 6), "blocks.0.ffn.0.lora_B.weight": (6, 3)}, "shape \\[10, 6\\]"),
        ({"blocks.0.ffn.0.alpha": ()}, "blocks.0.ffn.0.alpha lacks"),
        ({"blocks.0.ffn.0.alpha": (0,)}, "alpha has shape .0., expected one number"),
        ({}, "it has no tensors"),
        ({"blocks.0.ffn.0.lora_A.bias": (3,)}, "blocks.0.ffn.0.lora_A.bias .nearest"),
        ({"blocks.0.ffn.0.lokr_w1": (2, 2)}, "blocks.0.ffn.0.lokr_w1 lacks its other matrix, w2_a"),
        ({"blocks.0.ffn.0.hada_w1_a": (10, 3), "blocks.0.ffn.0.hada_w1_b": (3, 6)}, "lacks its other matrix, w2_a"),
        (
            {f"blocks.0.ffn.0.hada_w{i}_{side}": shape for i in (1, 2)
             for side, shape in (("a", (10 if i == 1 else 1, 3)), ("b", (3, 6)))},
            "do not fit each other, as a change of blocks.0.ffn.0.weight",
        ),
        ({"blocks.0.self_atn.q.diff": (6, 6)}, r"\(nearest: blocks.0.self_attn.q, .*, .*\)"),
        ({"blocks.0.ffn.0.diff": (10, 6), "blocks_0_ffn_0.diff": (10, 6)}, "are both for blocks.0.ffn.0.weight"),
        # A weight of another size is said before blocks that only the larger model has.
        ({"blocks.9.ffn.0.diff": (8, 4), "blocks.0.ffn.0.diff": (8, 4)}, "\\[8, 4\\].* \\[10, 6\\]; .* another size"),
        ({"blocks.0.ffn.0.diff": (6, 6)}, "shape \\[10, 6\\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_that_names_it(tensors, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=rf"lora\.safetensors: .*{message}"):
        with_file(
            base, {key: np.ones(shape, np.float32) for key, shape in tensors.items()}, tmp_path / "lora.safetensors"
        )


@pytest.mark.parametrize("role", ["lora_A", "lora_B"])
def test_matrices_of_integers_are_refused(role, base, tmp_path):
    shapes = {"lora_A": (RANK, 6), "lora_B": (10, RANK)}
    tensors = {
        f"blocks.0.ffn.0.{name}.weight": np.ones(shape, np.int8 if name == role else np.float16)
        for name, shape in shapes.items()
    }
    with pytest.raises(CheckpointError, match=rf"blocks\.0\.ffn\.0\.{role}\.weight has dtype int8, expected floats"):
        with_file(base, tensors, tmp_path / "lora.safetensors")


@pytest.mark.parametrize(
    "key", ["lora_magnitude_vector", "dora_scale", "oft_blocks", "oft_diag", "a1.weight", "on_input", "set_weight"]
)
def test_other_methods_are_refused_by_their_keys(key, base, tmp_path):
    with pytest.raises(UnsupportedModelError, match=rf"blocks\.0\.ffn\.0\.{key} .* not supported"):
        with_file(base, {f"blocks.0.ffn.0.{key}": np.ones((10, 6), np.float32)}, tmp_path / "lora.safetensors")
