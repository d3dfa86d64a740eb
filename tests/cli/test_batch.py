"""`verax batch` as a command: files and pipes, its end by signals, what it prints, and wrong usage."""

import json
import signal
import subprocess
import sys

import pytest

from tests.support.tiny import tiny_checkpoint

OPTIONS = ["--max-num-seqs", "2", "--max-model-len", "64", "--no-structured-outputs", "--any-model-name"]

LIMIT = 240
"""Seconds for a process, whose programs may have to be compiled first."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("batch") / "tiny"))


def request(name, **body):
    body = {"model": "gpt-4o-mini", "prompt": f"abc {name}", "max_tokens": 4, "ignore_eos": True, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def lines_of(requests):
    return "".join(json.dumps(entry) + "\n" for entry in requests)


def names_in(text):
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def process(*arguments, **options):
    command = [sys.executable, "-m", "verax", "batch", *arguments, *OPTIONS]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def test_a_file_is_answered_continued_and_its_errors_run_again(run, model, tmp_path):
    (tmp_path / "in.jsonl").write_text(lines_of([request("a"), request("b", temperature=-1), request("c")]))
    command = ["batch", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", model, *OPTIONS]
    done = run(*command)
    assert (done.status, done.out) == (1, "")
    assert "2 done, 1 failed, 0 skipped in " in done.err
    assert "; 8 output tokens, " in done.err
    (tmp_path / "in.jsonl").write_text(lines_of([request(name) for name in "abcd"]))
    done = run(*command)
    assert done.status == 1  # the output has an error
    earlier = "(earlier errors: 1; --retry-errors runs them again)"
    assert f"1 done, 0 failed, 3 skipped {earlier} in " in done.err
    done = run(*command, "--retry-errors")
    assert done.status == 0
    assert "1 done, 0 failed, 3 skipped in " in done.err
    assert sorted(names_in((tmp_path / "out.jsonl").read_text())) == list("abcd")


def test_ctrl_c_ends_a_run_whose_pipe_stays_open(model):
    with process("-i", "-", "-o", "-", model, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        try:
            running.stdin.write(lines_of([request("a"), request("b")]))
            running.stdin.flush()
            names = [json.loads(running.stdout.readline())["custom_id"] for _ in range(2)]
            running.send_signal(signal.SIGINT)
            assert running.wait(LIMIT) == 130
        finally:
            running.kill()
        assert sorted(names) == ["a", "b"]
        assert running.stdout.read() == ""
        shown = running.stderr.read()
        assert "2 done, 0 failed, 0 skipped in " in shown
        assert "stopped before the end" in shown
        assert "Traceback" not in shown
