"""`LLM`: a checkpoint and its engines, with vLLM's names: loading, devices, caches, compilation, and the calls."""

from __future__ import annotations

import contextvars
import itertools
import logging
import sys
import threading
import time
from collections import abc
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from verax import builtin, checkpoint, ops, progress
from verax._compat import enable_compilation_cache, make_mesh
from verax._optional import require_optional
from verax.errors import CheckpointError, InvalidParameterError, UnsupportedModelError
from verax.loading import load_causal_lm, model_shapes, repeated_units
from verax.machine import return_freed_memory
from verax.models import DTYPES, CausalLM, causal_lm, check_dtype
from verax.models.causal_lm import check_causal_lm, prediction_layers
from verax.nn import pack_linear_weights
from verax.ops.division import TENSOR_AXIS
from verax.options import options_of
from verax.text.engine import weight_update
from verax.text.engine.blocks import BlockManager
from verax.text.engine.engine import Engine
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.outputs import RequestOutput, SpeculationTotals
from verax.text.engine.replicas import ReplicaRouter
from verax.text.engine.request import Message, Prompt, Request, RequestInput, batch_of
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.scheduler import Scheduler
from verax.text.features.lora import AdaptedLayers, AdapterLoader, LoRARequest
from verax.text.features.speculative import load_draft_model, new_speculator
from verax.text.hosts import Group
from verax.text.step.program import AbstractModel, CompiledPrograms, check_supported, compile_all, write_programs
from verax.text.step.runner import DeviceAdapters, ModelRunner, weight_bytes
from verax.text.step.sizes import cache_memory, plan_sizes, state_bytes
from verax.text.tokens.tokenizer import Tokenizer, eos_token_ids, suppressed_token_ids

_log = logging.getLogger("verax.text")


class LLM:
    """A language model ready to generate: weights on the device, programs compiled.

    Several threads may call it. Calls of `generate` and `chat` wait for each other; `AsyncLLM` runs requests together.

    Examples:
        >>> llm = LLM()  # the built-in model; or a Hugging Face folder or hub id
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        revision: str | None = None,
        skip_tokenizer_init: bool = False,
        use_tqdm: bool = True,
        config: EngineConfig | None = None,
        **options: Any,
    ):
        """Load a checkpoint, allocate the cache and compile every step.

        Args:
            model: a folder with config.json and safetensors, a GGUF file, a hub id, or None for the built-in model.
            dtype: `"bfloat16"` or `"float32"`, of weights, matmul inputs and cache; the rest is float32 in both.
            quantization: `"int8"` (a scale a row) or `"int4"` (a scale for 32 inputs): quantise the linear layers, the
                output head among them, while loading. `"w8a8"`: int8, and layers round their inputs to 8-bit integers
                with a scale for each token (and device), but for the output head and experts: quicker where many rows
                are multiplied, and less exact. Checkpoints that are quantised already, as GGUF files are, run
                unchanged; `"dequantize"` makes floats in `dtype` of their weights.
            revision: branch, tag or commit of a hub id.
            skip_tokenizer_init: serve token ids without a tokenizer. Prompts are token ids then, and texts are empty.
            use_tqdm: progress bars while loading and compiling, if stderr is a terminal.
            options: fields of `EngineConfig` by name, such as `max_model_len`; they replace the fields of `config`.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
            UnsupportedModelError: if verax has no such architecture.
            InvalidParameterError: if an option is unknown or a size makes no sense, with its name.
            HostsError: if other hosts are missing, or differ from this one.
        """
        check_dtype(dtype)
        config = (config or EngineConfig()).with_options(options)  # checked before minutes of loading
        hosts = None
        if config.nnodes > 1:
            hosts = Group.join(config, {"dtype": dtype, "quantization": quantization, "revision": revision})
        meshes = tensor_meshes(config.tensor_parallel_size, config.data_parallel_size, config.nnodes)
        begin = time.perf_counter()
        opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model, revision=revision)
        if hosts is not None:
            hosts.agree(_digests(opened, config))
        tokenizer = None if skip_tokenizer_init or config.node_rank > 0 else _tokenizer(opened)
        models = []
        for mesh in map(weight_update.placement_mesh, meshes):
            with progress.bar("loading weights", enabled=use_tqdm, count=False) as report:
                model_of_mesh = load_causal_lm(
                    opened,
                    max_model_len=config.max_model_len,
                    prediction_head=config.uses_prediction_head,
                    dtype=dtype,
                    quantization=quantization,
                    mesh=mesh,
                    progress=report,
                )
            if mesh is None:
                pack_linear_weights(model_of_mesh, few_rows=True)
            models.append(model_of_mesh)
        self.load_seconds = time.perf_counter() - begin
        self._generation_config = opened.generation_config
        ends = tokenizer.eos_token_ids if tokenizer else eos_token_ids(opened.config, opened.generation_config)
        model_class, sizes = causal_lm(opened.config, prediction_head=config.uses_prediction_head)
        if sizes.tie_word_embeddings and not models[0].config.tie_word_embeddings:  # the weights have a head
            sizes = replace(cast(Any, sizes), tie_word_embeddings=False)
        repeats = repeated_units(model_class, sizes, config.tensor_parallel_size)
        suppressed = suppressed_token_ids(opened.generation_config, sizes.vocab_size)
        engines = _new_engines(models, config, meshes, repeats, hosts, tokenizer, ends, suppressed, use_tqdm)
        quantized = quantization is not None or bool(opened.packed)
        shapes = partial(model_shapes, model_class, sizes, dtype=DTYPES[dtype])
        self._template = None if quantized else lambda: AbstractModel.from_module(shapes())
        self._start(engines, models[0], config, hosts, use_tqdm)

    @classmethod
    def from_module(
        cls,
        model: CausalLM,
        *,
        tokenizer: Tokenizer | None = None,
        use_tqdm: bool = True,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> LLM:
        """An LLM of a model in memory. Without a tokenizer, prompts are token ids and texts are empty.

        Args:
            model: a module that satisfies `verax.models.CausalLM`.
            use_tqdm: a progress bar while compiling, if stderr is a terminal.
            options: fields of `EngineConfig` by name; they replace the fields of `config`.

        Raises:
            InvalidParameterError: if the model lacks a member, an option is unknown or a size makes no sense.
        """
        check_causal_lm(model)
        llm = cls.__new__(cls)
        llm.load_seconds = 0.0
        llm._generation_config = {}
        ends = tokenizer.eos_token_ids if tokenizer else frozenset()
        config = (config or EngineConfig()).with_options(options)
        if config.nnodes > 1:
            raise InvalidParameterError(
                "nnodes: a model in memory runs on one host; several load one from a checkpoint"
            )
        meshes = tensor_meshes(config.tensor_parallel_size, config.data_parallel_size)
        models = [weight_update.placed_model(model, mesh) for mesh in meshes]
        repeats = repeated_units(type(model), model.config, config.tensor_parallel_size)
        template = AbstractModel.from_module(model)
        llm._template = lambda: template
        engines = _new_engines(models, config, meshes, repeats, None, tokenizer, ends, (), use_tqdm)
        llm._start(engines, models[0], config, None, use_tqdm)
        return llm

    def _start(
        self, engines: list[Engine], model: CausalLM, config: EngineConfig, hosts: Group | None, use_tqdm: bool
    ) -> None:
        self.config = config
        self.model_config = model.config
        self._hosts = hosts
        self._use(engines)
        self.compile_seconds = _compile_all(engines, use_tqdm)
        return_freed_memory()

    def _use(self, engines: abc.Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        """The engine of each replica. Their devices work at the same time: a step is dispatched before it is read."""
        self.max_num_seqs = sum(engine.scheduler.max_num_seqs for engine in engines)
        """Most sequences that run at once, on all replicas."""
        self.max_model_len = engines[0].max_model_len
        """Longest sequence that is served, in tokens."""
        self._lock = threading.RLock()
        """Held by whoever adds requests or runs steps."""
        self._turns, self._dropped = 0, list[str]()
        """Calls of `_turn` within each other, and requests of streams that were closed meanwhile."""
        self._router = ReplicaRouter(engines, block_size=engines[0].prefix_block_size)
        self._names = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine of the first replica."""
        return self.engines[0]

    def write_programs(self, folder: str | Path) -> list[Path]:
        """Write the compiled programs into a folder for `programs` of a later start; their files.

        Such a start traces, lowers and compiles nothing. The folder holds machine code: load only one that you made.

        Args:
            folder: a new folder, or one of programs to replace.

        Raises:
            InvalidParameterError: for an engine with adapters, drafts or several devices, and for a folder that holds
                anything else.
        """
        check_supported(self.config)
        runner = self.engine.runner
        return write_programs(runner.compiled_programs(), Path(folder), runner.abstract_model, runner.config)

    def update_weights(self, tree: Any) -> None:
        """Replace the weights by others of the same shapes and dtypes, as a trainer has them. Nothing is compiled.

        The arrays are copied where the engine would share them. Cached prefixes are dropped, adapters stay.

        Args:
            tree: a module like the model, its `nnx.State`, or arrays by their names in the checkpoint.

        Raises:
            InvalidParameterError: if a weight is missing, unknown, or of another shape or dtype, with its name; for an
                engine that was loaded quantised, has unfinished requests, or runs on several hosts.
        """
        with self._lock:
            weight_update.check_idle("update_weights", self.engines, self.config.nnodes)
            if self._template is None:
                raise InvalidParameterError(
                    "update_weights: the engine's weights are quantised; load it without quantization to update them"
                )
            weight_update.update_weights(self.engines, self._template(), tree)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and cache on the devices until `wake_up`, as vLLM does.

        Adapters stay there, and so does a draft model with its cache.

        Args:
            level: 1 keeps the weights in the host's memory. 2 drops them, and `update_weights` has to bring others.

        Raises:
            InvalidParameterError: for another level, unfinished requests, or an engine on several hosts.
        """
        with self._lock:
            weight_update.check_idle("sleep", self.engines, self.config.nnodes)
            weight_update.sleep(self.engines, level)

    def wake_up(self) -> None:
        """Allocate the cache again, empty, and put the weights back on the devices unless `sleep` has dropped them."""
        with self._lock:
            for engine in self.engines:
                engine.runner.wake_up()

    def follow(self) -> None:
        """Repeat the dispatches of rank 0 until it ends, on a host of another rank.

        If rank 0 or another host is gone, the process ends with status 1 and a message on stderr.

        Raises:
            InvalidParameterError: on rank 0, or where there is one host.
        """
        hosts = self._hosts
        if hosts is None or hosts.leads:
            raise InvalidParameterError("node_rank: rank 0 leads; hosts with a larger node_rank follow")
        for dispatch in hosts.dispatches():
            self.engine.repeat(dispatch)

    @property
    def kv_cache(self) -> str:
        """The key/value cache in words: its dtype, tokens and bytes."""
        runner, config = self.engine.runner, self.engine.runner.config
        parts = [
            f"{(group.num_blocks - 1) * config.block_size:,} tokens"  # block 0 is padding's
            + ("" if group.window is None else f" of windows of {group.window:,}")
            for group in config.groups
        ]
        replicas = "" if len(self.engines) == 1 else f" on each of {len(self.engines)} replicas"
        size = f"{runner.cache_bytes / 1e9:.2f} GB"
        return f"{jnp.dtype(config.cache_dtype).name}, {' and '.join(parts)} in {size}{replicas}"

    @property
    def spec_decode(self) -> SpeculationTotals | None:
        """Totals of speculative decoding since the start; None without it."""
        totals = [engine.speculator.totals for engine in self.engines if engine.speculator is not None]
        return SpeculationTotals.sum(totals) if totals else None

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters that the checkpoint's generation_config.json recommends, with some of them replaced."""
        return replace(self._recommended, **overrides)

    @property
    def chat_sampling(self) -> dict[str, float]:
        """Temperature and top_p of conversations, if the checkpoint recommends no sampling; else nothing."""
        return SamplingParams.for_chat(self._generation_config)

    @cached_property
    def _recommended(self) -> SamplingParams:
        return SamplingParams.from_generation_config(self._generation_config)

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | abc.Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, token ids, a dictionary of either, or a list; one set of parameters, or one each.

        Args:
            sampling_params: the checkpoint's recommended ones if None.
            use_tqdm: a progress bar, if stderr is a terminal.
            lora_request: adapter of all prompts, or one for each, among which None stands for the base model.

        Returns:
            One output for each prompt, in their order. A request that fails while it runs, such as one whose grammar
            becomes too ambiguous, has its `error` there, and the others are not affected.

        Raises:
            RequestRefusedError: if a prompt can never be served; then none is.
            CheckpointError: if an adapter cannot be read or does not fit the model.
        """
        return self._run(batch_of(prompts), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: abc.Sequence[Message] | abc.Sequence[abc.Sequence[Message]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | abc.Sequence[LoRARequest | None] | None = None,
        *,
        tools: abc.Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the checkpoint's chat template.

        `lora_request` is as in `generate`.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, abc.Sequence):
            raise InvalidParameterError(f"messages: expected a list of messages, or of conversations, got {messages!r}")
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: abc.Sequence[Any] = [messages] if one else messages
        prompts = [self._prompt_with(conversation, tools=tools, **template_options) for conversation in conversations]
        continued = bool(template_options.get("continue_final_message"))
        fields = {"add_special_tokens": False, "continues_prompt": continued}
        return self._run(prompts, sampling_params, use_tqdm, lora_request, **fields)

    def stream(
        self,
        prompt: Prompt | abc.Sequence[Message],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> Generator[str, None, RequestOutput]:
        """Pieces of the answer to a prompt or a conversation, as soon as they are decided; `n` must be 1.

        The request enters the engine with the first piece that is asked for. Closing the iterator early aborts it. The
        iterator's return value (`yield from`) is the final `RequestOutput`.
        """
        params = self._recommended if sampling_params is None else sampling_params
        inputs = RequestInput(prompt, params, stream=True, lora_request=lora_request)
        if params.n != 1:
            raise InvalidParameterError(f"n: a stream has one answer, got {params.n}")
        if template_options:
            if not inputs.is_chat:
                raise InvalidParameterError(f"{next(iter(template_options))}: a prompt has no chat template")
            conversation: Any = inputs.prompt
            text = self._prompt_with(conversation, **template_options)
            continued = bool(template_options.get("continue_final_message"))
            inputs = replace(inputs, prompt=text, add_special_tokens=False, continues_prompt=continued)
        return self._pieces(self._prepare(inputs))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer and chat template of prompts and answers; None for an engine of token ids alone."""
        return self.engine.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        for engine in self.engines:
            engine.tokenizer = tokenizer

    def render(self, messages: abc.Sequence[Message], **template_options: Any) -> str:
        """The prompt of a conversation, by the checkpoint's chat template.

        Raises:
            InvalidParameterError: if a variable of the template has the name of a sampling parameter.
        """
        if sampling := [name for name in template_options if name in options_of(SamplingParams)]:
            raise InvalidParameterError(f"{sampling[0]}: give it in sampling_params; a chat template has no use for it")
        return self.engine.render(messages, **template_options)

    def _prompt_with(self, messages: abc.Sequence[Message], *, tools: Any = None, **template_options: Any) -> str:
        """`render`, which refuses functions that the template leaves out: the model would not know of them."""
        prompt = self.render(messages, tools=tools, **template_options)
        if tools and prompt == self.render(messages, **template_options):
            raise InvalidParameterError(
                "tools: the checkpoint's chat template leaves them out; describe them in a message, or give another "
                "template (Tokenizer.with_chat_template)"
            )
        return prompt

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        output_token_ids: abc.Sequence[abc.Sequence[int]] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue one prompt for callers who call `step` themselves; the request's id.

        With `output_token_ids`, an answer so far for each sample, the request continues exactly as if it had sampled
        these tokens itself. Its outputs contain them; only new tokens have log-probabilities.
        """
        params = self._recommended if sampling_params is None else sampling_params
        inputs = RequestInput(prompt, params, request_id, output_token_ids=output_token_ids, lora_request=lora_request)
        with self._lock:
            request = self._prepare(inputs)
            self._add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one engine step; outputs of the requests that got a token, or ended."""
        with self._turn():
            return [output for engine in self._busy() for output in engine.step()]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request; its output so far, or None if there is no such request."""
        with self._turn():
            engine = self._engine_of(request_id)
            return None if engine is None else engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything to do."""
        return bool(self._busy())

    def _busy(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.has_unfinished_requests]

    def _engine_of(self, request_id: str) -> Engine | None:
        return next((engine for engine in self.engines if request_id in engine), None)

    def _prepare(self, inputs: RequestInput) -> Request:
        """Make a request, with an id that no unfinished one has."""
        request_id = inputs.request_id
        if request_id is None:
            request_id = next(name for i in self._names if self._engine_of(name := f"request-{i}") is None)
        elif self._engine_of(request_id) is not None:
            raise InvalidParameterError(f"request_id: {request_id!r} is in use by an unfinished request")
        return self.engine.prepare(inputs, request_id)

    def _add(self, request: Request) -> Engine:
        """Queue a prepared request at one of the engines, which is returned."""
        with self._turn():
            engine = self._router.choose(request.prompt_token_ids, request.adapter_id)
            engine.add(request)
            return engine

    def _advance(self) -> list[Request]:
        """`step` without building outputs: the requests that got tokens. Finished ones stay until `pop_output`."""
        with self._turn():
            return [request for engine in self._busy() for request in engine.advance()]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Context of a change of the engines, at whose end requests of closed streams are aborted.

        The garbage collector closes dropped streams anywhere, in the middle of a step of this thread too.
        """
        with self._lock:
            self._turns += 1
            try:
                yield
            finally:
                self._turns -= 1
                while self._dropped and not self._turns:
                    self.abort(self._dropped.pop())

    def _run(
        self,
        prompts: abc.Sequence[str | abc.Sequence[int]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | abc.Sequence[LoRARequest | None] | None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Outputs of prompts; `fields` of `RequestInput` are for all of them."""
        n = len(prompts)
        inputs = [
            RequestInput(prompt, params, lora_request=adapter, **fields)
            for prompt, params, adapter in zip(
                prompts,
                _one_each("sampling_params", self._recommended if sampling_params is None else sampling_params, n),
                _one_each("lora_request", lora_request, n),
                strict=True,
            )
        ]
        requests = [self._prepare(item) for item in inputs]
        done: dict[Request, RequestOutput] = {}
        with self._lock:
            tokens, begin = 0, time.perf_counter()
            try:
                engine_of = {request: self._add(request) for request in requests}
                with progress.bar("generating", enabled=use_tqdm) as report:
                    while len(done) < n:
                        for request in self._advance():
                            if request.finished and request in engine_of:
                                output = done[request] = engine_of[request].pop_output(request)
                                tokens += sum(len(sample.token_ids) for sample in output.outputs)
                        rate = tokens / (time.perf_counter() - begin)
                        report(len(done), n, f"{rate:.0f} tokens/s")
            finally:  # an error or an interrupt leaves nothing of this call in the engines
                for request in requests:
                    if request not in done:
                        self.abort(request.request_id)
        if self.spec_decode is not None:
            _log.info("speculative decoding: %s since the start", self.spec_decode)
        return [done[request] for request in requests]

    def _pieces(self, request: Request) -> Generator[str, None, RequestOutput]:
        """Run a prepared request. It is queued here: a generator that never began leaves nothing in the engine."""
        finalizing = sys.is_finalizing  # when the interpreter ends, globals may be gone before a generator is
        engine = self._add(request)
        shown = request.sequences[0].detokenizer
        assert shown is not None
        try:
            while not request.finished:
                with self._lock:
                    self._advance()
                    piece = shown.delta()
                if piece:
                    yield piece
            if piece := shown.finish():
                yield piece
            if request.error is not None:
                raise request.error
            return engine.output(request)  # `step` may have removed it already
        finally:
            if not finalizing():
                self._dropped.append(request.request_id)
                with self._turn():
                    pass


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """The values of a list, one for each prompt, or one value for all of them."""
    if not isinstance(value, abc.Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise InvalidParameterError(f"{name}: {len(value)} given for {count} prompts")
    return list(value)


def _digests(opened: checkpoint.Checkpoint, config: EngineConfig) -> dict[str, str]:
    """Digests of the weights of the model and of the draft model, if there is one, by what they are."""
    digests = {"the digest of the weights": checkpoint.fingerprint(opened)}
    if config.speculation is not None and config.speculation.model is not None:
        draft = checkpoint.Checkpoint.open(config.speculation.model)
        digests["the digest of the draft model's weights"] = checkpoint.fingerprint(draft)
    return digests


def _tokenizer(opened: checkpoint.Checkpoint) -> Tokenizer:
    try:
        return Tokenizer.from_checkpoint(opened)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; skip_tokenizer_init=True serves token ids without a tokenizer") from error


def tensor_meshes(size: int, replicas: int = 1, hosts: int = 1) -> list[Mesh | None]:
    """The first devices in groups, each a mesh whose axis divides a model; None if JAX has one device only.

    One of several devices is a mesh too: programs over it run the implementations for a single device.

    `replicas`: number of groups; 1 if there are several hosts. `hosts`: number of hosts, each of which has as many of
    the devices.
    """
    by_host = [jax.local_devices(process_index=rank if hosts > 1 else None) for rank in range(hosts)]
    devices, per_host = min(by_host, key=len), size // hosts
    needed = per_host * replicas
    if needed > len(devices):
        found = f"{len(devices)} of platform {devices[0].platform}"
        wanted = f"tensor_parallel_size: {size} needs {needed} devices"
        if hosts > 1:
            wanted += f" on each of {hosts} hosts"
            found += f" on host {by_host.index(devices)}"
        if replicas > 1:
            wanted = f"data_parallel_size: {replicas} replicas of tensor_parallel_size {size} need {needed} devices"
        raise InvalidParameterError(
            f"{wanted}, and JAX has {found}; to try it on virtual devices of a CPU, start with "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={needed} in the environment"
        )
    if hosts > 1:
        devices = [device for of_host in by_host for device in of_host[:per_host]]
        return [make_mesh((size,), (TENSOR_AXIS,), devices)]
    if len(devices) == 1:
        return [None]
    return [make_mesh((size,), (TENSOR_AXIS,), devices[i : i + size]) for i in range(0, needed, size)]


def _new_engines(
    models: abc.Sequence[CausalLM],
    config: EngineConfig,
    meshes: abc.Sequence[Mesh | None],
    repeats: abc.Mapping[str, int],  # of `repeated_units`
    hosts: Group | None,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    suppressed_token_ids: abc.Sequence[int],
    use_tqdm: bool,
) -> list[Engine]:
    """Engines of equal models, one on each mesh, with caches. Nothing is compiled yet."""
    enable_compilation_cache()
    model = models[0]
    recurrent = state_bytes(model.config) > 0
    if config.uses_prediction_head and not prediction_layers(model.config):
        raise UnsupportedModelError(
            'speculative_config: the method "mtp" needs a model with its head of multi-token prediction'
        )
    if config.structured_outputs:
        require_optional("llguidance")  # missing it shows now, not at the first request
    drafts: list[CausalLM | None] = [None] * len(models)
    if (speculation := config.speculation) is not None and speculation.model is not None:
        drafts = [
            load_draft_model(speculation, model, tokenizer, mesh=weight_update.placement_mesh(mesh), use_tqdm=use_tqdm)
            for model, mesh in zip(models, meshes, strict=True)
        ]
    # Before the caches take what is free.
    adapters: list[DeviceAdapters | None] = [None] * len(models)
    loader = None
    if config.enable_lora:
        abstract = AbstractModel.from_module(model)
        layers = AdaptedLayers.of(
            abstract.build,
            abstract.weights,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            repeats=repeats,
            devices=config.tensor_parallel_size,
        )
        adapters = [DeviceAdapters(layers, mesh, hosts) for mesh in meshes]
        loader = AdapterLoader(layers, config.max_cpu_loras or config.max_loras)
    draft_config, free = None if drafts[0] is None else drafts[0].config, None
    if hosts is not None and config.kv_cache_memory is None:
        free = min(hosts.exchange(cache_memory(config.tensor_parallel_size // config.nnodes)))
    weights = weight_bytes(model) // config.tensor_parallel_size
    sizes = plan_sizes(model.config, model.dtype, config, draft=draft_config, free=free, weights=weights)
    compiled = None
    if config.programs is not None:
        compiled = CompiledPrograms.open(config.programs)
        sizes = compiled.sizes_for(sizes, config)
    if hosts is not None:
        target = ops.target().device_kind
        hosts.agree({"model": model.config, "draft model": draft_config, "target": target, **asdict(sizes)})
    caching = config.enable_prefix_caching is not False and bool(sizes.num_kept_states or not recurrent)
    seeds = np.random.default_rng(config.seed)
    engines = []
    for model, mesh, draft, slots in zip(models, meshes, drafts, adapters, strict=True):
        runner = ModelRunner(
            model,
            sizes,
            eos_token_ids=sorted(eos_token_ids),
            suppressed_token_ids=suppressed_token_ids,
            adapters=slots,
            mesh=mesh,
            compiled=compiled,
            group=hosts,
        )
        blocks = BlockManager(
            [group.num_blocks for group in sizes.groups],
            sizes.block_size,
            windows=[group.window for group in sizes.groups],
            enable_prefix_caching=caching,
            num_states=sizes.num_kept_states if recurrent else None,
        )
        scheduler = Scheduler(
            blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_loras=config.max_loras,
            prompt_sizes=sizes.prompt_sizes,
            decode_steps={shape.rows: shape.decode_steps for shape in sizes.repeated},
        )
        engines.append(
            Engine(
                runner,
                scheduler,
                tokenizer=tokenizer,
                seed=seeds,
                speculator=config.speculation and new_speculator(config.speculation, runner, draft, model),
                adapters=loader,
            )
        )
    return engines


def _compile_all(engines: abc.Sequence[Engine], use_tqdm: bool) -> float:
    """Compile every step of the engines; seconds taken.

    The first compiles alone: where JAX's cache does not distinguish devices, as on GPUs, the others find its programs
    there. They begin at the same time, so that a host with many cores compiles for all of them at once.
    """
    begin = time.perf_counter()
    compiled = [0] * len(engines)
    with progress.bar("compiling steps", enabled=use_tqdm) as report:

        def show(replica: int, count: int, programs: int) -> None:
            compiled[replica] = count
            report(sum(compiled), programs * len(engines))

        _warm_up(engines[0], partial(show, 0))
        with ThreadPoolExecutor(max(1, len(engines) - 1), "verax-compile") as pool:
            # Each in a copy of this context, which has the choices of `use_implementations` and `use_target`.
            others = [
                pool.submit(contextvars.copy_context().run, _warm_up, engine, partial(show, i))
                for i, engine in enumerate(engines[1:], start=1)
            ]
            for other in others:
                other.result()
    return time.perf_counter() - begin


@ops.use_earlier_programs()
def _warm_up(engine: Engine, report: Callable[[int, int], None]) -> None:
    runner, draft_model = engine.runner, None if engine.speculator is None else engine.speculator.draft_model
    compile_all([*runner.uncompiled(), *(() if draft_model is None else draft_model.uncompiled())], report)
    if runner.group is not None:
        runner.group.exchange(None)  # a collective gives up on a device that still compiles
        if not runner.group.leads:
            return  # a follower repeats what rank 0 runs
    runner.warm_up()
    if draft_model is not None:
        draft_model.warm_up()
