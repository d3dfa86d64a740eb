"""`verax compile`: a folder that `verax generate --programs` starts with, for the attached device only."""

import sys

import pytest

from tests.support.tiny import tiny_checkpoint
from verax import cli


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["verax", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr()


def test_a_command_starts_with_the_programs_of_another(monkeypatch, capsys, tmp_path):
    folder, programs = tiny_checkpoint(tmp_path / "checkpoint"), tmp_path / "programs"
    sizes = ["--max-num-seqs", 2, "--max-model-len", 64, "--max-num-batched-tokens", 32]
    code, shown = run(monkeypatch, capsys, "compile", folder, "-o", programs, "--device", "cpu", *sizes)
    assert (code, shown.err) == (0, "")
    assert shown.out.startswith(f"{programs}: 4 programs, ")
    generate = ["generate", "abc", "--model", folder, "--max-tokens", 4, "-t", 0, "--ignore-eos"]
    code, shown = run(monkeypatch, capsys, *generate, "--programs", programs)
    assert code == 0
    assert shown.out.startswith("abc")
    code, shown = run(monkeypatch, capsys, *generate, "--programs", programs, "--dtype", "float32")
    assert code == 1
    assert "cache_dtype: the programs of" in shown.err


def test_another_device_than_the_attached_one_is_refused(monkeypatch, capsys, tmp_path):
    code, shown = run(monkeypatch, capsys, "compile", "-o", tmp_path / "programs", "--device", "h100")
    assert code == 1
    assert "h100 is 'NVIDIA H100 80GB HBM3', attached is 'cpu'" in shown.err
    assert not (tmp_path / "programs").exists()
