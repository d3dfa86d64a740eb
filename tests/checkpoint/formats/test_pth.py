"""A `.pth` file: nothing in it is run, and every fault of a damaged one is an error with the file's name."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from verax.checkpoint.formats.pth import PthFile
from verax.errors import CheckpointError


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def reference(key="0", storage=b"ctorch\nFloatStorage\n", kind="storage"):
    """Instructions for a storage."""
    return b"(" + text(kind) + storage + text(key) + text("cpu") + b"K\x06tQ"


def tensor(offset=0, shape=(2, 3), strides=(3, 1), function=b"ctorch._utils\n_rebuild_tensor_v2\n", **storage):
    """Instructions for a float32 tensor."""
    pair = b"".join(
        b"(" + b"".join(b"J" + n.to_bytes(4, "little", signed=True) for n in ns) + b"t" for ns in (shape, strides)
    )
    return function + b"(" + reference(**storage) + b"K" + bytes([offset]) + pair + b"\x89}tR"


def dictionary(**values):
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in values.items()) + b"u."


DATA = np.arange(6, dtype=np.float32)
BYTES = DATA.tobytes()


def archive(path, program, *, data=BYTES, compression=zipfile.ZIP_STORED, **more):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {"data.pkl": program, "data/0": data, **more}.items():
            file.writestr(f"archive/{name}", content)
    return path


def test_a_tensor_is_a_read_only_view(tmp_path):
    file = PthFile(archive(tmp_path / "f.pth", dictionary(x=tensor())))
    np.testing.assert_array_equal(file.read("x"), DATA.reshape(2, 3))
    assert np.shares_memory(file.read("x"), file.read("x"))
    with pytest.raises(ValueError, match="read-only"):
        file.read("x")[0] = 1
    file.release("x")
    np.testing.assert_array_equal(file.read("x"), DATA.reshape(2, 3))


class Touch:
    """Pickled, it makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(protocol, tmp_path):
    program = pickle.dumps({"x": Touch(tmp_path / "ran")}, protocol)
    path = archive(tmp_path / "f.pth", program)
    with pytest.raises(CheckpointError, match=f"{path}: it asks for .*only tensors"):
        PthFile(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(program)
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "builtins.eval"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"(cos\nsystem\no.", "os.system"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)\x81.", "NEWOBJ"),
        (b"ctorch.jit._pickle\nbuild_intlist\n.", "torch.jit._pickle.build_intlist"),
        (b"c__builtin__\nset\n]\x85R.", "__builtin__.set"),
        (dictionary(x=tensor(storage=b"ctorch\nComplexFloatStorage\n")), "torch.ComplexFloatStorage"),
    ],
)
def test_what_is_refused_is_named(program, named, tmp_path):
    path = archive(tmp_path / "f.pth", program)
    with pytest.raises(CheckpointError, match=f"{path}: it asks for .*{named}"):
        PthFile(path)


@pytest.mark.parametrize(
    "program",
    [
        b"garbage",
        b"\x80\x02}",
        b"\x80\x02R.",
        dictionary(x=reference(kind="module")),
        dictionary(x=tensor(shape=(-2, 3))),
        dictionary(x=tensor(strides=(3, -1))),
        dictionary(x=tensor(strides=(1,))),
        dictionary(x=tensor(offset=1)),
        dictionary(x=tensor(shape=(3, 3))),
        dictionary(x=tensor(key="1")),
        dictionary(x=tensor(key="../data.pkl")),
    ],
)
def test_a_damaged_description_is_an_error_that_names_the_file(program, tmp_path):
    path = archive(tmp_path / "f.pth", program)
    with pytest.raises(CheckpointError, match=f"{path}: .*the file is damaged or incomplete"):
        PthFile(path)


ORDERED = b"ccollections\nOrderedDict\n)R"


@pytest.mark.parametrize(
    "program",
    [
        dictionary(x=b"ctorch._utils\n_rebuild_tensor_v2\n}X\x08\x00\x00\x00__call__K\x01sb"),
        dictionary(x=b"ctorch._utils\n_rebuild_tensor_v2\n(}}X\x04\x00\x00\x00nameK\x01stb"),
        dictionary(x=b"ctorch\nFloatStorage\n(}}X\x05\x00\x00\x00dtypeK\x01stb"),
    ],
)
def test_a_pickle_cannot_change_what_it_calls(program, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be interpreted"):
        PthFile(archive(tmp_path / "f.pth", program))
    test_a_tensor_is_a_read_only_view(tmp_path)


def test_attributes_of_a_dictionary_are_ignored(tmp_path):
    program = b"\x80\x02" + ORDERED + text("x") + tensor() + b"s(}}X\x05\x00\x00\x00itemsK\x01stb."
    assert list(PthFile(archive(tmp_path / "f.pth", program)).tensors) == ["x"]


def test_a_memo_larger_than_the_pickle_is_refused_before_it_takes_memory(tmp_path):
    with pytest.raises(CheckpointError, match="its memo has a place 4294967295"):
        PthFile(archive(tmp_path / "f.pth", b"\x80\x02}r\xff\xff\xff\xff."))


def test_the_error_of_a_legacy_file_says_how_to_write_it_again(tmp_path):
    content = io.BytesIO()
    pickle.dump(0x1950A86A20F9469CFC6C, content, protocol=2)
    (tmp_path / "f.pth").write_bytes(content.getvalue() + b"\x80\x02M\xe9\x03.")
    with pytest.raises(CheckpointError, match=r"f\.pth: .*before 1\.6.*torch\.save\(torch\.load"):
        PthFile(tmp_path / "f.pth")


def test_errors_distinguish_other_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"f\.pth: no such file"):
        PthFile(tmp_path / "f.pth")
    with zipfile.ZipFile(tmp_path / "z.pth", "w") as file:
        file.writestr("a/b.txt", "c")
    with pytest.raises(CheckpointError, match=r"not one of torch\.save"):
        PthFile(tmp_path / "z.pth")
    with pytest.raises(CheckpointError, match="is compressed"):
        PthFile(archive(tmp_path / "c.pth", dictionary(x=tensor()), compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="no tensors by name"):
        PthFile(archive(tmp_path / "e.pth", dictionary(x=text("y"))))
    with pytest.raises(CheckpointError, match="byte order is b'middle'"):
        PthFile(archive(tmp_path / "o.pth", dictionary(x=tensor()), byteorder=b"middle"))
