"""One part in a process of its own: `python -m verax.bench.accelerator.process NAME FOLDER`.

A part that dies, hangs or fills the memory takes nothing else with it, and what it held on the device is free after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from verax.bench.accelerator.parts import PARTS
from verax.files import write_json

__all__ = ["device", "part_file", "run_part"]

REHEARSE = "--rehearse"

DEVICE = "device"
"""In the place of a part's name: the process prints the machine and measures nothing."""

DEVICE_SECONDS = 120.0
"""Time to find the devices."""

# Baselines need some of the device's memory too, of which JAX would take three quarters at once.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def part_file(name: str, folder: Path) -> Path:
    """File of a part's rows."""
    return folder / "parts" / f"{name}.json"


def run_part(name: str, folder: Path, *, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Run a part; its record, which its file holds too.

    Args:
        name: a name out of `PARTS`.
        folder: folder of all files.
        rehearse: at tiny sizes.
        seconds: time after which it is stopped.

    Returns:
        `rows`, `seconds`, `device`, `rehearse` and `error`, which is empty if the part came to its end.
    """
    path = part_file(name, folder)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, log = time.monotonic(), path.with_suffix(".log")
    status = _run([name, str(folder), *([REHEARSE] if rehearse else [])], log, seconds)
    record = json.loads(path.read_text()) if path.exists() else {"rows": [], "error": "", "rehearse": rehearse}
    if status is None:
        record["error"] = f"stopped after {seconds:.0f} s"
    elif status:
        record["error"] = _last_line(log) or f"ended with status {status}"
    record["seconds"] = time.monotonic() - begin
    write_json(path, record)
    return record


def device(folder: Path) -> dict[str, Any]:
    """Fingerprint of the machine, with JAX's name of the device as `device_kind`.

    It is found in a process of its own: this one must not hold a part of the device's memory.

    Raises:
        RuntimeError: if JAX does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "device.json", folder / "device.log"
    status = _run([DEVICE, str(folder)], log, DEVICE_SECONDS)
    if status != 0:
        raise RuntimeError(f"JAX does not start: {_last_line(log) or f'no answer after {DEVICE_SECONDS:.0f} s'}")
    return json.loads(path.read_text())


def _run(arguments: list[str], log: Path, seconds: float) -> int | None:
    """Exit status of this module's process; None if it was stopped with all that it had started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_ENVIRONMENT | os.environ,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, pytest's among them."""
    for one in (*psutil.Process(process.pid).children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _measure(name: str, folder: Path, rehearse: bool) -> None:
    """Run a part in this process. Its file is written after each row, so that none is lost with those behind it."""
    import jax

    from verax._compat import enable_compilation_cache
    from verax.bench.results import write

    enable_compilation_cache()
    record: dict[str, Any] = {
        "rows": [],
        "error": "",
        "rehearse": rehearse,
        "device": jax.devices()[0].device_kind,
    }
    for measured in PARTS[name].load()(rehearse=rehearse):
        record["rows"] += [row.as_dict() for row in measured.rows]
        if measured.result is not None:
            write(measured.result, folder)
        write_json(part_file(name, folder), record)


def _write_device(folder: Path) -> None:
    import jax

    from verax.machine import fingerprint

    write_json(folder / "device.json", {**fingerprint(), "device_kind": jax.devices()[0].device_kind})


def _main(name: str, folder: str, *options: str) -> None:
    if name == DEVICE:
        _write_device(Path(folder))
    else:
        _measure(name, Path(folder), REHEARSE in options)


if __name__ == "__main__":
    _main(*sys.argv[1:])
