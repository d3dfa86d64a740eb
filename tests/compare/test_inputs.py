"""Given inputs: what files may hold, and what is said of those that do not fit."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from verax import builtin
from verax.checkpoint import Checkpoint
from verax.compare.case import Inputs, read_inputs
from verax.compare.cases.text import _rows
from verax.errors import InvalidParameterError

IDS = np.array([[5, 6, 7], [8, 9, 1]])


def test_a_text_file_has_a_text_in_each_line(tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_text("one sentence\n\n  \nanother: ü\n", encoding="utf-8")
    assert read_inputs(path).texts == ("one sentence", "another: ü")
    assert read_inputs(path).about == {"inputs": str(path)}


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_arrays_are_read_by_name(kind, tmp_path):
    arrays = {"ids": IDS, "x": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}
    path = tmp_path / f"inputs.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    else:
        arrays["low"] = arrays["x"].astype(ml_dtypes.bfloat16)
        save_file(arrays, path)
    arrays_read = read_inputs(path).arrays
    assert list(arrays_read) == list(arrays)
    for name, array in arrays.items():
        assert arrays_read[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays_read[name], array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.csv", b"1,2", "expected a .txt, .npz or .safetensors"),
        ("empty.txt", b"\n\n", "nothing in it"),
        ("latin.txt", b"\xfc\n", "cannot be read"),
        ("broken.npz", b"PK", "cannot be read"),
        ("broken.safetensors", b"{}", "cannot be read"),
        ("not-there.npz", None, "cannot be read"),
    ],
)
def test_an_unreadable_file_is_refused_with_its_reason(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidParameterError, match=f"inputs.*{message}"):
        read_inputs(tmp_path / name)


def test_a_pickle_is_not_opened(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_inputs(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs(arrays={"y": IDS}), "it does not take 'y'; it takes x "),
        (Inputs(arrays={"x": IDS[0]}), r"x has shape \[3\], expected \[any, 3\]"),
        (Inputs(arrays={"x": IDS[:, :2]}), r"x has shape \[2, 2\], expected \[any, 3\]"),
        (Inputs(arrays={"x": IDS[:0]}), "not empty"),
        (Inputs(texts=("a",)), "texts"),
    ],
)
def test_arrays_that_the_call_does_not_take_are_refused(inputs, message):
    with pytest.raises(InvalidParameterError, match=message):
        inputs.checked({"x": (None, 3)})


def test_texts_are_rows_of_their_tokens():
    rows = _rows(
        Checkpoint.open(builtin.encoder()), 10**6, Inputs(texts=("A dog runs.", "A dog runs over a field.")), 4, count=2
    )
    short = rows.real[0]
    assert short.sum() < short.size == rows.real[1].sum()
    same = np.flatnonzero(rows.ids[0] == rows.ids[1])
    assert set(range(4)) <= set(same.tolist())  # [CLS] a dog runs
    assert not rows.ids[0][~short].any()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": IDS + 1}, "from 0 to 9"),
        ({"input_ids": IDS.astype(np.float32)}, "integers"),
        ({"attention_mask": IDS}, "input_ids is missing"),
        ({"input_ids": IDS, "attention_mask": np.array([[0, 1, 1], [1, 1, 1]])}, "ones and then zeros"),
        ({"input_ids": IDS, "attention_mask": np.array([[1, 1, 1], [0, 0, 0]])}, "row 1 of attention_mask"),
        ({"input_ids": IDS, "attention_mask": np.ones((2, 2), int)}, "of input_ids' shape"),
        ({"input_ids": np.tile(IDS, 9)}, "27 tokens in a row, and the model takes 20"),
    ],
)
def test_tokens_that_no_model_takes_are_refused(arrays, message, tmp_path):
    with pytest.raises(InvalidParameterError, match=message):
        _rows(tmp_path, 10, Inputs(arrays=arrays), 4, count=2, longest=20)
