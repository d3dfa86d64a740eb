"""openai-python's own tests of the resources that verax serves, on a server of the built-in models.

`make openai-conformance` fetches the tests and runs this. `openai_deselected.toml` lists the tests that are left out.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from verax.bench.serve.load import started

RESOURCES = (
    *("chat", "responses", "test_completions.py", "test_embeddings.py", "test_models.py", "test_responses.py"),
    "test_videos.py",
)
"""Files and folders below tests/api_resources."""

OPTIONS = ["--served-model-name", "gpt-6-astra", "--any-model-name", "--max-model-len", "256", "--max-num-seqs", "8"]
"""Options of the server: the name is one that the tests look up."""


def main() -> int:
    """Run the tests of the folder that the command line names; the exit status."""
    folder = Path(sys.argv[1]).absolute()
    return asyncio.run(_run(folder))


async def _run(folder: Path) -> int:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "verax", "serve", "--host", "127.0.0.1", "--port", str(port), *OPTIONS]

    async with started(command) as server:
        done = subprocess.run(
            [
                *(folder / "venv/bin/python", "-m", "pytest", "-p", "openai_plugin", "-p", "no:cacheprovider"),
                *("--override-ini", "addopts=", "--tb", "short"),
                *(f"tests/api_resources/{name}" for name in RESOURCES),
            ],
            cwd=folder / "source",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TEST_API_BASE_URL": f"{server.url}/v1"},
            check=False,
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
