"""`verax batch --ray` and `verax serve --ray` as processes, which start a Ray of their own."""

import json
import subprocess
import sys

import psutil
import pytest

OPTIONS = [
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--max-model-len", "128", "--dtype", "float32"),
    "--no-structured-outputs",
]
RAY = ["--ray", "--num-cpus", "0.5"]


@pytest.fixture
def start(tmp_path_factory, monkeypatch):
    """Starts a command of verax; whatever it started ends with the test."""
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "commands"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []

    def begin(*words, **options):
        process = subprocess.Popen([sys.executable, "-m", "verax", *words], text=True, **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                member.kill()


def test_a_batch_over_replicas_is_that_of_one_process_and_goes_on(start, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    body = {"prompt": "The number", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    rows = [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": i}}
        for i in range(40)
    ]
    rows.append({**rows[0], "custom_id": "bad", "url": "/v1/nothing"})
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    command = ["batch", "-i", str(source), "-o", str(target), *RAY, "--replicas", "2", *OPTIONS]
    first = start(*command, stderr=subprocess.PIPE)
    errors = first.communicate(timeout=200)[1]
    assert first.returncode == 1, errors  # one line is an error
    assert "40 done, 1 failed, 0 skipped" in errors
    answers = pq.read_table(target).to_pylist()
    assert sorted(answer["custom_id"] for answer in answers) == sorted(row["custom_id"] for row in rows)
    texts = {json.loads(answer["body"])["choices"][0]["text"] for answer in answers if answer["body"]}
    assert len(texts) == 1
