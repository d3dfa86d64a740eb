"""Takes the pictures of the page for the documentation: `python docs/screenshots.py`.

It starts `verax serve` with the built-in models, works through each tab in Chromium, and writes
docs/screenshots/TAB-{light,dark,narrow}.png. It needs the extras `server`, `video` and `test`, and Chromium.
"""

import io
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLOURS = 128
"""Colours of a picture, which keep it well below 100 KB."""

WIDE = {"width": 1120, "height": 700}
NARROW = {"width": 360, "height": 640}
VARIANTS = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "narrow": (NARROW, "light")}


def main() -> None:
    """Start the server, and take the pictures of every tab."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    reports = ROOT / "benchmarks" / "results"
    command = [sys.executable, "-m", "verax", "serve", "--port", str(port), "--reports", str(reports)]
    server = subprocess.Popen(command)
    try:
        while not healthy(address):
            assert server.poll() is None, "the server has ended"
            time.sleep(0.2)
        FOLDER.mkdir(exist_ok=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            for name, (viewport, scheme) in VARIANTS.items():
                take(browser, address, name, viewport, scheme)
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


def take(browser: Browser, address: str, variant: str, viewport: dict, scheme: str) -> None:
    """Work through the tabs in a fresh browser profile, and write a picture of each."""
    context = browser.new_context(viewport=viewport, color_scheme=scheme, device_scale_factor=1)
    page = context.new_page()
    page.goto(address)
    for tab, fill in TABS.items():
        page.get_by_role("navigation").get_by_role("link", name=tab).click()
        fill(page)
        page.mouse.move(0, 0)
        page.wait_for_timeout(4000 if tab != "Reports" else 500)  # until notices are gone
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
        picture.save(FOLDER / f"{tab.lower()}-{variant}.png", optimize=True)
    context.close()


def chat(page: Page) -> None:
    """Two questions that the built-in model can answer."""
    for question in ("What is 47 + 38?", "Tell me a story about a brave fox."):
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Send").wait_for()


def clips(page: Page) -> None:
    """Two clips that the built-in model can draw."""
    for prompt in (
        "a red circle floats left over a blue to green gradient",
        "a cyan ring drifts down across a background from black to white",
    ):
        page.get_by_label("Prompt").fill(prompt)
        page.get_by_role("button", name="Create the clip").click()
        page.get_by_role("article", name=prompt).first.get_by_label("Download").wait_for()


def sentences(page: Page) -> None:
    """The sentences that are there."""
    page.get_by_role("button", name="Compare").click()
    page.locator(".matrix").wait_for()


def server(page: Page) -> None:
    """A few answers, so that the charts have something to show."""
    page.evaluate(
        """async () => {
          for (let round = 0; round < 6; round++) {
            await Promise.all([...Array(8)].map((_, index) => fetch("v1/completions", {
              method: "POST",
              headers: { "Content-Type": "application/json" },
              body: JSON.stringify({ prompt: `Story ${index}.`, max_tokens: 60 + 40 * (round % 3), temperature: 0.7 }),
            }).then((answer) => answer.json())));
            await new Promise((resolve) => setTimeout(resolve, 1500));
          }
        }"""
    )


def reports(page: Page) -> None:
    """One report of a benchmark."""
    page.get_by_label("Filter the reports").fill("text")
    page.locator(".files button", has_text=".md").first.click()
    page.locator(".report table").first.wait_for()


TABS = {"Chat": chat, "Clips": clips, "Sentences": sentences, "Server": server, "Reports": reports}

if __name__ == "__main__":
    main()
