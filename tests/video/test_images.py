"""Pictures and clips in, and files out: what is read is what was written, and nothing is left half-written."""

import os
import struct
import sys
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import write_video
from verax._optional import require_optional
from verax.errors import InvalidParameterError, MissingDependencyError
from verax.video.files import check_path, write_clip, write_contact_sheet
from verax.video.images import read_clip, read_image

ORIENTATIONS = (
    *((1, 0, 0, 1), (-1, 0, 0, 1), (1, 0, 0, -1), (-1, 0, 0, -1)),
    *((0, 1, 1, 0), (0, 1, -1, 0), (0, -1, 1, 0), (0, -1, -1, 0)),
)
"""Numbers a, b, c, d of display matrices: a pixel (x, y) is shown at (a x + c y, b x + d y)."""


def picture(height=21, width=34, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def clip(frames=7, height=48, width=64):
    """A smooth coloured gradient that moves, which lossy formats can keep."""
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    channels = 60 + 2 * x + 5 * t, 200 - 3 * y, 40 + x + y + 3 * t
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2))


def test_an_image_is_the_same_from_a_path_pillow_and_arrays(tmp_path):
    expected = picture()
    Image.fromarray(expected).save(tmp_path / "a.png")
    floats = expected / np.float32(255)
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(expected), expected, floats):
        np.testing.assert_array_equal(read_image(image), expected)


def test_images_are_turned_upright_and_made_rgb(tmp_path):
    upright = picture()
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(np.rot90(upright)).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), upright)
    grey = Image.fromarray(upright[..., 0])
    np.testing.assert_array_equal(read_image(grey), np.repeat(upright[..., :1], 3, axis=-1))


RAMP = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(2, axis=0)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "mode F", "mode I", "mode I;16B"])
def test_grey_of_more_than_8_bits_keeps_its_shades(name, tmp_path):
    values = {"mode F": (RAMP / 65535).astype(np.float32), "mode I": RAMP.astype(np.int32), "mode I;16B": RAMP}
    image = Image.fromarray(values.get(name, RAMP))
    if name == "mode I;16B":
        image = Image.frombytes("I;16B", RAMP.shape[::-1], RAMP.astype(">u2").tobytes())
    elif name.startswith("a."):
        image.save(image := tmp_path / name)
    expected = np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, axis=-1)
    np.testing.assert_allclose(read_image(image).astype(int), expected, atol=1)


@pytest.mark.parametrize(("bits", "black"), [(12, 1), (16, 1), (16, 0)])
def test_grey_of_tiff_files_is_of_their_bits_from_black_to_white(bits, black, tmp_path):
    data = bytes.fromhex("000555aaafff" if bits == 12 else "00005555aaaaffff")
    sizes = {256: 4, 257: 1, 258: bits, 259: 1, 262: black, 277: 1, 278: 1}
    tags = [(tag, 3, 1, value) for tag, value in sizes.items()] + [(273, 4, 1, 8), (279, 4, 1, len(data))]
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags)) + bytes(4)
    (tmp_path / "a.tif").write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + table)
    expected = [0, 85, 170, 255]
    assert read_image(tmp_path / "a.tif")[0, :, 1].tolist() == expected[:: 1 if black else -1]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(np.full((2, 2), 70000, np.int32)), "start: expected grey of 0 to 65535 .* mode I, got 70000"),
        (Image.fromarray(np.full((2, 2), 200, np.int32)), "got 200 to 200; convert an image of 8 bits to mode L"),
        (Image.fromarray(np.full((2, 2), -0.5, np.float32)), "start: expected grey of 0 to 1 in an image of mode F"),
        ("nothing.png", "start: there is no file nothing.png"),
        (__file__, r"start: .*test_images.py cannot be read as an image"),
        (np.zeros((4, 4)), r"start: expected an array \[height, width, 3\], got one of shape \[4, 4\]"),
        (np.full((4, 4, 3), 1.5), "floats in 0..1, got 1.5 to 1.5"),
        (np.full((4, 4, 3), np.nan), "floats in 0..1, got nan"),
        (np.zeros((4, 4, 3), int), "got int64"),
        (3, "expected a path, a PIL.Image or an array .*, got int"),
    ],
)
def test_what_is_not_an_image_is_refused(image, message):
    with pytest.raises(InvalidParameterError, match=message):
        read_image(image, name="start")


@pytest.mark.parametrize(("name", "least"), [("a.mp4", 38), ("a.gif", 30), ("a.webp", 34), ("a", np.inf)])
def test_a_clip_is_read_as_it_was_written(name, least, tmp_path):
    frames = clip()
    with np.errstate(divide="ignore"):
        path = write_clip(frames, tmp_path / name, fps=24)
        read, fps = read_clip(path)
        assert read.shape == frames.shape
        assert psnr(read, frames) >= least
    assert fps == (None if name == "a" else pytest.approx(24, rel=0.01))
    assert [found.name for found in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("matrix", ORIENTATIONS)
def test_a_video_is_turned_and_mirrored_as_its_file_says(matrix, tmp_path):
    frames = np.zeros((3, 32, 64, 3), np.uint8) + np.array([30, 30, 30], np.uint8)
    frames[:, :16, :32], frames[:, 16:, 32:] = (200, 30, 30), (30, 30, 200)  # red left above, blue right below
    write_clip(frames, tmp_path / "plain.mp4", fps=10, crf=0)
    data, (a, b, c, d) = bytearray((tmp_path / "plain.mp4").read_bytes()), matrix
    begin = data.find(b"tkhd") + 4 + 4 + 20 + 16
    data[begin : begin + 36] = struct.pack(">9i", *(x << 16 for x in (a, b, 0, c, d, 0, 0, 0)), 1 << 30)
    (tmp_path / "turned.mp4").write_bytes(data)
    read, _ = read_clip(tmp_path / "turned.mp4")
    y, x = np.mgrid[:32, :64]
    shown_x, shown_y = a * x + c * y, b * x + d * y
    expected = np.zeros((32, 64, 3) if a else (64, 32, 3), int)
    expected[shown_y - shown_y.min(), shown_x - shown_x.min()] = frames[0]
    assert read.shape == (3, *expected.shape)
    assert np.abs(read[0] - expected).mean() < 5


@pytest.mark.parametrize(
    ("options", "width", "shades"),
    [
        ({"format": "yuv420p10le"}, 64, [0, 1, 2, 3, 4, 5]),
        ({"wide": Fraction(1, 2)}, 32, [0, 1, 2, 3, 4, 5]),
        ({"times": [0, 100, 150, 160, 400, 500]}, 64, [0, 1, 3, 3, 4, 5]),
        ({"cover": True}, 64, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["ten bits", "narrow pixels", "uneven times", "cover"],
)
def test_a_video_is_read_as_it_is_shown(options, width, shades, tmp_path):
    write_video(tmp_path / "a.mkv", **{"times": range(0, 600, 100), **options})
    frames, fps = read_clip(tmp_path / "a.mkv")
    assert (frames.shape, fps) == ((6, 32, width, 3), pytest.approx(10))
    assert [round(frame.mean() / 40) for frame in frames] == shades


def test_a_name_with_a_colon_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clip(clip(), "take:1.mp4", fps=8)
    assert read_clip("take:1.mp4")[0].shape == clip().shape
    assert [path.name for path in tmp_path.iterdir()] == ["take:1.mp4"]


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
def test_a_picture_is_a_clip_of_one_frame_without_a_rate(suffix, tmp_path):
    Image.fromarray(picture()).save(tmp_path / f"a.{suffix}")
    frames, fps = read_clip(tmp_path / f"a.{suffix}")
    assert (frames.shape, fps) == ((1, *picture().shape), None)


@pytest.mark.parametrize("size", [(8, 8), (2, 2)])
def test_a_photo_with_another_picture_in_its_file_is_one_frame(size, tmp_path):
    photo, other = (Image.new("RGB", shape, shade) for shape, shade in (((8, 8), "white"), (size, "black")))
    photo.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[other])
    frames, fps = read_clip(tmp_path / "a.jpg")
    assert (len(frames), fps) == (1, None)
    assert frames.min() > 250


@pytest.mark.parametrize("shades", [[250], [80, 250]])
def test_the_picture_that_an_animated_png_has_for_other_programs_is_not_a_frame(shades, tmp_path):
    fallback, *frames = (Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (10, *shades))
    fallback.save(tmp_path / "a.png", save_all=True, append_images=frames, default_image=True, duration=100)
    read, fps = read_clip(tmp_path / "a.png")
    assert ([round(frame.mean()) for frame in read], fps) == (shades, 10)


@pytest.mark.parametrize("suffix", ["gif", "webp"])
@pytest.mark.parametrize("shades", [[0, 0, 1, 1, 1, 2], [0, 0, 1, 1], [3] * 9, [0, 1, 2, 3]])
def test_equal_frames_of_an_animation_are_written_and_read(suffix, shades, tmp_path):
    frames = np.stack([np.full((8, 8, 3), 60 * shade, np.uint8) for shade in shades])
    read, fps = read_clip(write_clip(frames, tmp_path / f"a.{suffix}", fps=24))
    assert [round(frame.mean() / 60) for frame in read] == shades
    assert fps == 24


@pytest.mark.parametrize(
    ("suffix", "fps", "warns"), [("gif", 50, 0), ("gif", 60, 1), ("webp", 90, 0), ("webp", 100, 1)]
)
def test_a_warning_says_where_browsers_show_an_animation_slower(suffix, fps, warns, caplog, tmp_path):
    write_clip(np.arange(7 * 192, dtype=np.uint8).reshape(7, 8, 8, 3), tmp_path / f"a.{suffix}", fps=fps)
    assert len(caplog.records) == warns


@pytest.mark.parametrize("name", ["a.mp4", "a.webp"])
def test_frames_that_a_format_cannot_hold_are_refused_by_name(name, tmp_path):
    with pytest.raises(InvalidParameterError, match=r"at most 1638[34] pixels"):
        write_clip(np.zeros((1, 2, 16386, 3), np.uint8), tmp_path / name, fps=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".gif", ".mp4", ""])
def test_a_limit_reads_the_first_frames_of_a_clip(suffix, tmp_path):
    frames = np.repeat(np.arange(0, 240, 20, dtype=np.uint8), 16 * 16 * 3).reshape(12, 16, 16, 3)
    path = write_clip(frames, tmp_path / f"a{suffix}", fps=8)
    assert [round(frame.mean(), -1) for frame in read_clip(path, limit=5)[0]] == [0, 20, 40, 60, 80]
    assert len(read_clip(list(frames), limit=3)[0]) == len(read_clip(frames, limit=3)[0]) == 3


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "apng", "avif"])
def test_frames_of_an_animation_last_as_long_as_they_are_shown(suffix, tmp_path):
    first, *rest = (Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (10, 90, 170, 250))
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=rest, duration=[100, 300, 100, 50], lossless=True)
    read, fps = read_clip(tmp_path / f"a.{suffix}")
    assert [round(frame.mean(), -1) for frame in read] == [10] * 2 + [90] * 6 + [170] * 2 + [250]
    assert fps == 20
    if suffix == "avif":
        return  # its longest duration is shorter
    first.save(tmp_path / f"b.{suffix}", save_all=True, append_images=rest[:1], duration=[10, 6 * 10**5])
    with pytest.raises(InvalidParameterError, match="60001 frames of the shortest; expected at most 10000"):
        read_clip(tmp_path / f"b.{suffix}")


def test_an_animation_that_says_it_is_huge_is_refused_before_it_is_decoded(tmp_path):
    write_clip(np.random.default_rng(0).integers(0, 255, (3, 16, 24, 3), np.uint8), tmp_path / "a.gif", fps=8)
    content = (tmp_path / "a.gif").read_bytes()
    (tmp_path / "a.gif").write_bytes(content[:6] + struct.pack("<HH", 9000, 9000) + content[10:])
    with pytest.raises(InvalidParameterError, match="3 frames of 9000 x 9000 pixels; expected at most 67108864"):
        read_clip(tmp_path / "a.gif")


def test_a_folder_has_frames_of_several_formats_in_the_order_of_their_numbers(tmp_path):
    names = ["frame_1.bmp", "frame_2.webp", "frame_10.PNG", "frame_11.jpeg"]
    for shade, name in enumerate(names):
        image = Image.fromarray(np.full((8, 8, 3), 60 * shade, np.uint8))
        image.save(tmp_path / name)
    (tmp_path / "._frame_1.bmp").write_bytes(b"what a Mac adds")
    assert [round(frame.mean() / 60) for frame in read_clip(tmp_path)[0]] == [0, 1, 2, 3]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidParameterError, match=r"empty has no frames: expected files that end in \.png, "):
        read_clip(tmp_path / "empty")


def test_crf_trades_quality_for_size(tmp_path):
    frames = np.stack([picture(48, 64, seed) for seed in range(5)])
    best, worst = (write_clip(frames, tmp_path / f"{crf}.mp4", fps=16, crf=crf) for crf in (5, 45))
    assert best.stat().st_size > 2 * worst.stat().st_size
    assert psnr(read_clip(best)[0], frames) > psnr(read_clip(worst)[0], frames)


def test_a_clip_is_a_list_of_images_or_an_array_too():
    frames = clip(3)
    np.testing.assert_array_equal(read_clip(frames)[0], frames)
    np.testing.assert_array_equal(read_clip([Image.fromarray(frame) for frame in frames])[0], frames)
    with pytest.raises(InvalidParameterError, match="video: has no frames"):
        read_clip([])
    with pytest.raises(InvalidParameterError, match="video: frames differ in size"):
        read_clip([picture(), picture(5, 5)])


@pytest.mark.parametrize("name", ["test_images.py", "nothing.mp4", "nothing.gif"])
def test_what_is_not_a_clip_is_refused(name, tmp_path):
    path = __file__ if name.endswith(".py") else tmp_path / name
    with pytest.raises(InvalidParameterError, match=r"cannot be read as a clip|there is no file"):
        read_clip(path)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a"])
def test_an_interrupted_write_leaves_what_was_there(name, tmp_path, monkeypatch):
    write_clip(clip(2), tmp_path / name, fps=8)
    before = read_clip(tmp_path / name)[0]

    class Interrupting(np.ndarray):
        def __iter__(self):
            yield from list(np.asarray(self))[:1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_clip(clip(3).view(Interrupting), tmp_path / name, fps=8)
    assert [found.name for found in tmp_path.iterdir()] == [name]
    np.testing.assert_array_equal(read_clip(tmp_path / name)[0], before)
    write_clip(clip(3), tmp_path / name, fps=8)
    assert len(read_clip(tmp_path / name)[0]) == 3


def test_a_path_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "b.mp4").mkdir()
    for name, message in {
        "a.avi": "suffix .avi; clips are written as .mp4, .gif, .webp",
        "no/a.mp4": "there is no folder",
        "mine": "holds other things than frames",
        "b.mp4": "is a folder",
    }.items():
        with pytest.raises(InvalidParameterError, match=message):
            check_path(tmp_path / name)
    with pytest.raises(InvalidParameterError, match=r"fps: expected .* at most 100 .*gif, got 120"):
        check_path(tmp_path / "a.gif", fps=120)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as of a disk that is mounted to be read
    with pytest.raises(InvalidParameterError, match=r"path: the folder .* cannot be written to"):
        check_path(tmp_path / "a.mp4")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize(
    ("frames", "options", "message"),
    [
        (clip(2).astype(float), {}, "frames: expected uint8"),
        (clip(0), {}, "frames: expected uint8"),
        (clip(2, 47), {}, "even heights and widths, got 47 x 64"),
        (clip(2), {"fps": 0}, "fps: expected more than 0"),
        (clip(2), {"fps": 0.001, "name": "a.gif"}, "fps: 0.001 frames per second show equal frames for longer than"),
        (clip(2), {"fps": 120, "name": "a.gif"}, "fps: expected more than 0 and at most 100 .*gif, got 120"),
        (clip(2), {"crf": 60}, "crf: expected 0"),
    ],
)
def test_what_cannot_be_a_video_is_refused(frames, options, message, tmp_path):
    with pytest.raises(InvalidParameterError, match=message):
        write_clip(frames, tmp_path / options.pop("name", "a.mp4"), **{"fps": 8, **options})
    assert not list(tmp_path.iterdir())


def test_a_contact_sheet_has_every_picture_over_its_caption(tmp_path):
    pictures = np.stack([picture(seed=seed) for seed in range(5)])
    captions = ["one", "a caption that is far too long for its cell", "", "four", "five"]
    sheet = read_image(write_contact_sheet(pictures, tmp_path / "a.png", captions=captions, columns=3))
    places = [find(sheet, wanted) for wanted in pictures]
    assert [column for _, column in places] == [places[0][1], places[1][1], places[2][1], *[p[1] for p in places[:2]]]
    rows = [row for row, _ in places]
    assert rows[0] == rows[1] == rows[2] < rows[3] == rows[4]
    below = sheet[rows[0] + 21 : rows[3]]
    assert [below[:, c : c + 34].min() < 128 for _, c in places[:3]] == [True, True, False]


def find(sheet, wanted):
    h, w = wanted.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(sheet, (h, w), axis=(0, 1))[:, :, 0, :1, :8]
    found = np.argwhere((windows == wanted[:1, :8, 0]).all((2, 3)))
    assert len(found) == 1
    row, column = found[0]
    np.testing.assert_array_equal(sheet[row : row + h, column : column + w], wanted)
    return row, column


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for module in ("av", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"PyAV is not installed: pip install 'verax\[video\]'"):
        require_optional("av")
    with pytest.raises(MissingDependencyError, match="Pillow is not installed"):
        read_image("a.png")
