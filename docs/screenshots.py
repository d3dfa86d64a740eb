"""Takes the pictures of the page for the documentation: `python docs/screenshots.py`.

It starts `verax serve` with the built-in models, works through each tab in Chromium, and writes docs/screenshots. It
needs the extras `server`, `video` and `test`, and Chromium.
"""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MAX_BYTES = 70_000
"""Size of a picture above which it is saved with loss."""

GAP = 16
"""Pixels between the parts of a picture that shows several tabs."""

WIDE = {"width": 1120, "height": 920}
NARROW = {"width": 360, "height": 640}
VARIANTS = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "narrow": (NARROW, "light")}

SETTLED = 3500
"""Milliseconds after which a tab has lost its notices."""

TOOL_CONVERSATION = [
    ("user", "How warm is it in Paris, and what is that in Fahrenheit?", {}),
    (
        "assistant",
        "",
        {
            "reasoning": "The weather changes: I look it up.",
            "toolCalls": [{"id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'}],
        },
    ),
    ("tool", '{"celsius": 18, "sky": "clear"}', {"toolCallId": "call_1"}),
    (
        "assistant",
        """It is **18 °C** in Paris, with a clear sky.

| scale | temperature |
|:--|--:|
| Celsius | 18.0 |
| Fahrenheit | 64.4 |

```python
def fahrenheit(celsius: float) -> float:
    return 9 / 5 * celsius + 32  # 18 °C are 64.4 °F
```
""",
        {},
    ),
]
"""A conversation with a tool, written by hand: the built-in model has no tools. Role, text, other fields."""


def main() -> None:
    """Start the server, and take the pictures."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    reports = ROOT / "benchmarks" / "results"
    command = [sys.executable, "-m", "verax", "serve", "--port", str(port), "--reports", str(reports)]
    command += ["--max-num-seqs", "8", "--max-model-len", "512"]
    server = subprocess.Popen(command)
    try:
        while not healthy(address):
            assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            pages = {}
            for name, (viewport, scheme) in VARIANTS.items():
                pages[name] = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
                pages[name].goto(address)
            write({name: take(name, list(pages.values())) for name in PICTURES}, list(pages))
            browser.close()
    finally:
        server.terminate()
        server.wait()


def healthy(address: str) -> bool:
    """True once the server answers."""
    try:
        with urllib.request.urlopen(address + "health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def take(name: str, pages: list[Page]) -> list[Image.Image]:
    """One tab in each variant."""
    tab, fill = PICTURES[name]
    for page in pages:
        navigate(page, tab)
        page.mouse.move(0, 0)
    fill(pages)
    return [Image.open(io.BytesIO(page.screenshot())).convert("RGB") for page in pages]


def navigate(page: Page, tab: str) -> None:
    """Open a tab."""
    page.get_by_role("navigation").get_by_role("link", name=tab).click()


def write(pictures: dict[str, list[Image.Image]], variants: list[str]) -> None:
    """A file for each tab in light, one for all in dark, one for all on a narrow screen."""
    FOLDER.mkdir(exist_ok=True)
    for name, shots in pictures.items():
        save(name, shots[variants.index("light")])
    dark = [shots[variants.index("dark")] for shots in pictures.values()]
    half = [shot.resize((shot.width // 2, shot.height // 2), Image.Resampling.LANCZOS) for shot in dark]
    save("dark", grid(half, 2))
    save("narrow", grid([shots[variants.index("narrow")] for shots in pictures.values()], 3))


def grid(shots: list[Image.Image], columns: int) -> Image.Image:
    """Pictures of one size in rows."""
    width, height = shots[0].width + GAP, shots[0].height + GAP
    rows = -(-len(shots) // columns)
    sheet = Image.new("RGB", (columns * width - GAP, rows * height - GAP), "#808080")
    for index, shot in enumerate(shots):
        sheet.paste(shot, (index % columns * width, index // columns * height))
    return sheet


def save(name: str, picture: Image.Image) -> None:
    """Write a picture, without loss if it is small enough then."""
    for options in ({"lossless": True}, {"quality": 85}, {"quality": 65}):
        file = io.BytesIO()
        picture.save(file, "WEBP", method=6, **options)
        if len(file.getvalue()) <= MAX_BYTES:
            break
    (FOLDER / f"{name}.webp").write_bytes(file.getvalue())


def ask(page: Page, question: str) -> None:
    """Wait for the answer to a question."""
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Send").wait_for()


def chat(pages: list[Page]) -> None:
    """Two questions that the built-in model can answer, and the tokens of the second answer."""
    for page in pages:
        ask(page, "What is 47 + 38?")
        ask(page, "Tell me a story about a brave fox.")
        answer = page.get_by_role("article", name="Answer").last
        answer.get_by_role("button", name="Token probabilities").click()
        answer.locator(".token", has_text="shy").first.hover()


def tools(pages: list[Page]) -> None:
    """An imported conversation with a tool."""
    ids = [f"m{number:032x}" for number in range(1, len(TOOL_CONVERSATION) + 1)]
    nodes = {
        id: {"id": id, "parent": parent, "role": role, "content": content, **more}
        for id, parent, (role, content, more) in zip(ids, [None, *ids], TOOL_CONVERSATION, strict=False)
    }
    title, now = "The weather in Paris", time.time() * 1000
    conversation = {"id": "m" + "f" * 32, "title": title, "created": now, "updated": now, "nodes": nodes}
    file = {"format": "verax-conversations", "version": 1, "conversations": [conversation | {"leaf": ids[-1]}]}
    for page in pages:
        page.get_by_label("File to import").set_input_files(
            {"name": "weather.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
        )
        opener = page.get_by_role("button", name="Conversations")
        if opener.get_attribute("aria-expanded") == "false":
            opener.click()
        page.get_by_role("button", name=title, exact=True).click()
        page.locator(".code").wait_for()
        page.mouse.move(0, 0)
    pages[0].wait_for_timeout(SETTLED)


def clips(pages: list[Page]) -> None:
    """Clips that the built-in model can draw: some are there, one is being made, others wait."""
    page = pages[0]
    prompts = (
        "a red circle floats left over a blue to green gradient",
        "a cyan ring drifts down across a background from black to white",
        "a yellow square floats up over a purple to cyan gradient",
    )
    for prompt in prompts:
        create(page, prompt)
        page.get_by_role("article", name=prompt).first.get_by_label("Download").wait_for()
    page.get_by_label("Steps").fill("250")
    for _ in range(3):
        create(page, "a green triangle drifts right across a background from white to blue")
    for other in pages:
        navigate(other, "Chat")
        navigate(other, "Clips")
        other.get_by_text(re.compile("^[1-9]+%$")).wait_for()
        other.get_by_role("article", name=prompts[0]).locator("img").wait_for()
    page.locator(".notice").first.wait_for(state="detached")


def create(page: Page, prompt: str) -> None:
    """Put a clip into the queue."""
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Create the clip").click()
    page.get_by_role("article", name=prompt).first.wait_for()


def sentences(pages: list[Page]) -> None:
    """The sentences that are there."""
    for page in pages:
        page.get_by_role("button", name="Compare").click()
        page.mouse.move(0, 0)
        page.locator(".matrix").wait_for()


def server(pages: list[Page]) -> None:
    """A load that grows, so that the charts have something to show."""
    pages[0].evaluate(
        """async () => {
          const story = (animal, tokens) => fetch("v1/chat/completions", {
            method: "POST",
            headers: { "Content-Type": "application/json" },
            body: JSON.stringify({ messages: [{ role: "user", content: `Tell me a story about a ${animal}.` }],
              max_tokens: tokens, temperature: 0.7, ignore_eos: true }),
          }).then((answer) => answer.json());
          const animals = ["brave fox", "shy cat", "small bird", "happy dog", "old frog", "kind bear"];
          for (const parallel of [1, 3, 6, 2, 12, 4]) {
            const end = Date.now() + 7000;
            await Promise.all([...Array(parallel)].map(async (_, index) => {
              while (Date.now() < end) await story(animals[index % 6], 120 + 40 * (index % 4));
            }));
          }
        }"""
    )
    pages[0].wait_for_timeout(2500)


def reports(pages: list[Page]) -> None:
    """One report of a benchmark."""
    for page in pages:
        page.get_by_label("Filter the reports").fill("text")
        page.locator(".files button", has_text=".md").first.click()
        page.locator(".report table").first.wait_for()
        page.mouse.move(0, 0)


PICTURES = {
    "chat": ("Chat", chat),
    "tools": ("Chat", tools),
    "sentences": ("Sentences", sentences),
    "server": ("Server", server),
    "reports": ("Reports", reports),
    "clips": ("Clips", clips),
}
"""Tab of each picture, and what is done in it."""

if __name__ == "__main__":
    main()
