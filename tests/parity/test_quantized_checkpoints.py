"""Quantised checkpoints of the published layouts, compared with the libraries that define them, and transformers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.packing import awq, float8, gptq, mxfp4, quantized_checkpoint
from tests.support.tiny import tiny_checkpoint
from verax import checkpoint, ops
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors"}


LAYOUTS = {
    "gptq, asymmetric": (lambda rng, F, D: gptq(rng, F, D, symmetric=False, act_order=True), {**GPTQ, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "fp8, blocks": (float8, FP8),
    "mxfp4": (mxfp4, {**COMPRESSED, "format": "mxfp4-pack-quantized"}),
}
ROUNDED, INTEGERS = 0.01, 0.03
"""Relative error of logits with inputs that are rounded to bfloat16, or to 8 bits for 4-bit weights. Zero points are
anywhere here: weights are not centred, so that errors of the inputs count more than with real ones."""


def theirs(folder, config, floats, tokens):
    """Logits of transformers' float32 model with these weights."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    checkpoint.save(floats, folder, config=plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_match_the_weights_in_float32(tmp_path, name):
    pack, scheme = LAYOUTS[name]
    floats = quantized_checkpoint(tmp_path / "packed", pack, scheme)
    opened = Checkpoint.open(tmp_path / "packed")
    ours = load_causal_lm(opened, dtype="float32")
    tokens = np.random.default_rng(0).integers(3, 300, (1, 24))
    expected = theirs(tmp_path / "floats", opened.config, floats, tokens)
    with ops.use_implementations(linear="reference"):
        reference = np.asarray(ours.logits(ours(jnp.asarray(tokens))))
    got = np.asarray(ours.logits(ours(jnp.asarray(tokens))))
    assert np.linalg.norm(reference - expected) < ROUNDED * np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) < INTEGERS * np.linalg.norm(expected)


def test_fine_grained_fp8_is_transformers_dequantised():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    arrays, expected = float8(np.random.default_rng(0), 256, 384)
    parts = {key: torch.from_numpy(np.array(array, np.float32)) for key, array in arrays.items()}
    parts["weight"] = parts["weight"].to(torch.float8_e4m3fn)
    dequantized = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    np.testing.assert_allclose(dequantized.numpy(), expected, rtol=2**-23)


def test_mxfp4_is_transformers_dequantised():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    arrays, expected = mxfp4(np.random.default_rng(0), 40, 96)
    blocks = torch.from_numpy(arrays["weight_packed"].reshape(1, 40, 3, 16))
    scales = torch.from_numpy(arrays["weight_scale"].reshape(1, 40, 3))
    np.testing.assert_array_equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T, expected)


def compressed(weight, bits, group_size, scale_dtype):
    """Tensors that the library writes for a weight, and the weight that it reads back from them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "channel" if group_size is None else "group"
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy=strategy, group_size=group_size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    grouped = weight.reshape(weight.shape[0], -1, group_size or weight.shape[1])
    scale = (grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).to(scale_dtype)
    library = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors = library.compress({"weight": weight, "weight_scale": scale}, scheme)
    return tensors, library.decompress(dict(tensors), scheme)["weight"]


@pytest.mark.parametrize(
    ("bits", "group_size", "scale_dtype"),
    [(4, 32, "bfloat16"), (4, 128, "float16"), (8, None, "float32"), (8, 64, "bfloat16")],
)
def test_values_are_bit_for_bit_the_librarys(tmp_path, bits, group_size, scale_dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 384, generator=generator) * torch.logspace(-3, 1, 7)[:, None]
    tensors, expected = compressed(weight, bits, group_size, getattr(torch, scale_dtype))
    save_file({f"up.{key}": value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    ours = Checkpoint.open(tmp_path).read("up.weight")
    assert (ours.bits, ours.group_size) == (bits, group_size)
    # The library multiplies in the scale's dtype; the integers times the scales in float32 round to the same.
    rounded = torch.from_numpy(np.asarray(ours.dequantize())).to(getattr(torch, scale_dtype))
    assert torch.equal(rounded.float(), expected.float())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_transformers_reads_what_we_write(tmp_path, quantization):
    tiny_checkpoint(tmp_path / "float", num_hidden_layers=2)
    ours = load_causal_lm(Checkpoint.open(tmp_path / "float"), dtype="float32", quantization=quantization)
    config = {**Checkpoint.open(tmp_path / "float").config, "tie_word_embeddings": False, "torch_dtype": "float32"}
    checkpoint.save(ours, tmp_path / "quantised", config=config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(3, 300, (1, 24))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    # The written values are in question here, so the reference: it rounds inputs to bfloat16 only, not to integers.
    with ops.use_implementations(linear="reference"):
        got = np.asarray(ours.logits(ours(jnp.asarray(tokens))))
    assert np.linalg.norm(got - expected) < 0.02 * np.linalg.norm(expected)


def test_inputs_of_8_bits_cost_no_more_than_in_transformers(tmp_path):
    tiny_checkpoint(tmp_path / "float", num_hidden_layers=2)
    opened = Checkpoint.open(tmp_path / "float")
    model = load_causal_lm(opened, dtype="float32", quantization="w8a8", quantize_head=False)
    checkpoint.save(model, tmp_path / "w8a8", config={**opened.config, "torch_dtype": "float32"})
    written = Checkpoint.open(tmp_path / "w8a8")
    tokens = np.random.default_rng(0).integers(3, 300, (4, 48))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "w8a8", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    ours = load_causal_lm(written, dtype="float32")
    exact = load_causal_lm(written, dtype="float32", quantization="dequantize")
    got, exact = (np.asarray(one.logits(one(jnp.asarray(tokens)))) for one in (ours, exact))
    # Numbers differ: the library's scale of a token is its largest input over 127.5, ours, as vLLM's, that over 127.
    error, their_error = (np.linalg.norm(one - exact) / np.linalg.norm(exact) for one in (got, expected))
    assert 0.01 < error < 1.1 * their_error < 0.1
