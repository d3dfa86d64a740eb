"""`VideoJobs`: the queue's bounds, cancelling, expiry and errors, with a pipeline that waits for permission."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from verax.errors import QueueFullError, RequestRefusedError
from verax.serve.video.jobs import ClipStore, VideoJobs
from verax.video.outputs import VideoProgress
from verax.video.request import ResolvedRequest

pytest.importorskip("av")
pytest.importorskip("PIL.Image")

FRAMES = np.zeros((5, 16, 16, 3), np.uint8)


class SteppedPipeline:
    """Stands in for a pipeline: each denoising step waits for a permission of the test."""

    geometry = SimpleNamespace(pixels_per_latent=8)
    stages = SimpleNamespace(encode=lambda frames: np.zeros((1, 1, 16, 16, 16), np.float32))

    def __init__(self):
        self.may_go = threading.Semaphore(0)
        self.made = []

    def generate(self, request):
        if request.prompt == "refuse":
            raise RequestRefusedError("too large")
        if request.prompt == "break":
            raise RuntimeError("a secret")
        for stage, total in (("text", 1), ("denoise", 4), ("decode", 1)):
            for done in range(1, total + 1):
                if stage == "denoise":
                    assert self.may_go.acquire(timeout=10)
                latents = np.zeros((1, 16, 2, 2, 2), np.float32) if stage == "denoise" else None
                if not request.callback(VideoProgress(stage, done, total, 0, 1, 0.0, 8, latents)):
                    return SimpleNamespace(frames=FRAMES[:0], fps=8)
        self.made.append(request.prompt)
        return SimpleNamespace(frames=FRAMES, fps=8)


@pytest.fixture
def pipeline():
    return SteppedPipeline()


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def jobs(pipeline, now):
    jobs = VideoJobs(pipeline, ClipStore(1 << 20), max_queued=2, max_jobs=4, ttl=60, clock=lambda: now[0])
    yield jobs
    pipeline.may_go.release(100)
    jobs.close()
    assert not jobs.store.folder.exists()


def request(prompt="a", **options):
    return ResolvedRequest(prompt, num_frames=5, height=16, width=16, **options)


def until(jobs, job, done):
    """Wait for a state of the job."""

    async def main():
        async with asyncio.timeout(10):
            with jobs.watch(job) as changed:
                while not done(job):
                    await changed.wait()
                    changed.clear()

    asyncio.run(main())


def test_progress_rises_to_99_and_then_to_100(jobs, pipeline):
    job = jobs.submit(request(), "clips")
    assert (job.status, job.progress) in (("queued", 0), ("in_progress", 0), ("in_progress", 3))
    pipeline.may_go.release(2)
    until(jobs, job, lambda job: job.progress == 47)
    assert job.preview is not None
    seen, told = [], threading.Event()

    def watch():  # on the queue's thread, at each change
        seen.append((job.status, job.progress))
        if job.ended:
            told.set()

    job.watchers.add(watch)
    pipeline.may_go.release(2)
    assert told.wait(10)
    assert [state for state in seen if state[1] > 99] == [("completed", 100)]
    assert [progress for _, progress in seen] == sorted(progress for _, progress in seen)
    assert (job.status, job.progress, job.completed_at, job.expires_at) == ("completed", 100, 1000, 1060)
    assert jobs.store.path(job.id, "video").is_file()


def test_the_queue_is_bounded_and_clips_are_made_in_their_order(jobs, pipeline):
    first = jobs.submit(request("a"), "clips")
    until(jobs, first, lambda job: job.status == "in_progress")
    waiting = [jobs.submit(request(prompt), "clips") for prompt in "bc"]
    with pytest.raises(QueueFullError, match="2 clips wait"):
        jobs.submit(request(), "clips")
    pipeline.may_go.release(100)
    until(jobs, waiting[1], lambda job: job.ended)
    assert pipeline.made == ["a", "b", "c"]
    jobs.submit(request(), "clips")
    with pytest.raises(QueueFullError, match="4 clips are kept"):
        jobs.submit(request(), "clips")


def test_deleting_cancels_what_waits_and_what_runs(jobs, pipeline):
    image = np.zeros((16, 16, 3), np.uint8)
    running, waiting = (jobs.submit(request(prompt, image=image), "clips") for prompt in "ab")
    until(jobs, running, lambda job: job.status == "in_progress")
    assert jobs.delete(waiting.id)
    assert jobs.delete(running.id)
    assert not jobs.delete(running.id)
    pipeline.may_go.release(1)
    last = jobs.submit(request("c"), "clips")
    pipeline.may_go.release(100)
    until(jobs, last, lambda job: job.ended)
    assert pipeline.made == ["c"]
    assert [folder.name for folder in jobs.store.folder.iterdir()] == [last.id]
    assert jobs.newest_last() == [last]


def test_clips_expire(jobs, pipeline, now):
    pipeline.may_go.release(100)
    job = jobs.submit(request(), "clips")
    until(jobs, job, lambda job: job.ended)
    now[0] += 59
    assert jobs.get(job.id) is job
    now[0] += 1
    assert jobs.get(job.id) is None
    assert jobs.newest_last() == []
    jobs.check_room()
    assert jobs.store.used() == 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", ("invalid_request", "too large")),
        ("break", ("server_error", "making the clip failed; the server's log has more")),
    ],
)
def test_an_error_fails_its_clip_and_the_queue_goes_on(jobs, pipeline, prompt, error):
    pipeline.may_go.release(100)
    failed, fine = jobs.submit(request(prompt), "clips"), jobs.submit(request(), "clips")
    until(jobs, fine, lambda job: job.ended)
    assert (failed.status, failed.error) == ("failed", error)
    assert fine.status == "completed"


def test_images_wait_on_disk(jobs):
    job = jobs.submit(request(image=np.ones((16, 16, 3), np.uint8)), "clips")
    assert isinstance(job.request.image, np.memmap)


def test_a_clip_that_cannot_be_ended_does_not_end_the_queue(jobs, pipeline, monkeypatch):
    remove = jobs.store.remove
    monkeypatch.setattr(jobs.store, "remove", lambda name: 1 / 0)
    pipeline.may_go.release(100)
    failed = jobs.submit(request("break"), "clips")
    fine = jobs.submit(request(), "clips")
    until(jobs, fine, lambda job: job.ended)
    assert (failed.status, fine.status) == ("failed", "completed")
    monkeypatch.setattr(jobs.store, "remove", remove)


def test_asking_for_clips_neither_waits_for_files_nor_touches_them(jobs, pipeline, now, monkeypatch):
    pipeline.may_go.release(100)
    job = jobs.submit(request(), "clips")
    until(jobs, job, lambda job: job.ended)
    now[0] += 60
    with monkeypatch.context() as patch:
        patch.setattr(jobs.store, "remove", lambda name: 1 / 0)
        assert jobs.get(job.id) is None
        assert jobs.newest_last() == []
