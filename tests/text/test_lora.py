"""Adapters: layers, loading, what a follower of several hosts writes, and requests of engines.

Each request gets the tokens of the model that has its adapter merged, whatever else runs.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.adapters import adapter_weights, changed, linear_sizes, save_adapter
from tests.support.engine import alone, finish, generate, nothing_compiles, tokens
from tests.support.invariants import check_engine
from tests.support.tiny import HYBRID, random_weights, tiny_config
from tests.text.conftest import make_llm
from tests.text.speculative.conftest import LOOPING, NGRAM, REPEATED, UNIQUE, assert_unchanged
from verax import AsyncLLM
from verax.checkpoint import Checkpoint, save
from verax.errors import CheckpointError, InvalidParameterError
from verax.loading import load_causal_lm
from verax.models import causal_lm
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.lora import AdaptedLayers, AdapterLoader, LoadedAdapter, LoRARequest
from verax.text.hosts import Dispatch, Group
from verax.text.step.program import AbstractModel
from verax.text.step.runner import DeviceAdapters

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
DENSE = ATTENTION | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)


def layers_of(family, **changes):
    architecture, config = causal_lm(tiny_config(family, **changes))
    model = AbstractModel.from_module(nnx.eval_shape(lambda: architecture(config, rngs=nnx.Rngs(0))))
    return AdaptedLayers.of(model.build, model.weights, max_loras=2, max_rank=3)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"tie_word_embeddings": False}, DENSE),
        ("llama", {}, DENSE),
        ("gemma3_text", {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}, DENSE),
        ("phi3", {}, {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
        ("qwen3_moe", EXPERTS, ATTENTION),
        ("gpt_oss", EXPERTS, ATTENTION),
        ("gemma4_text", {}, DENSE | {"per_layer_input_gate", "per_layer_projection"}),
    ],
)
def test_layers_are_what_every_token_passes_without_the_head(family, changes, expected):
    layers = layers_of(family, **changes)
    by_layer = {name for name in layers.shapes if name != "model.per_layer_model_projection"}  # of all layers at once
    assert by_layer == {f"model.layers.{i}.{name}" for i in range(2) for name in expected}
    size = {"k_proj": (32, 64)} if family != "phi3" else {"qkv_proj": (128, 64)}
    assert all(layers.shapes[f"model.layers.0.self_attn.{name}"] == shape for name, shape in size.items())


def test_layers_go_by_their_names_in_every_published_layout():
    layers = layers_of("gemma3_text", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16)
    path = "model.layers.1.mlp.up_proj"
    for name in (path, "model.language_model.layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"):
        assert layers.names[name] == path


PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def loader():
    layers = AdaptedLayers({PATH: (6, 8)}, {PATH: PATH, "layers.0.self_attn.q_proj": PATH}, 1, 4, "float32")
    return AdapterLoader(layers, 2)


@pytest.fixture
def make(tmp_path):
    def save(number=1, sizes=None, **settings):
        weights = adapter_weights(sizes or {PATH: (6, 8)}, rank=settings.get("rank", 4))
        return LoRARequest(f"a{number}", number, save_adapter(tmp_path / f"a{number}", weights, **settings))

    return save


def test_a_slow_disk_holds_up_no_other_adapter_and_each_is_read_once(loader, make, monkeypatch):
    slow, quick, begun, goes = make(1), make(2), threading.Event(), threading.Event()
    loaded, read, reads = loader.load(quick), loader._read, []

    def read_slowly(request):
        reads.append(request)
        begun.set()
        assert goes.wait(20)
        return read(request)

    monkeypatch.setattr(loader, "_read", read_slowly)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(loader.load, slow) for _ in range(2)]
        assert begun.wait(20)
        assert loader.load(quick) is loaded
        goes.set()
        assert both[0].result() is both[1].result()
    assert reads == [slow]


def test_an_adapter_that_cannot_be_read_can_be_tried_again(loader, make, tmp_path):
    with pytest.raises(CheckpointError):
        loader.load(LoRARequest("a", 1, tmp_path / "missing"))
    assert loader.load(make(1)).id == 1


def test_a_number_stands_for_one_folder(loader, make):
    loader.load(make())
    with pytest.raises(InvalidParameterError, match="lora_int_id: 1 stands for the adapter in"):
        loader.load(LoRARequest("b", 1, make(2).lora_path))


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        ({"rank": 5}, InvalidParameterError, r"max_lora_rank: .* has rank 5, .* pass LLM\(..., max_lora_rank=5\)"),
        ({"sizes": {PATH: (6, 9)}}, CheckpointError, r"another base.*q_proj \(adapter \[6, 9\], model \[6, 8\]\)"),
        ({"sizes": {"lm_head": (6, 8)}}, CheckpointError, "no layers .* lm_head; it was trained for somebody/tiny"),
        ({"sizes": {f"model.h.{i}.c": (6, 8) for i in range(9)}}, CheckpointError, r"model\.h\.4\.c and 4 more"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(loader, make, made, error, says):
    with pytest.raises(error, match=says):
        loader.load(make(**made))


def test_matrices_of_a_vision_tower_are_left_out_of_an_adapter_that_changes_the_text_too(make):
    layers = layers_of("qwen3")
    path, tower = "model.layers.1.self_attn.q_proj", "model.visual.blocks.0.attn.qkv"
    loader = AdapterLoader(layers, 2)
    both = make(1, {path.replace("model.", "model.language_model."): layers.shapes[path], tower: (9, 5)}, rank=3)
    assert set(loader.load(both).matrices) == {path}
    with pytest.raises(CheckpointError, match=tower):
        loader.load(make(2, {tower: (9, 5)}, rank=3))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *((values, "lora_name: expected a name") for values in (("", 1, "path"), (3, 1, "path"))),
        *((("a", number, "path"), "lora_int_id: expected a whole number of at least 1") for number in (0, True, "1")),
        *((("a", 1, path), "lora_path: expected an adapter's folder") for path in ("", None)),
    ],
)
def test_a_request_with_wrong_values_is_refused(values, says):
    with pytest.raises(InvalidParameterError, match=says):
        LoRARequest(*values)


class Leader(Group):
    """The group of rank 0, which keeps what is sent."""

    def __init__(self):
        super().__init__(0, 2)
        self.sent = []

    def send(self, dispatch):
        self.sent.append(dispatch.encode())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_follower_writes_the_adapters_that_rank_0_sends(dtype):
    sizes = {"up": (7, 5), "down": (5, 7)}  # odd: in bfloat16 they are no whole number of int32
    layers = AdaptedLayers(sizes, {}, max_loras=2, max_rank=3, dtype=dtype)
    leader, follower = DeviceAdapters(layers, group=Leader()), DeviceAdapters(layers)
    rng = np.random.default_rng(0)
    matrices = {"down": (rng.standard_normal((2, 7)).astype(dtype), rng.standard_normal((5, 2)).astype(dtype))}
    leader.warm_up()
    adapter = LoadedAdapter(LoRARequest("fox", 1, "adapters/fox"), matrices)
    leader.place(adapter, 1)
    leader.place(adapter, 1)  # it is there already
    dispatches = [Dispatch.decode(message) for message in leader._group.sent]
    assert [dispatch.program for dispatch in dispatches] == ["adapt", "adapt"]
    for dispatch in dispatches:
        follower.repeat(*dispatch.unpack())
    for ours, theirs in zip(leader.arrays, follower.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.any(np.asarray(follower.arrays[2], np.float32))


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 33, 40, 12)]
ALL = (0, 1, 2, 3)
MIXED = (0, 1, 2, 1, 3, 2)
"""Adapter of each prompt, 0 for none: three adapters for two slots."""


RANKS = (4, 3, 1)
"""Ranks of the adapters: the rank of the slots, and smaller ones."""


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Adapters 1, 2 of all linear layers and 3 of the attention alone, each with its weights."""
    root, made = tmp_path_factory.mktemp("adapters"), []
    sizes = linear_sizes(random_weights(tiny_config()))
    for number, rank in enumerate(RANKS, start=1):
        some = sizes if number < 3 else {module: size for module, size in sizes.items() if "self_attn" in module}
        weights = adapter_weights(some, seed=number, rank=rank, spread=0.5)
        folder = save_adapter(root / f"a{number}", weights, rank=rank, lora_alpha=2 * rank)
        made.append((LoRARequest(f"a{number}", number, str(folder)), weights))
    return made


@pytest.fixture(scope="session")
def lora_llm(tiny_folder):
    return make_llm(tiny_folder, max_num_seqs=4, enable_lora=True, max_loras=2, max_lora_rank=4)


@pytest.fixture(scope="module")
def requests(adapters):
    return [None, *(request for request, _ in adapters)]


@pytest.fixture(scope="module")
def expected(lora_llm, adapters):
    """Greedy tokens of each prompt, of the base model and with each adapter merged."""
    base, result = random_weights(tiny_config()), []
    for weights in ({}, *(weights for _, weights in adapters), {}):
        lora_llm.update_weights(changed(base, weights, scale=2.0))
        result.append(tokens(generate(lora_llm, PROMPTS, GREEDY)))
    assert result.pop() == result[0]
    assert all(a != b for prompt in zip(*result, strict=True) for i, a in enumerate(prompt) for b in prompt[:i])
    return result


@pytest.mark.parametrize("numbers", [MIXED, *([number] * len(PROMPTS) for number in ALL)])
def test_base_and_adapters_in_one_batch_give_the_tokens_of_merged_models(lora_llm, requests, expected, numbers):
    chosen = [requests[number] for number in numbers]
    outputs = generate(lora_llm, PROMPTS, GREEDY, lora_request=chosen if numbers is MIXED else chosen[0])
    assert tokens(outputs) == [expected[number][at] for at, number in enumerate(numbers)]
    check_engine(lora_llm.engine)


def test_blocks_of_one_adapter_serve_no_other(lora_llm, requests):
    lora_llm.engine.scheduler.blocks.reset_prefix_cache()
    prompt = PROMPTS[3]
    for cached in (0, 32):
        for request in requests:
            output = generate(lora_llm, prompt, GREEDY, lora_request=request)[0]
            assert output.num_cached_tokens == cached


def test_nothing_compiles_after_the_start_whatever_adapters_come(lora_llm, requests, tmp_path):
    sizes = linear_sizes(random_weights(tiny_config()))
    folder = save_adapter(tmp_path, adapter_weights(sizes, seed=9, rank=2), rank=2)
    fourth = LoRARequest("fourth", 4, folder)
    with nothing_compiles(lora_llm):
        generate(lora_llm, PROMPTS[:5], GREEDY, lora_request=[*requests, fourth])


def test_streams_chats_and_queued_requests_take_an_adapter(lora_llm, requests, expected):
    messages = [{"role": "user", "content": "abc"}]
    texts = {number: lora_llm.chat(messages, GREEDY, False, requests[number])[0].outputs[0].text for number in (0, 1)}
    assert texts[0] != texts[1]
    assert "".join(lora_llm.stream(messages, GREEDY, requests[1])) == texts[1]
    lora_llm.add_request(PROMPTS[2], GREEDY, lora_request=requests[2])
    assert tokens(finish(lora_llm)) == [expected[2][2]]


async def test_the_asynchronous_engine_takes_adapters_and_refuses_bad_ones(lora_llm, requests, expected, tmp_path):
    async with AsyncLLM.from_llm(lora_llm) as llm:
        calls = [llm.collect(PROMPTS[at], GREEDY, lora_request=requests[i]) for at, i in enumerate(MIXED)]
        calls.append(llm.collect(PROMPTS[0], GREEDY, lora_request=LoRARequest("none", 8, tmp_path)))
        *outputs, error = await asyncio.gather(*calls, return_exceptions=True)
    assert tokens(outputs) == [expected[number][at] for at, number in enumerate(MIXED)]
    assert isinstance(error, CheckpointError)
    assert "adapter_config.json" in str(error)


async def test_no_other_prompt_waits_for_adapters_that_are_read(lora_llm, requests, monkeypatch):
    read, disk = lora_llm.engine._adapters._read, threading.Event()
    monkeypatch.setattr(lora_llm.engine._adapters, "_loaded", OrderedDict())
    monkeypatch.setattr(lora_llm.engine._adapters, "_read", lambda request: disk.wait() and read(request))
    async with AsyncLLM.from_llm(lora_llm) as llm:
        waiting = [asyncio.ensure_future(llm.collect(PROMPTS[1], GREEDY, lora_request=requests[i])) for i in (1, 1, 2)]
        try:
            assert (await asyncio.wait_for(llm.collect("once upon a time", GREEDY), 10)).finished
        finally:
            disk.set()
        assert all(output.finished for output in await asyncio.gather(*waiting))


def test_arguments_that_make_no_sense_are_refused_before_anything_runs(llm, lora_llm, requests):
    for engine, adapter, says in (
        (lora_llm, [requests[1]], "lora_request: 1 given for 2 prompts"),
        (lora_llm, ["a1", None], "lora_request: expected a LoRARequest, got 'a1'"),
        (llm, requests[1], "enable_lora=True"),
    ):
        with pytest.raises(InvalidParameterError, match=says):
            engine.generate(PROMPTS[:2], GREEDY, lora_request=adapter)
        assert not engine.has_unfinished_requests


def test_recurrent_layers_take_adapters_too(hybrid_folder, tmp_path):
    base = random_weights(tiny_config("qwen3_5_text", **HYBRID))
    modules = linear_sizes(base, ("in_proj_qkv", "out_proj", "q_proj", "up_proj"))
    assert any("linear_attn.in_proj_qkv" in module for module in modules)
    weights = adapter_weights(modules, spread=0.5)
    adapter = LoRARequest("a", 1, save_adapter(tmp_path / "adapter", weights))
    save(changed(base, weights), tmp_path / "merged", config=tiny_config("qwen3_5_text", **HYBRID))
    llm = make_llm(hybrid_folder, max_num_seqs=1, enable_lora=True)
    plain = alone(llm, PROMPTS[2], GREEDY)
    adapted = tokens(generate(llm, PROMPTS[2], GREEDY, lora_request=adapter))
    llm.update_weights(load_causal_lm(Checkpoint.open(tmp_path / "merged"), dtype="float32"))
    assert adapted == [alone(llm, PROMPTS[2], GREEDY)] != [plain]


DRAFTED = [REPEATED[0], UNIQUE[1], REPEATED[1], UNIQUE[3], REPEATED[2]]
DRAFTED_FOR = (0, 1, 2, 0, 1)
"""Adapter of each prompt, 0 for none."""


def test_adapters_answer_as_without_drafts(tiny_folder, adapters):
    lora = dict(enable_lora=True, max_loras=2, max_lora_rank=4)
    llm = make_llm(tiny_folder, max_num_seqs=2, speculative_config=NGRAM, **lora)
    compiled = llm.engine.runner.num_compiled()
    requests = [None, *(request for request, _ in adapters)]
    chosen = [requests[number] for number in DRAFTED_FOR]
    for params in (SamplingParams(**LOOPING), SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)):
        assert_unchanged(llm, DRAFTED, params, lora_request=chosen)
    assert llm.spec_decode.num_accepted_tokens > 0
    assert llm.engine.runner.num_compiled() == compiled
