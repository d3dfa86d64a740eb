import os
import sys
import threading
import types

import pytest

from verax.ray import actor


def test_an_actor_has_as_many_threads_as_cpus(monkeypatch):
    lent = {"CPU": 3.0}
    context = types.SimpleNamespace(get_assigned_resources=lambda: lent)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setenv("NPROC", "7")
    for cpus, threads in ((3.0, "3"), (0.5, "1"), (2.5, "2")):
        lent["CPU"] = cpus
        actor.set_threads()
        assert os.environ["NPROC"] == threads


def test_one_compiles_and_the_others_wait_until_it_has(monkeypatch, tmp_path):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    begun, compiled, entered = threading.Event(), threading.Event(), []

    def first():
        with actor.one_compiles("model", {"max_num_seqs": 8}):
            begun.set()
            assert compiled.wait(20)

    def second():
        with actor.one_compiles("model", {"max_num_seqs": 8}):
            entered.append(compiled.is_set())

    compiling = threading.Thread(target=first)
    compiling.start()
    assert begun.wait(20)
    waiting = threading.Thread(target=second)
    waiting.start()
    with actor.one_compiles("another model"):  # another one does not wait
        pass
    compiled.set()
    compiling.join()
    waiting.join()
    assert entered == [True]


def test_a_start_that_fails_leaves_the_next_one_to_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="no such model"), actor.one_compiles("model"):
        raise ValueError("no such model")
    assert not list((tmp_path / "ray").glob("*.warm"))
    with actor.one_compiles("model"):
        pass


def test_without_a_cache_nobody_waits(monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", "")
    with actor.one_compiles("model"):
        pass
