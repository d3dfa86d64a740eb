import pytest

from verax.checkpoint.video.names import Renaming

TABLE = Renaming(
    [
        ("blocks.{i}.norm3", "blocks.{i}.norm2"),
        ("blocks.{i}.modulation", "blocks.{i}.scale_shift_table"),
        ("layers.{i}.parts.{j}.qkv", ("h.{i}.{j}.q", "h.{i}.{j}.k", "h.{i}.{j}.v")),
        ("head", "proj_out"),
    ]
)


@pytest.mark.parametrize(
    ("original", "diffusers"),
    [
        ("blocks.12.norm3.weight", ("blocks.12.norm2.weight",)),
        ("blocks.0.modulation", ("blocks.0.scale_shift_table",)),
        ("layers.3.parts.4.qkv.bias", ("h.3.4.q.bias", "h.3.4.k.bias", "h.3.4.v.bias")),
        ("head.weight", ("proj_out.weight",)),
    ],
)
def test_names_go_both_ways(original, diffusers):
    assert TABLE.forward(original) == diffusers
    assert [TABLE.backward(name) for name in diffusers] == [(original, part) for part in range(len(diffusers))]


@pytest.mark.parametrize(
    "name", ["header.weight", "blocks.x.norm3.weight", "blocks.1.norm33.weight", "blocks.1.norm2.weight", ""]
)
def test_a_name_without_a_rule_has_no_other(name):
    assert TABLE.forward(name) is None
    assert TABLE.backward("x" + name) is None
