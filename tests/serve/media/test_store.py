"""`ClipStore`: the forms of a clip, and a disk that is full."""

import errno
import io
import os

import numpy as np
import pytest

from verax.serve.video import jobs as store_module
from verax.serve.video.jobs import VARIANTS, ClipStore, StorageFullError
from verax.video.images import read_clip

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("av")

FRAMES = np.random.default_rng(0).integers(0, 256, (9, 32, 64, 3), np.uint8)


@pytest.fixture
def store():
    store = ClipStore(max_bytes=1 << 20)
    yield store
    store.close()
    assert not store.folder.exists()


def test_a_clip_has_all_its_forms_and_they_go_with_it(store):
    store.write("video_a", FRAMES, 8)
    assert read_clip(store.path("video_a", "video"))[0].shape == FRAMES.shape
    assert read_clip(store.path("video_a", "gif"))[0].shape == FRAMES.shape
    sizes = {name: PIL.open(store.path("video_a", name)).size for name in ("thumbnail", "spritesheet")}
    assert sizes == {"thumbnail": (64, 32), "spritesheet": (4 * 64, 3 * 32)}
    assert store.used() == sum(store.path("video_a", name).stat().st_size for name in VARIANTS)
    store.remove("video_a")
    assert store.used() == 0
    assert list(store.folder.iterdir()) == []


def test_large_frames_are_made_small_but_for_the_clip(store):
    store.write("video_a", np.zeros((2, 640, 1280, 3), np.uint8), 8)
    assert read_clip(store.path("video_a", "gif"))[0].shape[1:] == (160, 320, 3)
    assert PIL.open(store.path("video_a", "thumbnail")).size == (512, 256)
    assert PIL.open(store.path("video_a", "spritesheet")).size == (640, 80)


def test_what_is_kept_for_a_clip_is_on_disk_until_the_clip_is(store):
    kept = store.keep("video_a", "image", FRAMES[0])
    np.testing.assert_array_equal(kept, FRAMES[0])
    assert isinstance(kept, np.memmap)
    assert store.used() > FRAMES[0].nbytes
    store.write("video_a", FRAMES, 8)
    assert not list(store.folder.rglob("*.npy"))


def test_room_is_known_without_looking_at_the_files(store, monkeypatch):
    store.write("video_a", FRAMES, 8)
    size = store.used()
    with monkeypatch.context() as patch:
        for name in ("walk", "scandir", "stat"):
            patch.setattr(os, name, lambda *arguments, **options: 1 / 0)
        store.check_room()
        assert store.used() == size


def test_clips_beyond_the_limit_are_refused_and_leave_nothing(store):
    store.max_bytes = 5000
    with pytest.raises(StorageFullError, match="would take more than 5000 bytes"):
        store.keep("video_a", "image", FRAMES)
    assert store.used() == 0
    store.check_room()
    store.max_bytes = 0
    with pytest.raises(StorageFullError, match="delete some or wait"):
        store.check_room()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_leaves_nothing(store, monkeypatch, code):
    def full(frames, path, fps):
        path.write_bytes(b"half")
        raise OSError(code, "no space")

    monkeypatch.setattr(store_module, "write_clip", full)
    with pytest.raises(StorageFullError, match="the disk is full"):
        store.write("video_a", FRAMES, 8)
    assert store.used() == 0


def test_a_jpeg_is_one():
    assert PIL.open(io.BytesIO(store_module.jpeg(FRAMES[0]))).size == (64, 32)
