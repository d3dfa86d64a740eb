"""The published LAM in PyTorch, written from its equations for the comparison: the layer whose Cython-compiled form the
earlier port timed, and the sentence encoder around it. Eager operations and a Python loop over the chunks, as its
authors ran it. Needs `pip install 'verax[parity]'`; nothing but the benchmark and the parity tests imports it.

Letters: B batch, L tokens, D width, H heads, K the size of a head (keys and values alike), n chunks of C tokens.
"""

from __future__ import annotations

import math
from typing import Any

from verax.errors import InvalidParameterError, MissingDependencyError

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
except ImportError as error:
    raise MissingDependencyError("the PyTorch side of LAM needs torch: pip install 'verax[parity]'") from error

VARIANTS = {"B": 64, "C": 128}
"""Chunk size by default. B carries two states from chunk to chunk; C, the production form, carries none."""

FLUX_RANGE = (0.01, 0.99)


class ShortConv(nn.Module):
    """Depthwise convolution of four taps and SiLU. Padded by two on both sides: token t sees t + 1."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel_size=4, padding=2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, D]` to the same."""
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class ResonanceFlux(nn.Module):
    """Two numbers between 0 and 1: one a token (phi), and one a chunk (psi)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        hidden = head_dim // 2
        self.W_bilinear = nn.Parameter(torch.randn(num_heads, head_dim, head_dim) * head_dim**-0.5)
        self.temp = nn.Parameter(torch.full((num_heads,), math.sqrt(head_dim)))
        self.flux_net = nn.Sequential(nn.Linear(2 * head_dim + 1, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.token_flux_proj = nn.Sequential(nn.Linear(2 * head_dim, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def token(self, kb: Tensor, v: Tensor) -> Tensor:
        """phi `[B, H, L, 1]` of keys and values that beta has scaled."""
        return torch.sigmoid(self.token_flux_proj(torch.cat([kb, v], dim=-1))).clamp(*FLUX_RANGE)

    def chunk(self, k: Tensor, u: Tensor) -> Tensor:
        """psi `[B, H, n]` of keys and pseudo-values `[B, H, n, C, K]`."""
        score = torch.einsum("bhnck,hkv,bhncv->bhnc", k, self.W_bilinear, u) / self.temp[:, None, None]
        summary = torch.cat([k.mean(dim=3), u.mean(dim=3), score.mean(dim=3, keepdim=True)], dim=-1)
        return torch.sigmoid(self.flux_net(summary)).clamp(*FLUX_RANGE).squeeze(-1)


class GatedNorm(nn.Module):
    """RMS normalisation by head. `gate` is in the checkpoints and takes no part."""

    def __init__(self, head_dim: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.gate = nn.Parameter(torch.ones(head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` to the same."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


def unit_frobenius(state: Tensor) -> Tensor:
    """Matrices `[..., K, K]` of norm one."""
    return state / (torch.linalg.matrix_norm(state, keepdim=True) + 1e-8)


def _within_chunks(q: Tensor, k: Tensor, kb: Tensor, v: Tensor, C: int) -> tuple[Tensor, ...]:
    """The arguments by chunks `[B, H, n, C, K]`, and T and P `[B, H, n, C, C]`."""
    q, k, kb, v = (x.unflatten(2, (-1, C)) for x in (q, k, kb, v))
    A = -torch.tril(kb @ k.transpose(-1, -2), -1)
    T = torch.eye(C, dtype=A.dtype, device=A.device) + A + torch.tril(A @ A.transpose(-1, -2), -1)
    return q, k, kb, v, T, torch.tril(q @ k.transpose(-1, -2))


def hierarchical_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decays: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    flux: ResonanceFlux,
    *,
    chunk_size: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The rule of variant B: a fast and a slow state, updated and mixed after each chunk.

    Args:
        q, k, v: `[B, H, L, K]`, not normalised; `chunk_size` divides L.
        beta: `[B, H, L, 1]`.
        decays: fast and slow, `[B, H, L]`, between 0 and 1.
        gates: gates of the outputs, fast and slow, `[B, H, L, 1]`.
        flux: weight of the blend of the two.
        chunk_size: tokens of a chunk; the result depends on it.

    Returns:
        Outputs `[B, H, L, K]`, and both final states `[B, H, K, K]`.
    """
    C = chunk_size
    q, k = F.normalize(q, dim=-1, eps=1e-12), F.normalize(k, dim=-1, eps=1e-12)
    v, kb = beta * v, beta * k
    share = (0.5 + 0.3 * flux.token(kb, v)).unflatten(2, (-1, C))
    q, k, kb, v, T, P = _within_chunks(q, k, kb, v, C)
    U, W = T @ v, T @ kb
    psi = flux.chunk(k, U)
    means = [decay.unflatten(2, (-1, C)).mean(dim=3) for decay in decays]
    gates_by_chunk = [gate.unflatten(2, (-1, C)) for gate in gates]

    B, H, n, _, K = q.shape
    states = [q.new_zeros(B, H, K, K), q.new_zeros(B, H, K, K)]
    outputs = []
    for i in range(n):
        flux_here = psi[:, :, i, None, None]
        read = []
        for x, forget in enumerate((0.1, 0.05)):
            states[x] = means[x][:, :, i, None, None] * (1 - forget * flux_here) * states[x]
            R = unit_frobenius(states[x])
            V = U[:, :, i] - W[:, :, i] @ R
            read.append(gates_by_chunk[x][:, :, i] * (q[:, :, i] @ R + P[:, :, i] @ V))
            states[x] = states[x] + k[:, :, i].transpose(-1, -2) @ V
        outputs.append(share[:, :, i] * read[0] + (1 - share[:, :, i]) * read[1])
        coupling = 0.05 + 0.1 * psi[:, :, i].mean()
        fast, slow = states
        states = [
            unit_frobenius(fast + coupling * flux_here * slow),
            unit_frobenius(slow + coupling * (1 - flux_here) * fast),
        ]
    return torch.cat(outputs, dim=2), (states[0], states[1])


def local_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decays: tuple[Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    flux: ResonanceFlux,
    *,
    chunk_size: int,
) -> Tensor:
    """The rule of variant C: chunks by themselves, without a state. Arguments as in `hierarchical_delta_rule`."""
    C = chunk_size
    q, k = F.normalize(q, dim=-1, eps=1e-12), F.normalize(k, dim=-1, eps=1e-12)
    v, kb = beta * v, beta * k
    *_, v, T, P = _within_chunks(q, k, kb, v, C)
    fast, slow = (gate.unflatten(2, (-1, C)) for gate in gates)
    return (0.1 * fast * (P @ v) + 0.9 * slow * (P @ (T @ v))).flatten(2, 3)


class EnhancedHierarchicalDeltaNet(nn.Module):
    """The published layer under its published parameter names: 780,622 parameters at width 384 and 12 heads.

    `variant`: `"B"` or `"C"` (inference only). `chunk_size`: tokens of a chunk where they divide the length; the
    variant's own if None.
    """

    g_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(
        self,
        d_model: int = 384,
        num_heads: int = 12,
        *,
        variant: str = "B",
        chunk_size: int | None = None,
        fast_decay: float = 0.3,
        slow_decay: float = 0.85,
        allow_neg_eigval: bool = False,
    ):
        super().__init__()
        if variant not in VARIANTS:
            raise InvalidParameterError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
        if d_model % num_heads:
            raise InvalidParameterError(f"num_heads: expected a divisor of {d_model}, got {num_heads}")
        self.num_heads, self.variant, self.allow_neg_eigval = num_heads, variant, allow_neg_eigval
        self.chunk_size = chunk_size or VARIANTS[variant]
        D, H, K = d_model, num_heads, d_model // num_heads
        for name in ("q", "k", "v", "g", "o"):
            setattr(self, f"{name}_proj", nn.Linear(D, D, bias=False))
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_conv1d", ShortConv(D))
        self.b_proj = nn.Linear(D, H, bias=False)
        for name, start in (("fast", fast_decay), ("slow", slow_decay)):
            setattr(self, f"{name}_decay_proj", nn.Linear(D, H))
            setattr(self, f"{name}_decay_bias", nn.Parameter(torch.full((H,), math.log(start))))
            setattr(self, f"{name}_gate_proj", nn.Linear(D, H, bias=False))
        self.resonance_flux = ResonanceFlux(H, K)
        self.o_norm = GatedNorm(K)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, *, use_cache: bool = False, regularise: bool = True
    ) -> tuple[Tensor, None, tuple[Tensor | None, Tensor] | None, Tensor]:
        """`[B, L, D]` to `(y [B, L, D], None, states or None, regulariser [])`. The mask is ignored, as published."""
        length = x.shape[1]
        if length >= 64 and length % 32:
            x = F.pad(x, (0, 0, 0, -length % 32))
        inputs, chunk_size = self.rule_inputs(x), self.chunk(x.shape[1])
        ortho = x.new_zeros(())
        if self.variant == "C":
            out, states = local_rule(*inputs, chunk_size=chunk_size), None
        else:
            out, states = hierarchical_delta_rule(*inputs, chunk_size=chunk_size)
            eye = torch.eye(out.shape[-1], dtype=x.dtype, device=x.device)
            for S in states if regularise else ():
                ortho = ortho + (S @ S.transpose(-1, -2) - eye).square().sum(dim=(-1, -2)).mean() / eye.numel()
        out = self.o_norm(out).transpose(1, 2).flatten(2)
        y = self.o_proj(out * torch.sigmoid(self.g_proj(x)))
        return y[:, :length], None, states if use_cache else None, ortho

    def rule_inputs(self, x: Tensor) -> tuple[Any, ...]:
        """The positional arguments of the rule, out of `[B, L, D]` that is padded already."""
        H = self.num_heads
        q, k, v = (
            getattr(self, f"{name}_conv1d")(getattr(self, f"{name}_proj")(x)).unflatten(-1, (H, -1)).transpose(1, 2)
            for name in "qkv"
        )
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)[..., None] * (2 if self.allow_neg_eigval else 1)
        decays, gates = [], []
        for name in ("fast", "slow"):
            logits = getattr(self, f"{name}_decay_proj")(x) + getattr(self, f"{name}_decay_bias")
            decays.append(torch.sigmoid(logits).transpose(1, 2))
            gates.append(torch.sigmoid(getattr(self, f"{name}_gate_proj")(x)).transpose(1, 2)[..., None])
        return q, k, v, beta, tuple(decays), tuple(gates), self.resonance_flux

    def chunk(self, length: int) -> int:
        """Tokens of a chunk at a (padded) length: one chunk of everything where the size does not divide it."""
        return length if length <= 32 or length % self.chunk_size else self.chunk_size


class LamSentenceEncoder(nn.Module):
    """The sentence encoder: MiniLM's embeddings and feed-forward blocks around six of the layers, mean, unit length.

    At the sizes of the defaults it has 23,848,788 parameters, like the published model: the pooler that MiniLM
    brings along is in its files and in this count, and is not used.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 30522,
        d_model: int = 384,
        num_heads: int = 12,
        num_layers: int = 6,
        intermediate_size: int = 1536,
        max_positions: int = 512,
        **layer: Any,
    ):
        super().__init__()
        D, teacher = d_model, nn.Module()
        teacher.embeddings = nn.Module()
        teacher.embeddings.word_embeddings = nn.Embedding(vocab_size, D)
        teacher.embeddings.position_embeddings = nn.Embedding(max_positions, D)
        teacher.embeddings.token_type_embeddings = nn.Embedding(2, D)
        teacher.embeddings.LayerNorm = nn.LayerNorm(D, eps=1e-12)
        teacher.encoder = nn.Module()
        teacher.encoder.layer = nn.ModuleList(_feed_forward(D, intermediate_size) for _ in range(num_layers))
        teacher.pooler = nn.Module()
        teacher.pooler.dense = nn.Linear(D, D)
        self.teacher_model: Any = teacher
        self.deltanet_layers = nn.ModuleList(
            EnhancedHierarchicalDeltaNet(D, num_heads, **layer) for _ in range(num_layers)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Token numbers and mask `[B, L]` to sentence vectors `[B, D]` of length one."""
        x = self.hidden(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask[..., None].to(x.dtype)
        return F.normalize((x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9), dim=-1)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Output of the last block, `[B, L, D]`."""
        embeddings = self.teacher_model.embeddings
        positions = embeddings.position_embeddings.weight
        length = input_ids.shape[1]
        if length > positions.shape[0]:
            positions = F.interpolate(positions.T[None], size=length, mode="linear", align_corners=True)[0].T
        types = embeddings.token_type_embeddings.weight[0]
        x = embeddings.LayerNorm(embeddings.word_embeddings(input_ids) + types + positions[:length])
        for layer, block in zip(self.deltanet_layers, self.teacher_model.encoder.layer, strict=True):
            # Without the regulariser: nobody reads it here, and the other side does not compute it.
            x = block.attention.output.LayerNorm(x + layer(x, attention_mask, regularise=False)[0])
            # GELU twice: as published.
            inner = F.gelu(F.gelu(block.intermediate.dense(x)))
            x = block.output.LayerNorm(x + block.output.dense(inner))
        return x


def _feed_forward(width: int, intermediate_size: int) -> nn.Module:
    """A block of BERT without its attention, under BERT's names."""
    block: Any = nn.Module()
    block.attention, block.attention.output = nn.Module(), nn.Module()
    block.attention.output.LayerNorm = nn.LayerNorm(width, eps=1e-12)
    block.intermediate, block.output = nn.Module(), nn.Module()
    block.intermediate.dense = nn.Linear(width, intermediate_size)
    block.output.dense = nn.Linear(intermediate_size, width)
    block.output.LayerNorm = nn.LayerNorm(width, eps=1e-12)
    return block
