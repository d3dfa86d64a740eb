"""The command itself: help, versions, machine facts, and how it ends."""

import gc
import json
import signal
import subprocess
import sys
import time

import pytest
import typer

import verax
from tests.support import gguf as files
from tests.support.tiny import tiny_checkpoint
from tests.support.tiny_encoder import tiny_encoder
from verax import cli, ops
from verax.cli import app


def test_without_arguments_it_helps(run):
    done = run()
    assert done.status == 0
    for command in ("generate", "chat", "info", "demo", "bench", "train"):
        assert command in done.out


@pytest.mark.parametrize("group", ["bench", "compare", "train"])
def test_a_group_without_a_command_helps_and_reports_no_error(run, group):
    done = run(group)
    assert (done.status, done.err) == (2, "")
    assert f"verax {group}" in done.out


@pytest.mark.parametrize("command", ["generate", "chat", "info", "demo", "bench text", "train lora"])
def test_every_command_explains_itself(run, command):
    done = run(*command.split(), "--help")
    assert done.status == 0
    assert f"verax {command}" in done.out


def test_help_in_a_pipe_has_every_flag_in_full(run):
    for name, command in typer.main.get_command(app).commands.items():
        shown = run(name, "--help").out
        assert [flag for option in command.params for flag in option.opts if flag not in shown] == [], name


def test_the_version_is_the_packages(run):
    assert run("--version").out.strip().endswith(verax.__version__)


def test_info_names_versions_devices_and_every_operation(run):
    facts = json.loads(run("info", "--json", "--no-measure").out)
    assert facts["machine"]["verax"] == verax.__version__
    assert facts["machine"]["devices"]
    assert facts["measured"] is None
    assert set(facts["operations"]) == set(ops.operations())
    for name, row in facts["operations"].items():
        for implementation in row["runs"].split(", "):
            assert implementation.split(" (")[0] in ops.operations()[name].implementations


def test_info_describes_a_checkpoint(run, tmp_path):
    folder = tiny_checkpoint(tmp_path / "folder")
    files.write(folder, tmp_path / "a.gguf", "Q8_0")
    facts = {path: json.loads(run("info", str(path), "--json").out) for path in (folder, tmp_path / "a.gguf")}
    ours, theirs = facts.values()
    same = ("architecture", "layers", "hidden_size", "heads", "context", "vocabulary", "parameters", "tokens")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert [kind.split()[0] for kind in facts[tmp_path / "a.gguf"]["weights"]] == ["Q8_0", "F32"]
    assert [kind.split()[0] for kind in facts[folder]["weights"]] == ["float32"]
    assert "Q8_0" in run("info", str(tmp_path / "a.gguf")).out


def test_info_describes_a_sentence_encoder(run, tmp_path):
    facts = json.loads(run("info", str(tiny_encoder(tmp_path / "encoder")), "--json").out)
    assert (facts["architecture"], facts["layers"], facts["heads"], facts["context"]) == ("bert", 3, "4", 64)


def test_closed_streams_are_empty_ones(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", ["verax", "info", "--json", "--no-measure"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


def test_an_interrupt_ends_with_130_and_no_traceback(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("verax.machine.fingerprint", interrupted)
    done = run("info", "--no-measure")
    assert (done.status, done.err) == (130, "interrupted\n")


def test_a_device_that_jax_lacks_is_one_line_and_other_failures_are_not(run, monkeypatch):
    def failed(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("verax.machine.fingerprint", failed)
    with pytest.raises(AssertionError):
        run("info", "--no-measure")
    monkeypatch.setattr("jax.local_devices", failed)
    done = run("info", "--no-measure")
    assert done.status == 1
    assert done.err.startswith("verax: error: JAX_PLATFORMS")
    assert done.err.count("\n") == 1


def test_an_interrupt_that_the_garbage_collector_drops_comes_again(run, monkeypatch):
    def collected(phase, info):
        if phase == "stop":
            gc.callbacks.remove(collected)
            raise KeyboardInterrupt

    def work(*args, **kwargs):
        gc.callbacks.append(collected)
        gc.collect()
        for _ in range(1000):
            time.sleep(0.01)

    monkeypatch.setattr("verax.machine.fingerprint", work)
    done = run("info", "--no-measure")
    assert (done.status, done.err) == (130, "interrupted\n")


ENDED = """
import os, signal, sys, time
from pathlib import Path

from verax import cli, machine
from verax.files import atomic_path


def ended():
    with atomic_path(path) as partial:
        partial.mkdir()
        os.kill(os.getpid(), number)
        time.sleep(10)


number, path = int(sys.argv[1]), Path(sys.argv[2])
signal.signal(number, signal.SIG_DFL)  # nohup would have it ignored
machine.fingerprint = ended
sys.argv = ["verax", "info", "--no-measure"]
cli.main()
"""
"""Program of a command to which a signal comes while it writes a folder."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_command_leaves_nothing_half_written(tmp_path, number):
    command = [sys.executable, "-c", ENDED, str(int(number)), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_gone_is_no_error():
    command = f"{sys.executable} -m verax info --json --no-measure | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
