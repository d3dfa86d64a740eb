"""Which folder of the package may import which: arrows point downwards, and no files import each other in a circle."""

from pathlib import Path

import pytest

from tests.support.imports import circle, forbidden, import_graph, upwards

SOURCES = Path(__file__).parents[1] / "src" / "verax"

LEAVES = {"errors", "_compat", "_optional", "fields", "files"}
"""Leaves: errors, differences of JAX's versions, optional packages, values and files that are read and written."""

ENGINE = LEAVES | {"builtin", "progress", "_buckets", "ops", "models", "checkpoint", "loading"}
"""Folders that an engine stands on. An engine names no other engine, except for what its row adds."""

PROOF = ENGINE | {"nn", "plots", "page", "machine", "shapes", "text", "video", "embed"}
"""Folders that the proofs, the plan and the training look at, all from outside."""

MAY_IMPORT: dict[str, set[str]] = {
    # Leaves: whatever imports them gets nothing else with them.
    "errors": set(),
    "_optional": {"errors"},
    "files": {"errors"},
    "_compat": {"errors", "files"},
    "fields": {"errors", "files"},
    "_buckets": {"errors"},
    "progress": {"errors"},
    "builtin": {"errors"},
    "shapes": set(),
    "page": set(),
    "published": {"errors", "files"},
    "plots": {"errors", "_optional", "files"},
    "machine": {"errors", "_compat"},
    # Arrays in, arrays out: an operation can be used without the rest of the package. Rope reads its configuration.
    "ops": {"errors", "fields", "files"},
    "nn": {"errors", "ops"},
    # A model is a function of arrays and a configuration. It does not depend on where its weights come from.
    "models": {"errors", "fields", "files", "nn", "ops"},
    # Files to arrays, for any model: quantised weights are a type of ops.
    "checkpoint": LEAVES | {"ops"},
    # The one place where a checkpoint meets a model.
    "loading": LEAVES | {"builtin", "progress", "ops", "nn", "models", "checkpoint"},
    # Engines. Text joins projections of its model (`nn`) and knows the processor that its compiled programs belong to
    # (`machine`). Video divides weights as the layers of its models declare it. An encoder pools the states of its own;
    # its sentences go through the tokenizer of text.
    "text": ENGINE | {"nn", "machine"},
    "video": ENGINE | {"nn"},
    "embed": ENGINE | {"nn", "text.tokenizer"},
    # Files of work for encoders and video models; the server's batches go on where they stopped by the same files.
    "batch": ENGINE | {"embed", "video"},
    # HTTP over the engines.
    "serve": ENGINE | {"text", "embed", "video", "batch"},
    # Actors and deployments over the engines and their server, for those who run Ray.
    "ray": ENGINE | {"text", "embed", "video", "serve"},
    "train": PROOF,
    "compare": PROOF,
    # It sees programs and shapes only.
    "plan": PROOF,
    # The public names.
    "verax": {"checkpoint", "compare", "models", "ops", "embed", "ray", "text", "video", "errors"},
    # Benchmarks time what `compare` traces, score what `train` makes and simulate what `plan` counts; none of these
    # imports a benchmark.
    "bench": PROOF | {"compare", "plan", "train", "verax"},
    "cli": PROOF | {"published", "compare", "plan", "train", "verax", "bench", "ray", "batch", "serve"},
    "__main__": {"cli"},
}
"""Folders, files and single modules that each folder may import. A row names rows above it only."""


@pytest.fixture(scope="module")
def graph():
    return import_graph(SOURCES)


def test_every_folder_imports_only_what_its_row_allows(graph):
    assert forbidden(graph, MAY_IMPORT) == []


def test_no_files_import_each_other_in_a_circle(graph):
    assert circle(graph) == []


def test_no_row_of_the_table_points_upwards():
    assert upwards(MAY_IMPORT) == []


@pytest.fixture
def planted(tmp_path):
    """Makes a package `house` of one line a file, and reads its imports."""

    def make(files):
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "house" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return import_graph(tmp_path / "house")

    return make


@pytest.mark.parametrize(
    "line",
    [
        "import house.text.llm",
        "from house.text import llm",
        "from house.text.llm import LLM",
        "from ..text import llm",
        "from ..text.llm import LLM",
        "def late():\n    from house.text import llm",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.text import llm",
        "import importlib\nllm = importlib.import_module('house.text.llm')",
    ],
)
def test_an_import_that_is_not_in_the_table_is_found_however_it_is_written(planted, line):
    graph = planted({"models/__init__.py": "", "models/wan.py": line, "text/__init__.py": "", "text/llm.py": ""})
    allowed = {"errors": [], "models": ["errors"], "text": ["models"], "house": []}
    assert forbidden(graph, allowed) == ["house.models.wan imports house.text.llm, but models may import errors"]


def test_a_row_may_name_a_single_module_of_a_folder(planted):
    graph = planted({"embed.py": "from house.text import tokenizer, llm", "text/llm.py": "", "text/tokenizer.py": ""})
    allowed = {"text": [], "embed": ["text.tokenizer"], "house": []}
    assert forbidden(graph, allowed) == ["house.embed imports house.text.llm, but embed may import text.tokenizer"]


def test_a_folder_without_a_row_is_found(planted):
    assert forbidden(planted({"plan/run.py": ""}), {"house": []}) == ["house.plan.run: plan has no row in the table"]


def test_a_circle_of_files_is_found_inside_a_folder_and_across_folders(planted):
    graph = planted({"a/x.py": "from house.b import y", "b/y.py": "def f():\n    from house.a.x import g"})
    assert sorted(set(circle(graph))) == ["house.a.x", "house.b.y"]
    assert circle(graph | {"house.b.y": set()}) == []


def test_a_row_that_points_upwards_is_found():
    assert upwards({"ops": ["models"], "models": ["ops"]}) == [
        "ops may import models, which does not stand above it in the table"
    ]
