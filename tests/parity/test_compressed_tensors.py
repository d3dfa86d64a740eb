"""Quantised checkpoints against the library that defines their layout, and against transformers reading ours."""

import json

import numpy as np
import pytest

from tests.support.tiny import tiny_checkpoint
from verax import checkpoint, ops
from verax.checkpoint import Checkpoint
from verax.loading import load_causal_lm

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")


def compressed(weight, bits, group_size, scale_dtype):
    """What the library writes for a weight, and what it reads back from that."""
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


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, None), (8, 64)])
def test_values_are_bit_for_bit_the_librarys(tmp_path, bits, group_size, scale_dtype):
    from safetensors.torch import save_file

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
    import jax.numpy as jnp

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
