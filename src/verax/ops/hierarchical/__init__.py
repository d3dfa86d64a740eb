"""LAM's hierarchical delta rule: as published, and the form without its faults (docs/lam.md says which is which)."""

from verax.ops.hierarchical._gated import HierarchicalState, hierarchical_gated_delta_rule
from verax.ops.hierarchical._inputs import HierarchicalInputs, Perceptron, ResonanceFlux
from verax.ops.hierarchical._published import hierarchical_delta_rule, local_delta_rule, orthogonality_loss

__all__ = [
    "HierarchicalInputs",
    "HierarchicalState",
    "Perceptron",
    "ResonanceFlux",
    "hierarchical_delta_rule",
    "hierarchical_gated_delta_rule",
    "local_delta_rule",
    "orthogonality_loss",
]
