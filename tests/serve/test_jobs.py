"""Jobs of clips: the queue with a pipeline that waits for permission, the files of clips, and previews."""

import asyncio
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verax.errors import QueueFullError, RequestRefusedError
from verax.serve.video.jobs import ClipStore, StorageFullError, VideoJobs
from verax.video.images import read_clip
from verax.video.outputs import VideoProgress
from verax.video.pipeline import Previewer
from verax.video.request import ResolvedRequest

pytest.importorskip("av")
PIL = pytest.importorskip("PIL.Image")

FRAMES = np.zeros((5, 16, 16, 3), np.uint8)


class SteppedPipeline:
    """Stands in for a pipeline: each denoising step waits for a permission of the test."""

    def __init__(self):
        self.may_go = threading.Semaphore(0)
        self.prompts = []

    def generate(self, request):
        if request.prompt == "refuse":
            raise RequestRefusedError("too large")
        if request.prompt == "break":
            raise RuntimeError("a secret")
        if request.prompt == "exhaust":
            raise RuntimeError("RESOURCE_EXHAUSTED: 12 GB on /secret")
        for stage, total in (("text", 1), ("denoise", 4), ("decode", 1)):
            for done in range(1, total + 1):
                if stage == "denoise":
                    assert self.may_go.acquire(timeout=10)
                latents = np.zeros((1, 16, 2, 2, 2), np.float32) if stage == "denoise" else None
                preview = None if latents is None else lambda: np.full((300, 600, 3), 99, np.uint8)
                if not request.callback(VideoProgress(stage, done, total, 0, 1, done / 2, 8, latents, preview=preview)):
                    return SimpleNamespace(frames=FRAMES[:0], fps=8)
        self.prompts.append(request.prompt)
        return SimpleNamespace(frames=FRAMES, fps=8)


@pytest.fixture
def pipeline():
    return SteppedPipeline()


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
async def jobs(pipeline, now):
    jobs = VideoJobs(pipeline, ClipStore(1 << 20), max_queued=2, max_jobs=4, ttl=60, clock=lambda: now[0])
    yield jobs
    pipeline.may_go.release(100)
    await jobs.close()
    assert not jobs.store.folder.exists()


def request(prompt="a", **options):
    return ResolvedRequest(prompt, num_frames=5, height=16, width=16, **options)


async def until(jobs, job, done):
    """Wait for a state of the job; the states until then."""
    seen = []
    async with asyncio.timeout(10):
        with jobs.watch(job) as changed:
            while not done(job):
                await changed.wait()
                changed.clear()
                seen.append((job.status, job.progress))
    return seen


async def test_the_queue_is_bounded_and_clips_are_made_in_their_order(jobs, pipeline):
    first = await jobs.submit(request("a"), "clips")
    await until(jobs, first, lambda job: job.status == "in_progress")
    waiting = [await jobs.submit(request(prompt), "clips") for prompt in "bc"]
    with pytest.raises(QueueFullError, match="2 clips wait"):
        await jobs.submit(request(), "clips")
    pipeline.may_go.release(100)
    await until(jobs, waiting[1], lambda job: job.ended)
    assert pipeline.prompts == ["a", "b", "c"]
    await jobs.submit(request(), "clips")
    with pytest.raises(QueueFullError, match="4 clips are kept"):
        await jobs.submit(request(), "clips")


async def test_deleting_cancels_what_waits_and_what_runs(jobs, pipeline):
    image = np.zeros((16, 16, 3), np.uint8)
    running, waiting = [await jobs.submit(request(prompt, image=image), "clips") for prompt in "ab"]
    await until(jobs, running, lambda job: job.status == "in_progress")
    assert await jobs.delete(waiting.id)
    assert await jobs.delete(running.id)
    assert not await jobs.delete(running.id)
    pipeline.may_go.release(1)
    last = await jobs.submit(request("c"), "clips")
    pipeline.may_go.release(100)
    await until(jobs, last, lambda job: job.ended)
    assert pipeline.prompts == ["c"]
    assert [folder.name for folder in jobs.store.folder.iterdir()] == [last.id]
    assert jobs.newest_last() == [last]


async def test_the_seconds_left_follow_from_the_steps_so_far(jobs, pipeline):
    job = await jobs.submit(request(), "clips")
    await until(jobs, job, lambda job: job.status == "in_progress")
    assert job.seconds_left is None
    pipeline.may_go.release(2)
    # Two of four steps took 1 second. Denoising is 82 hundredths of a clip, and 53 are left.
    await until(jobs, job, lambda job: job.progress == 47)
    assert (job.seconds_left, job.preview is not None) == (round(1 / 0.41 * 0.53), True)
    pipeline.may_go.release(100)
    await until(jobs, job, lambda job: job.ended)
    assert job.seconds_left is None


async def test_a_clip_that_is_made_holds_no_picture_on_the_disk(jobs, pipeline):
    picture = np.zeros((16, 16, 3), np.uint8)
    job = await jobs.submit(request(image=picture, reference_images=(picture,)), "clips")
    held = [weakref.ref(array) for array in (job.request.image, *job.request.reference_images)]
    pipeline.may_go.release(100)
    await until(jobs, job, lambda job: job.ended)
    gc.collect()
    assert [array() for array in held] == [None, None]


async def test_clips_expire(jobs, pipeline, now):
    pipeline.may_go.release(100)
    job = await jobs.submit(request(), "clips")
    await until(jobs, job, lambda job: job.ended)
    now[0] += 59
    assert jobs.get(job.id) is job
    now[0] += 1
    assert jobs.get(job.id) is None
    assert jobs.newest_last() == []
    await jobs.check_room()
    assert jobs.store.used() == 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", ("invalid_request", "too large")),
        ("break", ("server_error", "making the clip failed (RuntimeError); the server's log has more")),
        (
            "exhaust",
            ("out_of_memory", "making the clip took more memory than there is; ask for fewer frames or a smaller size"),
        ),
    ],
)
async def test_an_error_fails_its_clip_and_the_queue_continues(jobs, pipeline, prompt, error):
    pipeline.may_go.release(100)
    failed, fine = await jobs.submit(request(prompt), "clips"), await jobs.submit(request(), "clips")
    await until(jobs, fine, lambda job: job.ended)
    assert (failed.status, failed.error) == ("failed", error)
    assert fine.status == "completed"


async def test_files_that_cannot_be_removed_end_no_queue_and_are_removed_in_a_thread(jobs, pipeline, monkeypatch):
    threads = []

    def fail(name):
        threads.append(threading.get_ident())
        raise OSError("busy")

    pipeline.may_go.release(100)
    with monkeypatch.context() as patch:
        patch.setattr(jobs.store, "remove", fail)
        await jobs.submit(request("break"), "clips")
        fine = await jobs.submit(request(), "clips")
        await until(jobs, fine, lambda job: job.ended)
        with pytest.raises(OSError, match="busy"):
            await jobs.delete(fine.id)
    assert fine.status == "completed"
    assert len(threads) == 2
    assert threading.get_ident() not in threads


NOISE = np.random.default_rng(0).integers(0, 256, (9, 32, 64, 3), np.uint8)


@pytest.fixture
def store():
    store = ClipStore(max_bytes=1 << 20)
    yield store
    store.close()
    assert not store.folder.exists()


def test_clips_do_not_outlive_a_store_that_nothing_closes():
    store = ClipStore(max_bytes=1 << 20)
    store.write("video_a", NOISE, 8)
    folder = store.folder
    with pytest.warns(ResourceWarning):
        del store
    assert not folder.exists()


def test_large_frames_are_made_small_but_for_the_clip(store):
    store.write("video_a", np.zeros((2, 640, 1280, 3), np.uint8), 8)
    assert read_clip(store.path("video_a", "gif"))[0].shape[1:] == (160, 320, 3)
    assert PIL.open(store.path("video_a", "thumbnail")).size == (512, 256)
    assert PIL.open(store.path("video_a", "spritesheet")).size == (640, 80)


@pytest.mark.parametrize(("fps", "shown"), [(8, 8), (50, 50), (60, 30), (240, 48)])
def test_a_gif_lasts_as_long_as_its_clip(store, fps, shown):
    frames = np.random.default_rng(0).integers(0, 256, (2 * fps, 16, 16, 3), np.uint8)
    store.write("video_a", frames, fps)
    gif, rate = read_clip(store.path("video_a", "gif"))
    assert (len(gif), rate) == (2 * shown, pytest.approx(shown))


def test_what_is_kept_for_a_clip_is_on_disk_until_the_clip_is(store):
    kept = store.keep("video_a", "image", NOISE[0])
    np.testing.assert_array_equal(kept, NOISE[0])
    assert isinstance(kept, np.memmap)
    assert store.used() > NOISE[0].nbytes
    store.write("video_a", NOISE, 8)
    assert not list(store.folder.rglob("*.npy"))


def test_clips_beyond_the_limit_are_refused_and_leave_nothing(store):
    store.max_bytes = 5000
    with pytest.raises(StorageFullError, match="would take more than 5000 bytes"):
        store.keep("video_a", "image", NOISE)
    assert store.used() == 0
    store.check_room()
    store.max_bytes = 0
    with pytest.raises(StorageFullError, match="delete some or wait"):
        store.check_room()


def test_an_image_of_which_a_part_fits_on_the_disk_is_refused_as_one_that_does_not(store, monkeypatch):
    def save(file, array):  # NumPy's error has no code
        raise OSError(f"{array.nbytes} requested and 4096 written")

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(StorageFullError, match="the disk is full"):
        store.keep("video_a", "image", NOISE)
    assert not list(store.folder.iterdir())


def test_the_colours_of_latents_are_found():
    mix = np.random.default_rng(1).standard_normal((3, 16))

    def encode(frames):
        _, T, H, W, _ = frames.shape
        return frames.reshape(1, T, H // 8, 8, W // 8, 8, 3).mean((3, 5)) @ mix + 2

    stages: Any = SimpleNamespace(decoder=None, vae=None, encode=encode)  # without a decoder of its own
    colors = {43: (200, 10, 10), 128: (10, 10, 200), 213: (30, 220, 30)}
    frame = np.zeros((1, 1, 32, 96, 3), np.uint8) + np.asarray(list(colors.values()), np.uint8).repeat(32, axis=0)
    image = Previewer(stages, 8)(encode(frame))
    assert image.shape == (85, 256, 3)
    for column, color in colors.items():
        np.testing.assert_allclose(image[40, column].astype(int), color, atol=8)
