"""Writes the matrix of docs/models.md out of what tests ran: `python docs/models_matrix.py FILES`.

Files are pytest's own, `pytest --junitxml=build/models.xml tests/parity/test_causal_lm.py ...`. A cell is the number of
cases of a family that passed; each case is a test of this repository, and its name says what was compared with what.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of the matrix -->\n"

COLUMNS = {
    "float32 logits": r"test_float32_logits_match_transformers\[([^]]+)\]",
    "greedy tokens": r"test_greedy_tokens(?:_of_a_batch)?_match_transformers\[([^]]+)\]",
    "bfloat16 error": r"test_bfloat16_is_no_further_from_float32_than_transformers_bfloat16\[([^]]+)\]",
    "int8": r"test_logprobs_of_the_engine_are_close_to_transformers\[([^]]+?)-\d+-quantization=int8",
    "GGUF, floats": r"test_logits_match_the_dequantised_weights_in_transformers\[(.+)-F32\]",
    "GGUF, quantised": r"test_logits_match_the_dequantised_weights_in_transformers\[(.+)-(?!F32)\w+\]",
    "mesh": r"test_tokens_equal_one_device\[([^]]+)\]",
}
"""Pattern of the names of each column's tests, with a group for the family."""

SPECULATION = {
    "qwen35": r"speculative.*test_answers_equal_an_engine_without_drafts\[hybrid-",
    "qwen3": r"speculative.*test_answers_equal_an_engine_without_drafts",
}
"""Patterns of tests whose names have no family, by the family that they run; the first that fits counts."""

FAMILIES = {
    **{"Qwen3": "qwen3", "Qwen2": "qwen2", "Llama": "llama", "Mistral": "mistral", "Ministral": "ministral"},
    **{"Ministral 3": "ministral3", "Gemma 3": "gemma3", "Gemma 2": "gemma2", "Gemma 4": "gemma4", "Phi-3": "phi3"},
    **{"SmolLM3": "smollm3", "OLMo 2": "olmo2", "OLMo 3": "olmo3", "Granite": "granite", "Granite 4": "granite4"},
    **{"Qwen2-MoE": "qwen2moe", "Qwen3-MoE": "qwen3moe", "Qwen3.5": "qwen35", "Qwen3.5, experts": "qwen35moe"},
    **{"Qwen3-Next": "qwen3next", "gpt-oss": "gptoss"},
}
"""Families, and the beginnings of their names in tests, without punctuation. The longest that fits counts."""

OTHER_NAMES = {"mistral3": "ministral3", "wide": "qwen3", "gqa": "qwen3", "twokeyheads": "qwen35"}
"""Names of tests' families that begin otherwise."""


def family_of(name: str) -> str | None:
    """Row of a test's family; None for one that has none."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for other, own in OTHER_NAMES.items():
        plain = own + plain.removeprefix(other) if plain.startswith(other) else plain
    fitting = [label for label, beginning in FAMILIES.items() if plain.startswith(beginning)]
    return max(fitting, key=lambda label: len(FAMILIES[label]), default=None)


def place(name: str) -> tuple[str, str] | None:
    """Family and column of a test by its whole name; None for a test of neither."""
    for family, pattern in SPECULATION.items():
        if re.search(pattern, name):
            return family_of(family) or "", "speculation"
    for column, pattern in COLUMNS.items():
        if found := re.search(pattern, name):
            family = family_of(next(filter(None, found.groups())))
            return None if family is None else (family, column)
    return None


def table(paths: list[Path]) -> str:
    """The matrix of pytest's files, with the processors and the days of the runs."""
    passed, failed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    results, runs = dict[str, tuple[tuple[str, str], bool]](), set[str]()
    for path in paths:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
            runs.add(f"{properties.get('processor', 'an unknown processor')} on {str(suite.get('timestamp'))[:10]}")
            for case in suite.iter("testcase"):
                name = f"{case.get('classname')}::{case.get('name')}"
                if (cell := place(name)) is not None and case.find("skipped") is None:
                    wrong = case.find("failure") is not None or case.find("error") is not None
                    results[name] = cell, wrong  # of a test in several files, the last one's counts
    for cell, wrong in results.values():
        (failed if wrong else passed)[cell] += 1
    columns = [column for column in (*COLUMNS, "speculation") if any(cell[1] == column for cell in (*passed, *failed))]
    rows = [label for label in FAMILIES if any(cell[0] == label for cell in (*passed, *failed))]
    lines = [f"| family | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in rows:
        cells = [
            f"{passed[row, column]}, {failed[row, column]} failed" if failed[row, column] else passed[row, column] or ""
            for column in columns
        ]
        lines.append(f"| {row} | {' | '.join(map(str, cells))} |")
    heading = f"Numbers of cases that passed, with random weights; {' and '.join(sorted(runs))}:"
    return "\n".join([heading, "", *lines, ""])


def main() -> None:
    """Write the matrix into the page."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python docs/models_matrix.py FILES, of pytest --junitxml")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table([Path(name) for name in sys.argv[1:]]) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
