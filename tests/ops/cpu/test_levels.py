"""Instruction-set levels of the native library: one list, in native/levels.h."""

import pytest

from tests.support.cpu import for_each_level, needs_library
from verax.ops.cpu import build, library


def test_the_library_has_the_levels_of_the_header_in_its_order():
    listed = [name for name, (where, _) in build.level_flags().items() if where in (build.architecture(), "any")]
    here = library.levels()
    assert here == [name for name in listed if name in here]
    assert here[-1] == "portable"


def test_flags_of_a_level_are_read_whole():
    flags = build.level_flags()
    assert flags["avx512_bf16"][1][-2:] == ["-mavx512vnni", "-mavx512bf16"]
    assert set(flags["avx512"][1]) < set(flags["avx512_bf16"][1]) < set(flags["amx"][1])
    assert flags["portable"] == ("any", ["-DVERAX_PORTABLE"])
    assert flags["neon"] == ("aarch64", [])


CAPABILITIES = {
    "amx": {"bf16_dot", "bf16_tiles", "fma"},
    "avx512_bf16": {"bf16_dot", "fma"},
    **{level: {"fma"} for level in ("avx512", "avx2", "neon")},
}


@for_each_level
def test_capabilities_are_those_of_the_level_in_force(level):
    with library.use_level(level):
        assert {name for name in CAPABILITIES["amx"] if library.has(name)} == CAPABILITIES.get(level, set())
        assert not any(library.has(name) for name in ("", " ", "bf16", "dot", "bf16_dot bf16_tiles"))


def test_a_missing_library_has_no_capabilities(monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: library._Loaded(None, "none"))
    assert not library.has("bf16_dot")
    assert library.levels() == []


def test_a_level_that_is_not_listed_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"portable.*got 'avx9000'"), library.use_level("avx9000"):
        pass


def test_a_library_of_an_unknown_level_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(build.BuildError, match=r"no level avx9000; the levels are amx,.*portable"):
        build.build(tmp_path / "library.so", levels=["avx2", "avx9000"])
    assert not list(tmp_path.iterdir())


@needs_library
def test_an_editable_installation_has_the_levels_that_this_machine_runs(tmp_path):
    every = [name for name, (where, _) in build.level_flags().items() if where in (build.architecture(), "any")]
    assert build._levels_here(build.compiler(), every, tmp_path) == library.levels()
