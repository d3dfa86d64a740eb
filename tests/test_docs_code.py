"""The code of README.md, CONTRIBUTING.md and docs/ runs, or says why it does not."""

import contextlib
import io
import sys
from pathlib import Path

import pytest

from tests.support.markdown import Block, MarkdownError, blocks, inline_commands, is_generated
from tests.support.markdown_run import check_command, commands, run_block
from verax import cli
from verax.ops import operations
from verax.text.engine.llm import LLM

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

FILES = {
    "sentences.txt": "A dog runs.\nThe north is cold today.\nA puppy is running over a field.\n",
    "papers.jsonl": '{"title": "A dog runs.", "year": 2026}\n',
}
"""Files that the pages' commands read as the reader's own."""

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


def verax(words: list[str]) -> tuple[int, str]:
    """Run a command of verax in this process, whose compiled programs are then shared."""
    output = io.StringIO()
    before = sys.argv
    sys.argv = ["verax", *words]
    try:
        with contextlib.redirect_stdout(output):
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0), output.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("main ends with SystemExit")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run a page in, and engines of few programs: a full one compiles for minutes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    start = LLM.__init__

    def start_small(self, model=None, **options):
        start(self, model, **{**options, "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128})

    monkeypatch.setattr(LLM, "__init__", start_small)
    registered = {operation: dict(operation.implementations) for operation in operations().values()}
    yield tmp_path
    for operation, implementations in registered.items():  # a page may register one of its own
        operation.implementations.clear()
        operation.implementations.update(implementations)


@every_page
def test_the_blocks_of_a_page_run_in_their_order(page, place):
    code = [] if is_generated(page) else blocks(page)
    namespace = {"__name__": page.stem}
    for block in code:
        if block.language in ("python", "sh") and block.not_run is None:
            run_block(block, namespace, verax)


@every_page
def test_every_command_of_a_page_exists(page):
    for block in blocks(page):
        lines = commands(block.text) if block.language == "sh" else []
        if block.language == "console":
            lines = [line for line in block.text.splitlines() if line.startswith("$ ")]
        for line in lines:
            check_command(line)
    for line in inline_commands(page):
        check_command(line, whole=False)


def write(folder, text):
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def only(folder, text) -> Block:
    (block,) = blocks(write(folder, text))
    return block


def test_a_block_is_found_with_its_line_and_its_reason(tmp_path):
    block = only(tmp_path, "text\n\n<!-- not run: needs a GPU -->\n\n```sh\nnvidia-smi\n```\n")
    assert (block.line, block.language, block.text, block.not_run) == (6, "sh", "nvidia-smi", "needs a GPU")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run -->\n```sh\nls\n```\n", "unknown marker"),
        ("<!-- not run:   -->\n```sh\nls\n```\n", "unknown marker"),
        ("<!-- skipped: slow -->\n```sh\nls\n```\n", "unknown marker"),
        ("<!-- not run: an output -->\n```text\nls\n```\n", "needs no marker"),
        ("```\nls\n```\n", "a block of ''"),
        ("```bash\nls\n```\n", "a block of 'bash'"),
        ("```sh\nls\n", "has no end"),
    ],
)
def test_a_block_that_is_neither_run_nor_excused_is_an_error(tmp_path, text, message):
    with pytest.raises(MarkdownError, match=message):
        blocks(write(tmp_path, text))


def test_a_wrong_python_block_fails_with_the_line_of_the_page(tmp_path):
    block = only(tmp_path, "# Page\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as error:
        run_block(block, {}, verax)
    assert error.traceback[-1].lineno + 1 == 4


def test_python_blocks_see_the_names_of_earlier_ones(tmp_path):
    namespace = {}
    for block in blocks(write(tmp_path, "```python\nx = 1\n```\n```python\ny = x + 1\n```\n")):
        run_block(block, namespace, verax)
    assert namespace["y"] == 2


@pytest.mark.parametrize("command", ["false", "verax embed --no-such-option", "verax --version | grep nothing"])
def test_a_wrong_shell_block_fails(tmp_path, command):
    with pytest.raises(MarkdownError, match="ended with status"):
        run_block(only(tmp_path, f"```sh\n{command}\n```\n"), {}, verax)


def test_a_shell_block_joins_continued_lines_and_skips_comments(tmp_path):
    block = only(tmp_path, "```sh\n# first\nverax generate \\\n    --json\n\nls  # second\n```\n")
    assert commands(block.text) == ["verax generate --json", "ls  # second"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verax generate --no-such-option", "No such option"),
        ("verax no-such-command", "No such command"),
        ("JAX_PLATFORMS=cpu verax bench delta --nothing", "No such option"),
        ("verax bench text --runs many", "valid integer"),
        ("verax video --prompt a --no-such-option | cat", "No such option"),
        ("make nothing", "no make verb"),
        ("pip install -e '.[video,nothing]'", "no extra"),
        ("python examples/nothing.py", "no script"),
    ],
)
def test_a_command_that_does_not_exist_is_an_error(command, message):
    with pytest.raises(MarkdownError, match=message):
        check_command(command)


def test_a_command_in_prose_may_leave_arguments_out_but_its_options_exist():
    check_command("verax quantize", whole=False)
    with pytest.raises(MarkdownError, match="Missing"):
        check_command("verax quantize")
    with pytest.raises(MarkdownError, match="No such option"):
        check_command("verax quantize --nothing", whole=False)


def test_code_spans_of_the_prose_are_found_outside_of_blocks(tmp_path):
    page = write(tmp_path, "A `verax bench\ntext` and `LLM`.\n```sh\nverax info\n```\nThen `verax info`.\n")
    assert inline_commands(page) == ["verax bench text", "verax info"]
