"""`LLM`: a checkpoint and an engine behind vLLM's names."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from verax import builtin, checkpoint, progress
from verax._compat import enable_compilation_cache
from verax.errors import InvalidParameterError
from verax.loading import load_causal_lm
from verax.models import DTYPES, Qwen3ForCausalLM
from verax.text.block_manager import BlockManager
from verax.text.engine import Engine
from verax.text.outputs import RequestOutput
from verax.text.runner import ModelRunner, state_bytes
from verax.text.sampling_params import SamplingParams
from verax.text.scheduler import Scheduler
from verax.text.sizes import plan_sizes
from verax.text.tokenizer import Tokenizer

__all__ = ["DTYPES", "KV_CACHE_DTYPES", "LLM"]

KV_CACHE_DTYPES = ("auto", *DTYPES, "int8")
"""`"auto"` is the dtype of the weights; `"int8"` has a scale for each token and head."""

NO_PREFIX_CACHE = (
    "this model has recurrent layers: to go on behind a shared prefix they need the state that it left, which blocks "
    "of keys and values do not hold"
)

_log = logging.getLogger("verax.text")

Prompt = str | List[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's dictionaries: `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]


class LLM:
    """A language model ready to generate: weights on the device, programs compiled.

    Example:
        >>> llm = LLM()  # the built-in model; or a Hugging Face folder or hub id
        >>> llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "bfloat16",
        quantization: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool | None = None,
        seed: int = 0,
        revision: str | None = None,
        use_tqdm: bool = True,
    ):
        """Load a checkpoint, allocate the cache and compile every step.

        Args:
            model: a folder with config.json and safetensors, a GGUF file, a hub id, or None for the built-in model.
            dtype: `"bfloat16"` or `"float32"`, of weights, matmul inputs and cache; the rest is float32 in both.
            quantization: `"int8"` (a scale a row) or `"int4"` (a scale for 32 inputs): quantise the linear layers, the
                output head among them, while loading. Checkpoints that are quantised already load without it.
            max_model_len: longest sequence, prompt and answer; the model's own, or what the cache can hold, if None.
            max_num_seqs: most sequences in one step. If None: 256, or in a model with recurrent layers as many as half
                of the cache's memory has states for.
            max_num_batched_tokens: token budget of a step; 512 on a CPU and 2048 elsewhere (at least max_num_seqs) if
                None.
            block_size: tokens in a block of the cache.
            kv_cache_memory: bytes for the cache, recurrent states included. If None: as much as `max_num_seqs` full
                sequences need, but at most a quarter of the free memory of a CPU, or what 90% of an accelerator's leave
                beside the weights.
            kv_cache_dtype: `"auto"` for that of the weights, or `"bfloat16"`, `"float32"`, `"int8"`: with int8 nearly
                twice as many tokens as with bfloat16 fit into the same memory, and long contexts are read faster.
            enable_prefix_caching: keep full blocks of earlier requests for prompts that begin alike. If None: yes, but
                not in a model with recurrent layers, whose state after a prefix no block holds.
            seed: seeds requests that bring no seed of their own.
            revision: branch, tag or commit of a hub id.
            use_tqdm: progress bars while loading and compiling, if stderr is a terminal.

        Raises:
            CheckpointError: if the checkpoint is missing, damaged, or does not fit its config.json.
            UnsupportedModelError: if verax has no such architecture.
            InvalidParameterError: if a size makes no sense, with the argument's name.
        """
        if dtype not in DTYPES:
            raise InvalidParameterError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        _check_cache_dtype(kv_cache_dtype)  # before minutes of loading
        begin = time.perf_counter()
        opened = checkpoint.Checkpoint.open(builtin.text_model() if model is None else model, revision=revision)
        tokenizer = Tokenizer.from_checkpoint(opened)
        with progress.bar("loading weights", enabled=use_tqdm, count=False) as report:
            loaded = load_causal_lm(opened, dtype=dtype, quantization=quantization, progress=report)
        self.load_seconds = time.perf_counter() - begin
        self._start(
            loaded,
            tokenizer=tokenizer,
            generation_config=opened.generation_config,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            use_tqdm=use_tqdm,
        )

    @classmethod
    def from_module(cls, model: Qwen3ForCausalLM, *, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
        """An LLM of a model that is in memory already. Without a tokenizer, prompts are token ids and texts are empty.

        `options` are those of the constructor from `max_model_len` to `seed`, and `use_tqdm`.
        """
        llm = cls.__new__(cls)
        llm.load_seconds = 0.0
        defaults = dict(
            max_model_len=None,
            max_num_seqs=None,
            max_num_batched_tokens=None,
            block_size=16,
            kv_cache_memory=None,
            kv_cache_dtype="auto",
            enable_prefix_caching=None,
            seed=0,
            use_tqdm=True,
        )
        unknown = set(options) - set(defaults)
        if unknown:
            raise InvalidParameterError(f"{', '.join(sorted(unknown))}: no option of from_module")
        llm._start(model, tokenizer=tokenizer, generation_config={}, **{**defaults, **options})
        return llm

    def _start(
        self,
        model: Qwen3ForCausalLM,
        *,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        kv_cache_dtype: str,
        enable_prefix_caching: bool | None,
        seed: int,
        use_tqdm: bool,
        **sizes: Any,
    ) -> None:
        _check_cache_dtype(kv_cache_dtype)
        recurrent = state_bytes(model.config) > 0
        if recurrent and enable_prefix_caching:
            raise InvalidParameterError(f"enable_prefix_caching: {NO_PREFIX_CACHE}")
        if recurrent:
            _log.info("prefix caching is off: %s", NO_PREFIX_CACHE)
        enable_compilation_cache()
        self.model_config = model.config
        self.tokenizer = tokenizer
        self._generation_config = dict(generation_config)
        cache_dtype = model.dtype if kv_cache_dtype == "auto" else jnp.dtype(kv_cache_dtype)
        config = plan_sizes(model.config, cache_dtype, **sizes)
        runner = ModelRunner(model, config, eos_token_ids=sorted(tokenizer.eos_token_ids) if tokenizer else ())
        caching = not recurrent if enable_prefix_caching is None else enable_prefix_caching
        blocks = BlockManager(config.num_blocks, config.block_size, enable_prefix_caching=caching)
        scheduler = Scheduler(
            blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.engine = Engine(runner, scheduler, vocab_size=model.config.vocab_size, tokenizer=tokenizer, seed=seed)
        with progress.bar("compiling steps", enabled=use_tqdm) as report:
            self.compile_seconds = runner.warm_up(report)

    @property
    def max_model_len(self) -> int:
        """Longest sequence that this engine serves, in tokens."""
        return self.engine.max_model_len

    @property
    def kv_cache(self) -> str:
        """The key/value cache in words: its dtype, tokens and bytes."""
        runner, config = self.engine.runner, self.engine.runner.config
        tokens = (config.num_blocks - 1) * config.block_size  # block 0 is padding's
        return f"{jnp.dtype(config.cache_dtype).name}, {tokens:,} tokens in {runner.cache_bytes / 1e9:.2f} GB"

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters that the checkpoint's generation_config.json recommends, with some of them replaced."""
        return SamplingParams.from_generation_config(self._generation_config, **overrides)

    def generate(
        self,
        prompts: Prompt | List[Prompt],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, token ids, a dictionary of either, or a list; one set of parameters, or one each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestRefusedError: if a prompt can never be served; then none is.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm, add_special_tokens=True)

    def chat(
        self,
        messages: List[Message] | List[List[Message]],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: List[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of conversations, through the checkpoint's chat template."""
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: List[Any] = [messages] if one else messages
        prompts = [self.render(conversation, tools=tools, **template_options) for conversation in conversations]
        return self._run(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def stream(
        self, prompt: Prompt | List[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Generator[str, None, RequestOutput]:
        """Pieces of the answer's text to a prompt or a conversation, as they come; `n` must be 1.

        Closing the iterator early aborts the request. Its return value (`yield from`) is the final `RequestOutput`.
        """
        params = sampling_params or self.default_sampling_params()
        if params.n != 1:
            raise InvalidParameterError(f"n: a stream has one answer, got {params.n}")
        items: Any = prompt
        is_chat = not isinstance(prompt, (str, Mapping)) and len(items) > 0 and isinstance(items[0], Mapping)
        text = self.render(items, **template_options) if is_chat else _content(items)
        request_id = self.engine.add_request(text, params, add_special_tokens=not is_chat)
        return self._pieces(request_id)

    def render(self, messages: List[Message], **template_options: Any) -> str:
        """The prompt that a conversation becomes."""
        if self.tokenizer is None:
            raise InvalidParameterError("messages: this model has no tokenizer, so no chat template")
        return self.tokenizer.apply_chat_template(messages, **template_options)

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue one prompt for callers who drive `step` themselves; its id."""
        params = sampling_params or self.default_sampling_params()
        return self.engine.add_request(_content(prompt), params, request_id=request_id)

    def step(self) -> list[RequestOutput]:
        """Run one engine step: the outputs of the requests that moved on."""
        return self.engine.step()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request; what it has so far, or None if there is no such request."""
        return self.engine.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.engine.has_unfinished_requests

    def _run(
        self,
        prompts: List[str | List[int]],
        sampling_params: SamplingParams | List[SamplingParams] | None,
        use_tqdm: bool,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [sampling_params or self.default_sampling_params()] * len(prompts)
        else:
            params = list(sampling_params) if isinstance(sampling_params, List) else [sampling_params]
        if wrong := [how for how in params if not isinstance(how, SamplingParams)]:
            raise InvalidParameterError(f"sampling_params: expected SamplingParams, got {wrong[0]!r}")
        if len(params) != len(prompts):
            raise InvalidParameterError(f"sampling_params: {len(params)} given for {len(prompts)} prompts")
        waiting: list[str] = []
        done: dict[str, RequestOutput] = {}
        tokens, begin = 0, time.perf_counter()
        try:
            for prompt, how in zip(prompts, params, strict=True):
                waiting.append(self.engine.add_request(prompt, how, add_special_tokens=add_special_tokens))
            ours = set(waiting)
            with progress.bar("generating", enabled=use_tqdm) as report:
                while len(done) < len(waiting):
                    for request in self.engine.advance():
                        if request.finished and request.request_id in ours:
                            output = done[request.request_id] = self.engine.close(request)
                            tokens += sum(len(sample.token_ids) for sample in output.outputs)
                    rate = tokens / (time.perf_counter() - begin)
                    report(len(done), len(waiting), f"{rate:.0f} tokens/s")
        finally:  # a refused prompt or an interrupt leaves nothing of this call behind
            for request_id in waiting:
                if request_id not in done:
                    self.engine.abort(request_id)
        return [done[request_id] for request_id in waiting]

    def _pieces(self, request_id: str) -> Generator[str, None, RequestOutput]:
        finalizing = sys.is_finalizing  # when the interpreter ends, globals may be gone before a generator is
        request = self.engine.request(request_id)
        shown = self.engine.detokenizer(request.sequences[0])
        try:
            while not request.finished:
                self.engine.advance()
                if piece := shown.delta():
                    yield piece
            if piece := shown.finish():
                yield piece
            return self.engine.close(request)
        finally:
            if not finalizing():
                self.engine.abort(request_id)


def _check_cache_dtype(kv_cache_dtype: str) -> None:
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InvalidParameterError(
            f"kv_cache_dtype: expected one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}"
        )


def _as_list(prompts: Prompt | List[Prompt]) -> list[str | List[int]]:
    """One text, one dictionary or one list of token ids is a batch of one."""
    if isinstance(prompts, (str, Mapping)):
        return [_content(prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidParameterError(f"prompts: expected texts or lists of token ids, got {prompts!r}")
    items: list[Any] = list(prompts)
    if items and not isinstance(items[0], (str, Mapping)) and not hasattr(items[0], "__len__"):
        return [items]
    return [_content(item) for item in items]


def _content(prompt: Any) -> str | List[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    raise InvalidParameterError(f"prompts: expected prompt or prompt_token_ids in a dictionary, got {sorted(prompt)}")
