"""Findings in the text of optimised programs, in small programs as libtpu and XLA:GPU write them."""

import pytest

from tests.targets.hlo import read_module

HEAD = "HloModule jit_step, is_scheduled=true, {alias}entry_computation_layout={{(bf16[8192,1024])->bf16[2]}}\n"
DONATED = "input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}, may-alias) }, "
CACHE, SLOTS = "bf16[8192,1024]{1,0:T(8,128)(2,1)}", "s32[64]{0:T(128)}"


def module(*lines, alias=DONATED, others=""):
    """A program of three parameters, of which two are donated: a cache of 16 MB and slots."""
    parameters = [f"%p.0 = {CACHE} parameter(0)", f"%p.1 = {CACHE} parameter(1)", f"%p.2 = {SLOTS} parameter(2)"]
    body = "\n".join(f"  {line}" for line in (*parameters, *lines))
    return HEAD.format(alias=alias) + others + "\nENTRY %main.9 (p.0: bf16[8192,1024]) -> bf16[2] {\n" + body + "\n}\n"


def test_collectives_count_by_kind_and_a_started_one_counts_once():
    result = read_module(
        module(
            "%all-reduce.1 = f32[64]{0} all-reduce(%x), channel_id=1, to_apply=%add",
            "%all-reduce-start.2 = f32[64]{0} all-reduce-start(%x), channel_id=2, to_apply=%add",
            "%all-reduce-done.2 = f32[64]{0} all-reduce-done(%all-reduce-start.2)",
            "%g = (f32[16]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}",
        )
    )
    assert result.collectives == {"all-reduce": 2, "all-gather": 1}


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        (f"%copy.1 = {CACHE} copy(%p.1)", 1),
        (f"%copy.1 = {CACHE.replace('1,0:', '0,1:')} copy(%bitcast.4)", 1),
        (f"%copy.1 = ({CACHE}, {CACHE}, u32[]{{:S(2)}}) copy-start(%p.1)", 1),
        # To the memory of the chip, of an array that is not donated, of slots.
        (f"%copy.1 = ({CACHE[:-1]}S(1)}}, {CACHE}, u32[]{{:S(2)}}) copy-start(%p.1)", 0),
        ("%copy.1 = bf16[8192,512]{1,0} copy(%x)", 0),
        (f"%copy.1 = {SLOTS} copy(%p.2)", 0),
    ],
)
def test_copies_of_large_donated_buffers_in_the_devices_memory_count(line, copies):
    assert read_module(module(line)).donated_copies == copies
    assert read_module(module(line, alias="")).donated_copies == 0


TWICE = CACHE.replace("8192", "16384")
FUSED = f"\n%joined (a: bf16[]) -> bf16[] {{\n  %a = {CACHE} parameter(0)\n  %c = {TWICE} concatenate(%a, %a)\n}}\n"
FUSION = f"%c = {TWICE} fusion(%p.0), kind=kLoop, calls=%joined, metadata={{}}"


@pytest.mark.parametrize(
    ("line", "fused", "copies"),
    [
        (f"%c = {TWICE} concatenate(%p.0, %p.0), dimensions={{0}}", "", 1),
        (f"%b = {CACHE} bitcast(%p.0)\n  %c = {CACHE} transpose(%b), dimensions={{1,0}}", "", 1),
        (FUSION, FUSED, 1),
        (FUSION, FUSED.replace("concatenate", "add"), 0),
        # A donated array, a small part of one, and a result that is something else.
        (f"%c = {TWICE} concatenate(%p.1, %p.1), dimensions={{0}}", "", 0),
        ("%c = bf16[16,1024]{1,0} slice(%p.0), slice={[0:16], [0:1024]}", "", 0),
        (f"%c = {CACHE} add(%p.0, %p.0)", "", 0),
    ],
)
def test_results_that_hold_other_large_arguments_again_count(line, fused, copies):
    assert read_module(module(line, others=fused)).argument_copies == copies


@pytest.mark.parametrize(
    ("line", "transfers"),
    [
        ("%o = token[] outfeed(%x, %token)", 1),
        ("%s = (f32[4]{0}, u32[], token[]) send(%x, %token), channel_id=3, is_host_transfer=true", 1),
        ('%c = f32[4]{0} custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"', 1),
        (f"%copy = {CACHE[:-1]}S(5)}} copy(%p.0)", 1),
        ('%c = f32[4]{0} custom-call(%x), custom_call_target="TopK"', 0),
        ("%s = (f32[4]{0}, u32[], token[]) send(%x, %token), channel_id=3", 0),
    ],
)
def test_transfers_to_the_host_are_found(line, transfers):
    assert read_module(module(line)).host_transfers == transfers


@pytest.mark.parametrize(
    ("inner", "loops"),
    [
        ("%d = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 1),
        ('%d = (f32[4,4]{1,0}, s8[8]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"', 1),
        ("%d = f32[4,4]{1,0} add(%a, %b)", 0),
    ],
)
def test_a_loop_counts_if_it_or_a_fusion_in_it_multiplies(inner, loops):
    fused = "\n%fused (a: f32[4,4]) -> f32[4,4] {\n  " + inner + "\n}\n"
    body = "\n%body (t: s32[]) -> s32[] {\n  %f = f32[4,4]{1,0} fusion(%a), kind=kOutput, calls=%fused\n}\n"
    loop = "%w = (s32[], f32[4,4]{1,0}) while(%init), condition=%test, body=%body"
    assert read_module(module(loop, others=fused + body)).loops_with_products == loops
