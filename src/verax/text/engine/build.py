"""Engines of a model: the devices of each replica, caches on them, and their compiled steps."""

from __future__ import annotations

import contextvars
import logging
import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import jax
import numpy as np
from jax.sharding import Mesh

from verax import ops, progress
from verax._compat import make_mesh
from verax._optional import require_optional
from verax.errors import InvalidParameterError, UnsupportedModelError
from verax.models import CausalLM
from verax.ops.division import TENSOR_AXIS
from verax.text.engine.blocks import BlockManager
from verax.text.engine.engine import Engine
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.scheduler import Scheduler
from verax.text.features.lora import AdaptedLayers, AdapterLoader
from verax.text.features.speculative import load_draft_model, new_speculator
from verax.text.hosts import Group
from verax.text.step.compiled_programs import CompiledPrograms
from verax.text.step.program import AbstractModel, compile_all
from verax.text.step.runner import DeviceAdapters, ModelRunner
from verax.text.step.sizes import RunnerConfig, cache_memory, plan_sizes, state_bytes
from verax.text.tokens.tokenizer import Tokenizer

__all__ = ["new_engines", "placement_mesh", "tensor_meshes", "warm_up"]


def tensor_meshes(size: int, replicas: int = 1, hosts: int = 1) -> list[Mesh | None]:
    """The first devices in groups, each a mesh whose axis divides a model; None if JAX has one device only.

    One of several devices is a mesh too: programs over it run the implementations for a single device.

    Args:
        size: devices of a group.
        replicas: number of groups; 1 if there are several hosts.
        hosts: number of hosts, each of which has as many of the devices.

    Raises:
        InvalidParameterError: if there are fewer devices.
    """
    devices, per_host = jax.local_devices(), size // hosts
    needed = per_host * replicas
    if needed > len(devices):
        platform, count = devices[0].platform, len(devices)
        wanted = f"tensor_parallel_size: {size} needs {needed} devices"
        if hosts > 1:
            wanted += f" on each of {hosts} hosts"
        if replicas > 1:
            wanted = f"data_parallel_size: {replicas} replicas of tensor_parallel_size {size} need {needed} devices"
        raise InvalidParameterError(
            f"{wanted}, and JAX has {count} of platform {platform}; to try it on virtual devices of a CPU, start with "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={needed} in the environment"
        )
    if hosts > 1:
        devices = [device for rank in range(hosts) for device in jax.local_devices(process_index=rank)[:per_host]]
        return [make_mesh((size,), (TENSOR_AXIS,), devices)]
    if len(devices) == 1:
        return [None]
    return [make_mesh((size,), (TENSOR_AXIS,), devices[i : i + size]) for i in range(0, needed, size)]


def placement_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh that weights are placed on; None for JAX's default device alone, which needs none."""
    alone = mesh is not None and mesh.size == 1 and mesh.devices.flat[0] == jax.local_devices()[0]
    return None if alone else mesh


NO_PREFIX_CACHE = (
    "this model has recurrent layers: to continue a shared prefix they need the state that it left, which blocks "
    "of keys and values do not hold"
)

NO_ROLLBACK = (
    "this model has recurrent layers, whose state cannot go back to before a draft that did not hold; leave "
    "speculative_config out"
)

_log = logging.getLogger("verax.text")


def new_engines(
    models: abc.Sequence[CausalLM],
    config: EngineConfig,
    meshes: abc.Sequence[Mesh | None],
    num_key_value_heads: int,
    *,
    hosts: Group | None,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    use_tqdm: bool,
) -> list[Engine]:
    """Allocate the cache of each replica. Nothing is compiled yet.

    Args:
        models: equal models, one on each mesh.
        config: options of the engines.
        meshes: devices of each replica; None for JAX's default device.
        num_key_value_heads: that the checkpoint has.
        hosts: hosts that share the model; None for one host.
        tokenizer: of prompts and texts; None to serve token ids.
        eos_token_ids: tokens that end a text.
        use_tqdm: a progress bar while loading a draft model, if stderr is a terminal.

    Raises:
        InvalidParameterError: for options that this model cannot have, or a size that makes no sense.
        UnsupportedModelError: for speculative decoding with a model that cannot go back.
    """
    model = models[0]
    recurrent = state_bytes(model.config) > 0
    if recurrent and config.enable_prefix_caching:
        raise InvalidParameterError(f"enable_prefix_caching: {NO_PREFIX_CACHE}")
    if recurrent:
        _log.info("prefix caching is off: %s", NO_PREFIX_CACHE)
    if recurrent and config.speculation is not None:
        raise UnsupportedModelError(f"speculative_config: {NO_ROLLBACK}")
    if config.structured_outputs:
        require_optional("llguidance")  # missing it shows now, not at the first request
    drafts: list[CausalLM | None] = [None] * len(models)
    if (speculation := config.speculation) is not None and speculation.model is not None:
        drafts = [
            load_draft_model(speculation, model, tokenizer, mesh=placement_mesh(mesh), use_tqdm=use_tqdm)
            for model, mesh in zip(models, meshes, strict=True)
        ]
    # Before the caches take what is free.
    adapters: list[DeviceAdapters | None] = [None] * len(models)
    loader = None
    if config.enable_lora:
        layers = _adapted_layers(model, config, num_key_value_heads)
        adapters = [DeviceAdapters(layers, mesh, hosts) for mesh in meshes]
        loader = AdapterLoader(layers, config.max_cpu_loras or config.max_loras)
    if hosts is not None and config.kv_cache_memory is None:
        own = cache_memory(config.tensor_parallel_size // config.nnodes)
        config = replace(config, kv_cache_memory=min(hosts.exchange(own)))
    sizes = plan_sizes(model.config, model.dtype, config, draft=None if drafts[0] is None else drafts[0].config)
    compiled = None
    if config.programs is not None:
        compiled = CompiledPrograms.open(config.programs)
        sizes = compiled.sizes_for(sizes, config)
    if hosts is not None:
        draft_config = None if drafts[0] is None else drafts[0].config
        target = ops.target().device_kind
        hosts.agree({"model": model.config, "draft model": draft_config, "target": target, **asdict(sizes)})
    caching = not recurrent if config.enable_prefix_caching is None else config.enable_prefix_caching
    seeds = np.random.default_rng(config.seed)
    engines = []
    for model, mesh, draft, slots in zip(models, meshes, drafts, adapters, strict=True):
        runner = ModelRunner(
            model,
            sizes,
            eos_token_ids=sorted(eos_token_ids),
            adapters=slots,
            mesh=mesh,
            compiled=compiled,
            group=hosts,
        )
        engines.append(
            Engine(
                runner,
                _new_scheduler(sizes, config, enable_prefix_caching=caching),
                vocab_size=model.config.vocab_size,
                tokenizer=tokenizer,
                seed=seeds,
                speculator=None if config.speculation is None else new_speculator(config.speculation, runner, draft),
                adapters=loader,
            )
        )
    return engines


def warm_up(engines: abc.Sequence[Engine], *, use_tqdm: bool) -> float:
    """Compile every step of the engines; seconds taken.

    The first compiles alone: where JAX's cache does not distinguish devices, as on GPUs, the others find its programs
    there. They begin at the same time, so that a host with many cores compiles for all of them at once.

    Args:
        engines: engines of equal models.
        use_tqdm: a progress bar, if stderr is a terminal.
    """
    begin = time.perf_counter()
    done = [0] * len(engines)
    with progress.bar("compiling steps", enabled=use_tqdm) as report:

        def reporter(replica: int) -> Callable[[int, int], None]:
            def show(count: int, programs: int) -> None:
                done[replica] = count
                report(sum(done), programs * len(engines))

            return show

        _warm_up(engines[0], reporter(0))
        with ThreadPoolExecutor(max(1, len(engines) - 1), "verax-compile") as pool:
            # Each in a copy of this context, which has the choices of `use_implementations` and `use_target`.
            others = [
                pool.submit(contextvars.copy_context().run, _warm_up, engine, reporter(i))
                for i, engine in enumerate(engines[1:], start=1)
            ]
            for other in others:
                other.result()
    return time.perf_counter() - begin


@ops.use_earlier_programs()
def _warm_up(engine: Engine, report: Callable[[int, int], None]) -> None:
    runner, drafter = engine.runner, None if engine.speculator is None else engine.speculator.drafter
    compile_all([*runner.uncompiled(), *(() if drafter is None else drafter.uncompiled())], report)
    if runner.group is not None:
        runner.group.exchange(None)  # a collective gives up on a device that still compiles
        if not runner.group.leads:
            return  # a follower repeats what rank 0 runs
    runner.warm_up()
    if drafter is not None:
        drafter.warm_up()


def _new_scheduler(sizes: RunnerConfig, config: EngineConfig, *, enable_prefix_caching: bool) -> Scheduler:
    blocks = BlockManager(
        [group.num_blocks for group in sizes.groups],
        sizes.block_size,
        windows=[group.window for group in sizes.groups],
        enable_prefix_caching=enable_prefix_caching,
    )
    return Scheduler(
        blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_loras=config.max_loras,
        prompt_sizes=sizes.prompt_sizes,
    )


def _adapted_layers(model: CausalLM, config: EngineConfig, num_key_value_heads: int) -> AdaptedLayers:
    """Layers that adapters can change, in a model whose checkpoint has the given number of key/value heads."""
    abstract = AbstractModel.from_module(model)
    return AdaptedLayers.of(
        abstract.build,
        abstract.weights,
        max_loras=config.max_loras,
        max_rank=config.max_lora_rank,
        repeats=model.config.num_key_value_heads // num_key_value_heads,
        devices=config.tensor_parallel_size,
    )
