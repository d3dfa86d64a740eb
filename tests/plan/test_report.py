"""A plan as tables and as a page."""

import io
import json
import re

import pytest
from rich.console import Console

from tests.support.tiny import tiny_config
from verax.plan.compiled.compiler import Compiled
from verax.plan.compiled.hlo import Findings
from verax.plan.devices import find_device
from verax.plan.model import Described
from verax.plan.report import show, write
from verax.plan.text import plan_text

FINDINGS = Findings(
    {"all-reduce": 5, "all-gather": 1}, host_transfers=0, donated_copies=2, argument_copies=0, loops_with_products=1
)


@pytest.fixture(scope="module")
def found():
    return plan_text(Described("a <model>", "text", tiny_config()), find_device("v5e"), devices=2, context=64)


def shown(plan):
    console = Console(width=120, record=True, file=io.StringIO())
    show(plan, console)
    return console.export_text()


def test_the_tables_say_that_times_are_bounds(found):
    text = shown(found)
    assert "a <model> on 2 x v5e" in text
    assert re.search(r"decode step: 8 sequences of 64 tokens +1 .* ms +\w+", text)
    assert "Times are bounds, not predictions" in text
    assert re.search(r"At most [\d,.]+ tokens/s of all sequences", text)
    assert "per device" in text
    assert text.rstrip().endswith("fits")
    assert shown({**found, "fits": False}).rstrip().endswith("does not fit")


def test_what_could_not_be_counted_is_named(found):
    program = {**found["programs"][0], "uncounted": ["ffi_call"]}
    assert "Not counted: ffi_call." in shown({**found, "programs": [program]})


def test_the_page_has_two_pictures_and_needs_no_network(found, tmp_path):
    paths = write(found, tmp_path / "new")
    assert [path.name for path in paths] == ["plan.json", "plan.html"]
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(found))
    page = paths[1].read_text()
    assert page.count("<svg") == 2
    assert "a &lt;model&gt;" in page
    for outside in ('src="', 'href="http', "@import", "<script", "<link"):
        assert outside not in page


def test_a_compilation_has_its_bytes_its_counts_and_its_refusals(found):
    compiled = Compiled("decode step", 91.0, 2**30, 10**6, 10**6, 10**8, 10**7, 2**30 + 10**8, None, FINDINGS)
    refused = Compiled("mixed step", 9.0, needed=29 * 2**30, refused="RESOURCE_EXHAUSTED: no room")
    rows = [compiled.as_dict(), refused.as_dict()]
    report = {"jax": "0.10.2", "compiler": "libtpu 0.0.42.1", "devices": 2, "depth": 3, "programs": rows, "fits": False}
    text = shown({**found, "compiled": report, "fits": False})
    assert re.search(r"decode step +1.07 GB +1.00 MB +1.00 MB +100.00 MB", text)
    assert re.search(r"decode step +5 all-reduce, 1 all-gather +0 +2 +0 +1", text)
    assert re.search(r"mixed step +- +- +- +- +- +31.14 GB", text)
    assert "Refused: mixed step: RESOURCE_EXHAUSTED: no room" in text
    assert "Compiled by libtpu 0.0.42.1 with JAX 0.10.2; nothing ran." in text
    assert "Compiled with 3 layers only" in text
