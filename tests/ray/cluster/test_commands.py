"""`verax batch --ray` as a process, which starts a Ray of its own."""

import contextlib
import json
import subprocess
import sys
import time

import psutil
import pytest

OPTIONS = [
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--max-model-len", "128", "--dtype", "float32"),
    "--no-structured-outputs",
]
RAY = ["--ray", "--num-cpus", "0.5", "--replicas", "2"]


@contextlib.contextmanager
def started(*words):
    """A command of verax as a process; whatever it started ends with it."""
    process = subprocess.Popen([sys.executable, "-m", "verax", *words], text=True, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            for member in (*psutil.Process(process.pid).children(recursive=True), process):
                member.kill()


def replicas_of(process):
    """Processes of a command's replicas."""
    family = psutil.Process(process.pid).children(recursive=True)
    return [child for child in family if "".join(child.cmdline()[:1]).startswith("ray::ServeReplica")]


def test_a_batch_over_replicas_loses_no_line_though_one_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("VERAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    body = {"prompt": "The number", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    rows = [
        {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": {**body, "seed": i}}
        for i in range(200)
    ]
    rows.append({**rows[0], "custom_id": "bad", "url": "/v1/nothing"})
    source, target, lines = (tmp_path / name for name in ("in.parquet", "out.parquet", "out.parquet.jsonl"))
    pq.write_table(pa.Table.from_pylist(rows), source)
    with started("batch", "-i", str(source), "-o", str(target), *RAY, *OPTIONS) as batch:
        while batch.poll() is None and not (lines.exists() and lines.stat().st_size):
            time.sleep(0.02)
        assert batch.poll() is None, batch.stderr.read()
        found = replicas_of(batch)
        assert len(found) == 2
        found[0].kill()
        errors = batch.communicate(timeout=200)[1]
    assert batch.returncode == 1, errors  # one line is an error
    assert "200 done, 1 failed, 0 skipped" in errors
    answers = pq.read_table(target).to_pylist()
    assert sorted(answer["custom_id"] for answer in answers) == sorted(row["custom_id"] for row in rows)
    texts = {json.loads(answer["body"])["choices"][0]["text"] for answer in answers if answer["body"]}
    assert len(texts) == 1
