"""`/v1/videos`: a clip from its request to its files, by OpenAI's client too, and what is refused."""

import base64
import io
import re
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import error_of, events_of, named
from tests.support.pictures import bomb, saved
from tests.support.tiny_video import video_folder
from verax import VideoPipeline
from verax.serve import app as app_module
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings
from verax.serve.video import jobs, videos
from verax.video.files import write_clip

PIL = pytest.importorskip("PIL.Image")
av = pytest.importorskip("av")

PROMPT = "a red circle floats left over a blue to green gradient"
QUICK = {"prompt": PROMPT, "num_inference_steps": 2, "num_frames": 5}


def data_uri(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PNG = data_uri(saved("PNG"))


@pytest.fixture(scope="module")
def client(served_pipeline):
    server = Server(
        videos=LazyModel("clips", lambda: served_pipeline), settings=ServerSettings(max_video_body_bytes=1 << 20)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "ROUTES", (videos.routes,))
        app = create_app(server)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def finished(client, name):
    seen = []
    for _ in range(3000):
        video = client.get(f"/v1/videos/{name}").json()
        seen.append(video["progress"])
        if video["status"] in ("completed", "failed"):
            assert seen == sorted(seen)
            return video
        assert video["progress"] <= 99
        time.sleep(0.02)
    raise AssertionError("the clip takes more than a minute")


def frames_of(file):
    with av.open(file if isinstance(file, io.BytesIO) else str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(float)


@pytest.fixture(scope="module")
def created(client):
    """A finished clip: the answer to its request, its events, and its state."""
    response = client.post("/v1/videos", json={**QUICK, "seed": 3, "model": "clips"})
    assert response.status_code == 200, response.text
    events = client.get(f"/v1/videos/{response.json()['id']}/events").text
    return response, events, finished(client, response.json()["id"])


def test_a_clip_is_queued_made_and_described(created):
    response, _, video = created
    assert response.headers["openai-poll-after-ms"] == "1000"
    assert response.json()["status"] in ("queued", "in_progress")
    assert re.fullmatch(r"video_[0-9a-f]{32}", video["id"])
    expected = {
        **{"object": "video", "status": "completed", "progress": 100, "model": "clips", "prompt": PROMPT},
        **{"seconds": "0.625", "size": "64x64", "num_frames": 5, "fps": 8, "num_inference_steps": 2, "seed": 3},
        **{"guidance_scale": 5.0, "flow_shift": 3.0, "negative_prompt": "", "error": None},
    }
    assert {name: video[name] for name in expected} == expected
    assert video["created_at"] <= video["completed_at"] < video["expires_at"]


def test_the_files_are_the_clip_that_the_pipeline_makes(created, client, served_pipeline, tmp_path):
    clip = served_pipeline(PROMPT, num_inference_steps=2, num_frames=5, seed=3)
    video, gif = clip.save(tmp_path / "clip.mp4"), clip.save(tmp_path / "clip.gif")
    contents = f"/v1/videos/{created[2]['id']}/content"
    assert client.get(contents, params={"variant": "gif"}).content == gif.read_bytes()
    response = client.get(contents)
    assert response.headers["content-type"] == "video/mp4"
    # Not its bytes: x264 made another file of the same frames in 1 of 500 runs on a processor with AVX-512.
    served, made_here = frames_of(io.BytesIO(response.content)), frames_of(video)
    assert served.shape == made_here.shape == (5, 64, 64, 3)
    assert np.abs(served - made_here).mean() < 2


@pytest.mark.parametrize(
    ("variant", "size"),
    [("thumbnail", (64, 64)), ("spritesheet", (256, 128)), ("gif", (64, 64)), ("preview", (256, 256))],
)
def test_each_variant_is_a_picture(created, client, variant, size):
    response = client.get(f"/v1/videos/{created[2]['id']}/content", params={"variant": variant})
    picture = PIL.open(io.BytesIO(response.content))
    assert response.headers["content-type"] == f"image/{picture.format.lower()}"
    assert picture.size == size


def test_events_show_progress_previews_and_the_end(created):
    text, done, rest = created[1].partition("data: [DONE]\n\n")
    assert done
    assert not rest
    events = events_of(text)
    progress = [event["video"]["progress"] for event in events if "video" in event]
    assert progress == sorted(progress)
    assert events[-1]["type"] == "video.completed"
    assert events[-1]["video"]["progress"] == 100
    (preview, *_) = [event["image"] for event in events if event["type"] == "video.preview"]
    assert base64.b64decode(preview.removeprefix("data:image/jpeg;base64,")).startswith(b"\xff\xd8\xff")


@pytest.mark.parametrize(
    ("given", "status", "begin", "end"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=10-", 206, 10, None),
        ("bytes=-10", 206, -10, None),
        ("bytes=5-4", 200, 0, None),
        ("bytes=0-1,3-4", 200, 0, None),
        ("lines=1-2", 200, 0, None),
        ("bytes=-", 200, 0, None),
        ("bytes=-0", 416, 0, None),
        ("bytes=99999999-", 416, 0, None),
    ],
)
def test_ranges(created, client, given, status, begin, end):
    path = f"/v1/videos/{created[2]['id']}/content"
    whole = client.get(path).content
    response = client.get(path, headers={"Range": given})
    assert response.status_code == status
    if status == 416:
        assert error_of(response, 416)["param"] == "range"
        assert response.headers["content-range"] == f"bytes */{len(whole)}"
    else:
        assert response.content == whole[begin:end]


def test_pages_of_the_list(created, client):
    names = [client.post("/v1/videos", json=QUICK).json()["id"] for _ in range(2)]
    every = client.get("/v1/videos").json()
    newest_first = [video["id"] for video in every["data"]]
    assert newest_first == [*reversed(names), created[2]["id"]]
    assert (every["first_id"], every["last_id"], every["has_more"]) == (names[1], created[2]["id"], False)
    page = client.get("/v1/videos", params={"order": "asc", "limit": 1, "after": created[2]["id"]}).json()
    assert [video["id"] for video in page["data"]] == [names[0]]
    assert page["has_more"]
    for query in ({"limit": 0}, {"limit": 101}, {"limit": -1}, {"limit": "9" * 50}, {"order": "up"}, {"after": "x"}):
        assert error_of(client.get("/v1/videos", params=query))["param"] == next(iter(query))
    assert error_of(client.get(f"/v1/videos/{names[0]}/content?variant=../x"))["param"] == "variant"
    for name in names:
        assert client.delete(f"/v1/videos/{name}").json() == {"id": name, "object": "video.deleted", "deleted": True}
        assert error_of(client.get(f"/v1/videos/{name}"), 404)["type"] == "not_found_error"
        assert error_of(client.delete(f"/v1/videos/{name}"), 404)["code"] == "video_not_found"


def test_a_form_with_a_picture_whose_name_is_a_path(client):
    files = {"input_reference": ("../../x", saved("PNG"), "text/html")}
    form = {"prompt": PROMPT, "num_inference_steps": "2", "num_frames": "5", "guidance_scale": "1.5", "seed": "7"}
    response = client.post("/v1/videos", data=form, files=files)
    assert response.status_code == 200, response.text
    video = finished(client, response.json()["id"])
    assert (video["status"], video["guidance_scale"], video["seed"]) == ("completed", 1.5, 7)
    client.delete(f"/v1/videos/{video['id']}")
    for seed, taken in ((-1, 2**64 - 1), (5 + 2**32, 5 + 2**32), (2**64 + 1, 1)):
        created = client.post("/v1/videos", json={**QUICK, "seed": seed}).json()
        assert created["seed"] == taken
        client.delete(f"/v1/videos/{created['id']}")


def test_a_form_of_a_control_clip_masks_and_reference_pictures(tmp_path):
    sizes = dict(height=32, width=64, num_frames=5, num_inference_steps=2)
    pipe = VideoPipeline(video_folder("vace", tmp_path / "vace", **sizes), show_progress=False)
    control = np.random.default_rng(0).integers(0, 256, (6, 32, 64, 3), np.uint8)
    clip = write_clip(control, tmp_path / "control.webp", fps=8)
    mask, pictures = saved("PNG", control[0]), [saved("PNG"), saved("PNG", control[1])]
    files = [("input_reference", clip.read_bytes()), ("mask", mask)]
    files += [("reference_images", picture) for picture in pictures]
    server = Server(videos=LazyModel("vace", lambda: pipe))
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        form = {"prompt": "a red circle", "conditioning_scale": "[1, 0.5]", "seed": "7", "half_size_steps": "1"}
        response = client.post("/v1/videos", data=form, files=files)
        assert response.status_code == 200, response.text
        made = finished(client, response.json()["id"])
        assert (made["half_size_steps"], made["conditioning_scale"]) == (1, [1, 0.5])
        got = client.get(f"/v1/videos/{response.json()['id']}/content", params={"variant": "gif"}).content
        two = [("mask", mask), ("mask", mask)]
        assert error_of(client.post("/v1/videos", data=form, files=two))["message"] == "mask: give one file"
        video = data_uri(clip.read_bytes(), "image/webp")
        uris = {"input_reference": video, "reference_images": [PNG] * 2}
        body = {**form, "conditioning_scale": [1, 0.5], "seed": 7, "half_size_steps": 1, **uris}
        assert client.post("/v1/videos", json=body).status_code == 200
        assert error_of(client.post("/v1/videos", json={"prompt": "a", "mask": PNG}))["param"] == "mask"
        many = {"prompt": "a", "reference_images": [PNG] * 9}
        assert error_of(client.post("/v1/videos", json=many))["param"] == "reference_images"
    frames = [np.asarray(PIL.open(io.BytesIO(data)).convert("RGB")) for data in (mask, *pictures)]
    options = dict(mask=frames[:1], reference_images=frames[1:], conditioning_scale=(1, 0.5), half_size_steps=1)
    expected = pipe("a red circle", video=clip, seed=7, **options)
    assert expected.fps == 8
    assert got == expected.save(tmp_path / "clip.gif").read_bytes()


def test_a_full_disk_fails_the_clip_and_not_the_server(client, monkeypatch):
    def full(frames, path, fps):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(jobs, "write_clip", full)
    name = client.post("/v1/videos", json=QUICK).json()["id"]
    video = finished(client, name)
    assert (video["status"], video["error"]["code"]) == ("failed", "storage_full")
    assert error_of(client.get(f"/v1/videos/{name}/content"), 404)["code"] == "video_failed"
    client.delete(f"/v1/videos/{name}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *named("prompt", None, " ", "a" * 40_000, ["a"]),
        *named("size", "64", "1280x720", "-64x64", "60x64", "../../x"),
        *(
            (dict(width=64, height=64, size="64x64"), "width"),
            (dict(height=64), "height"),
            (dict(width=8, height=64), "size"),
        ),
        *(
            *named("boundary_ratio", 0.5),
            *named("reference_url", "http://127.0.0.1/a.png"),
            *named("video_url", "a.mp4"),
        ),
        *(
            case
            for name in ("duration", "steps", "cfg_scale", "aspect_ratio", "image", "last_frame", "lora", "sampler")
            for case in named(name, "2")
        ),
        *named("n", 2),
        *named("enable_teacache", True),
        *named("seconds", "4", -1, "nan", 1e300),
        (dict(seconds="1", num_frames=5), "seconds"),
        *named("num_frames", 21, 6, -3, 10**30, True),
        *named("fps", 0, 10**9),
        *named("num_inference_steps", 0, 10**9),
        *named("guidance_scale", -1, 1e300),
        *named("flow_shift", 0),
        *named("cache", "none"),
        (dict(cache="magcache", cache_retention_ratio=2), "cache_retention_ratio"),
        (dict(cache_max_skip_steps=2), "cache_max_skip_steps"),
        *named("seed", 1.5),
        *named("negative_prompt", 3),
        (dict(image_reference={"image_url": "http://127.0.0.1/a.png"}), "image_reference.image_url"),
        (dict(image_reference={"image_url": "/etc/passwd"}), "image_reference.image_url"),
        *named("image_reference", {"file_id": "file_1"}),
        (dict(image_reference={}), "image_reference.image_url"),
        (dict(image_reference={"image_url": PNG}, input_reference=PNG), "image_reference"),
        *named("last_image", PNG, "a.png", {"file_id": "file_1"}),  # the first for a model that takes none
        *named("mask", PNG),
        *named("reference_images", [PNG]),
        *named("conditioning_scale", 0.5),
        *named("input_reference", data_uri(b"GIF8"), data_uri(bomb(30_000, 30_000)), data_uri(saved("PNG")[:500])),
    ],
)
def test_wrong_fields_are_named(client, body, param):
    error = error_of(
        client.post("/v1/videos", json={**QUICK, **({"num_frames": None} if "seconds" in body else {}), **body})
    )
    assert error["param"] == param
    assert error["message"].startswith(f"{param.partition('.')[0]}")


def test_fields_of_other_servers_that_ask_for_nothing_are_taken(client):
    created = client.post("/v1/videos", json={**QUICK, "n": 1, "enable_teacache": False, "lora": None, "loras": []})
    assert created.status_code == 200, created.text
    client.delete(f"/v1/videos/{created.json()['id']}")


def test_the_operator_sets_the_sizes(served_pipeline):
    settings = ServerSettings(video_sizes=("32x64", "512x512"))
    server = Server(videos=LazyModel("clips", lambda: served_pipeline), settings=settings)
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        for size in ("64x64", "32x64", "512x512"):
            width, height = map(int, size.split("x"))
            for given in ({"size": size}, {"width": width, "height": height}):
                created = client.post("/v1/videos", json={**QUICK, **given})
                assert created.json()["size"] == size
                client.delete(f"/v1/videos/{created.json()['id']}")
        for size in ("64x32", "48x64", "x"):
            error = error_of(client.post("/v1/videos", json={**QUICK, "size": size}))
            assert error["message"].startswith("size: expected one of 64x64, 32x64, 512x512, got")


def test_wrong_forms_are_refused(client):
    fields = {"prompt": PROMPT}
    assert error_of(client.post("/v1/videos", data=fields, files={"other": b"x"}))["param"] == "other"
    assert error_of(client.post("/v1/videos", data={**fields, "fps": "1e400"}, files={"input_reference": b"x"}))
    files = {"input_reference": ("a.png", saved("PNG")), "last_image": ("b.png", saved("PNG"))}
    refused = error_of(client.post("/v1/videos", data={**fields, "num_frames": "5"}, files=files))
    assert refused["message"].startswith("last_image: needs a model for first and last frame")
    twice = [(name, (None, PNG)) for name in ("input_reference", "input_reference[image_url]")]
    scales = [("conditioning_scale", (None, scale)) for scale in "12"]
    numbered = [("reference_images[0]", (None, PNG))]
    listed = [("reference_images[]", (None, PNG))]  # read, and this model takes none
    cases = {"input_reference": twice, "conditioning_scale": scales, "reference_images[0]": numbered}
    for name, several in {**cases, "reference_images": listed}.items():
        assert error_of(client.post("/v1/videos", data=fields, files=several))["param"] == name
    url = {"input_reference[image_url]": (None, "https://example.com/a.png")}
    assert error_of(client.post("/v1/videos", data=fields, files=url))["param"] == "input_reference.image_url"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert error_of(client.post("/v1/videos", content=b"--x\r\nbroken", headers=headers))
    assert error_of(client.post("/v1/videos", content=b"{}", headers={"content-type": "text/plain"}), 415)
    error_of(client.post("/v1/videos", data=fields, files={"input_reference": bytes(2 << 20)}), 413)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openai_python(client):
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=client, max_retries=0)
    video = api.videos.create(
        prompt=PROMPT, input_reference=("a.png", saved("PNG")), extra_body={"num_inference_steps": 2, "num_frames": 5}
    )
    assert video.status in ("queued", "in_progress")
    assert api.videos.poll(video.id, poll_interval_ms=20).status == "completed"
    assert api.videos.retrieve(video.id).progress == 100
    assert api.videos.list(limit=1).data[0].id == video.id
    assert api.videos.download_content(video.id).read()[4:8] == b"ftyp"
    assert api.videos.download_content(video.id, variant="thumbnail").read().startswith(b"\xff\xd8\xff")
    assert api.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.videos.retrieve(video.id)
    with pytest.raises(openai.BadRequestError, match=r"at most 2\.125"):
        api.videos.create(prompt=PROMPT, seconds="8")
