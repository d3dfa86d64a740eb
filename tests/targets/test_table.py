"""The table of `docs/accelerators.md`."""

from tests.targets.cases import Case
from tests.targets.table import BEGIN, END, PAGE, render, replaced
from verax.plan.compiled.compiler import Compiled
from verax.plan.compiled.hlo import Findings

CASE = Case("qwen3", "v5e", 4, 2, {})


def test_a_program_has_its_bytes_and_one_that_was_refused_what_it_needs():
    fits = Compiled("decode", 24.4, 2**30, temporaries=2**29, findings=Findings({"all-reduce": 5}, 0, 0, 1))
    refused = Compiled("mixed", 9.0, needed=29 * 2**30, refused="RESOURCE_EXHAUSTED")
    programs = [fits.as_dict(), refused.as_dict()]
    table = render({CASE: {"jax": "1", "compiler": "libtpu 2", "depth": 2, "programs": programs}}).splitlines()
    assert table[2] == (
        "| qwen3, 2 | decode | 4 x v5e | libtpu 2, JAX 1 | 1.00 GiB | 0.50 GiB | 0.00 GiB | 5 all-reduce | 24 s |"
    )
    assert table[3] == "| qwen3, 2 | mixed | 4 x v5e | libtpu 2, JAX 1 | refused | needs 29.00 GiB |  |  | 9 s |"


def test_the_table_is_put_between_the_marks_of_the_page():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replaced(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
