"""Image files for tests, well-meant and not."""

import io
import struct
import zlib

import numpy as np

PICTURE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


def saved(format, image=PICTURE, **options):
    """The image as a file."""
    import PIL.Image

    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, format, **options)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of this size in a hundred bytes; its pixels are missing."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
