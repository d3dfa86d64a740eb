"""`verax serve`: the engines over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options
from verax.serve.settings import ServerSettings

if TYPE_CHECKING:
    from verax.serve.server import Server
    from verax.text.lora.request import LoRARequest

__all__ = ["serve"]

BUILT_IN = "verax-text"
BUILT_IN_EMBEDDING = "verax-embed"
BUILT_IN_VIDEO = "verax-video"

_LIMITS = "Limits"
_ACCESS = "Access"
_LORA = "LoRA adapters"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint folder, GGUF file or hub id; the built-in model if left out."),
    ] = None,
    embedding_model: Annotated[
        str | None, typer.Option(help="Model of /v1/embeddings; the built-in one if left out.")
    ] = None,
    reranker_model: Annotated[
        str | None, typer.Option(help="Model of /v1/rerank, which is not served if left out.")
    ] = None,
    video_model: Annotated[str | None, typer.Option(help="Model of /v1/videos; the built-in one if left out.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the text model in requests; can be repeated. The first is that of answers."),
    ] = None,
    any_model_name: Annotated[
        bool, typer.Option("--any-model-name", help="Accept any model name, for clients with a fixed one.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that requests need; can be repeated.", envvar="VERAX_API_KEY", rich_help_panel=_ACCESS),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(help="Name that the server is called by, if not its address.", rich_help_panel=_ACCESS),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may call the server (CORS).", rich_help_panel=_ACCESS),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in one step.", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a step.", min=1)] = None,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    speculative_config: options.SpeculativeConfig = None,
    chat_template: options.ChatTemplate = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    seed: options.Seed = 0,
    structured_outputs: Annotated[
        bool,
        typer.Option(help="Take requests for JSON, tool calls and other forms; compiles more programs at the start."),
    ] = True,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Serve adapters; --lora-modules does so too.", rich_help_panel=_LORA)
    ] = False,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            help="An adapter as name=folder, chosen by this name as a request's model; can be repeated.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    max_loras: Annotated[int, typer.Option(help="Adapters that one step can use.", min=1, rich_help_panel=_LORA)] = 1,
    max_lora_rank: Annotated[int, typer.Option(help="Largest rank of an adapter.", min=1, rich_help_panel=_LORA)] = 16,
    max_cpu_loras: Annotated[
        int | None,
        typer.Option(
            help="Adapters that are kept in memory; others are read when they are used.",
            min=1,
            rich_help_panel=_LORA,
            show_default="all of --lora-modules",
        ),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Most requests that wait; more get 429.", min=0, rich_help_panel=_LIMITS)
    ] = 1024,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens that wait; more get 429.", min=1, rich_help_panel=_LIMITS)
    ] = None,
    max_embedding_inputs: Annotated[
        int, typer.Option(help="Most texts of a request for embeddings or a ranking.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.max_embedding_inputs,
    max_queued_embedding_inputs: Annotated[
        int,
        typer.Option(
            help="Most texts that wait or run for embeddings, or for rankings; more get 429.",
            min=1,
            rich_help_panel=_LIMITS,
        ),
    ] = ServerSettings.max_queued_embedding_inputs,
    embedding_batch_size: Annotated[
        int, typer.Option(help="Texts that the encoder or the reranker reads at once.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.embedding_batch_size,
    max_queued_videos: Annotated[
        int, typer.Option(help="Most clips that wait to be made; more get 429.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.max_queued_videos,
    max_videos: Annotated[
        int, typer.Option(help="Most clips that are kept; more get 429.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.max_videos,
    max_video_storage_bytes: Annotated[
        int, typer.Option(help="Most bytes on disk of all clips; more get 429.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.max_video_storage_bytes,
    video_ttl: Annotated[
        float, typer.Option(help="Seconds for which a finished clip is kept.", min=1, rich_help_panel=_LIMITS)
    ] = ServerSettings.video_ttl,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have, once the server is to end.", min=0)
    ] = ServerSettings.shutdown_timeout,
    slow_client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for which a client may leave its stream unread, and that it has to send its headers.",
            min=0.1,
            rich_help_panel=_LIMITS,
        ),
    ] = ServerSettings.slow_client_timeout,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="URL of an OpenTelemetry collector that gets a span of each request, by OTLP over HTTP."),
    ] = None,
    disable_page: Annotated[bool, typer.Option("--disable-page", help="Serve the API alone.")] = False,
    reports: Annotated[
        Path | None, typer.Option(help="Folder of reports of verax compare and verax bench, which the page shows.")
    ] = None,
) -> None:
    """Serve a text model, an encoder, a reranker and a video model over HTTP, with the APIs of OpenAI.

    All but the text model are loaded when they are first used.

    Examples:

        verax serve

        verax serve Qwen/Qwen3-0.6B --api-key secret --port 8080

        verax serve --embedding-model sentence-transformers/all-MiniLM-L6-v2

        verax serve Qwen/Qwen3-0.6B --lora-modules sql=adapters/sql --lora-modules de=adapters/german --max-loras 2
    """
    from verax._optional import require_optional

    for module in ("starlette", "uvicorn", "httptools", "prometheus_client"):
        require_optional(module)
    from verax.serve.logs import configure_logs
    from verax.serve.run import bind, run
    from verax.serve.server import LazyModel, Server
    from verax.serve.tracing import RequestTracer
    from verax.text.async_llm import AsyncLLM

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        any_model_name=any_model_name,
        allowed_hosts=tuple(allowed_hosts or ()),
        allowed_origins=tuple(allowed_origins or ()),
        max_embedding_inputs=max_embedding_inputs,
        max_queued_embedding_inputs=max_queued_embedding_inputs,
        embedding_batch_size=embedding_batch_size,
        max_queued_videos=max_queued_videos,
        max_videos=max_videos,
        max_video_storage_bytes=max_video_storage_bytes,
        video_ttl=video_ttl,
        shutdown_timeout=shutdown_timeout,
        slow_client_timeout=slow_client_timeout,
        log_format=log_format,
        log_prompts=log_prompts,
        disable_page=disable_page,
        reports=reports,
    )
    adapters = _adapters(lora_modules or [])
    configure_logs(log_format)
    tracer = None if otlp_traces_endpoint is None else RequestTracer.to_collector(otlp_traces_endpoint)
    listener = bind(settings)  # before minutes of loading
    llm = AsyncLLM(
        model,
        dtype=dtype,
        quantization=quantization,
        revision=revision,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        seed=seed,
        structured_outputs=structured_outputs,
        speculative_config=speculative_config,
        enable_lora=enable_lora or bool(adapters),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras or max(max_loras, len(adapters)),
    )
    for adapter in adapters.values():
        llm.llm.engine.load_adapter(adapter)  # one that cannot be served ends the start, not a request
    options.with_chat_template(llm.llm, chat_template)
    server = Server(
        llm=llm,
        served_names=tuple(served_model_name or [model or BUILT_IN]),
        adapters=adapters,
        root=model or BUILT_IN,
        encoder=LazyModel(embedding_model or BUILT_IN_EMBEDDING, lambda: _encoder(embedding_model)),
        reranker=None if reranker_model is None else LazyModel(reranker_model, lambda: _reranker(reranker_model)),
        videos=LazyModel(video_model or BUILT_IN_VIDEO, lambda: _pipeline(video_model)),
        settings=settings,
        tracer=tracer,
    )
    if status := run(server, listener, lambda url: _announce(server, url)):
        raise typer.Exit(status)


def _adapters(modules: list[str]) -> dict[str, LoRARequest]:
    """Adapters by name, of arguments such as `sql=adapters/sql`; their files are checked before the model is loaded."""
    from verax.checkpoint.peft import Adapter
    from verax.text.lora.request import LoRARequest

    found: dict[str, LoRARequest] = {}
    for number, module in enumerate(modules, start=1):
        name, separator, path = module.partition("=")
        if not (name and separator and path):
            raise typer.BadParameter(f"--lora-modules: expected name=folder, got {module!r}")
        if name in found:
            raise typer.BadParameter(f"--lora-modules: {name} is given twice")
        Adapter.open(path)
        found[name] = LoRARequest(name, number, path)
    return found


def _encoder(model: str | None) -> Any:
    from verax.embed.encoder import Encoder

    return Encoder(model, show_progress=False)


def _reranker(model: str) -> Any:
    from verax.embed.reranker import Reranker

    return Reranker(model, show_progress=False)


def _pipeline(model: str | None) -> Any:
    from verax.video.pipeline import VideoPipeline

    return VideoPipeline.from_pretrained(model)


def _announce(server: Server, url: str) -> None:
    """Print where the server listens, and a command to try."""
    settings = server.settings
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    body = f'{{"model": "{server.served_names[0]}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}'
    page = "" if settings.disable_page else f"; the page is at {url}/"
    typer.echo(f"{', '.join(server.served_names)} at {url}/v1{page}")
    typer.echo(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
