"""The delta rule and its family: linear attention whose state replaces what it held for a key (docs/delta.md).

One recurrence (`DeltaInputs`) with a reference, a chunked implementation and a decode step; the published rules are its
cases.
"""

from verax.ops.delta import _chunk  # noqa: F401  (it registers its implementation)
from verax.ops.delta._inputs import DeltaInputs
from verax.ops.delta._recurrence import delta_recurrence, delta_slot_recurrence
from verax.ops.delta._rules import (
    DeltaOptions,
    comba,
    delta_rule,
    dplr_delta_rule,
    gated_delta_product,
    gated_delta_rule,
    kda,
    sequence_parallel,
)
from verax.ops.delta._scan import delta_chunk_scan, delta_chunk_scan_backward

__all__ = [
    "DeltaInputs",
    "DeltaOptions",
    "comba",
    "delta_chunk_scan",
    "delta_chunk_scan_backward",
    "delta_recurrence",
    "delta_rule",
    "delta_slot_recurrence",
    "dplr_delta_rule",
    "gated_delta_product",
    "gated_delta_rule",
    "kda",
    "sequence_parallel",
]
