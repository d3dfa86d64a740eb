"""`verax serve`: the engines over HTTP."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli import options, serving
from verax.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from verax.serve.http.server import Server

__all__ = ["serve"]

_ACCESS = "Access"


def serve(
    model: serving.Model = None,
    embedding_model: serving.EmbeddingModel = None,
    reranker_model: serving.RerankerModel = None,
    embedding_dtype: serving.EmbeddingDtype = "float32",
    embedding_quantization: serving.EmbeddingQuantization = None,
    video_model: serving.VideoModel = None,
    video_devices: serving.VideoDevices = None,
    video_guidance_parallel: serving.VideoGuidanceParallel = False,
    video_sequence_parallel: serving.VideoSequenceParallel = 1,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for a free one.", min=0, max=65535)] = 8000,
    served_model_name: serving.ServedModelName = None,
    any_model_name: serving.AnyModelName = False,
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
    max_num_seqs: serving.MaxNumSeqs = None,
    max_num_batched_tokens: serving.MaxNumBatchedTokens = None,
    dtype: options.Dtype = "bfloat16",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    data_parallel_size: options.DataParallelSize = 1,
    nnodes: options.Nnodes = 1,
    node_rank: options.NodeRank = 0,
    master_addr: options.MasterAddr = "127.0.0.1",
    master_port: options.MasterPort = 29501,
    speculative_config: options.SpeculativeConfig = None,
    programs: options.Programs = None,
    chat_template: options.ChatTemplate = None,
    revision: serving.Revision = None,
    seed: options.Seed = 0,
    structured_outputs: serving.StructuredOutputs = True,
    enable_lora: serving.EnableLora = False,
    lora_modules: serving.LoraModules = None,
    max_loras: serving.MaxLoras = 1,
    max_lora_rank: serving.MaxLoraRank = 16,
    max_cpu_loras: serving.MaxCpuLoras = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Most requests that wait; more get 429.", min=0, rich_help_panel=serving.LIMITS)
    ] = 1024,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Most prompt tokens that wait; more get 429.", min=1, rich_help_panel=serving.LIMITS),
    ] = None,
    max_embedding_inputs: serving.MaxEmbeddingInputs = ServerSettings.max_embedding_inputs,
    max_queued_embedding_inputs: Annotated[
        int,
        typer.Option(
            help="Most texts that wait or run for embeddings, or for rankings; more get 429.",
            min=1,
            rich_help_panel=serving.LIMITS,
        ),
    ] = ServerSettings.max_queued_embedding_inputs,
    embedding_batch_size: serving.EmbeddingBatchSize = ServerSettings.embedding_batch_size,
    max_queued_videos: Annotated[
        int, typer.Option(help="Most clips that wait to be made; more get 429.", min=1, rich_help_panel=serving.LIMITS)
    ] = ServerSettings.max_queued_videos,
    max_videos: Annotated[
        int, typer.Option(help="Most clips that are kept; more get 429.", min=1, rich_help_panel=serving.LIMITS)
    ] = ServerSettings.max_videos,
    max_video_storage_bytes: Annotated[
        int, typer.Option(help="Most bytes on disk of all clips; more get 429.", min=1, rich_help_panel=serving.LIMITS)
    ] = ServerSettings.max_video_storage_bytes,
    video_ttl: Annotated[
        float, typer.Option(help="Seconds for which a finished clip is kept.", min=1, rich_help_panel=serving.LIMITS)
    ] = ServerSettings.video_ttl,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have, once the server is to end.", min=0)
    ] = ServerSettings.shutdown_timeout,
    slow_client_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for which a client may leave its stream unread, and that it has to send its headers.",
            min=0.1,
            rich_help_panel=serving.LIMITS,
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
    ray: serving.Ray = False,
    replicas: serving.Replicas = "1",
    num_cpus: serving.NumCpus = 1.0,
    num_gpus: serving.NumGpus = 0.0,
) -> None:
    """Serve a text model, an encoder, a reranker and a video model over HTTP, with the APIs of OpenAI.

    All but the text model are loaded when they are first used.

    Examples:

        verax serve

        verax serve Qwen/Qwen3-0.6B --api-key secret --port 8080

        verax serve --embedding-model sentence-transformers/all-MiniLM-L6-v2

        verax serve Qwen/Qwen3-0.6B --lora-modules sql=adapters/sql --lora-modules de=adapters/german --max-loras 2

        verax serve Qwen/Qwen3-0.6B --ray --replicas 1:8 --num-gpus 1

        verax serve Qwen/Qwen3-8B --tensor-parallel-size 4 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
    """
    others = {"embedding-model": embedding_model, "reranker-model": reranker_model, "video-model": video_model}
    encoders = serving.embedding_options(embedding_dtype, embedding_quantization, embedding_model, reranker_model)
    videos = serving.video_options(video_devices, video_guidance_parallel, video_sequence_parallel)
    others |= {f"video-{name.replace('_', '-')}": value for name, value in videos.items()}
    if ray and (given := [f"--{name}" for name, other in others.items() if other is not None]):
        raise typer.BadParameter(f"--ray: replicas are of the text model; {given[0]} needs a server of its own")
    serving.check_one_process(ray, nnodes)
    serving.require_packages("uvicorn", "httptools")
    from verax.serve.http.server import Server
    from verax.serve.http.telemetry import RequestTracer, configure_logs
    from verax.serve.run import bind, run

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
    adapters = serving.open_adapters(lora_modules, node_rank=node_rank)
    configure_logs(log_format)
    tracer = None if otlp_traces_endpoint is None else RequestTracer.to_collector(otlp_traces_endpoint)
    engine: dict[str, Any] = dict(
        adapters=adapters,
        dtype=dtype,
        quantization=quantization,
        revision=revision,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        seed=seed,
        structured_outputs=structured_outputs,
        speculative_config=speculative_config,
        programs=programs,
        enable_lora=enable_lora,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_cpu_loras=max_cpu_loras,
    )
    if node_rank > 0:
        return serving.follow(model, **engine)
    listener = bind(settings)  # before minutes of loading
    load = functools.partial(
        serving.new_server,
        model,
        settings,
        served_names=served_model_name,
        embedding_model=embedding_model,
        reranker_model=reranker_model,
        embedding_options=encoders,
        video_model=video_model,
        video_options=videos,
        chat_template=chat_template,
        max_queued_requests=1 << 20 if ray else max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        **engine,
    )
    with contextlib.ExitStack() as stack:
        if ray:
            running = stack.enter_context(serving.open_replicas(load, replicas, num_cpus, num_gpus))
            llm = running.text_engine(model, revision=revision, max_queued_requests=max_queued_requests)
            options.with_chat_template(llm, chat_template)
            names = tuple(served_model_name or [model or serving.BUILT_IN])
            server = Server(llm, names, adapters, root=model or serving.BUILT_IN, settings=settings, tracer=tracer)
        else:
            server = load(tracer=tracer)
        status = run(server, listener, lambda url: _announce(server, url))
    if status:
        raise typer.Exit(status)


def _announce(server: Server, url: str) -> None:
    """Print where the server listens, and a command to try."""
    settings = server.settings
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    body = f'{{"model": "{server.served_names[0]}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}'
    page = "" if settings.disable_page else f"; the page is at {url}/"
    typer.echo(f"{', '.join(server.served_names)} at {url}/v1{page}")
    typer.echo(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
