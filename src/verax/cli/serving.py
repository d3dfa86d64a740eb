"""Options of the models that `verax serve` and `verax batch` run, and the server that is made of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from verax.ray.replicas import RunningReplicas
    from verax.serve.http.server import Server
    from verax.serve.http.telemetry import RequestTracer
    from verax.text.features.lora import LoRARequest

__all__ = [
    "LIMITS",
    "AnyModelName",
    "EmbeddingBatchSize",
    "EmbeddingDtype",
    "EmbeddingModel",
    "EmbeddingQuantization",
    "EnableLora",
    "LoraModules",
    "MaxCpuLoras",
    "MaxEmbeddingInputs",
    "MaxLoraRank",
    "MaxLoras",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "Model",
    "NumCpus",
    "NumGpus",
    "Ray",
    "Replicas",
    "RerankerModel",
    "Revision",
    "ServedModelName",
    "StructuredOutputs",
    "VideoDevices",
    "VideoGuidanceParallel",
    "VideoModel",
    "VideoSequenceParallel",
    "check_one_process",
    "embedding_options",
    "follow",
    "new_server",
    "open_adapters",
    "open_replicas",
    "require_packages",
    "video_options",
]

BUILT_IN = "verax-text"
BUILT_IN_EMBEDDING = "verax-embed"
BUILT_IN_VIDEO = "verax-video"

LIMITS = "Limits"
_LORA = "LoRA adapters"
_RAY = "Ray"
_VIDEO = "Videos on several devices"

Model = Annotated[
    str | None,
    typer.Argument(help="A checkpoint folder, GGUF file or hub id; the built-in model if left out."),
]
EmbeddingModel = Annotated[str | None, typer.Option(help="Model of /v1/embeddings; the built-in one if left out.")]
RerankerModel = Annotated[str | None, typer.Option(help="Model of /v1/rerank, which is not served if left out.")]
EmbeddingDtype = Annotated[
    str, typer.Option(help="Dtype of --embedding-model and --reranker-model: float32 or bfloat16.")
]
EmbeddingQuantization = Annotated[
    str | None,
    typer.Option(
        help="int8: matrix products of 8-bit integers in --embedding-model and --reranker-model.", show_default="none"
    ),
]
VideoModel = Annotated[str | None, typer.Option(help="Model of /v1/videos; the built-in one if left out.")]
VideoDevices = Annotated[
    int | None,
    typer.Option(
        help="Devices to divide each clip over: guidance and sequence parallelism that use the most of them.",
        min=1,
        rich_help_panel=_VIDEO,
    ),
]
VideoGuidanceParallel = Annotated[
    bool,
    typer.Option(
        "--video-guidance-parallel",
        help="Prompt and negative prompt of a clip on two groups of devices.",
        rich_help_panel=_VIDEO,
    ),
]
VideoSequenceParallel = Annotated[
    int, typer.Option(help="Devices of a group, which divide the tokens of a clip.", min=1, rich_help_panel=_VIDEO)
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(help="Name of the text model in requests; can be repeated. The first is that of answers."),
]
AnyModelName = Annotated[
    bool, typer.Option("--any-model-name", help="Accept any model name, for clients with a fixed one.")
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most sequences in one step.", min=1)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Token budget of a step.", min=1)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
StructuredOutputs = Annotated[
    bool,
    typer.Option(help="Take requests for JSON, tool calls and other forms; compiles more programs at the start."),
]
EnableLora = Annotated[
    bool, typer.Option("--enable-lora", help="Serve adapters; --lora-modules does so too.", rich_help_panel=_LORA)
]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        help="An adapter as name=folder, chosen by this name as a request's model; can be repeated.",
        rich_help_panel=_LORA,
    ),
]
MaxLoras = Annotated[int, typer.Option(help="Adapters that one step can use.", min=1, rich_help_panel=_LORA)]
MaxLoraRank = Annotated[int, typer.Option(help="Largest rank of an adapter.", min=1, rich_help_panel=_LORA)]
MaxCpuLoras = Annotated[
    int | None,
    typer.Option(
        help="Adapters that are kept in memory; others are read when they are used.",
        min=1,
        rich_help_panel=_LORA,
        show_default="all of --lora-modules",
    ),
]
MaxEmbeddingInputs = Annotated[
    int, typer.Option(help="Most texts of a request for embeddings or a ranking.", min=1, rich_help_panel=LIMITS)
]
EmbeddingBatchSize = Annotated[
    int, typer.Option(help="Texts that the encoder or the reranker reads at once.", min=1, rich_help_panel=LIMITS)
]

Ray = Annotated[
    bool,
    typer.Option("--ray", help="Run replicas on Ray: RAY_ADDRESS's cluster, or this machine.", rich_help_panel=_RAY),
]
Replicas = Annotated[
    str, typer.Option(help="Number of replicas, or the least and the most, as 1:8.", rich_help_panel=_RAY)
]
NumCpus = Annotated[float, typer.Option(help="CPUs of a replica.", min=0.01, rich_help_panel=_RAY)]
NumGpus = Annotated[float, typer.Option(help="GPUs of a replica.", min=0, rich_help_panel=_RAY)]


def require_packages(*modules: str) -> None:
    """Check that the packages of a server are installed.

    Args:
        modules: those that the command needs beside the application's own.

    Raises:
        MissingDependencyError: naming the extra, if one is not.
    """
    from verax._optional import require_optional

    for module in ("starlette", "prometheus_client", *modules):
        require_optional(module)


def open_adapters(modules: Sequence[str] | None, *, node_rank: int) -> dict[str, LoRARequest]:
    """Adapters by name, of arguments such as `sql=adapters/sql`.

    Args:
        modules: the arguments.
        node_rank: number of this host. Host 0 reads the files, and checks them before the model is loaded.
    """
    from verax.checkpoint.peft import Adapter
    from verax.text.features.lora import LoRARequest

    found: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules or (), start=1):
        name, separator, path = module.partition("=")
        if not (name and separator and path):
            raise typer.BadParameter(f"--lora-modules: expected name=folder, got {module!r}")
        if name in found:
            raise typer.BadParameter(f"--lora-modules: {name} is given twice")
        if node_rank == 0:
            Adapter.open(path)
        found[name] = LoRARequest(name, number, path)
    return found


def check_one_process(ray: bool, nnodes: int) -> None:
    """Check that replicas on Ray are not to span hosts.

    Raises:
        typer.BadParameter: if they are.
    """
    if ray and nnodes > 1:
        raise typer.BadParameter("--ray: a replica is one process; --nnodes needs a command on each host")


def open_replicas(
    new_server: functools.partial[Server], replicas: str, num_cpus: float, num_gpus: float
) -> AbstractContextManager[RunningReplicas]:
    """Replicas on Ray while a command runs.

    Args:
        new_server: loads the models of a replica.
        replicas: their number, or the least and the most, as `1:8`.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each.

    Raises:
        typer.BadParameter: for another text.
        MissingDependencyError: if Ray is not installed.
    """
    from verax._optional import require_optional

    least, colon, most = replicas.partition(":")
    if not colon:
        most = least
    if not (least.isdecimal() and most.isdecimal()):
        raise typer.BadParameter(f"--replicas: expected a number, or two as 1:8, got {replicas!r}")
    require_optional("ray.serve")
    from verax.ray.replicas import running_replicas

    return running_replicas(new_server, (int(least), int(most)), num_cpus=num_cpus, num_gpus=num_gpus)


def new_server(
    model: str | None,
    settings: ServerSettings,
    *,
    served_names: Sequence[str] | None,
    embedding_model: str | None,
    reranker_model: str | None,
    embedding_options: Mapping[str, Any],
    video_model: str | None,
    video_options: Mapping[str, Any],
    adapters: Mapping[str, LoRARequest],
    enable_lora: bool,
    max_loras: int,
    max_cpu_loras: int | None,
    chat_template: Path | None,
    tracer: RequestTracer | None = None,
    **engine: Any,
) -> Server:
    """A server of the models; all but the text model and its adapters are loaded when they are first used.

    Args:
        model: the text checkpoint; the built-in one if None.
        settings: of the server.
        served_names: names of the text model in requests; that of the checkpoint if None.
        embedding_model: checkpoint of the encoder; the built-in one if None.
        reranker_model: checkpoint of the reranker; none is served if None.
        embedding_options: further arguments of `Encoder` and `Reranker`, for the models that are given; what does not
            fit them is said at the start.
        video_model: checkpoint of the video model; the built-in one if None.
        video_options: further arguments of `VideoPipeline.from_pretrained`, which says at the start what does not fit.
        adapters: what `open_adapters` gave.
        enable_lora: as in `EngineConfig`; True if there are adapters.
        max_loras: as in `EngineConfig`.
        max_cpu_loras: as in `EngineConfig`; enough for all adapters if None.
        chat_template: Jinja file; the checkpoint's template if None.
        tracer: tracer of the requests.
        engine: further arguments of `AsyncLLM`.
    """
    from verax.serve.http.server import LazyModel, Server
    from verax.text.engine.async_llm import AsyncLLM

    for_encoder = embedding_options if embedding_model else {}
    encoder = functools.cache(functools.partial(_encoder, embedding_model, **for_encoder))
    reranker = functools.cache(functools.partial(_reranker, reranker_model, **embedding_options))
    videos = functools.cache(functools.partial(_pipeline, video_model, **video_options))
    llm = AsyncLLM(model, **_lora_options(adapters, enable_lora, max_loras, max_cpu_loras), **engine)
    # Options that a model cannot have end the start, not a request.
    if embedding_options and embedding_model:
        encoder()
    if embedding_options and reranker_model:
        reranker()
    if video_options:
        videos()
    for adapter in adapters.values():
        llm.llm.engine.load_adapter(adapter)  # one that cannot be served ends the start, not a request
    options.with_chat_template(llm.llm, chat_template)
    return Server(
        llm=llm,
        served_names=tuple(served_names or [model or BUILT_IN]),
        adapters=adapters,
        root=model or BUILT_IN,
        encoder=LazyModel(embedding_model or BUILT_IN_EMBEDDING, encoder),
        reranker=None if reranker_model is None else LazyModel(reranker_model, reranker),
        videos=LazyModel(video_model or BUILT_IN_VIDEO, videos),
        settings=settings,
        tracer=tracer,
    )


def embedding_options(dtype: str, quantization: str | None, *models: str | None) -> dict[str, Any]:
    """Arguments of `Encoder` and `Reranker` that are not the defaults.

    Raises:
        typer.BadParameter: if there are some and none of the models is given, since the built-in encoder takes none.
    """
    found = {} if dtype == "float32" else {"dtype": dtype}
    if quantization is not None:
        found["quantization"] = quantization
    if found and not any(models):
        raise typer.BadParameter(f"--embedding-{next(iter(found))} needs --embedding-model or --reranker-model")
    return found


def video_options(devices: int | None, guidance_parallel: bool, sequence_parallel: int) -> dict[str, Any]:
    """Arguments of `VideoPipeline.from_pretrained` that are not the defaults."""
    given = dict(devices=devices, guidance_parallel=guidance_parallel, sequence_parallel=sequence_parallel)
    return {name: value for name, value in given.items() if value not in (None, False, 1)}


def follow(
    model: str | None,
    *,
    adapters: Mapping[str, LoRARequest],
    enable_lora: bool,
    max_loras: int,
    max_cpu_loras: int | None,
    **engine: Any,
) -> None:
    """Follow the host of rank 0, which runs the same command with its own rank, until it ends.

    Args:
        model: as in `new_server`, and so are the other arguments.
        adapters: what `open_adapters` gave.
        enable_lora, max_loras, max_cpu_loras: as in `EngineConfig`.
        engine: further arguments of `LLM`.
    """
    from verax.text.engine.llm import LLM

    llm = LLM(model, **_lora_options(adapters, enable_lora, max_loras, max_cpu_loras), **engine)
    typer.echo(f"rank {engine['node_rank']} of {engine['nnodes']} follows rank 0")
    llm.follow()


def _lora_options(
    adapters: Mapping[str, LoRARequest], enable_lora: bool, max_loras: int, max_cpu_loras: int | None
) -> dict[str, Any]:
    return {
        "enable_lora": enable_lora or bool(adapters),
        "max_loras": max_loras,
        "max_cpu_loras": max_cpu_loras or max(max_loras, len(adapters)),
    }


def _encoder(model: str | None, **options: Any) -> Any:
    from verax.embed.encoder import Encoder

    return Encoder(model, show_progress=False, **options)


def _reranker(model: str | None, **options: Any) -> Any:
    from verax.embed.reranker import Reranker

    assert model is not None
    return Reranker(model, show_progress=False, **options)


def _pipeline(model: str | None, **options: Any) -> Any:
    from verax.video.pipeline import VideoPipeline

    return VideoPipeline.from_pretrained(model, **options)
