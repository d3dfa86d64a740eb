"""Files are written whole or not at all, and a JSON file that cannot be read is named."""

import os
from pathlib import Path

import pytest

from verax.errors import CheckpointError
from verax.files import atomic_path, cache_folder, model_name, read_json, write_json, write_text


def test_a_file_appears_when_the_block_ends_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.npz"
    with atomic_path(path) as partial:
        assert partial.suffix == ".npz"
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("old", ["file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_files_and_folders_replace_each_other_or_stay(tmp_path, old, new):
    path = tmp_path / "a"
    make(path, old, "old")

    def fail():
        with atomic_path(path) as partial:
            make(partial, new, "broken")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert content(path) == "old"
    with atomic_path(path) as partial:
        make(partial, new, "new")
    assert content(path) == "new"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_two_who_write_at_once_do_not_write_to_one_file(tmp_path, kind):
    path = tmp_path / "a"
    with atomic_path(path) as slow:
        make(slow, kind, "slow")
        with atomic_path(path) as quick:
            make(quick, kind, "quick")
        assert content(path) == "quick"
    assert content(path) == "slow"
    assert [*tmp_path.iterdir()] == [path]


def make(path, kind, text):
    if kind == "folder":
        path.mkdir()
        path = path / "inside"
    path.write_text(text)


def content(path):
    return (path / "inside" if path.is_dir() else path).read_text()


def test_json_is_written_and_read_with_its_name(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"ä": [1, None]})
    assert path.read_text(encoding="utf-8") == '{\n  "ä": [\n    1,\n    null\n  ]\n}\n'
    read = read_json(path)
    assert read == {"ä": [1, None]}
    assert read.where == str(path)
    path.write_text('{"ä": 1}', encoding="utf-8-sig")  # as Windows' editors write it
    assert read_json(path) == {"ä": 1}
    assert read_json(tmp_path / "none.json", optional=True) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"a": "\\ud800"}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_anything_but_a_json_object_is_refused_with_the_name_of_the_file(tmp_path, text):
    path = tmp_path / "a.json"
    write_text(path, text)
    with pytest.raises(CheckpointError, match=r"a\.json: (not valid JSON|expected a JSON object)"):
        read_json(path)
    with pytest.raises(CheckpointError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Small-Q4_K_M.gguf", "Small-Q4_K_M"),
        ("models/Qwen3-0.6B/config.json", "Qwen3-0.6B"),
        ("large-00001-of-00003.gguf", "large"),
        ("models--Qwen--Qwen3-0.6B/snapshots/0a1b/config.json", "Qwen3-0.6B"),
    ],
)
def test_a_local_model_is_named_without_its_place(tmp_path, monkeypatch, path, name):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    model = file.parent if path.endswith(".json") else file
    assert model_name(model) == name
    monkeypatch.chdir(file.parent)
    if path.endswith(".json"):
        assert model_name(".") == name
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("named", "home", "found"),
    [
        (None, "/home/a", "/home/a/.cache/verax"),
        ("~/b", "/home/a", "/home/a/b"),
        ("/c", None, "/c"),
        ("", "/home/a", None),
        (None, None, None),
    ],
)
def test_caches_lie_where_the_variable_says_and_a_user_without_a_home_has_none(monkeypatch, named, home, found):
    for name, value in (("VERAX_CACHE_DIR", named), ("HOME", home)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if home is None:  # nor an entry in /etc/passwd
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder() == (None if found is None else Path(found))
