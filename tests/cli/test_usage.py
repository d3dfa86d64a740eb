"""Wrong usage of each command: one line that names what is wrong, before anything is loaded or written."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_config
from tests.support.tiny_encoder import tiny_encoder

pytestmark = pytest.mark.usefixtures("few_programs")

NOWHERE = ("-m", "no/such/model")
GENERATE = ("generate", "-m", "MODEL", "--max-num-seqs", "1")
SERVE = ("serve", "MODEL", "--port", "0", "--max-model-len", "64", "--max-num-seqs", "2")
RAY = ("serve", "no/such/model", "--port", "0", "--ray")
BATCH = ("batch", "no/such/model")
CLIPS = ("video", *NOWHERE, "--batch", "in.txt")
PLAN = ("plan", "text-builtin", "--device", "h100")

WRONG = [
    ((*GENERATE, "abc", "--dtype", "int3"), 1, "dtype: expected one of bfloat16, float32"),
    ((*GENERATE, "abc", "--kv-cache-dtype", "fp4"), 1, "kv_cache_dtype: expected one of auto, bfloat16"),
    ((*GENERATE, "abc", "--quantization", "int3"), 1, "quantization: expected one of int8, w8a8, int4"),
    ((*GENERATE, "a " * 500), 1, "prompt"),
    ((*GENERATE, "abc", "--grammar", "bad.gbnf"), 1, "structured_outputs: grammar:"),
    ((*GENERATE, "abc", "--json-schema", '{"type": '), 1, "structured_outputs: json:"),
    ((*GENERATE, "abc", "--lora", "nothing"), 1, "adapter_config.json: no such file"),
    (("generate", "abc", "--json-schema", "missing"), 2, "--json-schema: cannot read missing: "),
    (("generate", "abc", "--grammar", "bytes"), 2, "--grammar: cannot read bytes: "),
    (("generate", "abc", "--top-p", "2"), 2, "--top-p"),
    (("generate", "abc", "--max-tokens", "many"), 2, "--max-tokens"),
    (("generate", "abc", "--nonsense"), 2, "--nonsense"),
    (("generate", "abc", "--logprobs", "2"), 2, "--json"),
    (("generate", "abc", "--file", "x"), 2, "not both"),
    (("generate", ""), 2, "prompt 1: it is empty"),
    (("generate", "--file", "bytes"), 2, "not UTF-8 text"),
    (("generate", "--file", "nowhere.txt"), 2, "nowhere.txt: no such file"),
    (("generate", "--file", "."), 2, ".: is a directory"),
    (("generate",), 2, "standard input: it is empty"),
    (("embed", *NOWHERE, "--output", "vectors.txt", "a"), 2, "expected a name that ends in .npy or .jsonl"),
    (("embed", *NOWHERE, "--output", "no/such/out.npy", "a"), 2, "there is no folder no/such"),
    (("embed", *NOWHERE, "--file", "nowhere.txt"), 2, "nowhere.txt: no such file"),
    (("embed", *NOWHERE, "--file", "lines.jsonl", "--field", "title"), 2, "line 2: expected an object with a text"),
    (("embed", *NOWHERE, "--file", "lines.jsonl", "--field", "id"), 2, "line 3: not valid JSON"),
    (("embed", *NOWHERE), 2, "expected a sentence on each line"),
    (("embed", *NOWHERE, "--batch", "in.txt"), 2, "--output: none: expected a name that ends in .jsonl or .parquet"),
    (("embed", *NOWHERE, "--batch", "nowhere.txt", "-o", "out.jsonl"), 2, "--batch: nowhere.txt: no such file"),
    (("embed", *NOWHERE, "--batch", "lines.jsonl", "-o", "lines.jsonl"), 2, "--output: it is the input"),
    (("embed", *NOWHERE, "--batch", "in.txt", "-o", "out.jsonl", "a"), 2, "--batch: give it, or sentences, or --file"),
    (("embed", *NOWHERE, "--retry-errors", "a cat"), 2, "--retry-errors: it is for --batch"),
    (("rerank", "a cat"), 2, "Missing option '--model'"),
    (("rerank", "", *NOWHERE, "-d", "bad.gbnf"), 2, "query 1: it is empty"),
    (("rerank", "a cat", *NOWHERE), 2, "standard input: it is empty; expected a document on each line"),
    (("rerank", "a cat", "a dog", *NOWHERE, "-d", "in.txt"), 2, "give documents or --documents, not both"),
    (("rerank", "a cat", *NOWHERE, "-d", "bad.gbnf"), 1, "no/such/model: no such folder"),
    ((*BATCH, "-i", "nothing.jsonl", "-o", "out.jsonl"), 2, "--input: nothing.jsonl: no such file"),
    ((*BATCH, "-i", "in.txt", "-o", "in.txt"), 2, "--output: it is the input"),
    ((*BATCH, "-i", "in.txt", "-o", "nowhere/out.jsonl"), 2, "--output: nowhere/out.jsonl: there is no folder nowhere"),
    ((*BATCH, "-i", "in.txt", "-o", "-", "--retry-errors"), 2, "--retry-errors: it needs a file of answers"),
    ((*BATCH, "-i", "in.txt", "-o", "lines.jsonl"), 1, "lines.jsonl: line 1 is no"),
    (("quantize", "MODEL", "--model", "MODEL"), 2, "the checkpoint itself"),
    (("quantize", "MODEL"), 1, "exists already; name another folder, or --force"),
    (("quantize", "x", "--model", "MODEL", "--bits", "3"), 1, "3"),
    (("quantize", "in.txt", "--model", "MODEL"), 2, "in.txt is a file; a folder is written"),
    (("compile", *NOWHERE[1:], "-o", "."), 1, "programs: . exists, and holds other things than programs"),
    (("compile", *NOWHERE[1:], "-o", "in.txt"), 1, "programs: in.txt exists"),
    (("demo", "-o", "in.txt"), 2, "in.txt is a file; a folder is written"),
    (("bench", "quality", "-o", "in.txt"), 2, "in.txt is a file; a folder is written"),
    (("bench", "compare", "lines.jsonl", "in.txt"), 2, "lines.jsonl: "),
    (("train", "lora", "--data", "lines.jsonl", "-o", "in.txt"), 2, "in.txt is a file; a folder is written"),
    ((*CLIPS, "-o", "bytes"), 2, "bytes is a file; a folder is written"),
    (("quantize", "x", "--model", "MODEL", "--bits", "4", "--group-size", "48"), 1, "48"),
    (("convert", "MODEL", "out", "--lora", "ADAPTER", "--to", "diffusers"), 1, "leave --to out"),
    (("convert", "MODEL", "MODEL", "--lora", "ADAPTER"), 2, "that is the checkpoint itself"),
    (("convert", "MODEL", "ADAPTER", "--lora", "ADAPTER"), 1, "exists already"),
    (("convert", "MODEL", "out"), 1, "to, lora: give one"),
    (("convert", "MODEL", "out", "--to", "original", "--dtype", "int8"), 1, "dtype: expected bfloat16 or float32"),
    (("train", "lora", "--data", "lines.jsonl", "-o", "out"), 1, "lines.jsonl, line 1: expected an object with"),
    ((*SERVE, "--lora-modules", "fox"), 2, "expected name=folder, got 'fox'"),
    ((*SERVE, "--lora-modules", "a=ADAPTER", "--lora-modules", "a=b"), 2, "a is given twice"),
    ((*SERVE, "--lora-modules", "a=nothing"), 1, "adapter_config.json: no such file"),
    ((*SERVE, "--embedding-quantization", "int8"), 2, "needs --embedding-model or --reranker-model"),
    ((*SERVE, "--embedding-model", "ENCODER", "--embedding-quantization", "int4"), 1, "quantization: expected 'int8'"),
    ((*SERVE, "--embedding-model", "/nothing"), 1, "/nothing: no such folder; expected a folder with config.json"),
    ((*SERVE, "--reranker-model", "in.txt"), 1, "in.txt: this is a file; expected a folder with config.json"),
    ((*SERVE, "--video-model", "/nothing"), 1, "/nothing: no such folder; expected a folder of SkyReels-V2"),
    ((*SERVE, "--video-vae", "tiny=nothing.pth"), 1, "vae: there is no file nothing.pth"),
    ((*SERVE, "--replicas", "1:8"), 2, "--replicas: it is for replicas on Ray; give --ray too"),
    ((*BATCH, "-i", "in.txt", "-o", "out", "--num-gpus", "1"), 2, "--num-gpus: it is for replicas on Ray"),
    ((*RAY, "--embedding-model", "some/encoder"), 2, "--ray: replicas are of the text model; --embedding-model needs"),
    ((*RAY, "--video-devices", "2"), 2, "--ray: replicas are of the text model; --video-devices needs"),
    ((*RAY, "--nnodes", "2"), 2, "--ray: a replica is one process"),
    ((*RAY, "--max-queued-requests", "0"), 2, "--max-queued-requests: on Ray a request waits"),
    ((*RAY, "--replicas", "many"), 2, "--replicas: expected a number, or two as 1:8, got 'many'"),
    (("video",), 2, "give --prompt, or a file of prompts with --batch"),
    ((*CLIPS, "-o", "clips", "--prompt", "a"), 2, "--batch: --prompt is for one clip; leave it out"),
    ((*CLIPS, "-o", "clips", "--plan"), 2, "--batch: --plan is for one clip; leave it out"),
    ((*CLIPS, "-o", "out.mp4"), 2, "--output: out.mp4: expected a folder for clips with --batch"),
    (("video", *NOWHERE, "--batch", "nowhere.jsonl", "-o", "clips"), 2, "--batch: nowhere.jsonl: no such file"),
    (("compare", "text", "--against", "diffusers"), 2, "the reference of text is transformers"),
    (("compare", "--dtype", "float16", "text"), 2, "bfloat16, float32"),
    (("compare", "text", "--part", "vae"), 2, "only video models have it"),
    (("compare", "embed", "--num-frames", "9"), 2, "--num-frames: only video models"),
    (("compare", "video", "--random", "--part", "vae", "--prompt", "a dog"), 2, "--part vae takes arrays"),
    (("compare", "video", "--size", "1.3b"), 2, "it goes with --random"),
    (("compare", "video", "--random", "--size", "1.3b", "--part", "text_encoder"), 2, "made for transformer, vae"),
    (("compare", "text", "--inputs", "no/such.txt"), 2, "--inputs: no/such.txt cannot be read"),
    (("compare", "text", "--inputs", "a.txt", "--prompt", "b"), 2, "give one of the two"),
    (("compare", "own", "no/such.py"), 2, "no such file"),
    (("compare", "video", "--random", "--tokens", "7"), 2, "--tokens"),
    (("compare", "no/such/folder"), 2, "no/such/folder"),
    (("compare", "MODEL", "--random"), 2, "has weights"),
    (("plan", "text-builtin"), 2, "Missing option '--device'"),
    (("plan", "text-builtin", "--device", "abacus"), 2, "--device: 'abacus' is not in the table"),
    (("plan", "nowhere", "--device", "h100"), 2, "nowhere: no such folder"),
    ((*PLAN, "--memory", "-1"), 2, "'--memory'"),
    (("plan", "minilm", "--device", "h100", "--batch-size", "0"), 2, "'--batch-size'"),
    ((*PLAN, "--max-model-len", "99999"), 2, "--max-model-len: expected 2 to"),
    ((*PLAN, "--height", "64"), 2, "--height: the plan of a model of kind text has no"),
    ((*PLAN, "--kv-cache-dtype", "int4"), 2, "--kv-cache-dtype: expected one of"),
    (("generat",), 2, "generat"),
]


@pytest.fixture(scope="module")
def places(folder, tmp_path_factory):
    sizes = linear_sizes(random_weights(tiny_config(max_position_embeddings=128)))
    made = tmp_path_factory.mktemp("places")
    return {
        "MODEL": folder,
        "ADAPTER": str(save_adapter(made / "fox", adapter_weights(sizes, rank=20), rank=20)),
        "ENCODER": str(tiny_encoder(made / "encoder")),
    }


@pytest.mark.parametrize(("arguments", "status", "says"), WRONG, ids=[" ".join(row[0])[:60] for row in WRONG])
def test_wrong_usage_is_one_line_and_writes_nothing(run, tmp_path, monkeypatch, places, arguments, status, says):
    if any(option in arguments for option in ("--regex", "--grammar", "--json-schema", "--choice")):
        pytest.importorskip("llguidance", reason="needs llguidance: pip install 'verax[server]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.gbnf").write_text("root ::= other")
    (tmp_path / "lines.jsonl").write_text('{"id": "a", "title": "a"}\n{"id": "b"}\n{')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    done = run(*arguments)
    assert (done.status, done.out) == (status, "")
    assert says in done.err
    assert done.err.startswith("verax: error: ")
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("arguments", [("generate",), ("embed",), ("rerank", "a cat", "-m", "no/such/model")])
def test_no_text_at_a_terminal_is_wrong_usage(run, arguments):
    done = run(*arguments, terminal=True, stdin="typed\n")
    assert done.status == 2
    assert "give one as an argument" in done.err


@pytest.mark.parametrize(("command", "stdin"), [(("generate", "--file", "-"), "a text\n"), (("embed", "-f", "-"), "a")])
def test_a_dash_in_the_place_of_a_file_is_standard_input(run, command, stdin):
    assert run(*command, *NOWHERE, stdin=stdin).err.startswith("verax: error: no/such/model: no such folder")


def test_lines_come_from_a_pipe_with_a_name(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # bash's <(...) is one
    with ThreadPoolExecutor() as pool:
        written = pool.submit((tmp_path / "pipe").write_text, "a text\n")
        assert "no/such/model: no such folder" in run("generate", *NOWHERE, "--file", tmp_path / "pipe").err
        written.result()


@pytest.mark.parametrize(
    "command",
    [
        ("embed", "a cat", *NOWHERE, "-o", "vectors.npy"),
        ("embed", *NOWHERE, "--batch", "in.txt", "-o", "vectors.jsonl"),
        ("compile", "no/such/model", "-o", "programs"),
        ("quantize", "x", "--model", "MODEL"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(run, tmp_path, monkeypatch, places, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a cat")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # as of a disk that is mounted to be read
    done = run(*(places.get(argument, argument) for argument in command))
    assert done.status == 2
    assert "cannot be written to" in done.err
