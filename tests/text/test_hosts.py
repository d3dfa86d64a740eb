"""Several hosts: messages, links, and processes that run one engine."""

import contextlib
import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import jax
import numpy as np
import pytest

from tests.support.hosts import SIZES, ended, free_port, join, spawn
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from verax import LLM, AsyncLLM, SamplingParams, checkpoint
from verax.errors import HostsError, InvalidParameterError
from verax.text import hosts
from verax.text.engine.engine_config import EngineConfig
from verax.text.engine.llm import tensor_meshes
from verax.text.hosts import Address, Group, Link

zmq = pytest.importorskip("zmq")

PROMPTS = [[5, 9, 200, 31], [7, 8, 9] * 15, [100, 101, 102], [40, 41]]

SAMPLING = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3},
]


SHAPE = dict(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1)


@pytest.fixture
def lost():
    """The ranks that the others took for lost."""
    return []


@pytest.fixture
def groups(lost):
    """The groups of rank 0 and rank 1 in one process, without JAX's part."""
    leader, follower = Group(0, 2), Group(1, 2)
    link, address = Link.listen("127.0.0.1", 1, lost.append)
    follower._links = [Link.connect(address, 0, lost.append)]
    link.accept(address, 20)
    leader._links = [link]
    yield leader, follower
    for group in (leader, follower):
        for link in group._links:
            link.close(0)


def both(first, second):
    """Results of two calls at the same time, or the errors that they raise."""

    def run(call):
        try:
            return call()
        except HostsError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (first, second)))


def test_ranks_that_differ_are_refused_on_both_sides_by_what_differs(groups, lost, monkeypatch):
    leader, follower = groups
    equal, ours, theirs = {"seed": 1}, {"jax": "0.10.2"}, {"jax": "0.11.0"}
    assert both(lambda: leader.agree(equal), lambda: follower.agree(equal)) == [None, None]
    end = leader.end
    monkeypatch.setattr(leader, "end", lambda: (time.sleep(0.5), end()))
    errors = both(lambda: leader.agree({**equal, **ours}), lambda: follower.agree({**equal, **theirs}))
    assert {str(error) for error in errors} == {
        "nnodes: the hosts must be equal, but jax is 0.10.2 on rank 0 and 0.11.0 on rank 1"
    }
    assert lost == []  # a slow rank 0 does not take the one that differs for lost


def test_what_several_hosts_cannot_do_is_refused_before_anything_is_loaded():
    with pytest.raises(InvalidParameterError, match=r"^node_rank: rank 0 takes requests"):
        AsyncLLM(nnodes=2, node_rank=1, tensor_parallel_size=2)
    with pytest.raises(InvalidParameterError, match=r"^node_rank: rank 0 leads"):
        LLM.follow(SimpleNamespace(_hosts=None))


@pytest.mark.parametrize("which", ["the weights", "the draft model's weights"])
def test_hosts_with_other_weights_are_refused_before_the_weights_are_read(groups, tmp_path, monkeypatch, which):
    monkeypatch.setattr("verax.text.engine.llm.load_causal_lm", lambda *a, **k: pytest.fail("they were read"))
    monkeypatch.setattr("verax.text.engine.llm.tensor_meshes", lambda *a: [None])
    monkeypatch.setattr(Group, "join", classmethod(lambda cls, config, options: groups[config.node_rank]))
    folders = [tiny_checkpoint(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    models, drafts = (folders, folders[:1] * 2) if which == "the weights" else (folders[:1] * 2, folders)

    def start(rank):
        config = {"model": str(drafts[rank]), "num_speculative_tokens": 2}
        return LLM(models[rank], node_rank=rank, nnodes=2, tensor_parallel_size=2, speculative_config=config)

    ours, theirs = map(str, both(partial(start, 0), partial(start, 1)))
    assert ours == theirs
    assert ours.startswith(f"nnodes: the hosts must be equal, but the digest of {which} is ")
    assert ours.count("digest") == 1


def test_a_follower_ends_when_rank_0_does_and_with_a_message_when_it_is_killed():
    port = free_port()
    processes = [join(rank, port) for rank in range(2)]
    assert [status for status, _ in map(ended, processes)] == [0, 0]
    port = free_port()
    leader, follower = (join(rank, port, stays=1) for rank in range(2))
    assert [process.stdout.readline() for process in (leader, follower)] == ["joined\n"] * 2
    leader.kill()
    status, errors = ended(follower)
    leader.communicate()
    assert status != 0
    assert "rank 0 of 2 is gone" in errors


@pytest.mark.parametrize(
    ("fails", "message"), [("0", "rank 0 has ended before the engine had started"), ("01", "rank 1 failed")]
)
def test_an_error_at_the_start_ends_every_rank_with_it(fails, message):
    port = free_port()
    processes = [join(rank, port, fails=fails) for rank in range(2)]
    (ours, our_error), (theirs, their_error) = map(ended, processes)
    assert (ours, theirs) == (1, 1)  # JAX would abort a process that waits for one that is gone
    assert "rank 0 failed" in our_error
    assert message in their_error


def test_an_address_that_another_process_listens_at_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = EngineConfig(nnodes=2, tensor_parallel_size=2, master_addr=address)
        with pytest.raises(
            HostsError, match=f"^master_addr: rank 0 cannot listen at {address}: Address already in use"
        ):
            Group.join(config, {})


@pytest.mark.parametrize(("name", "warns"), [("leader", True), ("localhost", False), ("127.0.0.1", False)])
def test_a_name_that_no_other_host_reaches_is_a_warning(name, warns, monkeypatch, caplog):
    """Debian's /etc/hosts has 127.0.1.1 for the name of the host itself."""
    number = {"leader": "127.0.1.1"}.get(name, "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **options: [(0, 0, 0, "", (number, 0))])
    hosts._check_free(f"{name}:{free_port()}")
    assert ("master_addr: leader is 127.0.1.1 here" in caplog.text) == warns


def test_a_host_with_fewer_devices_is_named(monkeypatch):
    device = SimpleNamespace(platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda process_index: [device] * (2 - process_index))
    with pytest.raises(InvalidParameterError, match=r"needs 2 devices on each of 2 hosts, .* has 1 .* on host 1;"):
        tensor_meshes(4, hosts=2)


UNITS = 32
"""Inner units of the draft model."""


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("hosts") / "draft", intermediate_size=UNITS, **SHAPE)


@pytest.fixture(scope="module")
def folder(draft_folder):
    """The draft model with 16 times as many inner units, of which the others give zero.

    The drafts all hold, and the model is so much larger that they pay.
    """
    weights = random_weights(tiny_config(intermediate_size=UNITS, **SHAPE))
    for name, weight in weights.items():
        if ".mlp." in name:
            more = (0, 15 * UNITS)
            weights[name] = np.pad(weight, ((0, 0), more) if "down_proj" in name else (more, (0, 0)))
    folder = tiny_checkpoint(draft_folder.with_name("model"), intermediate_size=16 * UNITS, **SHAPE)
    return checkpoint.save(weights, folder, config=tiny_config(intermediate_size=16 * UNITS, **SHAPE))


def serve(folder, draft_folder, rank, port):
    drafts = {"model": str(draft_folder), "num_speculative_tokens": 3}
    options = {**SIZES, "tensor_parallel_size": 4, "nnodes": 2, "node_rank": rank}
    options["speculative_config"] = json.dumps(drafts)
    del options["block_size"]
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = ["-m", "verax", "serve", str(folder), "--dtype", "float32", "--no-structured-outputs", "--port", "0"]
    return spawn(*command, *given, "--master-addr", f"127.0.0.1:{port}")


def test_a_server_on_two_hosts_drafts_gives_one_devices_tokens_and_names_the_host_that_is_killed(folder, draft_folder):
    port = free_port()
    leader, follower = (serve(folder, draft_folder, rank, port) for rank in range(2))
    try:
        lines = iter(leader.stdout.readline, "")
        url = next((found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line))), None)
        assert url is not None, ended(leader)
        follower.terminate()  # who ends a group tells all hosts, and rank 0 lets requests finish
        # 40 tokens: drafts begin new blocks, which the other host must have in its tables too.
        plain = {"model": folder.name, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        with httpx.Client(base_url=url, timeout=300) as client:
            tokens = []
            for prompt, how in zip(PROMPTS, SAMPLING, strict=True):
                answer = client.post("/v1/completions", json={**plain, **how, "prompt": prompt}).json()
                tokens.append(tuple(answer["choices"][0]["token_ids"]))
            metrics = client.get("/metrics").text
            stream = {**plain, "max_tokens": 80, "prompt": PROMPTS[0], "stream": True}
            with client.stream("POST", "/v1/completions", json=stream) as answer:
                events = answer.iter_lines()
                assert next(events, None) is not None, ended(leader)
                follower.send_signal(signal.SIGKILL)
                rest = []
                with contextlib.suppress(httpx.RemoteProtocolError):  # the server ends a failed stream so
                    rest.extend(events)
        status, errors = ended(leader)
    finally:
        for process in (leader, follower):
            process.kill()
            process.communicate()
    assert "rank 1 of 2 is gone" in errors
    assert status == 1
    assert "data: [DONE]" not in rest
    llm = LLM(folder, dtype="float32", use_tqdm=False, **SIZES)
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **how) for how in SAMPLING]
    assert tokens == [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert len({*tokens}) == len(tokens)
    drafted, accepted = (
        float(re.search(rf"^vllm:spec_decode_num_{name}_tokens_total\S* (\S+)$", metrics, re.MULTILINE)[1])
        for name in ("draft", "accepted")
    )
    assert accepted == drafted > 10


def test_a_connection_without_the_key_is_not_a_peer_and_its_end_is_not_a_loss(lost):
    leader, address = Link.listen("127.0.0.1", 1, lost.append)
    follower = Link.connect(address, 0, lost.append)
    leader.accept(address, timeout=20)
    socket.create_connection((address.host, address.port)).close()
    public, _ = zmq.curve_keypair()
    stranger = Link.connect(Address(address.host, address.port, public.decode()), 0, lambda rank: None)
    leader.send(b"for the follower")
    assert follower.receive() == b"for the follower"
    assert not stranger._socket.poll(200)
    stranger.close(0)
    time.sleep(0.2)
    assert lost == []
    for link in (leader, follower):
        link.close(0)


def test_a_rank_that_never_connects_is_named():
    link, address = Link.listen("127.0.0.1", 3, lambda rank: None)
    with pytest.raises(HostsError, match=rf"rank 3 .* did not connect to tcp://127.0.0.1:{address.port} within 0 s"):
        link.accept(address, timeout=0.2)
    link.close(0)
