"""Builds of the native library: instruction-set levels, one list in native/levels.h, and the cache of objects."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from tests.support.cpu import for_each_level, needs_library
from verax.ops.cpu import build, library


def test_the_library_has_the_levels_of_the_header_in_its_order():
    listed = [name for name, (where, _) in build.level_flags().items() if where in (build.architecture(), "any")]
    here = library.levels()
    assert here == [name for name in listed if name in here]


CAPABILITIES = {
    "amx": {"bf16_dot", "bf16_tiles", "byte_dot", "fma", "half_dot"},
    "avx512_bf16": {"bf16_dot", "byte_dot", "fma", "half_dot"},
    **{level: {"byte_dot", "fma", "half_dot"} for level in ("avx512_vnni", "avx_vnni")},
    "neon_bf16": {"bf16_dot", "byte_dot", "fma"},
    "neon_dot": {"byte_dot", "fma"},
    **{level: {"fma", "half_dot"} for level in ("avx512", "avx2")},
    "neon": {"fma"},
}


@for_each_level
def test_capabilities_are_the_levels_in_force(level):
    with library.use_level(level):
        assert {name for name in CAPABILITIES["amx"] if library.has(name)} == CAPABILITIES.get(level, set())
        assert not any(library.has(name) for name in ("", " ", "bf16", "dot", "bf16_dot bf16_tiles"))


def test_a_missing_library_has_no_capabilities(monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: library._Loaded(None, "none"))
    assert not library.has("bf16_dot")
    assert library.levels() == []


def test_a_level_that_is_not_listed_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"this machine runs .*got 'avx9000'"), library.use_level("avx9000"):
        pass


def test_a_library_of_an_unknown_level_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(build.BuildError, match=r"unknown level avx9000; the levels are amx,.*portable"):
        build.build(tmp_path / "library.so", levels=["avx2", "avx9000"])
    assert not list(tmp_path.iterdir())


@needs_library
def test_an_editable_installation_has_the_levels_that_this_machine_runs(tmp_path):
    every = [name for name, (where, _) in build.level_flags().items() if where in (build.architecture(), "any")]
    here = build._levels_here(build.compiler(), every, tmp_path)
    assert [level for level in here if level in library.levels()] == library.levels()


@pytest.mark.skipif(build.architecture() != "x86_64", reason="AMX is of x86-64")
@pytest.mark.parametrize(("asked", "tests"), [(True, False), (False, True)])
def test_amx_is_emulated_where_it_is_asked_for_and_in_tests_of_a_machine_without(monkeypatch, tmp_path, asked, tests):
    monkeypatch.setattr(build, "_levels_here", lambda *_: ["avx2", "portable"])
    flags = build._levels(build.compiler(), ["amx"], tmp_path, emulate_amx=asked, tests=tests)
    assert list(flags) == ["amx", "portable"]
    assert build.EMULATE_AMX in flags["amx"]
    assert not any(flag.startswith("-mamx") for flag in flags["amx"])


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """List of the sources that were compiled, of a library of two kernels with a cache of its own."""
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    sources = tmp_path / "native"
    (sources / "kernels").mkdir(parents=True)
    for name in ("levels.h", "levels.cc", "export.h"):
        shutil.copy(build.SOURCES / name, sources)
    (sources / "kernels/one.h").write_text("#pragma once\ninline int one() { return 1; }\n")
    (sources / "kernels/one.cc").write_text('#include "one.h"\nnamespace VERAX_LEVEL { int use() { return one(); } }\n')
    (sources / "kernels/two.cc").write_text("namespace VERAX_LEVEL { int two() { return 2; } }\n")
    names, run = list[str](), build._run

    def record(command):
        if (source := next((part for part in command if part.startswith(str(sources / "kernels"))), None)) is not None:
            names.append(source.rpartition("/")[2])
        run(command)

    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "_run", record)
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path / "cache"))
    return names


def portable(folder, **options):
    """Build the portable level, and return the names of all objects in the cache."""
    assert build.build(folder / "library.so", levels=["portable"], **options) == ["portable"]
    return sorted(path.name for path in (folder / "cache/build").glob("*"))


def test_objects_are_compiled_once_for_equal_contents_and_flags(compiled, tmp_path):
    portable(tmp_path)
    assert sorted(compiled) == ["one.cc", "two.cc"]
    portable(tmp_path)
    assert sorted(compiled) == ["one.cc", "two.cc"]
    (build.SOURCES / "kernels/one.h").write_text("#pragma once\ninline int one() { return 3; }\n")
    portable(tmp_path)
    assert compiled[2:] == ["one.cc"]
    portable(tmp_path, flags=["-O1"])
    assert sorted(compiled[3:]) == ["one.cc", "two.cc"]


def test_kernels_compiled_meanwhile_into_the_cache_are_waited_for(compiled, tmp_path):
    build_to_cache = threading.Thread(target=build.build, args=(None,), kwargs={"levels": ["portable"]})
    build_to_cache.start()
    portable(tmp_path)
    build_to_cache.join()
    assert sorted(compiled) == ["one.cc", "two.cc"]


def test_a_file_that_another_build_removes_meanwhile_is_passed_over(compiled, tmp_path, monkeypatch):
    objects = portable(tmp_path)
    gone = tmp_path / "cache/build/gone.lock"
    glob = type(gone).glob
    monkeypatch.setattr(type(gone), "glob", lambda self, pattern: [*[gone] * (pattern == "*"), *glob(self, pattern)])
    assert portable(tmp_path) == sorted([*objects, "gone.lock"])


def test_another_clone_uses_the_same_objects(compiled, tmp_path, monkeypatch):
    objects = portable(tmp_path)
    shutil.copytree(build.SOURCES, tmp_path / "clone")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "clone")
    assert portable(tmp_path) == objects


def test_an_interrupted_build_leaves_no_broken_object(compiled, tmp_path, monkeypatch):
    copy = shutil.copyfile

    def half(source, target):
        copy(source, target)
        os.truncate(target, 100)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(shutil, "copyfile", half)
        with pytest.raises(KeyboardInterrupt):
            portable(tmp_path)
    unfinished = [*(tmp_path / "cache/build").glob("*.unfinished")]
    assert unfinished
    assert not [*(tmp_path / "cache/build").glob("*.o")]
    for path in unfinished:
        os.utime(path, (time.time() - 2 * build.STALE_SECONDS,) * 2)
    assert all(name.endswith(".o") for name in portable(tmp_path))


def test_the_least_recently_used_objects_are_removed_above_the_bound(compiled, tmp_path, monkeypatch):
    used = portable(tmp_path, flags=["-O1"])
    for path in (tmp_path / "cache/build").glob("*"):
        os.utime(path, (0, 0))
    sizes = sum(path.stat().st_size for path in (tmp_path / "cache/build").glob("*"))
    monkeypatch.setattr(build, "CACHE_BYTES", int(1.9 * sizes))
    left = portable(tmp_path, flags=["-O2"])
    assert len(used) < len(left) < 2 * len(used)
    assert len({*left} - {*used}) == len(used)


def test_a_cache_that_cannot_be_written_and_none_at_all_change_no_result(compiled, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    portable(tmp_path)
    monkeypatch.setenv("VERAX_CACHE_DIR", "")
    portable(tmp_path)
    assert sorted(compiled) == ["one.cc", "one.cc", "two.cc", "two.cc"]


def test_the_best_level_is_built_alone_and_can_be_loaded(compiled, tmp_path):
    every = build.build(tmp_path / "library.so", levels=[build.HERE])
    assert build.build(tmp_path / "best.so", levels=[build.BEST]) == every[:1]
    library = ctypes.CDLL(str(tmp_path / "best.so"))
    library.verax_level.restype = ctypes.c_char_p
    assert library.verax_level().decode() == every[0]


def test_a_library_of_another_processor_is_refused_by_name(compiled, tmp_path):
    levels = build.SOURCES / "levels.h"
    levels.write_text(re.sub(r'(ROW\(portable, any, "[^"]*"), true', r"\1, false", levels.read_text()))
    build.build(tmp_path / "library.so", levels=["portable"])
    environment = os.environ | {"VERAX_CPU_LIBRARY": str(tmp_path / "library.so")}
    command = [sys.executable, "-c", "from verax.ops.cpu import library; print(library.problem())"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "compiled for another processor" in printed
