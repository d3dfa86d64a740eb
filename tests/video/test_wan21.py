"""Wan 2.1's checkpoints: without options they are run as by their authors' own command, in either layout."""

import json
from typing import Any

import numpy as np
import pytest

from verax import VideoRequest
from verax.checkpoint.video.folder import VideoFolder
from verax.errors import UnsupportedModelError
from verax.models.wan.family import CHINESE, ENGLISH, WAN, read_settings
from verax.models.wan.model import FIRST_AND_LAST
from verax.serve.video.videos import VideoCreate, resolve
from verax.video.load import open_model
from verax.video.request import resolve_request

SIZES = {"1.3B": (1536, 8960, 12, 30), "14B": (5120, 13824, 40, 40)}
"""Widths of the transformer and of its feed-forward layers, heads and layers."""

NAMES = ("height", "width", "num_inference_steps", "guidance_scale", "shift")

COMMANDS = [
    ("Wan2.1-T2V-1.3B", "t2v", (480, 832, 50, 6.0, 8.0)),
    ("Wan2.1-T2V-14B", "t2v", (720, 1280, 50, 5.0, 5.0)),
    ("Wan2.1-I2V-14B-480P", "i2v", (480, 832, 40, 5.0, 3.0)),
    ("Wan2.1-I2V-14B-720P", "i2v", (720, 1280, 40, 5.0, 5.0)),
    ("Wan2.1-FLF2V-14B-720P", "flf2v", (720, 1280, 50, 5.0, 16.0)),
    ("Wan2.1-VACE-1.3B", "vace", (480, 832, 50, 5.0, 16.0)),
    ("Wan2.1-VACE-14B", "vace", (720, 1280, 50, 5.0, 16.0)),
]
"""Checkpoints, kinds, and the settings that `generate.py` has with the options of the README."""

PIPELINES = {"t2v": "WanPipeline", "vace": "WanVACEPipeline"}


def write(folder, fields: dict[str, Any]):
    for name, content in fields.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def original_config(name, kind):
    dim, ffn_dim, heads, layers = next(sizes for size, sizes in SIZES.items() if size in name)
    config = {"_class_name": "WanModel", "model_type": kind, "dim": dim, "ffn_dim": ffn_dim, "num_heads": heads}
    config |= {"num_layers": layers, "freq_dim": 256, "in_dim": 36 if kind in ("i2v", "flf2v") else 16, "out_dim": 16}
    more = {"_class_name": "VaceWanModel", "vace_layers": list(range(0, layers, 2)), "vace_in_dim": 96}
    return config | (more if kind == "vace" else {})


def diffusers_config(name, kind):
    dim, ffn_dim, heads, layers = next(sizes for size, sizes in SIZES.items() if size in name)
    config = {"_class_name": "WanTransformer3DModel", "num_attention_heads": heads, "attention_head_dim": dim // heads}
    config |= {"ffn_dim": ffn_dim, "num_layers": layers, "in_channels": 16, "out_channels": 16}
    more: dict[str, Any] = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": dim}
    more |= {"pos_embed_seq_len": FIRST_AND_LAST if kind == "flf2v" else None}
    vace = {"_class_name": "WanVACETransformer3DModel", "vace_layers": list(range(0, layers, 2))}
    vace |= {"vace_in_channels": 96}
    return config | (more if kind in ("i2v", "flf2v") else vace if kind == "vace" else {})


def diffusers_folder(path, name, kind, **scheduler):
    return write(
        path / f"{name}-Diffusers",
        {
            "model_index.json": {"_class_name": PIPELINES.get(kind, "WanImageToVideoPipeline")},
            "transformer/config.json": diffusers_config(name, kind),
            "scheduler/scheduler_config.json": scheduler,
        },
    )


def settings_of(folder):
    opened = VideoFolder(folder)
    return read_settings(opened, opened.flow_shift, kind=None, negative_prompts={})


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize(("name", "kind", "expected"), COMMANDS, ids=[name for name, *_ in COMMANDS])
def test_a_checkpoint_has_the_settings_of_its_authors_command(layout, name, kind, expected, tmp_path):
    if layout == "original":
        folder = write(tmp_path / name, {"config.json": original_config(name, kind)})
    else:
        folder = diffusers_folder(tmp_path, name, kind)
    settings = settings_of(folder)
    assert (settings.kind, settings.num_frames, settings.fps) == (kind, 81, 16)
    assert tuple(getattr(settings, field) for field in NAMES) == expected


def test_the_files_of_a_checkpoint_are_preferred_to_the_command(tmp_path):
    folder = diffusers_folder(tmp_path, "Wan2.1-T2V-1.3B", "t2v", flow_shift=3.0)
    assert settings_of(folder).shift == 3
    write(folder, {"verax.json": {"shift": 7.0, "guidance_scale": 2.0}})
    settings = settings_of(folder)
    assert (settings.shift, settings.guidance_scale, settings.height) == (7, 2, 480)


@pytest.mark.parametrize(
    ("scheduler", "solver", "shift"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, "euler", 3),
        ({"_class_name": "FlowMatchLCMScheduler", "shift": 5.0, "use_dynamic_shifting": False}, "lcm", 5),
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0, "solver_order": 2}, "unipc", 3),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, "euler", 8),
        # As diffusers' `from_config` leaves them: with the settings of the scheduler before.
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "flow_shift": 5.0}, "euler", 3),
        ({"_class_name": "UniPCMultistepScheduler", "shift": 7.0, "flow_shift": 2.0}, "unipc", 2),
        ({"_class_name": "FlowUniPCMultistepScheduler", "shift": 7.0, "flow_shift": 2.0}, "unipc", 7),
        ({"_class_name": "DPMSolverMultistepScheduler", "flow_shift": 3.0, "solver_type": "midpoint"}, "dpm++", 3),
    ],
)
def test_the_folders_scheduler_says_the_solver_and_the_shift(scheduler, solver, shift, tmp_path):
    settings = settings_of(diffusers_folder(tmp_path, "Wan2.1-T2V-1.3B", "t2v", **scheduler))
    assert (settings.solver, settings.shift) == (solver, shift)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_class_name", "DPMSolverSDEScheduler"),
        ("solver_type", "heun"),
        ("solver_order", 3),
        ("use_karras_sigmas", True),
        ("use_dynamic_shifting", True),
        ("prediction_type", "epsilon"),
        ("disable_corrector", [0]),
        ("shift_terminal", 0.1),
        ("solver_p", {"_class_name": "DPMSolverMultistepScheduler"}),
    ],
)
def test_settings_of_a_scheduler_that_are_not_implemented_are_refused(name, value, tmp_path):
    folder = diffusers_folder(tmp_path, "Wan2.1-T2V-1.3B", "t2v", **{name: value})
    with pytest.raises(UnsupportedModelError, match=rf"scheduler_config\.json: {name} .* is not supported"):
        settings_of(folder)


def test_a_stochastic_dpm_scheduler_is_refused(tmp_path):
    scheduler = {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"}
    folder = diffusers_folder(tmp_path, "Wan2.1-T2V-1.3B", "t2v", **scheduler)
    with pytest.raises(UnsupportedModelError, match="algorithm_type"):
        settings_of(folder)


@pytest.mark.parametrize("name", ["SkyReels-V2-T2V-14B-720P", "a.model"])
def test_a_repackaged_skyreels_differs_from_wan_by_the_name_of_its_folder(name, tmp_path):
    settings = settings_of(write(tmp_path / name, {"config.json": original_config("14B", "t2v")}))
    expected = (121, 24, 8.0) if name.startswith("SkyReels") else (81, 16, 5.0)
    assert (settings.num_frames, settings.fps, settings.shift) == expected


@pytest.mark.parametrize(
    ("kind", "reference", "negative_prompt"),
    [
        ("t2v", "skyreels", ENGLISH),
        ("df", "skyreels", CHINESE),
        ("t2v-a14b", "wan", CHINESE),
        ("i2v-a14b", "wan", CHINESE),
        ("ti2v", "wan", CHINESE),
        ("flf2v", "wan", f"镜头切换，镜头晃动，{CHINESE}"),
        ("vace", "wan", CHINESE),
    ],
)
def test_a_checkpoint_follows_the_rules_of_its_authors(kind, reference, negative_prompt, folders):
    model = open_model(VideoFolder(folders(kind)))
    assert (model.rules.name, model.settings.negative_prompt) == (reference, negative_prompt)
    other = "wan" if reference == "skyreels" else "skyreels"
    assert open_model(VideoFolder(folders(kind)), reference=other).rules.name == other


def test_wan2_1s_image_to_video_has_a_negative_prompt_of_its_own(tmp_path):
    opened = VideoFolder(diffusers_folder(tmp_path, "Wan2.1-I2V-14B-480P", "i2v"))
    settings = read_settings(opened, 3.0, kind=None, negative_prompts=WAN.negative_prompts)
    assert settings.negative_prompt == f"镜头晃动，{CHINESE}"


def picture(height, width):
    """Uneven picture whose first and last tenth of columns are black."""
    values = np.random.default_rng(0).integers(100, 256, (height, width, 3), np.uint8)
    values[:, : width // 10] = values[:, -(width // 10) :] = 0
    return values


@pytest.mark.parametrize(("kind", "is_whole"), [("i2v", True), ("flf2v", True), ("ti2v", False), ("vace", False)])
def test_a_picture_of_the_shape_of_the_frame_is_resized_whole_for_image_to_video(kind, is_whole):
    # 300 x 640 at an area of 480 x 832 are 432 x 912 with sides of whole tokens, which is 1% wider.
    frame = WAN.resize[kind](picture(300, 640), 432, 912)
    assert frame.shape == (432, 912, 3)
    black = (frame == 0).all(axis=(0, 2)).sum() / 912
    assert (abs(black - 0.2) < 0.004) == is_whole


@pytest.mark.parametrize("kind", ["i2v", "flf2v", "ti2v", "vace"])
def test_a_picture_of_another_shape_is_cropped_about_the_middle(kind):
    frame = WAN.resize[kind](picture(64, 400), 64, 96)
    assert frame.shape == (64, 96, 3)
    assert frame.min() > 90
    np.testing.assert_array_equal(frame, WAN.resize[kind](picture(64, 400)[:, 152:248], 64, 96))


def test_the_image_encoder_sees_the_users_picture_and_not_the_frame():
    image, frame = picture(64, 400), picture(64, 96)
    assert WAN.clip_pixels is not None
    pixels = WAN.clip_pixels(image, frame, 28)
    assert (pixels[:, :2].mean(), pixels[:, -2:].mean()) < (-1.5, -1.5)
    np.testing.assert_array_equal(pixels, WAN.clip_pixels(image, image, 28))


@pytest.mark.parametrize(
    ("kind", "usual", "shape", "expected"),
    [
        ("i2v", (720, 1280), (1080, 1920), (720, 1280)),
        ("i2v", (480, 832), (960, 1280), (544, 720)),
        ("flf2v", (480, 832), (1280, 960), (720, 544)),
        ("ti2v", (704, 1280), (1080, 1920), (704, 1248)),
        ("ti2v", (704, 1280), (600, 800), (800, 1088)),
        ("vace", (480, 832), (1080, 1920), (480, 832)),
        ("vace", (480, 832), (64, 96), (64, 96)),
    ],
)
def test_frames_have_the_shape_of_the_picture_and_the_usual_area(kind, usual, shape, expected):
    assert WAN.frame_sizes[kind](shape, usual) == expected


def test_a_request_without_a_size_has_the_size_that_follows_its_picture(pipes):
    pipe = pipes("i2v-a14b")
    image = picture(40, 160)  # four times as wide as high, for an area of 16 x 32
    assert size_of(pipe.resolve(VideoRequest("a red circle", image=image))) == (16, 32)
    follows = resolve_request(VideoRequest("a red circle", image=image, resolution="540P"), pipe.parts.model)
    assert size_of(follows) == (352, 1440)
    sizes: list[dict[str, Any]] = [{"height": 32, "width": 48}, {"height": 16}, {"width": 32}]
    for given in sizes:
        resolved = pipe.resolve(VideoRequest("a red circle", image=image, **given))
        assert size_of(resolved) == (given.get("height", 16), given.get("width", 32))
    plain = VideoRequest("a red circle", image=image, resolution="540P")
    assert size_of(resolve_request(plain, pipe.parts.model, follow_picture=False)) == (544, 960)


def size_of(request):
    return request.height, request.width


def test_the_server_keeps_the_usual_size_and_turns_it(pipes):
    for shape, size in (((40, 160), (16, 32)), ((160, 40), (32, 16))):
        given = {"image": [picture(*shape)[None]]}
        assert size_of(resolve(VideoCreate("a red circle"), given, pipes("i2v-a14b"))) == size
