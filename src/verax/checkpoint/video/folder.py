"""A SkyReels-V2 or Wan model in a folder of either published layout, found by looking; weights by the original's names.

- The original's: `config.json` and the transformer's safetensors, next to `Wan2.1_VAE.pth`,
  `models_t5_umt5-xxl-enc-bf16.pth`, `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth` and `google/umt5-xxl/`.
  Each `.pth` may be safetensors instead, with its settings next to it under the same name (`Wan2.1_VAE.json`). The two
  transformers of Wan 2.2 are in `high_noise_model/` and `low_noise_model/`.
- Diffusers': `model_index.json` and a folder for each part.

In both, a GGUF file may take the place of the weights of a transformer or of the text encoder. In the original's, it
then needs no config.json.

Weights may have the names of either layout in both, after the prefixes of ComfyUI and DiffSynth and the names of
PyTorch's wrappers, such as `model.diffusion_model.`, `pipe.dit.`, `_orig_mod.` and `module.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers

from verax.checkpoint.checkpoint import Checkpoint, DerivedFile, TensorFile, open_stem, open_together
from verax.checkpoint.formats.gguf import GGUFFile, part_names
from verax.checkpoint.formats.pth import PthFile
from verax.checkpoint.formats.quantized import QuantizedEntry
from verax.checkpoint.formats.safetensors import TensorInfo
from verax.checkpoint.resolve import read_tokenizer, resolve_video
from verax.checkpoint.video.parts import (
    EXPERTS,
    PARTS,
    PUBLISHED,
    WRAPPERS,
    Form,
    Part,
    boundary_of,
    noise_of,
    part_of,
    pipeline_name,
    recommended_shift,
    scheduler_settings,
    scheduler_solver,
)
from verax.checkpoint.video.quantized import GGUFPart, open_quantized, umt5_config, umt5_tokenizer, wan_config
from verax.errors import CheckpointError, UnsupportedModelError
from verax.fields import Epsilon, Positive, file_of, read_value
from verax.files import model_name, read_json

TOKENIZER = "google/umt5-xxl"
"""Its folder in the original layout."""
SETTINGS = "verax.json"
"""Name of verax's own settings file: defaults of a model that is not of the published sizes."""
_TINY_DECODER = re.compile(r"(light)?taew\d_\d\.safetensors")
"""Names of TAEHV's and LightX2V's files, which may be next to a transformer of any name."""
_COMFY = "model.diffusion_model."
_PREFIXES = re.compile(r"^((model|diffusion_model|pipe|dit)\.)+")
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")


def is_video_folder(folder: Path) -> bool:
    """True if a folder has a video model in either layout, by its files."""
    experts = folder / EXPERTS["transformer"]
    if (folder / "model_index.json").is_file() or (folder / "transformer").is_dir() or experts.is_dir():
        return True
    own = folder / "config.json"
    if own.is_file():
        return "_class_name" in read_json(own)
    return any(PARTS["vae"].pattern.fullmatch(path.name) for path in folder.glob("*")) and any(folder.glob("*.gguf"))


class VideoFolder:
    """An open folder. Weights are mapped when a part is asked for."""

    def __init__(self, path: str | Path):
        """Look at a folder, or fetch a hub id."""
        self.path = resolve_video(path)
        named = self.path if Path(path).expanduser().is_dir() else Path(path)
        self.name = Path(model_name(named.resolve())).name
        """Name of the folder or repository. In the original layout it may be the only sign of the kind of model."""
        self._described: dict[str, dict[str, Any]] = {}
        """Configurations of parts out of GGUF files that were read."""
        self.layout: Literal["original", "diffusers"] = "diffusers"
        if not (self.path / "model_index.json").is_file() and not (self.path / "transformer").is_dir():
            self.layout = "original"
            described = (self.path / "config.json").is_file() or _of_transformer(self.path, "gguf")
            if not described and not self._has_experts:
                raise CheckpointError(
                    f"{self.path}: no video model here: expected model_index.json and a folder for each part "
                    "(diffusers' layout), or config.json and the transformer's safetensors, or its GGUF file (the "
                    "original's; Wan 2.2's in high_noise_model and low_noise_model)"
                )

            for path in () if self._has_experts else self.path.iterdir():
                if path.is_file() and noise_of(path.name) and "lora" not in path.name.lower():
                    high, low = EXPERTS.values()
                    raise CheckpointError(
                        f"{path}: it is one of two transformers by its name; put the one for high noise into {high}/ "
                        f"and the one for low noise into {low}/, or rename it to run it alone"
                    )

    @property
    def pipeline(self) -> str:
        """The name of the pipeline in diffusers, such as `SkyReelsV2ImageToVideoPipeline`."""
        if self.layout == "original":
            return pipeline_name(self.config("transformer"), self.name)
        return read_value(read_json(self.path / "model_index.json"), "_class_name", str)

    @property
    def boundary_ratio(self) -> float | None:
        """Share of the noise levels from which the first of two transformers is used; None for one transformer."""
        if self.layout == "original":
            config = self.config("transformer") if self._has_experts else {}
            ratio = boundary_of(config) if self._has_experts else None
        else:
            config, ratio = self._index, self._index.get("boundary_ratio")
        if ratio is None and "transformer_2" in self:
            raise CheckpointError(f"{file_of(config)}: it has a second transformer, and no boundary_ratio")
        return None if ratio is None else read_value({**config, "boundary_ratio": ratio}, "boundary_ratio", Epsilon)

    @property
    def expand_timesteps(self) -> bool:
        """True for a model of text and image, in which each latent frame has a time of its own (Wan 2.2's 5B)."""
        if self.layout == "original":
            return self.config("transformer").get("model_type") == "ti2v"
        return read_value(self._index, "expand_timesteps", bool, False)

    @property
    def _index(self) -> dict[str, Any]:
        return read_json(self.path / "model_index.json", optional=True)

    @property
    def _has_experts(self) -> bool:
        """True for two transformers in the original layout."""
        folder = self.path / EXPERTS["transformer"]
        return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))

    @property
    def scheduler(self) -> dict[str, Any]:
        """Settings of the scheduler: the folder's, or for a published original those that its authors recommend."""
        if self.layout == "diffusers":
            return read_json(self.path / "scheduler" / "scheduler_config.json")
        own = self.path / "scheduler_config.json"
        if own.is_file():
            return read_json(own)
        return scheduler_settings(self.recommended_shift)

    @property
    def recommended_shift(self) -> float:
        """Shift of the noise levels in the commands of the checkpoint's authors."""
        experts = self.boundary_ratio is not None
        return recommended_shift(self.config("transformer"), self.pipeline, self.name, experts=experts)

    @property
    def flow_shift(self) -> float:
        """Shift of the scheduler's noise levels; 1 where its settings name none."""
        scheduler = self.scheduler
        # Diffusers keeps the settings of a scheduler from which another was made, so that both may be there.
        kind = scheduler.get("_class_name", "UniPCMultistepScheduler" if "flow_shift" in scheduler else None)
        name = "flow_shift" if kind in ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler") else "shift"
        return read_value(scheduler, name, Positive, 1.0)

    @property
    def solver(self) -> str:
        """Solver that the scheduler is, one of `video.solvers.SOLVERS`."""
        return scheduler_solver(self.scheduler)

    @property
    def own_settings(self) -> dict[str, Any]:
        """Contents of `verax.json`, defaults of a model that is not of the published sizes; empty without the file."""
        return read_json(self.path / SETTINGS, optional=True)

    @property
    def image_processor(self) -> dict[str, Any] | None:
        """Settings of the image processor; None if the folder has none."""
        folder = self.path / "image_processor" if self.layout == "diffusers" else self.path
        own = folder / "preprocessor_config.json"
        return read_json(own) if own.is_file() else None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer's files."""
        folder = self.path / ("tokenizer" if self.layout == "diffusers" else TOKENIZER)
        if not folder.is_dir() or not any(folder.iterdir()):
            raise CheckpointError(f"{self.path}: no tokenizer: expected {folder.relative_to(self.path)}/tokenizer.json")
        return folder

    def read_tokenizer(self) -> tokenizers.Tokenizer:
        """The text encoder's tokenizer, of tokenizer.json or else of the metadata of its GGUF file."""
        folder = self.path / ("tokenizer" if self.layout == "diffusers" else TOKENIZER)
        path = self.path / "text_encoder" if self.layout == "diffusers" else self.path
        name = "*" if self.layout == "diffusers" else self._original_file(PARTS["text_encoder"])
        encoders = [] if name is None or folder.is_dir() else sorted(path.glob(f"{name}.gguf"))
        return (
            umt5_tokenizer(GGUFFile(encoders[0]).metadata, encoders[0]) if encoders else read_tokenizer(self.tokenizer)
        )

    def __contains__(self, name: str) -> bool:
        """True if the folder has the part, one of `PARTS`."""
        if self.layout == "diffusers":
            return (self.path / name).is_dir()
        if name in EXPERTS:
            return name == "transformer" or (self.path / EXPERTS[name]).is_dir()
        return bool(self._original_file(PARTS[name]))

    def config(self, name: str) -> dict[str, Any]:
        """A part's config.json; of a file that was published without one, what it would be."""
        if self.layout == "diffusers":
            self._check_folder(name)
            return read_json(self.path / name / "config.json")
        if name in EXPERTS:
            config = self._transformer_config(name)
            if self._has_experts:
                config.setdefault("image_dim", None)  # no published pair attends to an image encoder's states
            return config
        stem = self._stem(PARTS[name])
        own, gguf = self.path / f"{stem}.json", self.path / f"{stem}.gguf"
        if own.is_file():
            return read_json(own)
        if name not in self._described:  # the vocabulary in its metadata takes long to read
            self._described[name] = umt5_config(GGUFPart(gguf, name)) if gguf.is_file() else {}
        return PARTS[name].published(stem) | self._described[name]

    def _transformer_config(self, name: str) -> dict[str, Any]:
        """Config.json of a transformer in the original layout, or the configuration that a GGUF file's shapes say."""
        folder = self._transformer_folder(name)
        if (folder / "config.json").is_file() or not (paths := _of_transformer(folder, "gguf")):
            return read_json(folder / "config.json")
        if name not in self._described:
            entries, packed = _by_original_names(PARTS[name], {}, _gguf_files(paths, name))
            shapes = {key: file.tensors[key].shape for key, file in entries.items()}
            shapes |= {key: entry.shape for key, entry in packed.items()}
            self._described[name] = wan_config(shapes, paths[0])
        return dict(self._described[name])

    def checkpoint(self, name: str, *, quantized: bool = True) -> Checkpoint:
        """A part's configuration and weights, these by the original's names.

        `quantized`: False for floats of all weights that the files have quantised. Keys that fit neither layout's names
        are kept, and `load_module` reports them.
        """
        part, config = self._part(name), self.config(name)
        files = self._diffusers_files(name) if self.layout == "diffusers" else self._original_files(name)
        entries, packed = _by_original_names(part, config, files, quantized=quantized)
        if not entries:
            raise CheckpointError(f"{self.path}: the {part.what} has no weights")
        where = self.path / name if self.layout == "diffusers" else self._transformer_folder(name)
        return Checkpoint(where, config, {}, entries, packed=packed)

    def has_weights(self, name: str) -> bool:
        """True if there are files of a part's weights; a plan needs none."""
        if self.layout == "original" and name not in EXPERTS:
            return name in self
        folder = self.path / name if self.layout == "diffusers" else self._transformer_folder(name)
        return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))

    def _check_folder(self, name: str) -> None:
        if not (self.path / name).is_dir():
            raise CheckpointError(
                f"{self.path}: no {self._part(name).what}: expected {name}/config.json and "
                f"{name}/{self._part(name).stem}.safetensors"
            )

    def _part(self, name: str) -> Part:
        """Names of a part in both layouts, by the class of the transformer."""
        diffusers = self.layout == "diffusers"
        folder = self.path / "transformer" if diffusers else self._transformer_folder("transformer")
        config = read_json(folder / "config.json", optional=True)
        return part_of(name, config.get("_class_name", PUBLISHED[0]))

    def _diffusers_files(self, name: str) -> Mapping[str, TensorFile]:
        part, folder = self._part(name), self.path / name
        files = open_stem(folder, part.stem) or _gguf_files(sorted(folder.glob("[!.]*.gguf")), name)
        if not files:
            raise CheckpointError(
                f"{folder}: no weights of the {part.what}: expected {part.stem}.safetensors, "
                "numbered files of that name, or a GGUF file"
            )
        return files

    def _original_files(self, name: str) -> Mapping[str, TensorFile]:
        if name in EXPERTS:
            return self._original_transformer(self._transformer_folder(name), name)
        part = PARTS[name]
        stem = self._stem(part)
        if files := open_stem(self.path, stem):
            return files
        if (gguf := self.path / f"{stem}.gguf").is_file():
            return _gguf_files([gguf], name)
        file = PthFile(self.path / f"{stem}.pth")
        return dict.fromkeys(file.tensors, file)

    def _transformer_folder(self, name: str) -> Path:
        """Folder of a part's files in the original layout."""
        return self.path / EXPERTS[name] if self._has_experts and name in EXPERTS else self.path

    @staticmethod
    def _original_transformer(folder: Path, name: str) -> Mapping[str, TensorFile]:
        for stem in ("model", "diffusion_pytorch_model"):
            if files := open_stem(folder, stem):
                return files
        if rest := _of_transformer(folder, "safetensors"):
            return open_together(rest)
        if files := _gguf_files(_of_transformer(folder, "gguf"), name):
            return files
        raise CheckpointError(
            f"{folder}: no weights of the transformer: expected model.safetensors or "
            "diffusion_pytorch_model.safetensors, numbered files of either name, or a GGUF file"
        )

    def _stem(self, part: Part) -> str:
        """Name of a part's files in the original layout, without number and ending."""
        stem = self._original_file(part)
        if stem is None:
            raise CheckpointError(
                f"{self.path}: no {part.what}: expected {part.original}.pth or {part.original}.safetensors"
            )
        return stem

    def _original_file(self, part: Part) -> str | None:
        files = [path.name for path in sorted(self.path.iterdir()) if part.pattern.fullmatch(path.name)]
        stems = sorted({_NUMBER.sub("", name.rsplit(".", 1)[0]) for name in files})
        if part.original in stems:
            return part.original
        if len(stems) > 1:
            raise CheckpointError(f"{self.path}: several files for the {part.what}: {', '.join(files)}; leave one")
        return stems[0] if stems else None


def _of_transformer(folder: Path, suffix: str) -> list[Path]:
    """Files of a folder of the original layout that are not of another part."""
    others = [_TINY_DECODER, *(part.pattern for name, part in PARTS.items() if name not in EXPERTS)]
    paths = sorted(folder.glob(f"[!.]*.{suffix}"))
    return [path for path in paths if not any(pattern.fullmatch(path.name) for pattern in others)]


def _gguf_files(paths: Sequence[Path], name: str) -> dict[str, TensorFile]:
    """File of each tensor of a part, by key, in one GGUF file or the parts of a split one; nothing without a path."""
    if not paths:
        return {}
    if [path.name for path in paths] not in (part_names(paths[0].name), [paths[0].name]):
        raise CheckpointError(
            f"{paths[0].parent}: several GGUF files for one part: {', '.join(path.name for path in paths)}; leave one"
        )
    file = GGUFPart(paths[0], name)
    return dict.fromkeys(file.tensors, file)


def _entry(name: str, sources: list[tuple[TensorFile, str]], form: Form) -> DerivedFile:
    """A weight by the original's name: a tensor of a file, or several whose rows together are it."""
    path, infos = sources[0][0].path, [file.tensors[key] for file, key in sources]
    first = infos[0]
    rows = (sum(info.shape[0] for info in infos), *first.shape[1:]) if len(infos) > 1 else first.shape
    if any((info.dtype, info.shape[1:]) != (first.dtype, first.shape[1:]) for info in infos):
        keys = ", ".join(key for _, key in sources)
        raise CheckpointError(f"{path}: {keys} differ in shape or dtype, and should be the rows of {name}")
    shape = form(np.broadcast_to(np.int8(0), rows)).shape
    end = first.start + sum(info.end - info.start for info in infos)

    def read() -> np.ndarray:
        arrays = [file.read(key) for file, key in sources]
        return form(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def release() -> None:
        for file, key in sources:
            file.release(key)

    return DerivedFile(path, name, TensorInfo(first.dtype, shape, first.start, end), read, release)


def _by_original_names(
    part: Part, config: Mapping[str, Any], files: Mapping[str, TensorFile], *, quantized: bool = True
) -> tuple[dict[str, TensorFile], dict[str, QuantizedEntry]]:
    """Files of the weights, and the quantised ones among these, by the original's names."""
    files, kept = open_quantized(files, rounds_inputs=part.original == PARTS["transformer"].original)
    names, keys = part.names(config), dict[str, str]()
    for key, file in files.items():
        if ".to_gate_compress." in key:
            raise UnsupportedModelError(
                f"{file.path}: {key} is of video sparse attention (VSA), which is not supported; take a checkpoint of "
                "full attention, such as FastWan2.2-TI2V-5B-FullAttn"
            )
        name = _PREFIXES.sub("", WRAPPERS.sub("", key))
        if not any((part.dropped.search(name), names.forward(name), names.backward(name))):
            name = key.removeprefix(_COMFY)  # another family's, whose names may begin so themselves
        if name in keys:
            raise CheckpointError(f"{file.path}: {keys[name]} and {key} are both {name}")
        keys[name] = key
    keys = {name: key for name, key in keys.items() if not part.dropped.search(name)}
    if "shared.weight" in keys:
        keys.pop("encoder.embed_tokens.weight", None)  # a second copy
    theirs = {name: original for name in keys if (original := names.backward(name)) is not None}
    ours = [name for name in keys if names.forward(name) is not None]
    if len(ours) >= len(theirs):
        theirs = {}
    pieces: dict[str, dict[int, str]] = {}
    for name in keys:
        original, piece = theirs.get(name, (name, 0))
        pieces.setdefault(original, {})[piece] = name
    entries: dict[str, TensorFile] = {}
    packed: dict[str, QuantizedEntry] = {}
    for original, parts in pieces.items():
        wanted = names.forward(original)
        if theirs and wanted is not None and len(parts) != len(wanted):
            absent = ", ".join(name for i, name in enumerate(wanted) if i not in parts)
            path = files[keys[next(iter(parts.values()))]].path
            raise CheckpointError(f"{path}: {absent} missing, and only {', '.join(parts.values())} present")
        if len(parts) == 1 and original not in part.forms and quantized and (describe := kept.get(keys[parts[0]])):
            packed[original], arrays = describe(original)
            entries |= arrays
            continue
        sources = [(files[keys[parts[i]]], keys[parts[i]]) for i in sorted(parts)]
        form = part.form(original).to_original if parts[0] in theirs else lambda array: array
        entries[original] = _entry(original, sources, form)
    return entries, packed
