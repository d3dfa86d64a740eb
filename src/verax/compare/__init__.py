"""Two implementations of one model, held against each other layer by layer."""

from verax.compare.align import Alignment, align
from verax.compare.case import Case, Side
from verax.compare.comparison import Comparison, Row
from verax.compare.jax_side import gradients_jax, run_compiled, trace_jax
from verax.compare.report import show, write
from verax.compare.run import compare, compare_case
from verax.compare.torch_side import gradients_torch, trace_torch
from verax.compare.trace import Trace, Watch, tap

__all__ = [
    "Alignment",
    "Case",
    "Comparison",
    "Row",
    "Side",
    "Trace",
    "Watch",
    "align",
    "compare",
    "compare_case",
    "gradients_jax",
    "gradients_torch",
    "run_compiled",
    "show",
    "tap",
    "trace_jax",
    "trace_torch",
    "write",
]
