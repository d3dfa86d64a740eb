"""Operations on arrays: a reference, which is the test oracle, and fast implementations under the same name."""

from verax.ops import delta, hierarchical, sampling
from verax.ops._dispatch import (
    Example,
    Implementation,
    Operation,
    chosen_implementations,
    operation,
    operations,
    skip_padding,
    tracing_context,
    use_earlier_programs,
    use_implementations,
    use_unfused,
)
from verax.ops._target import Target, target, use_target
from verax.ops.attention import attention
from verax.ops.block_quantized import BLOCK_KINDS, BlockQuantizedWeight
from verax.ops.conv import conv2d, conv3d
from verax.ops.delta import comba, delta_rule, dplr_delta_rule, gated_delta_product, gated_delta_rule, kda
from verax.ops.delta._inputs import StateSlots
from verax.ops.grouped import grouped_linear
from verax.ops.hierarchical import hierarchical_delta_rule, hierarchical_gated_delta_rule, local_delta_rule
from verax.ops.linear import gelu_mlp, linear, multi_linear, swiglu
from verax.ops.memory import materialize, update_rows
from verax.ops.packed import PackedWeight, pack_weight
from verax.ops.paged import Pages, QuantizedPages, new_pages, paged_attention, paged_decode_attention, write_pages
from verax.ops.pointwise import gelu, layer_norm, rms_norm
from verax.ops.quantized import QuantizedWeight, quantize
from verax.ops.rope import RotaryConfig, apply_rotary, norm_rotary, rotary_tables, swap_pairs
from verax.ops.short_convolution import short_convolution

# Fast implementations register themselves with the operations above.
import verax.ops.cpu.attention  # isort: skip
import verax.ops.cpu.conv  # isort: skip
import verax.ops.cpu.delta  # isort: skip
import verax.ops.cpu.linear  # isort: skip
import verax.ops.cpu.pointwise  # isort: skip
import verax.ops.cpu.sampling  # isort: skip
import verax.ops.gpu.attention  # isort: skip
import verax.ops.gpu.delta  # isort: skip
import verax.ops.gpu.linear  # isort: skip
import verax.ops.gpu.rope  # isort: skip
import verax.ops.tpu.attention  # isort: skip
import verax.ops.tpu.delta  # noqa: F401  # isort: skip

__all__ = [
    "BLOCK_KINDS",
    "BlockQuantizedWeight",
    "Example",
    "Implementation",
    "Operation",
    "PackedWeight",
    "Pages",
    "QuantizedPages",
    "QuantizedWeight",
    "RotaryConfig",
    "StateSlots",
    "Target",
    "apply_rotary",
    "attention",
    "chosen_implementations",
    "comba",
    "conv2d",
    "conv3d",
    "delta",
    "delta_rule",
    "dplr_delta_rule",
    "gated_delta_product",
    "gated_delta_rule",
    "gelu",
    "gelu_mlp",
    "grouped_linear",
    "hierarchical",
    "hierarchical_delta_rule",
    "hierarchical_gated_delta_rule",
    "kda",
    "layer_norm",
    "linear",
    "local_delta_rule",
    "materialize",
    "multi_linear",
    "new_pages",
    "norm_rotary",
    "operation",
    "operations",
    "pack_weight",
    "paged_attention",
    "paged_decode_attention",
    "quantize",
    "rms_norm",
    "rotary_tables",
    "sampling",
    "short_convolution",
    "skip_padding",
    "swap_pairs",
    "swiglu",
    "target",
    "tracing_context",
    "update_rows",
    "use_earlier_programs",
    "use_implementations",
    "use_target",
    "use_unfused",
    "write_pages",
]
