"""The code of README.md, CONTRIBUTING.md and docs/ runs, or says why it does not."""

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.markdown import MarkdownError, blocks, inline_commands, is_generated
from tests.support.markdown_run import check_command, commands, run_block
from verax import cli
from verax.ops import operations
from verax.text.engine.llm import LLM
from verax.video.pipeline import VideoPipeline

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
    """A folder to run a page in, engines of few programs, and clips of few steps: all of them take minutes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    start = LLM.__init__

    def start_small(self, model=None, **options):
        start(self, model, **{**options, "max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128})

    monkeypatch.setattr(LLM, "__init__", start_small)
    resolve = VideoPipeline.resolve

    def shortened(request):
        return replace(request, num_inference_steps=2, half_size_steps=min(1, request.half_size_steps))

    monkeypatch.setattr(VideoPipeline, "resolve", lambda pipe, request: resolve(pipe, shortened(request)))
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


def test_a_block_that_fails_and_a_command_that_does_not_exist_are_errors(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\n```\n", encoding="utf-8")
    with pytest.raises(MarkdownError, match="ended with status"):
        run_block(*blocks(page), {}, verax)
    with pytest.raises(MarkdownError, match="No such option"):
        check_command("verax generate --no-such-option")
