"""The server examples of README.md and docs/server.md, the dashboard's metrics and the load test, against a server."""

import ast
import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.markdown import blocks
from tests.support.markdown_run import commands
from verax import cli
from verax.bench.serve.cases import serve_command
from verax.bench.serve.load import Client, started

pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
OURS = "needs the server; tests/serve/test_docs_examples.py starts one and runs it"
PAGES = ("README.md", "docs/server.md")
BLOCKS = [block for page in PAGES for block in blocks(ROOT / page) if block.not_run == OURS]


@pytest.fixture(scope="module")
def target():
    """A server of the built-in model, as a person starts it."""
    server = started(partial(serve_command, None, {"max_num_seqs": 4, "max_model_len": 256}))
    with asyncio.Runner() as runner:
        yield runner.run(server.__aenter__()).url
        runner.run(server.__aexit__(None, None, None))


def here(text: str, target: str) -> str:
    return text.replace("http://127.0.0.1:8000", target)


def verax(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, capsys.readouterr()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_an_example_of_the_page_runs(block, target, monkeypatch, capsys):
    text = here(block.text, target)
    if block.language == "python":
        pytest.importorskip("openai")
        exec(compile(text, block.place, "exec"), {})
        assert "85" in capsys.readouterr().out
        return
    for command in commands(text):
        if command.startswith("verax "):
            status, shown = verax(monkeypatch, capsys, command.split())
            assert status == 0, shown.err
            assert re.search(r"\| \*\*server\*\* \|.* \| 16 \| ", shown.out), shown.out
            # In bfloat16 an answer under load may part from the one alone where two tokens are almost equally likely.
            check = re.search(
                r"of (\d+) answers asked for again without load, (\d+) were identical, 0 failed; 0 streams were lost",
                shown.out,
            )
            assert check is not None, shown.out
            assert int(check[2]) >= int(check[1]) // 2 > 0
            continue
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert '"choices"' in done.stdout
        assert ('"stream": true' not in command) or done.stdout.rstrip().endswith("data: [DONE]")


def test_the_pages_have_examples_that_run():
    assert [block.language for block in BLOCKS] == ["sh", "python", "sh"]


def python_with(package):
    """Interpreter that has a client's package: this one, or the one that `make client-examples` installs."""
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        return sys.executable
    own = ROOT / "build/clients" / package / "bin/python"
    if not own.exists():
        pytest.skip(f"{package} is not installed: `make client-examples` installs it into build/clients")
    return str(own)


@pytest.mark.parametrize(
    ("client", "package"), [("openai", "openai"), ("langchain", "langchain-openai"), ("litellm", "litellm")]
)
def test_the_example_of_a_client_runs(client, package, target):
    script = ROOT / "examples/server_clients" / f"{client}_client.py"
    command = [python_with(package), str(script)]
    # LiteLLM fetches a list of prices otherwise.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": ""}
    environment = {"VERAX_URL": f"{target}/v1", **quiet}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = dict(re.findall(r"^([a-z ]+): (.*)$", done.stdout, re.MULTILINE))
    assert "85" in shown["answer"]
    assert shown["stream"] == shown["answer"]
    assert all(isinstance(number, int) for number in ast.literal_eval(shown["by schema"]).values())
    name, arguments, total = re.fullmatch(r"(\w+) (\{.*\}) = (\d+)", shown["tool call"]).groups()
    assert (name, sum(ast.literal_eval(arguments).values())) == ("add", int(total))
    assert shown["after it"]
    assert re.fullmatch(r"\d+ numbers", shown["embedding"])


def metric_names(text):
    return set(re.findall(r"vllm:\w+", text))


def test_the_dashboard_and_the_page_name_metrics_that_the_server_has(target):
    dashboard = json.loads((ROOT / "docs/grafana/verax.json").read_text(encoding="utf-8"))
    queries = [query["expr"] for panel in dashboard["panels"] for query in panel["targets"]]
    assert len(queries) > 20
    samples = asyncio.run(Client(target).fetch("/metrics"))
    exported = metric_names(samples)
    assert metric_names(" ".join(queries)) <= exported
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert metric_names(page) <= exported | {name.removesuffix("_bucket") for name in exported}
    assert 'model_name="' in samples
