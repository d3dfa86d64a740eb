"""`verax serve` as a process: what it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys

import httpx

from tests.support.tiny import tiny_checkpoint


def test_it_prints_where_it_listens_answers_with_a_key_and_ends_at_sigterm(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-m", "verax", "serve", str(folder), "--port", "0", "--max-model-len", "64"]
    options = ["--max-num-seqs", "2", "--log-format", "json"]  # the model has its folder's name
    options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}', "--kv-cache-dtype", "fp8"]
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VERAX_API_KEY": "secret"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        assert "curl" in process.stdout.readline()
        assert re.search(r"float8_e4m3fn, [\d,]+ tokens in [\d.]+ GB", process.stdout.readline())
        body = {"model": "tiny", "prompt": "confidential", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        assert "vllm:spec_decode_num_drafts_total" in httpx.get(f"{url}/metrics", headers=headers).text
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert '"completion_tokens": 2' in log
        assert "confidential" not in log
        assert "secret" not in log
    finally:
        process.kill()
