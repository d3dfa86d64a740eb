"""The tables of `docs/accelerators.md`."""

from tests.targets.cases import Case
from tests.targets.compile import Compiled
from tests.targets.hlo import Findings
from tests.targets.kernels import KERNELS
from tests.targets.resources import Resources, longest_stretch
from tests.targets.table import PAGE, TABLES, marks, render, render_kernels, replaced

CASE = Case("qwen3", "v5e", 4, 2, {})


def test_a_program_has_its_bytes_and_one_that_was_refused_what_it_needs():
    fits = Compiled("decode", 24.4, 2**30, temporaries=2**29, findings=Findings({"all-reduce": 5}, 0, 0, 0, 1))
    refused = Compiled("mixed", 9.0, needed=29 * 2**30, refused="RESOURCE_EXHAUSTED")
    table = render({CASE: [fits, refused]}).splitlines()
    assert table[2] == "| qwen3, 2 | decode | 4 x v5e | 1.00 GiB | 0.50 GiB | 0.00 GiB | 5 all-reduce | 24 s |"
    assert table[3] == "| qwen3, 2 | mixed | 4 x v5e | refused | needs 29.00 GiB |  |  | 9 s |"


def test_a_kernel_has_its_resources_and_its_prediction():
    on_tpu, *_, on_gpu = KERNELS
    rows = render_kernels({on_tpu: Resources(None, 4 << 20, 36, 1068), on_gpu: Resources(72, 14336, 0)}).splitlines()
    assert "| v5e, pallas |  | 4,096 KiB | 36 registers | 1.07 | 537.9 | 657 us |" in rows[2]
    assert "| h100, triton | 72 | 14 KiB | 0 B |" in rows[3]


def test_a_tpus_longest_stretch_is_that_between_two_marks():
    bundles = [
        "     0   :  { %1 = vadd }",
        "  0x13 LB: > { %2 }",
        "  0x15   : > { %3 = sbr.rel (%p) }",
        "  0x2a PF: > { %4 }",
    ]
    assert longest_stretch(bundles) == 0x2A - 0x15


def test_each_table_is_put_between_its_marks_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        begin, end = marks(name)
        page = f"before\n{begin}\nold\n{end}\nafter\n"
        assert replaced(page, name, "new") == f"before\n{begin}\nnew\n{end}\nafter\n"
        assert text.count(begin) == text.count(end) == 1
