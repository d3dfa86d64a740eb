"""Local path of a checkpoint that is given as a folder, a GGUF file or a Hugging Face hub id; and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from verax.errors import CheckpointError, InvalidParameterError
from verax.files import read_json, refuse_pointer

TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
)
"""Patterns of the files of a tokenizer, in every published form."""

SENTENCE_FILES = ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "artifact.metadata")
"""Patterns of sentence-transformers' settings, how a model's states become a vector, and prompts; and of ColBERT's."""

_MODULE_FILES = ("*.json", "*.safetensors", "pytorch_model.bin", *TOKENIZER_FILES)
"""Patterns of the files of a module that modules.json lists, in its folder."""

_WANTED = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    *SENTENCE_FILES,
)
"""Patterns of the files that are fetched of a hub repository."""

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
"""Patterns of the weights that are fetched of a repository without safetensors files."""

_SETTINGS = ("config.json",)
"""Pattern of the file that decides a model's shapes."""

_UNWANTED = ("*/*.safetensors", "*/*.safetensors.index.json", "*/*/*", "tokenizer*/*", "chat_template*/*", "vocab*/*")
_UNWANTED += ("consolidated*",)
"""Patterns of files that are not fetched: second copies of the weights, in folders (`original/`, `onnx/`) and by the
names of Mistral's own code.

Those of folders are needed because a star in `_WANTED` matches folders too."""

_POSSIBLE = "expected a folder with config.json and weights, a .gguf file, or a hub id (organisation/name)"

_VIDEO_WANTED = ("*.json", "*.safetensors", "*.pth", "*.model")
"""Patterns of the files that are fetched of a video model's repository, of either published layout."""

_VIDEO_UNWANTED = ("xlm-roberta-large/*", "*.fp16.*", "*.bf16.*")
"""Patterns of files that are not fetched: the tokenizer of CLIP's text encoder, and second copies of weights."""

_VIDEO_SETTINGS = ("model_index.json", "config.json", "high_noise_model/config.json")
"""Files of which a video model's repository has one, by its layout."""

_VIDEO_POSSIBLE = "expected a folder of SkyReels-V2, Wan2.1 or Wan2.2, or a hub id (organisation/name)"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve(model: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Path of a checkpoint: the folder or GGUF file itself, or the local snapshot of a Hugging Face hub id.

    A GGUF file is a checkpoint of its own; its path is returned. A folder whose only weights are one GGUF file stands
    for that file.

    The environment variables `HF_HOME` and `HF_HUB_OFFLINE` hold. A snapshot in the local cache is used when offline.

    Args:
        model: folder, GGUF file or hub id.
        revision: branch, tag or commit of a hub id.
        weights: False to fetch the settings of a hub id alone.

    Raises:
        CheckpointError: if there is no such folder or file, no such id could be fetched, or a folder has several GGUF
            files and nothing else.
        InvalidParameterError: for a revision of a folder or file.
    """
    if model == "":  # which Path takes for the current folder
        raise CheckpointError(f"model: got an empty text; {_POSSIBLE}")
    folder = Path(model).expanduser()
    if revision is not None and folder.exists():  # such as a clone with the name of its hub id
        raise InvalidParameterError(f"revision: {revision!r} is of a hub id; {folder} lies here and has none")
    if folder.is_dir():
        return _only_gguf(folder) or folder
    if folder.is_file() and folder.suffix == ".gguf":
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: this is a file; {_POSSIBLE}")
    if folder.suffix == ".gguf":
        raise CheckpointError(f"{model}: no such file")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such folder; {_POSSIBLE}")
    if not weights:
        return _download(model, revision, _SETTINGS, _UNWANTED, _POSSIBLE)
    folder = _download(model, revision, _WANTED, _UNWANTED, _POSSIBLE)
    if not any(folder.glob("*.safetensors")):
        folder = _download(model, revision, _PICKLED, _UNWANTED, _POSSIBLE)
    if modules := module_files(folder):
        # Fetched separately: other weights in folders are second copies.
        unwanted = [f"{pattern.rpartition('/')[0]}/*/*" for pattern in modules]
        folder = _download(model, revision, modules, unwanted, _POSSIBLE)
    return folder


def module_files(folder: Path) -> list[str]:
    """Patterns of the files of the modules that a folder's modules.json lists, in folders within it."""
    listed = read_json(folder / "modules.json", list, optional=True)
    paths = [module.get("path") for module in listed if isinstance(module, dict)]
    within = [path for path in paths if isinstance(path, str) and path and ".." not in path and path[0] != "/"]
    return [f"{path}/{pattern}" for path in within for pattern in _MODULE_FILES]


def resolve_video(model: str | Path, *, weights: bool = True) -> Path:
    """Path of a video model's folder: the folder itself, or the local snapshot of a Hugging Face hub id.

    `weights`: False to fetch the settings of a hub id alone.
    """
    if model == "":
        raise CheckpointError(f"model: got an empty text; {_VIDEO_POSSIBLE}")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: this is a file; {_VIDEO_POSSIBLE}")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such folder; {_VIDEO_POSSIBLE}")
    folder = _download(model, None, ("*.json",), _VIDEO_UNWANTED, _VIDEO_POSSIBLE)
    if not any((folder / name).is_file() for name in _VIDEO_SETTINGS):
        # Repositories of single files, for other programs, have terabytes of them.
        raise CheckpointError(
            f"{model}: not a video model's repository: it has neither {' nor '.join(_VIDEO_SETTINGS)}; put files of "
            "one model into a folder, and name that"
        )
    return _download(model, None, _VIDEO_WANTED, _VIDEO_UNWANTED, _VIDEO_POSSIBLE) if weights else folder


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no other weights; None without one.

    Files for pictures (mmproj) and of importances (imatrix), which repositories have next to the models, do not count.
    """
    files = [path for path in sorted(folder.glob("[!.]*.gguf")) if not re.search("(?i)mmproj|imatrix", path.name)]
    if not files or any(folder.glob("*.safetensors")):
        return None
    from verax.checkpoint.formats.gguf import part_names

    if len(files) > 1 and [path.name for path in files] != part_names(files[0].name):
        raise CheckpointError(
            f"{folder}: it has several GGUF files; name one: {', '.join(path.name for path in files)}"
        )
    return files[0]


def _download(name: str, revision: str | None, wanted: Sequence[str], unwanted: Sequence[str], possible: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*wanted], ignore_patterns=[*unwanted]))
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name}: the hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here, and no such model on the hub (or it needs a token); {possible}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: no such folder here, not in the local cache, and the hub cannot be reached (offline?); "
            + possible
        ) from error
    except Exception as error:  # the client passes on errors of its HTTP library, whose classes have changed
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name}: could not be fetched from the hub: {first_line}") from error


def read_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """Read `folder/tokenizer.json`."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; transformers' AutoTokenizer.from_pretrained(...).save_pretrained writes one"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        refuse_pointer(path)
        raise CheckpointError(f"{path}: not a valid tokenizer, download it again: {error}") from error
