"""Requests of schemathesis to a server of the built-in models: `make fuzz-server`.

It reads `/openapi.json`, and makes requests of it that fit and that do not. None may fail on the server or be answered
with what the description lacks. Groups of endpoints can be run one by one.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from verax.bench.serve.client import started

GROUPS = {
    "chat": r"^/v1/chat/completions$",
    "count": r"^/v1/(chat/completions/input_tokens|responses/input_tokens|messages/count_tokens)$",
    "completions": r"^/v1/completions$",
    "responses": r"^/v1/responses$",
    "messages": r"^/v1/messages$",
    "small": r"^/(v1/(embeddings|rerank|models|tokenize|detokenize).*|health|metrics)$",
    "videos": r"^/v1/videos",
    "aliases": r"^/(?!v1/|health|metrics)",
}
"""Paths of each group. Aliases are the paths without `/v1`."""

SEED = 13
LEAST_CASES = 5000
"""Cases of all groups together."""

PHASES = {"aliases": "fuzzing"}
EXAMPLES = {"aliases": 5}
"""Phases and random cases for each operation of a group. Others have 100, and first those that cover the schema."""

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

LIMITS = ["--max-model-len", "128", "--max-num-seqs", "8", "--max-queued-requests", "16", "--any-model-name"]
"""Options of the server that keep each request small."""

HOOKS = Path(__file__).with_name("fuzz_hooks.py")


def main() -> int:
    """Run the groups that the command line names, all by default; the exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz-server", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"one of {', '.join(GROUPS)}; all if left out")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"no such group: {unknown.pop()}; expected {', '.join(GROUPS)}")
    cases, failed = asyncio.run(_fuzz(given.groups or list(GROUPS), given.seed))
    print(f"{cases} cases; groups that failed: {', '.join(failed) or 'none'}")
    if not given.groups and cases < LEAST_CASES:
        print(f"fewer than {LEAST_CASES} cases")
        return 1
    return 1 if failed else 0


async def _fuzz(groups: list[str], seed: int) -> tuple[int, list[str]]:
    """Number of cases, and the groups that failed."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "verax", "serve", "--host", "127.0.0.1", "--port", str(port), *LIMITS]

    cases, failed = 0, []
    async with started(command) as server:
        url = server.url
        clip = _clip(url)
        for group in groups:
            number, passed = _run(url, group, seed, clip)
            cases += number
            # A process that has ended, and one that hangs, raise here.
            httpx.get(f"{url}/health", timeout=60).raise_for_status()
            if not passed:
                failed.append(group)
    return cases, failed


def _clip(url: str) -> str:
    """Id of a finished clip."""
    made = httpx.post(f"{url}/v1/videos", json={"prompt": "a", "num_inference_steps": 1, "num_frames": 1}, timeout=300)
    name = made.raise_for_status().json()["id"]
    while (status := httpx.get(f"{url}/v1/videos/{name}", timeout=60).json()["status"]) != "completed":
        assert status != "failed"
        time.sleep(0.1)
    return name


def _run(url: str, group: str, seed: int, clip: str) -> tuple[int, bool]:
    """Run a group: its number of cases, and True if it passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
                *("--include-path-regex", GROUPS[group], "--checks", CHECKS, "--seed", str(seed)),
                *("--max-examples", str(EXAMPLES.get(group, 100)), "--phases", PHASES.get(group, "coverage,fuzzing")),
                *("--request-timeout", "60", "--continue-on-failure", "--no-shrink", "--no-color"),
                *("--suppress-health-check", "all", "--warnings", "off", "--generation-database", "none"),
                *("--report", "json", "--report-json-path", str(report)),
            ],
            cwd=folder,
            env={**os.environ, "SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": _python_path(), "VERAX_CLIP": clip},
            check=False,
        )
        found = json.loads(report.read_text(encoding="utf-8"))
    cases, rates = found["test_cases"]["generated"], found["valid_rates"].values()
    accepted = sum(phase["accepted"] for rate in rates for phase in rate.values())
    print(f"{group}: {cases} cases, of which {accepted} fitted the description and were answered with 2xx", flush=True)
    return cases, done.returncode == 0


def _python_path() -> str:
    return os.pathsep.join([str(HOOKS.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


if __name__ == "__main__":
    sys.exit(main())
