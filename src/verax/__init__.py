"""verax: generative models in JAX, from the checkpoints that PyTorch users publish, proven to give the same results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verax import checkpoint, compare, models, ops, ray
    from verax.embed.encoder import Encoder
    from verax.embed.reranker import RankedDocument, Reranker
    from verax.models import register_causal_lm, register_video_model
    from verax.text.engine.async_llm import AsyncLLM
    from verax.text.engine.engine_config import EngineConfig
    from verax.text.engine.llm import LLM
    from verax.text.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from verax.text.engine.sampling_params import SamplingParams, StructuredOutputs
    from verax.text.features.lora import LoRARequest
    from verax.video.outputs import VideoOutput, VideoProgress
    from verax.video.pipeline import VideoPipeline
    from verax.video.request import VideoRequest

__version__ = "0.1.0"
"""The one place of the version: pyproject.toml reads it from here."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Encoder",
    "EngineConfig",
    "LoRARequest",
    "Logprob",
    "RankedDocument",
    "RequestOutput",
    "Reranker",
    "SamplingParams",
    "StructuredOutputs",
    "VideoOutput",
    "VideoPipeline",
    "VideoProgress",
    "VideoRequest",
    "__version__",
    "checkpoint",
    "compare",
    "models",
    "ops",
    "ray",
    "register_causal_lm",
    "register_video_model",
]

_HOMES = {
    "LLM": "verax.text.engine.llm",
    "AsyncLLM": "verax.text.engine.async_llm",
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), "verax.text.engine.outputs"),
    "Encoder": "verax.embed.encoder",
    "EngineConfig": "verax.text.engine.engine_config",
    "LoRARequest": "verax.text.features.lora",
    **dict.fromkeys(("RankedDocument", "Reranker"), "verax.embed.reranker"),
    **dict.fromkeys(("SamplingParams", "StructuredOutputs"), "verax.text.engine.sampling_params"),
    **dict.fromkeys(("VideoOutput", "VideoProgress"), "verax.video.outputs"),
    "VideoPipeline": "verax.video.pipeline",
    "VideoRequest": "verax.video.request",
    **dict.fromkeys(("register_causal_lm", "register_video_model"), "verax.models"),
}
_MODULES = ("checkpoint", "compare", "models", "ops", "ray")


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import verax` costs nothing, JAX included."""
    if name in _MODULES:
        return importlib.import_module(f"verax.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
