"""`verax batch` as a command: files and pipes, its end by signals, what it prints, and wrong usage."""

import json
import signal
import subprocess
import sys

import pytest

from tests.batch.test_run import answers_in, line, text_of
from tests.support.tiny import tiny_checkpoint

OPTIONS = ["--max-num-seqs", "2", "--max-model-len", "64", "--no-structured-outputs", "--any-model-name"]
OPTIONS += ["--max-embedding-inputs", "10000"]  # more than a server queues

LIMIT = 240
"""Seconds for a process, whose programs may have to be compiled first."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("batch") / "tiny"))


def request(name, **body):
    return line(name, model="gpt-4o-mini", max_tokens=4, **body)


def test_a_file_is_answered_continued_and_its_errors_run_again(run, model, tmp_path):
    long = request("c", user="x" * (9 << 20))  # more bytes than a server reads
    (tmp_path / "in.jsonl").write_bytes(text_of([request("a"), request("b", temperature=-1), long]))
    command = ["batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", model, *OPTIONS]
    done = run(*command)
    assert (done.status, done.out) == (1, "")
    assert "2 done, 1 failed, 0 skipped in " in done.err
    assert "; 8 output tokens, " in done.err
    (tmp_path / "in.jsonl").write_bytes(text_of([request(name) for name in "abcd"]))
    done = run(*command)
    assert done.status == 1  # the output has an error
    earlier = "(earlier errors: 1; --retry-errors runs them again)"
    assert f"1 done, 0 failed, 3 skipped {earlier} in " in done.err
    done = run(*command, "--retry-errors")
    assert done.status == 0
    assert "1 done, 0 failed, 3 skipped in " in done.err
    assert sorted(answer["custom_id"] for answer in answers_in(tmp_path / "out.jsonl")) == list("abcd")


def test_ctrl_c_ends_a_run_whose_pipe_stays_open(model):
    command = [sys.executable, "-m", "verax", "batch", "-i", "-", "-o", "-", model, *OPTIONS]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as running:
        try:
            running.stdin.write(text_of([request("a"), request("b")]))
            running.stdin.flush()
            names = [json.loads(running.stdout.readline())["custom_id"] for _ in range(2)]
            running.send_signal(signal.SIGINT)
            assert running.wait(LIMIT) == 130
        finally:
            running.kill()
        assert sorted(names) == ["a", "b"]
        assert running.stdout.read() == b""
        shown = running.stderr.read().decode()
        assert "2 done, 0 failed, 0 skipped in " in shown
        assert "stopped before the end" in shown
        assert "Traceback" not in shown
