"""Safetensors files: values of sound ones, and errors with the file's name for every fault of damaged ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkpoint.small import raw_file
from verax.checkpoint.formats.safetensors import DTYPES, SafetensorsFile
from verax.errors import CheckpointError


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_values_are_read_bit_exactly_in_every_dtype(dtype, tmp_path):
    # Valid bytes of each dtype: booleans are 0 or 1.
    bits = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 256, 15 * dtype.itemsize, np.uint8)
    expected = bits.view(dtype).reshape(3, 5)
    save_file({"odd": expected[0, :3].copy(), "x": expected}, tmp_path / "f.safetensors")
    got = SafetensorsFile(tmp_path / "f.safetensors").read("x")
    assert got.dtype == dtype
    assert got.shape == (3, 5)
    assert got.tobytes() == expected.tobytes()


def test_a_tensor_that_begins_at_an_odd_byte_is_read(tmp_path):
    header = json.dumps({"x": entry("F32", (2,), 0, 8)}).encode()
    file = SafetensorsFile(
        raw_file(tmp_path / "f", header + b" " * (1 - len(header) % 2), np.float32([1.5, -2]).tobytes())
    )
    assert file.tensors["x"].start % 2 == 1
    np.testing.assert_array_equal(file.read("x"), [1.5, -2])


def test_views_are_read_only_and_copy_nothing(tmp_path):
    save_file({"x": np.arange(5.0)}, tmp_path / "f.safetensors")
    file = SafetensorsFile(tmp_path / "f.safetensors")
    first, second = file.read("x"), file.read("x")
    assert np.shares_memory(first, second)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def resident_kilobytes(path):
    """Kilobytes of a mapped file in this process."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.rstrip().endswith(str(path))
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.parametrize("rows", [1, 1000])
def test_release_gives_pages_back_and_leaves_views_unchanged(rows, tmp_path):
    path = tmp_path / "f.safetensors"
    count = 2000 // rows
    expected = {f"{i:04}": np.full((rows, 333), i, np.float32) for i in range(count)}
    save_file(expected, path)
    file = SafetensorsFile(path)
    views = {name: file.read(name) for name in expected}
    assert sum(view.sum() for view in views.values()) > 0
    assert resident_kilobytes(path) > 2500
    for name in expected:
        file.read(name).sum()
        file.release(name)
    assert resident_kilobytes(path) <= 64
    for name, value in expected.items():
        np.testing.assert_array_equal(views[name], value)


BAD_HEADERS = {
    "no JSON": (b"{'a': 1}", "not valid JSON"),
    "no object": (b"[1, 2]", "not valid JSON"),
    "nested beyond reason": (b"[" * 100_000, "not valid JSON"),
    "entry is not an object": ({"a.w": [1]}, "entry of a.w is malformed"),
    "no offsets": ({"a.w": {"dtype": "F32", "shape": [1]}}, "entry of a.w is malformed"),
    "dtype is a list": ({"a.w": entry() | {"dtype": ["F32"]}}, "entry of a.w is malformed"),
    "fractional shape": ({"a.w": entry(shape=(1.0,))}, "entry of a.w is malformed"),
    "negative shape": ({"a.w": entry(shape=(-1, -1))}, "entry of a.w is malformed"),
    "negative offset": ({"a.w": entry(begin=-4, end=0)}, "entry of a.w is malformed"),
    "unknown dtype": ({"a.w": entry("Q4_K")}, "a.w has dtype Q4_K; supported are F64"),
    "shape and bytes differ": ({"a.w": entry(shape=(3,))}, r"a.w of shape \[3\] and dtype F32 cannot have 4 bytes"),
    "end before beginning": ({"a.w": entry(begin=4, end=0)}, "a.w of shape .* cannot have -4 bytes"),
    "data missing": ({"a.w": entry(), "b.w": entry(begin=4, end=8)}, "b.w ends at byte .*, but the file has"),
    "overlap": ({"a.w": entry("F16", (2,)), "b.w": entry("F16", (1,), 2, 4)}, "b.w begins at byte"),
    "hole": ({"a.w": entry("F16", (1,), 2, 4)}, "a.w begins at byte"),
    "data left over": ({"a.w": entry("F16", (1,), 0, 2)}, "tensors end at byte .*, but the file has"),
}


@pytest.mark.parametrize(("header", "problem"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_the_error_of_a_bad_header_names_file_and_key(header, problem, tmp_path):
    path = raw_file(tmp_path / "model-00003.safetensors", header, b"data")
    with pytest.raises(CheckpointError, match=rf"model-00003\.safetensors: .*{problem}"):
        SafetensorsFile(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "f.safetensors"
    save_file({"a": np.arange(3, dtype=np.int16), "b": np.ones(5, np.float32)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"f\.safetensors: "):
            SafetensorsFile(path)


def test_a_missing_file_and_a_folder_in_its_place_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"f\.safetensors: no such file"):
        SafetensorsFile(tmp_path / "f.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)
