"""`.pth` files that torch.save writes, read bit for bit without it."""

import collections
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from verax.checkpoint.checkpoint import Checkpoint, fingerprint
from verax.checkpoint.formats.pth import PthFile

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip


def numbers(tensor):
    """A tensor's bytes, in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check(path, expected):
    file = PthFile(path)
    assert list(file.tensors) == list(expected)
    for name, tensor in expected.items():
        array = file.read(name)
        assert (name, array.shape, file.tensors[name].shape) == (name, tuple(tensor.shape), tuple(tensor.shape))
        assert str(array.dtype) == file.kind(name) == str(tensor.dtype).removeprefix("torch.")
        assert array.tobytes() == numbers(tensor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_read_bit_exactly_in_every_dtype(dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, 8), dtype=torch.uint8, generator=generator)
    tensors = {"odd.weight": bits[0, 0, :1].view(torch.bool) if dtype == torch.bool else bits[0, 0].view(dtype)}
    tensors |= {"x": bits.view(dtype), "scalar": bits.view(dtype)[1, 1, 0], "none": bits.view(dtype)[:, :0]}
    torch.save(tensors, tmp_path / "f.pth")
    check(tmp_path / "f.pth", tensors)


@pytest.mark.parametrize("files", [1, 2])
def test_a_checkpoint_of_pickled_weights_is_opened_as_one_of_safetensors(files, tmp_path):
    tensors = {"a.weight": torch.randn(3, 4).bfloat16(), "b.weight": torch.randn(5)}
    (tmp_path / "config.json").write_text("{}")
    if files == 1:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        names = {key: f"pytorch_model-0000{i}-of-00002.bin" for i, key in enumerate(tensors, 1)}
        for key, name in names.items():
            torch.save({key: tensors[key]}, tmp_path / name)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    opened = Checkpoint.open(tmp_path)
    assert opened.names() == list(tensors)
    for name, tensor in tensors.items():
        assert opened.read_raw(name).tobytes() == numbers(tensor)
        opened.release(name)
    save_file(tensors, tmp_path / "model.safetensors")
    assert fingerprint(opened) == fingerprint(Checkpoint.open(tmp_path))


def test_views_keep_their_offsets_and_strides(tmp_path):
    base = torch.randn(6, 7, 8)
    tensors = {
        "part": base[2:5, 1:, 3:6],
        "turned": base.permute(2, 0, 1),
        "stepped": base[::2, ::3, ::5],
        "spread": base[0, 0, :1].expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    torch.save(tensors, tmp_path / "f.pth")
    check(tmp_path / "f.pth", tensors)


def test_tied_weights_share_their_bytes(tmp_path):
    weight = torch.randn(5, 3)
    torch.save({"a": weight, "b": weight, "half": weight[2:]}, tmp_path / "f.pth")
    file = PthFile(tmp_path / "f.pth")
    assert np.shares_memory(file.read("a"), file.read("b"))
    assert np.shares_memory(file.read("a"), file.read("half"))
    check(tmp_path / "f.pth", {"a": weight, "b": weight, "half": weight[2:]})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_modules_state_dict_is_read(protocol, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    torch.save(module.state_dict(), tmp_path / "f.pth", pickle_protocol=protocol)
    check(tmp_path / "f.pth", module.state_dict())


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_weights_inside_a_training_checkpoint_are_found(key, tmp_path):
    module = torch.nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = {"epoch": 3, "best": 0.25, "args": {"lr": 1e-4, "names": ["a", "b"], "size": torch.Size([1, 2])}}
    torch.save({**saved, "optimizer": optimizer.state_dict(), key: module.state_dict()}, tmp_path / "f.pth")
    check(tmp_path / "f.pth", module.state_dict())


def test_nested_dictionaries_join_their_keys_and_parameters_are_tensors(tmp_path):
    a, b = torch.randn(2), torch.randn(3)
    tensors = {"encoder": collections.OrderedDict(weight=torch.nn.Parameter(a)), "decoder": {"0": {"bias": b}}}
    torch.save(tensors, tmp_path / "f.pth")
    check(tmp_path / "f.pth", {"encoder.weight": a, "decoder.0.bias": b})


def test_the_other_byte_order_is_turned_round(tmp_path):
    tensors = {"x": torch.randn(3, 5), "y": torch.randn(4).bfloat16(), "z": torch.arange(6).reshape(2, 3).T}
    torch.save(tensors, tmp_path / "f.pth")
    content = (tmp_path / "f.pth").read_bytes()
    assert content.count(b"little") == 1
    for tensor in tensors.values():
        plain = bytes(tensor.untyped_storage())
        turned = np.frombuffer(plain, f"u{tensor.element_size()}").byteswap().tobytes()
        assert content.count(plain) == 1
        content = content.replace(plain, turned)
    # The member that names the order gets shorter, so that the archive has to be written again.
    with zipfile.ZipFile(tmp_path / "f.pth") as old, zipfile.ZipFile(tmp_path / "g.pth", "w") as new:
        for member in old.infolist():
            at = member.header_offset
            skip = 30 + sum(int.from_bytes(content[at + i : at + i + 2], "little") for i in (26, 28))
            data = content[at + skip : at + skip + member.file_size]
            new.writestr(member.filename, b"big" if data == b"little" else data)
    check(tmp_path / "g.pth", tensors)
