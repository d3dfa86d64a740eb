"""One program compiled, by the local compiler: its record, the cache of results, refusals, other errors."""

import jax
import jax.numpy as jnp
import pytest

from verax.errors import VeraxError
from verax.plan.compiled import compiler
from verax.plan.compiled.compiler import compile_lowered
from verax.plan.compiled.topology import Compiler

LOCAL = Compiler("jaxlib", "jaxlib", "", {})
FULL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (29.22G) exceeds "
    "available HBM (15.75G).\nMore lines."
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def lowered(size=64):
    x = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jax.jit(lambda x, y: (x @ y, y + 1), donate_argnums=1).trace(x, x).lower()


def test_bytes_are_those_of_arguments_and_results_and_donated_buffers_count_once():
    found = compile_lowered("a product", lowered(), LOCAL, "here")
    size = 64 * 64 * 4
    assert (found.name, found.refused, found.arguments, found.aliased) == ("a product", None, 2 * size, size)
    assert found.results >= 2 * size
    assert found.needed == found.arguments + found.results - found.aliased + found.temporaries + found.code
    assert found.findings is not None
    assert found.findings.collectives == {}
    assert found.seconds > 0


def test_the_same_program_is_compiled_once(cache, monkeypatch):
    first = compile_lowered("one", lowered(), LOCAL, "here")
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert compile_lowered("again", lowered(), LOCAL, "here") == first._replace(name="again")


def test_another_program_device_or_compiler_and_a_broken_entry_are_compiled(cache):
    compile_lowered("one", lowered(), LOCAL, "here")
    compile_lowered("one", lowered(32), LOCAL, "here")
    compile_lowered("one", lowered(), LOCAL, "there")
    compile_lowered("one", lowered(), LOCAL._replace(package="flax"), "here")
    compile_lowered("one", lowered(), LOCAL._replace(description="another description"), "here")
    assert len(list(cache.iterdir())) == 5
    for path in cache.iterdir():
        path.write_text("{")
    assert compile_lowered("one", lowered(), LOCAL, "here").arguments


def test_without_a_folder_of_caches_nothing_is_kept(cache, monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", "")
    assert compile_lowered("one", lowered(), LOCAL, "here").arguments
    assert not cache.exists()


class Failing:
    """A lowered program that does not compile."""

    def __init__(self, message):
        self.message = message

    def as_text(self):
        return self.message

    def compile(self, **_):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (FULL, round(29.22 * 2**30)),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 19.50M of 15.00M hbm.", round(19.5 * 2**20)),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", 0),
    ],
)
def test_a_program_that_does_not_fit_is_refused_with_the_bytes_that_it_needs(message, needed):
    for _ in range(2):  # the second comes from the cache
        found = compile_lowered("large", Failing(message), LOCAL, "here")
        assert (found.needed, found.refused, found.findings) == (needed, message.partition("\n")[0], None)


def test_a_compiler_that_fails_is_named_with_its_message(cache):
    with pytest.raises(VeraxError, match=r"broken: jaxlib .* fails to compile it: INTERNAL: a bug$"):
        compile_lowered("broken", Failing("INTERNAL: a bug\nin many lines"), LOCAL, "here")
    assert not cache.exists()
