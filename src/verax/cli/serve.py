"""`verax serve`: the engines over HTTP; and the models that `verax serve` and `verax batch` run."""

from __future__ import annotations

import contextlib
import functools
import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax._optional import require_optional
from verax.cli import options
from verax.cli.options import Flags
from verax.cli.video import PipelineOptions
from verax.files import model_name
from verax.options import option, options_of
from verax.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from verax.ray.remote_llm import RunningReplicas
    from verax.serve.http.server import Server
    from verax.text.features.lora import LoRARequest

BUILT_IN = "verax-text"
BUILT_IN_EMBEDDING = "verax-embed"
BUILT_IN_VIDEO = "verax-video"

_LIMITS = "Limits"
_RAY = "Ray"


@dataclass(frozen=True)
class ModelsOptions:
    """Models of a server next to its text model, and names, adapters and template of the text model."""

    embedding_model: str | None = option(None, "Model of /v1/embeddings; the built-in one if left out.")
    reranker_model: str | None = option(None, "Model of /v1/rerank, which is not served if left out.")
    video_model: str | None = option(None, "Model of /v1/videos; the built-in one if left out.")
    served_model_name: tuple[str, ...] = option(
        (), "Name of the text model in requests; can be repeated. Answers have the first name."
    )
    chat_template: Path | None = option(
        None, "A Jinja file to render conversations with.", path="file", shown="the checkpoint's"
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "An adapter as name=folder, chosen by this name as a request's model; can be repeated.",
        panel="LoRA adapters",
    )


@dataclass(frozen=True)
class QueueOptions:
    """Limits of the requests that wait for the text model."""

    max_queued_requests: int = option(1024, "Most requests that wait; more get 429.", low=0, panel=_LIMITS)
    max_queued_tokens: int | None = option(
        None, "Most prompt tokens that wait; more get 429.", low=1, panel=_LIMITS, shown="no limit"
    )


@dataclass(frozen=True)
class RayOptions:
    """Replicas of a server on Ray."""

    ray: bool = option(False, "Run replicas on Ray: RAY_ADDRESS's cluster, or this machine.", panel=_RAY)
    replicas: str = option("1", "Number of replicas, or the least and the most, as 1:8.", panel=_RAY)
    num_cpus: float = option(1.0, "CPUs of a replica.", low=0.01, panel=_RAY)
    num_gpus: float = option(0.0, "GPUs of a replica.", low=0.0, panel=_RAY)


ModelsFlags = Annotated[
    list[dict[str, Any]],
    Flags(ModelsOptions),
    Flags(options.EncoderOptions, without=("max_length",), prefix="embedding_", panel="Encoder, reranker"),
    Flags(
        PipelineOptions,
        only=("quantization", "lora", "lora_2", "vae", "devices", "guidance_parallel", "sequence_parallel"),
        prefix="video_",
        panel="Videos",
    ),
    Flags(options.ModelOptions),
    options.engine_flags(structured_outputs=True),
    Flags(RayOptions),
]
"""Flags of the models of a server, for `Models`."""


@options.with_flags
def serve(
    model: options.ModelArgument = None,
    *,
    models: ModelsFlags,
    queue: Annotated[dict[str, Any], Flags(QueueOptions)],
    settings: Annotated[dict[str, Any], Flags(ServerSettings)],
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="URL of an OpenTelemetry collector that gets a span of each request, by OTLP over HTTP."),
    ] = None,
) -> None:
    """Serve models of text, embeddings and video over OpenAI's API.

    All but the text model are loaded when they are first used.

    \b
    Examples:
        verax serve
        verax serve Qwen/Qwen3-0.6B --api-key secret --port 8080
        verax serve --embedding-model sentence-transformers/all-MiniLM-L6-v2
        verax serve Qwen/Qwen3-0.6B --lora-modules sql=adapters/sql --lora-modules de=adapters/german --max-loras 2
        verax serve Qwen/Qwen3-0.6B --ray --replicas 1:8 --num-gpus 1
        verax serve Qwen/Qwen3-8B --tensor-parallel-size 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
    """
    served = Models(model, *models)
    if served.on_ray and served.others:
        message = f"--ray: replicas are of the text model; --{served.others[0]} needs a server of its own"
        raise typer.BadParameter(message)
    if served.on_ray and queue["max_queued_requests"] == 0:
        raise typer.BadParameter("--max-queued-requests: on Ray a request waits until a replica has it; give 1 or more")
    for module in ("uvicorn", "httptools"):
        require_optional(module)
    from verax.serve.http.server import Server
    from verax.serve.http.telemetry import RequestTracer, configure_logs
    from verax.serve.run import bind, run

    checked = ServerSettings(**settings)
    configure_logs(checked.log_format)
    tracer = None if otlp_traces_endpoint is None else RequestTracer.to_collector(otlp_traces_endpoint)
    if served.node_rank > 0:
        return served.follow()
    listener = bind(checked)  # before minutes of loading
    with contextlib.ExitStack() as stack:
        if served.on_ray:
            running = stack.enter_context(served.replicas(checked, **{**queue, "max_queued_requests": 1 << 20}))
            limit = queue["max_queued_requests"]
            # It has the members of AsyncLLM that the server calls, which may not import it.
            llm: Any = running.text_engine(model, revision=served.text["revision"], max_queued_requests=limit)
            options.with_chat_template(llm, served.chat_template)
            server = Server(llm, served.names, served.adapters, root=served.root, settings=checked, tracer=tracer)
        else:
            server = served.loader(checked, tracer=tracer, **queue)()
        status = run(server, listener, lambda url: _announce(server, url))
    if status:
        raise typer.Exit(status)


def _announce(server: Server, url: str) -> None:
    """Print where the server listens, a command to try, and what the cache may take."""
    from verax.text.engine.async_llm import AsyncLLM

    settings = server.settings
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    path, asked = "chat/completions", '"messages": [{"role": "user", "content": "What is 12 + 30?"}]'
    tokenizer = server.llm and server.llm.tokenizer
    if tokenizer is not None and not tokenizer.has_chat_template:
        path, asked = "completions", '"prompt": "Once upon a time"'
    page = "" if settings.disable_page else f"; the page is at {url}/"
    typer.echo(f"{', '.join(server.served_names)} at {url}/v1{page}")
    body = f'{{"model": "{server.served_names[0]}", {asked}}}'
    typer.echo(f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'")
    if isinstance(server.llm, AsyncLLM):
        typer.echo(f"key/value cache of at most: {server.llm.llm.kv_cache}")


class Models:
    """Models of a command, from the values of `ModelsFlags`: checked at once, loaded later."""

    def __init__(
        self,
        model: str | None,
        models: dict[str, Any],
        encoders: dict[str, Any],
        videos: dict[str, Any],
        loading: dict[str, Any],
        engine: dict[str, Any],
        ray: dict[str, Any],
    ):
        encoders, videos = _changed(options.EncoderOptions, encoders), _changed(PipelineOptions, videos)
        if encoders and not (models["embedding_model"] or models["reranker_model"]):
            name = next(iter(encoders))
            raise typer.BadParameter(f"--embedding-{name} needs --embedding-model or --reranker-model")
        if not ray["ray"] and (given := _changed(RayOptions, ray)):
            name = next(iter(given)).replace("_", "-")
            raise typer.BadParameter(f"--{name}: it is for replicas on Ray; give --ray too, or leave it out")
        if ray["ray"] and engine["nnodes"] > 1:
            raise typer.BadParameter("--ray: a replica is one process; --nnodes needs a command on each host")
        for module in ("starlette", "prometheus_client"):
            require_optional(module)
        self.root = model or BUILT_IN
        self.names: tuple[str, ...] = models["served_model_name"] or (model_name(self.root),)
        self.adapters = _open_adapters(models["lora_modules"], node_rank=engine["node_rank"])
        self.chat_template: Path | None = models["chat_template"]
        self.node_rank: int = engine["node_rank"]
        self.on_ray: bool = ray["ray"]
        self.text: dict[str, Any] = {
            **loading,
            **engine,
            "enable_lora": engine["enable_lora"] or bool(self.adapters),
            "max_cpu_loras": engine["max_cpu_loras"] or max(engine["max_loras"], len(self.adapters)),
        }
        others = [name for name in ("embedding_model", "reranker_model", "video_model") if models[name]]
        self.others = [name.replace("_", "-") for name in (*others, *(f"video_{name}" for name in videos))]
        from verax.checkpoint.resolve import resolve, resolve_video

        finders = {"embedding_model": resolve, "reranker_model": resolve, "video_model": resolve_video}
        for name, find in finders.items():
            if models[name] and not self.on_ray and self.node_rank == 0:
                find(models[name], weights=False)  # a wrong name ends the start, not a request
        self._others = {**models, "served_model_name": self.names, "encoders": encoders, "videos": videos}
        self._model, self._ray = model, ray

    def loader(self, settings: ServerSettings, **more: Any) -> functools.partial[Server]:
        """Function that makes a server of the models; all but the text model are loaded when they are first used.

        `more`: the `tracer` of the requests, and values of `QueueOptions`.
        """
        return functools.partial(_load, self._model, self._others, self.adapters, settings, **self.text, **more)

    def replicas(self, settings: ServerSettings, **queue: Any) -> AbstractContextManager[RunningReplicas]:
        """Replicas of the server on Ray while a command runs."""
        given = self._ray["replicas"]
        least, colon, most = given.partition(":")
        if not colon:
            most = least
        if not (least.isdecimal() and most.isdecimal()):
            raise typer.BadParameter(f"--replicas: expected a number, or two as 1:8, got {given!r}")
        require_optional("ray.serve")
        from verax.ray.remote_llm import running_replicas

        resources = {name: self._ray[name] for name in ("num_cpus", "num_gpus")}
        return running_replicas(self.loader(settings, **queue), (int(least), int(most)), **resources)

    def follow(self) -> None:
        """Follow the host of rank 0, which runs the same command with its own rank, until it ends.

        SIGTERM, which a group mostly gets as a whole, is ignored then: rank 0 lets running requests finish, and needs
        all hosts for that.
        """
        from verax.text.engine.llm import LLM

        llm = LLM(self._model, **self.text)
        typer.echo(f"rank {self.node_rank} of {self.text['nnodes']} follows rank 0")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        llm.follow()


def _changed(table: type, values: dict[str, Any]) -> dict[str, Any]:
    """Values that differ from the defaults of a table."""
    return {name: value for name, value in values.items() if value != options_of(table)[name].default}


def _open_adapters(modules: tuple[str, ...], *, node_rank: int) -> dict[str, LoRARequest]:
    """Adapters by name, of arguments such as `sql=adapters/sql`. Host 0 checks their files before a model is loaded."""
    from verax.checkpoint.lora import Adapter
    from verax.text.features.lora import LoRARequest

    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, start=1):
        name, separator, path = module.partition("=")
        if not (name and separator and path):
            raise typer.BadParameter(f"--lora-modules: expected name=folder, got {module!r}")
        if name in adapters:
            raise typer.BadParameter(f"--lora-modules: {name} is given twice")
        if node_rank == 0:
            Adapter.open(path)
        adapters[name] = LoRARequest(name, number, path)
    return adapters


def _load(
    model: str | None,
    others: dict[str, Any],
    adapters: dict[str, LoRARequest],
    settings: ServerSettings,
    tracer: Any = None,
    **text: Any,
) -> Server:
    """A server of the models; `others` are the values of `ModelsOptions`, and arguments of encoders and pipeline."""
    from verax.serve.http.server import LazyModel, Server
    from verax.text.engine.async_llm import AsyncLLM

    embedding_model, reranker_model = others["embedding_model"], others["reranker_model"]
    video_model: str | None = others["video_model"]
    encoders, videos = others["encoders"], others["videos"]

    @functools.cache
    def encoder() -> Any:
        from verax.embed.encoder import Encoder

        return Encoder(embedding_model, show_progress=False, **(encoders if embedding_model else {}))

    @functools.cache
    def reranker() -> Any:
        from verax.embed.reranker import Reranker

        return Reranker(reranker_model, show_progress=False, **encoders)

    @functools.cache
    def pipeline() -> Any:
        from verax.video.pipeline import VideoPipeline

        return VideoPipeline.from_pretrained(video_model, show_progress=False, **videos)

    lazy = lambda model, load: LazyModel(model_name(model), load, root=model)
    llm = AsyncLLM(model, **text)
    # Options that a model cannot have end the start, not a request.
    if encoders and embedding_model:
        encoder()
    if encoders and reranker_model:
        reranker()
    if videos:
        pipeline()
    llm.default_sampling_params()
    for adapter in adapters.values():
        llm.llm.engine.load_adapter(adapter)
    options.with_chat_template(llm.llm, others["chat_template"])
    return Server(
        llm=llm,
        served_names=others["served_model_name"],
        adapters=adapters,
        root=model or BUILT_IN,
        encoder=lazy(embedding_model or BUILT_IN_EMBEDDING, encoder),
        reranker=None if reranker_model is None else lazy(reranker_model, reranker),
        videos=lazy(video_model or BUILT_IN_VIDEO, pipeline),
        video_loras=tuple(Path(file).name for name in ("lora", "lora_2") for file in videos.get(name) or ()),
        settings=settings,
        tracer=tracer,
    )
