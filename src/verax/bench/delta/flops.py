"""Work of the delta rules by formula, in floating-point operations and bytes, for `verax bench delta`.

An addition and a multiplication are two operations. Only products are counted (matrices, convolutions, and the decay of
a state); norms, sigmoids and sums of other kinds are left out. A masked product counts whole, as every library computes
it. What an implementation does beyond the formula, to build an inverse or to pad, is its own loss and not counted, so
sides of a comparison that follow the same formula have the same count.

Letters: L tokens of all sequences together, H heads, K and V sizes of keys and values, C tokens of a chunk, D width.
"""

from __future__ import annotations

__all__ = [
    "encoder_flops",
    "factored_rule_flops",
    "gated_rule_bytes",
    "gated_rule_flops",
    "hierarchical_rule_flops",
    "layer_flops",
]


def gated_rule_flops(L: int, H: int, K: int, V: int, C: int | None = None, *, solved: bool = False) -> int:
    """The gated delta rule token by token (C None), or with chunks of C.

    Token by token: the state decays (KV), is read twice (2KV each) and written (2KV). By chunks, a token has its rows
    of `k k^T`, `q k^T` and `T k` (2CK each), of `T v` and of the product with what is written (2CV each), its share of
    the inverse T (C^2/3), and three products with a state (2KV each). Where what is written is `solved` for by
    substitution, there is no T: CV in place of the share of T and of both products with it.
    """
    if C is None:
        return L * H * 7 * K * V
    inner = 4 * C * K + 3 * C * V if solved else 6 * C * K + 4 * C * V + C * C // 3
    return L * H * (inner + 6 * K * V)


def gated_rule_bytes(L: int, N: int, H: int, K: int, V: int, *, size: int = 4) -> int:
    """q, k, v, beta and g read, outputs written, the float32 states of N sequences read and written, each once."""
    return L * H * size * (2 * K + 2 * V + 2) + 2 * 4 * N * H * K * V


def hierarchical_rule_flops(L: int, H: int, K: int, C: int, variant: str = "B") -> int:
    """LAM's published rule with chunks of C, flux networks included.

    A token has its rows of `k k^T`, `A A^T`, `T v` and `q k^T`; in variant B, of `T k`, of two products `P V`, of three
    products with each of two states, of the bilinear form and of its share in both flux networks; in variant C (at
    inference), of `P v` and `P U`.
    """
    rows = 2 * C * (3 * K + C)
    if variant == "C":
        return L * H * (rows + 4 * C * K)
    flux = 2 * K * K + 2 * K + _network(2 * K, K // 2)
    return L * H * (rows + 6 * C * K + 12 * K * K + flux) + L // C * H * _network(2 * K + 1, K // 2)


def factored_rule_flops(L: int, H: int, K: int, C: int, variant: str = "B", *, block: int = 64) -> int:
    """LAM's published rule without products of whole chunks (docs/lam.md): all implementations but the reference.

    Products with a triangle of rank K take squares of `block` tokens and, in a longer chunk, sums over the blocks
    before: with K columns to make T, then with those that go through T and through P. In variant B these are 2K and 2K,
    and there are `k^T U` and `k^T W`, what is read from both states and, a chunk, what each state forgets; in variant C
    they are K and 2K.
    """
    b, columns = min(block, C), 5 * K if variant == "B" else 4 * K
    token = 2 * b * (3 * K + columns) + (4 * K * columns if b < C else 0)
    if variant == "C":
        return L * H * token
    chunk = 4 * K**3 + 2 * K * K + _network(2 * K + 1, K // 2)
    return L * H * (token + 8 * K * K + _network(2 * K, K // 2)) + L // C * H * chunk


def layer_flops(L: int, D: int, H: int, C: int, variant: str = "B", *, factored: bool = False) -> int:
    """The layer: five projections, three convolutions of four taps, five small projections to heads, and the rule."""
    around = L * (5 * 2 * D * D + 3 * 2 * 4 * D + 5 * 2 * D * H)
    rule = factored_rule_flops if factored else hierarchical_rule_flops
    return around + rule(L, H, D // H, C, variant)


def encoder_flops(
    L: int, D: int, H: int, C: int, F: int, layers: int, variant: str = "B", *, factored: bool = False
) -> int:
    """The sentence encoder: layers and feed-forward blocks of inner width F."""
    return layers * (layer_flops(L, D, H, C, variant, factored=factored) + L * 4 * D * F)


def _network(inputs: int, hidden: int) -> int:
    """Two linear layers down to one number."""
    return 2 * inputs * hidden + 2 * hidden
