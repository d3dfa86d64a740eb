"""Image and video files for tests, well-meant and not."""

import io
import struct
import zlib
from fractions import Fraction

import numpy as np

PICTURE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


def saved(format, image=PICTURE, **options):
    """The image as a file."""
    import PIL.Image

    buffer = io.BytesIO()
    image = PIL.Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, format, **options)
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of this size in a hundred bytes; its pixels are missing."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def write_video(path, times, *, format="yuv420p", wide=1, cover=False):
    """Write a video of 64 x 32, lossless, whose frames are grey of 0, 40, 80, ... at times in milliseconds.

    Args:
        path: an .mp4 or .mkv.
        times: times of the frames.
        format: FFmpeg's pixel format.
        wide: width of a pixel by its height.
        cover: write a picture as the first stream.
    """
    import av

    with av.open(str(path), "w") as container:
        picture = container.add_stream("mjpeg", rate=1, height=16, width=16, pix_fmt="yuvj420p") if cover else None
        stream = container.add_stream("libx264", rate=10, height=32, width=64, pix_fmt=format, options={"crf": "0"})
        stream.codec_context.sample_aspect_ratio = wide
        stream.codec_context.time_base = Fraction(1, 1000)
        if picture is not None:
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 255, np.uint8), format="rgb24")
            container.mux([*picture.encode(frame.reformat(format="yuvj420p")), *picture.encode()])
        for shade, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), 40 * shade, np.uint8), format="rgb24")
            frame = frame.reformat(format=format)
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
