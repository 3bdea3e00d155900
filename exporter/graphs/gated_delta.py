"""The gated delta rule over a window of rows, without a loop (Yang et al., arXiv 2412.06464; Qwen3.5's linear attention).

A layer keeps a state S [Dk, Dv] per head. Row t decays it and corrects what it holds for the key of the row:

    S ← exp(g_t) · S,   u_t = β_t (v_t − Sᵀ k_t),   S ← S + k_t u_tᵀ,   o_t = Sᵀ q_t

A window begins with rows that an earlier pass has computed and that the state does not hold yet: the pass replays them. So the
state never holds a row that may be rejected, and rejecting costs nothing. Rows that are none (β = 0, g = 0) change nothing.

With D(j, t) = exp(g_{j+1} + … + g_t), and D(t) the same from the state on, u solves a triangular system:

    (I + M) U = β (V − D(t) K S₀),   M_{tj} = β_t D(j, t) k_tᵀ k_j  for j < t

Its inverse is made by doubling blocks: exact as forward substitution is, since no power of M occurs. Sums of g are sums of the
rows between, never a difference of two sums: those of 64 rows may be a thousand times as large as the one that matters.
All of it is float32 (or float64); operators are those of `runtime/bundle/operators.py`.
"""

from __future__ import annotations

import torch

from .hooks import rms_norm

L2_EPSILON = 1e-6
"""As in transformers' `l2norm`."""


def l2_normed(states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`states` [..., D] divided by the root of their sum of squares + 1e-6, times `scale`; an RMS norm does it."""
    size = states.shape[-1]
    weight = torch.full((size,), scale * size**-0.5, dtype=states.dtype)
    return rms_norm(states, weight, L2_EPSILON / size)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    folded: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a window of L rows, what its last W rows read, and the state after some of its rows.

    Args:
        query: [B, H, W, Dk] of the last W rows, normed and scaled.
        key: [B, H, L, Dk], normed.
        value: [B, H, L, Dv].
        decay: g [B, H, L] ≤ 0; 0 of a row that is none.
        beta: β [B, H, L]; 0 of a row that is none.
        state: S₀ [B, H, Dk, Dv].
        folded: bool [B, L]: true for the first rows of the window, as many as the new state shall hold, and rows that are none.
        most: a bound of L, static: the inverse takes log₂ of it steps.

    Returns:
        o [B, H, W, Dv], and the state [B, H, Dk, Dv] after the rows `folded`.
    """
    width, length = query.shape[2], key.shape[2]
    place = torch.arange(length)
    before = place[None, :] < place[:, None]  # [t, j]: j < t
    later = before.to(decay.dtype)
    upto = 1.0 - later.transpose(0, 1)  # [t, i]: i ≤ t
    between = torch.matmul(upto, decay[..., None] * later)  # [t, j]: g_{j+1} + … + g_t
    pairwise = torch.where(before.transpose(0, 1), 0.0, torch.exp(between))  # D(j, t), 0 for j > t
    since = torch.exp(torch.matmul(upto, decay[..., None]))  # D(t) [B, H, L, 1]

    transposed = key.transpose(2, 3)
    system = torch.where(before, beta[..., None] * pairwise * torch.matmul(key, transposed), 0.0)
    inverse = unit_lower_inverse(system, place, most)

    # Both read the state in one product: a graph may write the new state where the old one lies.
    held = torch.matmul(torch.cat((key, query), 2), state)
    known, read = held[:, :, :length], held[:, :, length:]
    updates = torch.matmul(inverse, beta[..., None] * (value - since * known))
    own = slice(length - width, length)
    within = torch.matmul(query, transposed) * pairwise[:, :, own]
    out = since[:, :, own] * read + torch.matmul(within, updates)

    kept = folded[:, None, :].to(decay.dtype)
    folding = decay * kept
    remaining = torch.exp(torch.matmul(folding[:, :, None, :], later)) * kept[:, :, None, :]  # [B, H, 1, L]
    whole = torch.exp(torch.matmul(folding[:, :, None, :], torch.ones_like(later[:, :1])))  # [B, H, 1, 1]
    return out, whole * state + torch.matmul(transposed * remaining, updates)


def unit_lower_inverse(system: torch.Tensor, place: torch.Tensor, most: int) -> torch.Tensor:
    """(I + M)⁻¹ of strictly lower triangular M [..., L, L], L ≤ `most`; `place` int64 [L] counts from 0.

    The inverse T of blocks of s rows becomes that of blocks of 2s: [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]] is
    T − T C T, where C is what M has below the diagonal of each pair of blocks.
    """
    inverse = (place[None, :] == place[:, None]).to(system.dtype)
    size = 1
    while size < most:
        block, pair = (_blocks(each, most).index_select(0, place) for each in (size, 2 * size))
        below = (pair[None, :] == pair[:, None]) & (block[None, :] < block[:, None])
        corner = torch.where(below, system, 0.0)
        if size == 1:
            inverse = inverse - corner
        else:
            inverse = inverse - torch.matmul(inverse, torch.matmul(corner, inverse))
        size *= 2
    return inverse


def _blocks(size: int, most: int) -> torch.Tensor:
    """int64 [most]: of every row the number of its block; a constant, since a bundle has no operator for a quotient of
    integers that torch would write."""
    return torch.tensor([row // size for row in range(most)])
