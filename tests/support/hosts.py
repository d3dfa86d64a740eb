"""Processes of a group of hosts, on this one."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

SIZES = dict(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=32, block_size=4)


def free_port():
    """A port for a process that starts later, and that no connection takes meanwhile for its own end.

    The kernel takes ports of a range for those, and for listeners without a number, so that it is below this range.
    """
    begin = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, begin - 10_000), begin)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def spawn(*command, devices=2):
    """A process with virtual devices, whose output is text in pipes."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def join(rank, port, **options):
    """A process that joins a group, without a model: see `main`."""
    return spawn(
        "-m", "tests.support.hosts", str(rank), str(port), *(f"{name}={value}" for name, value in options.items())
    )


def ended(process, seconds=120):
    """Status and error output of a process that ends within the given number of seconds."""
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def main(rank, port, options):
    """Join, print it, and follow; rank 0 ends, or waits to be killed if the options have `stays`.

    The ranks that the option `fails` names end with an error, and the others exchange values with them.
    """
    from verax.errors import HostsError
    from verax.text.engine.engine_config import EngineConfig
    from verax.text.hosts import Group

    config = EngineConfig(tensor_parallel_size=4, nnodes=2, node_rank=rank, master_addr=f"127.0.0.1:{port}")
    try:
        group = Group.join(config, options)
    except HostsError as error:
        sys.exit(str(error))
    sys.stdout.write("joined\n")
    sys.stdout.flush()
    if str(rank) in options.get("fails", ""):
        sys.exit(f"rank {rank} failed")
    if "fails" in options:
        try:
            return group.exchange(None)
        except HostsError as error:
            sys.exit(str(error))
    if not group.leads:
        return list(group.dispatches())
    if options.get("stays"):
        time.sleep(120)


if __name__ == "__main__":
    rank, port, *options = sys.argv[1:]
    main(int(rank), int(port), dict(option.split("=") for option in options))
