"""`verax plan`: exit statuses, JSON, the page, and errors that name an option."""

import json
import sys

import pytest


def test_a_model_that_fits_ends_with_0_and_one_that_does_not_with_1(run):
    fits = run("plan", "text-builtin", "--device", "h100", "--json")
    assert (fits.status, json.loads(fits.out)["fits"]) == (0, True)
    small = run("plan", "text-builtin", "--device", "h100", "--memory", "0.001", "--json")
    assert (small.status, json.loads(small.out)["fits"]) == (1, False)


def test_the_dtype_of_the_cache_decides_its_bytes(run):
    command = ("plan", "text-builtin", "--device", "h100", "--json", "--kv-cache-dtype")
    sizes = {name: json.loads(run(*command, name).out)["memory"]["cache"] for name in ("bfloat16", "int8", "fp8")}
    assert sizes["fp8"] == sizes["int8"] < 0.6 * sizes["bfloat16"]


def test_the_tables_and_the_page(run, tmp_path):
    done = run("plan", "text-builtin", "--device", "v6e", "--output", str(tmp_path / "page"))
    assert done.status == 0
    assert "Times are bounds" in done.out
    assert (tmp_path / "page" / "plan.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text-builtin"], "Missing option '--device'"),
        (["text-builtin", "--device", "abacus"], "--device: 'abacus' is not in the table"),
        (["nowhere", "--device", "h100"], "nowhere: no such folder"),
        (["text-builtin", "--device", "h100", "--context", "99999"], "--context: expected 2 to"),
        (["text-builtin", "--device", "l40s", "--compile"], "--compile: there is no compiler for 'l40s'"),
        (["text-builtin", "--device", "h100", "--depth", "2"], "--depth: layers to compile; give --compile as well"),
        (["text-builtin", "--device", "h100", "--kv-cache-dtype", "int4"], "--kv-cache-dtype: expected one of"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(run, arguments, message):
    done = run("plan", *arguments)
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_missing_compiler_ends_with_2_and_the_extra_that_has_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    done = run("plan", "text-builtin", "--device", "v5e", "--compile")
    assert done.status == 2
    assert "libtpu is not installed: pip install 'verax[plan-tpu]'" in done.err
    assert done.err.count("\n") == 1
