"""Lines of a file or a pipe, read in a thread as they are needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import BinaryIO

from verax.batch.parquet import ParquetLines

__all__ = ["read_lines"]

AHEAD = 64
"""Lines that are read before they are needed: enough that answers never wait for the disk."""


async def read_lines(file: BinaryIO | ParquetLines) -> AsyncGenerator[bytes, None]:
    """Lines of a file with their ends; the file is then closed. At most `AHEAD` lines are held, whatever its size.

    The thread is a daemon of its own: a pipe that nobody writes to holds up neither the event loop nor the end of the
    process.

    Raises:
        OSError: if reading fails.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)
    over = threading.Event()

    def items() -> Iterator[bytes | OSError]:
        try:
            yield from file
        except OSError as error:
            yield error
        yield b""

    def work() -> None:
        with suppress(RuntimeError), file:  # RuntimeError: the event loop is closed
            for item in items():
                room.acquire()
                if over.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, item)

    threading.Thread(target=work, name="verax-batch-reader", daemon=True).start()
    try:
        while line := await queue.get():
            if isinstance(line, OSError):
                raise line
            room.release()
            yield line
    finally:
        over.set()
        room.release()
