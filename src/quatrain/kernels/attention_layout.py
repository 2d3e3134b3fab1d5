"""Where tokens lie and which keys a query sees: what the reference and its twins agree on before any arithmetic.

Packed views hold tokens in whole blocks of 16, so that blocks along tokens never cross a head or a sequence: a batch
pads each head's tokens to a multiple of 16 with zeros; of sequences packed one after another, sequence s, which
begins at token c, begins at position 16 * (c // 16 + s). That needs no number from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quatrain.kernels.attention_rows import AttentionRows
from quatrain.kernels.quantize import empty_parts

BLOCK = 16


class Geometry(NamedTuple):
    """Sizes and masks of one attention.

    Attributes:
        heads: of the queries; a multiple of those of keys and values.
        queries: number of query tokens.
        head_size: of Q and K; V may have another.
        scale: of the scores.
        causal: whether query i sees no key beyond i + offset.
        bottom_right: offset = keys - queries (the last query sees the last key), in place of 0.
        window: 0 for none. Causal: a query sees the last `window` keys up to its own position; else those at most
            `window` positions away.
        orders: of batch, heads and tokens in the memory of q, k and v (`memory_orders`), in which dQ, dK and dV are
            laid out; () for 0, 1, 2 of each.
        kept: bool [batch, keys], False for padding; such keys and values count as zero.
        mask: bool [batch, 1 or heads, queries, keys], True where a query sees a key; excludes the other rules.
        starts_q, starts_k: int [sequences + 1], where packed sequences begin in q, and in k and v (batch 1).
    """

    heads: int
    queries: int
    head_size: int
    scale: float
    causal: bool = False
    bottom_right: bool = False
    window: int = 0
    orders: tuple[int, ...] = ()
    kept: Tensor | None = None
    mask: Tensor | None = None
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None


def memory_orders(*tensors: Tensor) -> tuple[int, ...]:
    """Dimensions 0, 1 and 2 of each tensor [b, h, t, d] by stride, the widest first: what `Geometry.orders` holds."""
    found: list[int] = []
    for x in tensors:
        order: list[int] = []
        for i in range(3):  # a compiler, whose strides may be symbols, cannot trace a sort
            order.insert(len([j for j in order if x.stride(j) >= x.stride(i)]), i)
        found += order
    return tuple(found)


def empty_in_order(
    like: Tensor, shape: tuple[int, ...], orders: tuple[int, ...], place: int, dtype: torch.dtype
) -> Tensor:
    """Uninitialised [b, h, t, d] that lies as q (place 0), k (1) or v (2) does, d innermost and dense.

    A gradient that lies as its tensor does is taken as it is, where autograd would copy another.
    """
    order = orders[3 * place : 3 * place + 3] or (0, 1, 2)
    out = like.new_empty(*(shape[i] for i in order), shape[3], dtype=dtype)
    return out.permute(*(order.index(i) for i in range(3)), 3)


def in_orders(gradients: list[Tensor], orders: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, copied where they do not lie as `empty_in_order` gives them."""
    found = []
    for place, x in enumerate(gradients):
        order = orders[3 * place : 3 * place + 3] or (0, 1, 2)
        dense = x.permute(*order, 3).contiguous()
        found.append(dense.permute(*(order.index(i) for i in range(3)), 3))
    return found[0], found[1], found[2]


class Sequence(NamedTuple):
    """Tokens that see each other: positions in q and k, and in the padded views."""

    q: slice
    k: slice
    padded_q: int
    padded_k: int


def padded_tokens(tokens: int, starts: Tensor | None) -> int:
    """Length of the padded views of so many tokens."""
    if starts is None:
        return -(-tokens // BLOCK) * BLOCK
    return BLOCK * (tokens // BLOCK + starts.numel() - 1)


def padded_positions(tokens: int, starts: Tensor) -> Tensor:
    """int64 [tokens]: where each token of packed sequences lies in a padded view."""
    starts = starts.long()
    token = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(starts, token, right=True) - 1
    sequence = sequence.clamp(0, starts.numel() - 2)
    begin = starts[sequence]
    return BLOCK * (begin // BLOCK + sequence) + token - begin


def pad_tokens(x: Tensor, starts: Tensor | None) -> Tensor:
    """x [b, h, t, d] to [b, h, t', d], with zeros between sequences and at the end."""
    tokens = x.shape[2]
    length = padded_tokens(tokens, starts)
    if starts is None:
        return x if length == tokens else torch.nn.functional.pad(x, (0, 0, 0, length - tokens))
    out = x.new_zeros(*x.shape[:2], length, x.shape[3])
    return out.index_copy(2, padded_positions(tokens, starts), x)


def check_starts(starts: Tensor | None, tokens: int) -> None:
    """Refuse starts of packed sequences that do not rise from 0 to `tokens`; on a GPU, where looking waits, no check.

    Raises:
        ValueError: they do not.
    """
    if starts is None or starts.device.type != "cpu":
        return
    found = starts.tolist()
    if found[0] != 0 or found[-1] != tokens or found != sorted(found):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, received {found[:8]}"
            f"{' ...' if len(found) > 8 else ''}; give the sums of the sequences' lengths"
        )


def sequences(geometry: Geometry, keys: int) -> list[Sequence]:
    """The sequences of one attention; a whole batch counts as one, with the batch kept."""
    g = geometry
    if g.starts_q is None or g.starts_k is None:
        return [Sequence(slice(0, g.queries), slice(0, keys), 0, 0)]
    q, k = g.starts_q.tolist(), g.starts_k.tolist()
    return [
        Sequence(slice(q[s], q[s + 1]), slice(k[s], k[s + 1]), _padded_start(q[s], s), _padded_start(k[s], s))
        for s in range(len(q) - 1)
    ]


def _padded_start(start: int, sequence: int) -> int:
    return BLOCK * (start // BLOCK + sequence)


def visible(geometry: Geometry, part: Sequence, rows: range, device: torch.device) -> Tensor | None:
    """bool [batch or 1, heads or 1, rows, keys]: what the given queries of a sequence see; None for everything."""
    g = geometry
    if g.mask is not None:
        return g.mask[:, :, rows.start : rows.stop]
    queries, keys = part.q.stop - part.q.start, part.k.stop - part.k.start
    seen: Tensor | None = None
    if g.causal or g.window:
        place = torch.arange(rows.start, rows.stop, device=device)[:, None] + (keys - queries if g.bottom_right else 0)
        behind = place - torch.arange(keys, device=device)[None, :]
        if g.causal:
            seen = (behind >= 0) & (behind < g.window) if g.window else behind >= 0
        else:
            seen = behind.abs() <= g.window
        seen = seen[None, None]
    if g.kept is not None:
        kept = g.kept[:, None, None, :]
        seen = kept if seen is None else seen & kept
    return seen


def key_means(k: Tensor, geometry: Geometry) -> Tensor:
    """Mean over each sequence's kept keys, [b, h, 1 or t, d] in fp32 (float64 if k is); 0 where there are none.

    Summed in float64, where sums of BF16 numbers are exact in all but name, so that order does not matter.
    """
    g = geometry
    wide = k.double()
    if g.starts_k is not None:
        starts = g.starts_k.long()
        token = torch.arange(k.shape[2], device=k.device)
        sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, starts.numel() - 2)
        sums = wide.new_zeros(*k.shape[:2], starts.numel() - 1, k.shape[3]).index_add(2, sequence, wide)
        means = sums / starts.diff().clamp(min=1)[:, None]
        mean = means[:, :, sequence]
    elif g.kept is not None:
        mean = wide.sum(2, keepdim=True) / g.kept.sum(1).clamp(min=1)[:, None, None, None]
    else:
        mean = wide.mean(2, keepdim=True)
    return mean if k.dtype == torch.float64 else mean.float()


def keep_tokens(x: Tensor, kept: Tensor | None) -> Tensor:
    """x [b, h, t, d] with zeros at padding: whatever lies there, NaN included, counts for nothing."""
    return x if kept is None else torch.where(kept[:, None, :, None], x, torch.zeros_like(x))


def empty_views(q: Tensor, k: Tensor, rows: AttentionRows, geometry: Geometry, for_backward: bool) -> list[Tensor]:
    """Uninitialised tensors of the shapes that packing gives, in the order of `AttentionRows.slots`."""
    slots: list[Tensor | None] = [None] * 12
    for x, starts, first, then, row, column in (
        (q, geometry.starts_q, 0, 9, rows.scores_query, rows.dkey_query),
        (k, geometry.starts_k, 3, 6, rows.scores_key, rows.dquery_key),
    ):
        b, h, tokens, d = x.shape
        length = padded_tokens(tokens, starts)
        plain = x.new_empty(b, h, length, d)
        matrix = plain.view(b * h * length, d)
        slots[first : first + 3] = (plain, None, None) if row is None else empty_parts(matrix, row)
        slots[then : then + 3] = (plain, None, None) if column is None else empty_parts(matrix.t(), column)
    return [slots[i] for i in rows.slots(for_backward)]  # type: ignore[misc]
