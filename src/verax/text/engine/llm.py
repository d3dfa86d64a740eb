"""`LLM`: a checkpoint and its engine, with vLLM's names."""

from __future__ import annotations

import logging
import sys
import time
from collections import abc
from collections.abc import Generator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
from jax.sharding import Mesh

from verax import builtin, checkpoint, progress
from verax._compat import enable_compilation_cache
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import divide_model, load_causal_lm
from verax.models import DTYPES, CausalLM, causal_lm, check_dtype
from verax.models.causal_lm import check_causal_lm
from verax.nn import pack_linear_weights, packed_copy
from verax.text.engine.build import new_engines, placement_mesh, tensor_meshes, warm_up
from verax.text.engine.engine import Engine
from verax.text.engine.engine_config import EngineConfig, EngineOptions
from verax.text.engine.outputs import RequestOutput, SpeculationTotals
from verax.text.engine.replicas import EngineGroup
from verax.text.engine.request import Message, Prompt, Request, RequestInput, batch_of
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import LoRARequest
from verax.text.hosts import Group
from verax.text.step.compiled_programs import check_supported, write_programs
from verax.text.tokens.tokenizer import Tokenizer, eos_token_ids

__all__ = ["DTYPES", "LLM"]

_log = logging.getLogger("verax.text")


class LLM:
    """A language model ready to generate: weights on the device, programs compiled.

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
        **options: Unpack[EngineOptions],
    ):
        """Load a checkpoint, allocate the cache and compile every step.

        Args:
            model: a folder with config.json and safetensors, a GGUF file, a hub id, or None for the built-in model.
            dtype: `"bfloat16"` or `"float32"`, of weights, matmul inputs and cache; the rest is float32 in both.
            quantization: `"int8"` (a scale a row) or `"int4"` (a scale for 32 inputs): quantise the linear layers, the
                output head among them, while loading. Checkpoints that are quantised already, as GGUF files are, run
                unchanged; `"dequantize"` makes floats in `dtype` of their weights.
            revision: branch, tag or commit of a hub id.
            skip_tokenizer_init: serve token ids without a tokenizer. Prompts are token ids then, and texts are empty.
            use_tqdm: progress bars while loading and compiling, if stderr is a terminal.
            config: options of the engine.
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
        for mesh in map(placement_mesh, meshes):
            with progress.bar("loading weights", enabled=use_tqdm, count=False) as report:
                model_of_mesh = load_causal_lm(
                    opened, dtype=dtype, quantization=quantization, mesh=mesh, progress=report
                )
            if mesh is None:
                pack_linear_weights(model_of_mesh, few_rows=True)
            models.append(model_of_mesh)
        self.load_seconds = time.perf_counter() - begin
        self._generation_config = dict(opened.generation_config)
        ends = tokenizer.eos_token_ids if tokenizer else eos_token_ids(opened.config, opened.generation_config)
        heads = causal_lm(opened.config)[1].num_key_value_heads
        self._start(
            models, config, meshes, heads, hosts=hosts, tokenizer=tokenizer, eos_token_ids=ends, use_tqdm=use_tqdm
        )

    @classmethod
    def from_module(
        cls,
        model: CausalLM,
        *,
        tokenizer: Tokenizer | None = None,
        use_tqdm: bool = True,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> LLM:
        """An LLM of a model in memory. Without a tokenizer, prompts are token ids and texts are empty.

        Args:
            model: a module that satisfies `verax.models.CausalLM`.
            tokenizer: the tokenizer of prompts and texts.
            use_tqdm: a progress bar while compiling, if stderr is a terminal.
            config: options of the engine.
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
        models = [
            packed_copy(model, few_rows=True) if mesh is None else divide_model(model, mesh)
            for mesh in map(placement_mesh, meshes)
        ]
        heads = model.config.num_key_value_heads
        llm._start(models, config, meshes, heads, tokenizer=tokenizer, eos_token_ids=ends, use_tqdm=use_tqdm)
        return llm

    def _start(
        self,
        models: list[CausalLM],
        config: EngineConfig,
        meshes: list[Mesh | None],
        heads: int,
        *,
        hosts: Group | None = None,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        use_tqdm: bool,
    ) -> None:
        """Allocate caches and compile every step, for a model on each mesh that has `heads` key/value heads itself."""
        self._hosts = hosts
        enable_compilation_cache()
        self.config = config
        self.model_config = models[0].config
        engines = new_engines(
            models,
            config,
            meshes,
            heads,
            hosts=hosts,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            use_tqdm=use_tqdm,
        )
        self._group = EngineGroup(engines)
        self.compile_seconds = warm_up(self.engines, use_tqdm=use_tqdm)

    @property
    def engines(self) -> abc.Sequence[Engine]:
        """The engine of each replica."""
        return self._group.engines

    @property
    def engine(self) -> Engine:
        """The engine of the first replica."""
        return self.engines[0]

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once, on all replicas."""
        return sum(engine.scheduler.max_num_seqs for engine in self.engines)

    def write_programs(self, folder: str | Path) -> list[Path]:
        """Write the compiled programs into a folder for `programs` of a later start; their files.

        Such a start traces, lowers and compiles nothing. The folder holds machine code: load only one that you made.

        Args:
            folder: a new folder, or one to replace.

        Raises:
            InvalidParameterError: for an engine with adapters, drafts or several devices.
        """
        check_supported(self.config)
        runner = self.engine.runner
        return write_programs(runner.compiled_programs(), Path(folder), runner.abstract_model, runner.config)

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
    def max_model_len(self) -> int:
        """Longest sequence that this engine serves, in tokens."""
        return self.engine.max_model_len

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
            prompts: what to complete.
            sampling_params: the checkpoint's recommended ones if None.
            use_tqdm: a progress bar, if stderr is a terminal.
            lora_request: adapter of all prompts, or one for each, among which None stands for the base model.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestRefusedError: if a prompt can never be served; then none is.
            CheckpointError: if an adapter cannot be read or does not fit the model.
        """
        return self._run(batch_of(prompts), sampling_params, use_tqdm, lora_request, add_special_tokens=True)

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
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: abc.Sequence[Any] = [messages] if one else messages
        prompts = [self.render(conversation, tools=tools, **template_options) for conversation in conversations]
        return self._run(prompts, sampling_params, use_tqdm, lora_request, add_special_tokens=False)

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
        params = sampling_params or self.default_sampling_params()
        if params.n != 1:
            raise InvalidParameterError(f"n: a stream has one answer, got {params.n}")
        inputs = RequestInput(prompt, params, stream=True, lora_request=lora_request)
        if inputs.is_chat and template_options:
            text = self.engine.render(inputs.prompt, **template_options)
            inputs = replace(inputs, prompt=text, add_special_tokens=False)
        return self._pieces(self._group.prepare(inputs))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer and chat template of prompts and answers; None for an engine of token ids alone."""
        return self.engine.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        for engine in self._group.engines:
            engine.tokenizer = tokenizer

    def render(self, messages: abc.Sequence[Message], **template_options: Any) -> str:
        """The prompt of a conversation, by the checkpoint's chat template."""
        return self.engine.render(messages, **template_options)

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
        params = sampling_params or self.default_sampling_params()
        request = self._group.prepare(
            RequestInput(prompt, params, request_id, output_token_ids=output_token_ids, lora_request=lora_request)
        )
        self._group.add(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one engine step; outputs of the requests that got a token, or ended."""
        return self._group.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request; its output so far, or None if there is no such request."""
        return self._group.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if `step` has anything to do."""
        return self._group.has_unfinished_requests

    def _run(
        self,
        prompts: abc.Sequence[str | abc.Sequence[int]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | abc.Sequence[LoRARequest | None] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        n = len(prompts)
        inputs = [
            RequestInput(prompt, params, add_special_tokens=add_special_tokens, lora_request=adapter)
            for prompt, params, adapter in zip(
                prompts,
                _one_each("sampling_params", self._recommended if sampling_params is None else sampling_params, n),
                _one_each("lora_request", lora_request, n),
                strict=True,
            )
        ]
        requests = [self._group.prepare(item) for item in inputs]
        done: dict[Request, RequestOutput] = {}
        tokens, begin = 0, time.perf_counter()
        try:
            for request in requests:
                self._group.add(request)
            ours = set(requests)
            with progress.bar("generating", enabled=use_tqdm) as report:
                while len(done) < n:
                    for request in self._group.advance():
                        if request.finished and request in ours:
                            output = done[request] = self._group.pop_output(request)
                            if request.error is not None:
                                raise request.error
                            tokens += sum(len(sample.token_ids) for sample in output.outputs)
                    rate = tokens / (time.perf_counter() - begin)
                    report(len(done), n, f"{rate:.0f} tokens/s")
        finally:  # an error or an interrupt leaves nothing of this call in the engines
            for request in requests:
                if request not in done:
                    self._group.abort(request.request_id)
        if self.spec_decode is not None:
            _log.info("speculative decoding: %s since the start", self.spec_decode)
        return [done[request] for request in requests]

    def _pieces(self, request: Request) -> Generator[str, None, RequestOutput]:
        """Run a prepared request. It is queued here: a generator that never began leaves nothing in the engine."""
        finalizing = sys.is_finalizing  # when the interpreter ends, globals may be gone before a generator is
        self._group.add(request)
        shown = request.sequences[0].detokenizer
        assert shown is not None
        try:
            while not request.finished:
                self._group.advance()
                if piece := shown.delta():
                    yield piece
            if piece := shown.finish():
                yield piece
            if request.error is not None:
                raise request.error
            return self._group.pop_output(request)
        finally:
            if not finalizing():
                self._group.abort(request.request_id)


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
