"""Processes that benchmarks start: sides in environments of their own, and commands that run to their end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import psutil

import verax
from verax.bench import worker
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError

ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Baselines need some of the device's memory too, of which JAX would take three quarters at once."""

CACHES = ("VERAX_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
"""Variables with the folders of compiled programs, which are empty at a first start."""

STARTS = (
    "First starts and peak memory are of processes that do nothing else, verax's too: nothing is compiled before, and "
    "an export for another engine counts in the start only."
)
"""Note of a page that shows them."""

LOG_END = 1000
"""Characters of a failed worker's output that its error repeats."""


class WorkerProcess:
    """Side of a benchmark in a process of its own, see `worker`. It ends with the block that it is the context of.

    Args:
        name: of the side, for errors.
        python: a Python that has the package.
        engines: module with a function of the package's name.
        engine: the package.
        remedy: what to do where the package is not installed.
        environment: variables of the process, unless they are set.
        empty_caches: nothing is compiled before, as at a first start.

    Attributes:
        printed: what the process printed, once it has ended.
        start_s: seconds of starting the process, importing the package, and `load`.

    Raises:
        InvalidParameterError: if that Python cannot be run.
        MissingDependencyError: if it does not have the package.
    """

    def __init__(
        self,
        name: str,
        python: str,
        engines: ModuleType,
        engine: str,
        *,
        remedy: str,
        environment: Mapping[str, str] | None = None,
        empty_caches: bool = False,
    ):
        begin, self._name, self._remedy, self.printed = time.perf_counter(), name, remedy, ""
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- `__exit__` closes it
        # Without -P, Python would take our modules of this folder for packages of the same name.
        command, pipe = [python, "-P", worker.__file__, str(engines.__file__)], subprocess.PIPE
        variables = {**ENVIRONMENT, **(environment or {}), **os.environ}
        self._caches = tempfile.TemporaryDirectory(prefix="verax-bench-", ignore_cleanup_errors=True)
        if empty_caches:
            variables |= dict.fromkeys(CACHES, self._caches.name)
        try:
            self._process: Any = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._log, env=variables, text=True
            )
        except OSError as error:
            raise InvalidParameterError(f"peer_python: cannot run {python} for {name}: {error.strerror}") from error
        self.ask(engine=engine)
        self.start_s = time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # which ends it
        self._process.wait()
        self._log.seek(0)
        self.printed = self._log.read()
        self._log.close()
        self._caches.cleanup()

    def load(self, **arguments: Any) -> dict[str, Any]:
        """Load the engine; the versions of its packages."""
        begin = time.perf_counter()
        versions = self.ask(**arguments)["versions"]
        self.start_s += time.perf_counter() - begin
        return versions

    def ask(self, **request: Any) -> dict[str, Any]:
        """Answer to a request.

        Raises:
            VeraxError: if the process fails; the message ends with its output.
        """
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "its process ended"}')
        if not answer.keys() & {"missing", "error"}:
            return answer
        self.__exit__()
        if "missing" in answer:
            raise MissingDependencyError(f"{self._name}: its Python has no {answer['missing']}; {self._remedy}")
        raise VeraxError(f"{self._name}: {answer['error']}; its output ends: {self.printed[-LOG_END:]}")


def run_command(
    words: Sequence[str], log: Path, seconds: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a Python with these words in a process of its own, and stop all of its processes at the end of the time.

    Args:
        words: after the Python.
        log: file of what the process writes as errors.
        seconds: after which it is stopped.
        variables: of its environment, in addition to this process's.

    Returns:
        `result`, the JSON on standard output or None; `note`, else its last line; `error`, empty if the status was 0;
        `seconds`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin, printed = time.monotonic(), log.with_suffix(".out")
    checkout = Path(verax.__file__).parents[2]
    with log.open("wb") as errors, printed.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=checkout if (checkout / "tests" / "gpu").is_dir() else None,
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT | os.environ | dict(variables or {}),
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # a server that it started would hold the device
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                process.wait()
    text, result, note = printed.read_text(encoding="utf-8", errors="replace").strip(), None, ""
    try:
        result = json.loads(text)
    except json.JSONDecodeError:
        note = text.rpartition("\n")[2].strip("= ")
    error = ""
    if status is None:
        error = f"stopped after {seconds:.0f} s"
    elif status:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        error = (result or {}).get("error") or note or last or f"ended with status {status}"
    return {"result": result, "note": note, "error": error, "seconds": time.monotonic() - begin}
