"""llama.cpp's server: where it is looked for, and how it is started."""

import pytest

from verax.bench.serve.llama_cpp import (
    BUILT,
    VARIABLE,
    find_llama_server,
    llama_cpp_command,
    llama_server_version,
)
from verax.errors import MissingDependencyError


def program(folder, name="llama-server"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\necho 'version: 0.5 (build 1)' >&2\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working directory and a PATH without the program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def test_the_given_program_goes_before_the_variable_path_and_the_built_one(nowhere, monkeypatch):
    built = program(nowhere / BUILT.parent)
    assert find_llama_server() == built
    on_path = program(nowhere / "bin")
    assert find_llama_server() == on_path
    named = program(nowhere / "named", "server")
    monkeypatch.setenv(VARIABLE, named)
    assert find_llama_server() == named
    given = program(nowhere / "given", "other")
    assert find_llama_server(given) == given


@pytest.mark.parametrize("given", [None, "/nowhere/llama-server"])
def test_without_the_program_the_error_says_how_to_get_it(nowhere, given):
    with pytest.raises(MissingDependencyError, match=r"no program .*; build it with make llama-server, or give"):
        find_llama_server(given)


def test_every_slot_has_room_for_the_longest_request(tmp_path):
    words = list(llama_cpp_command("llama-server", tmp_path / "a.gguf", slots=32, length=96)(8123))
    options = dict(zip(words[1::2], words[2::2], strict=False))
    assert (options["--parallel"], options["--ctx-size"]) == ("32", str(32 * 96))
    assert options["--threads"] == options["--threads-batch"]
    assert words[-2:] == ["--port", "8123"]


def test_the_version_is_the_one_that_the_program_prints(tmp_path):
    assert llama_server_version(program(tmp_path)) == "0.5 (build 1)"
    assert llama_server_version("/bin/true") == "unknown"
