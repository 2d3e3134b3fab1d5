"""Attention's warp-specialized kernels for Hopper, host side: where they serve, and how they are launched."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from quatrain.kernels.attention_layout import Geometry
from quatrain.kernels.attention_math import Views
from quatrain.kernels.attention_rows import AttentionRows
from quatrain.kernels.launch_triton import ceil_div, launch

ROWS, STAGES, WARPS, REGISTERS = 64, 4, 4, 240  # of one of a program's two groups; stages of the ring they share
FORWARD_STEP, STEP = 64, 32  # tokens of a step
HEAD_SIZE = 128
PADDED = 64  # base and delta are padded to a multiple of this
_KERNELS = "quatrain.kernels.attention_hopper_{}_triton"
_NEEDED = (
    "warp_specialize",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "DotOperandLayout",
    "inline_asm_elementwise",
)


@functools.cache
def hopper_obstacle(arch: int) -> str | None:
    """Why these kernels cannot run on a device of compute capability arch / 10 with this Triton, or None."""
    if arch != 90:
        return f"they need compute capability 9.0, this is {arch / 10:.1f}"
    try:
        from triton.experimental.gluon import language

        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        for part in ("forward", "backward"):
            importlib.import_module(_KERNELS.format(part))
    except (ImportError, AttributeError) as error:
        return f"this version of Triton has no Gluon that they can be written in ({error})"
    missing = [name for name in _NEEDED if not hasattr(language, name)]
    return f"the Gluon of this version of Triton has no {', '.join(missing)}" if missing else None


def serves(v: Tensor, geometry: Geometry, arch: int) -> bool:
    """Whether they serve what descriptors can load: BF16, head size 128, causal, lengths equal, nothing else masked."""
    g = geometry
    return (
        g.head_size == HEAD_SIZE
        and g.causal
        and g.queries == v.shape[2]
        and not g.window
        and g.kept is None
        and g.mask is None
        and g.starts_q is None
        and v.shape[3] == HEAD_SIZE
        and v.dtype == torch.bfloat16
        and hopper_obstacle(arch) is None
    )


def serves_backward(views: Views, rows: AttentionRows) -> bool:
    """Whether their backward pass serves these rows: dS stochastic, in products with operands packed along tokens."""
    pairs = (
        (rows.dquery_grad, rows.dquery_key, views.key_tokens),
        (rows.dkey_grad, rows.dkey_query, views.query_tokens),
    )
    return all(
        grad is not None and grad.stochastic and operand is not None and parts is not None and parts[1] is not None
        for grad, operand, parts in pairs
    )


def launch_forward(
    sources: tuple[Tensor, Tensor, Tensor],
    maxima: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    geometry: Geometry,
    factors: tuple[float, ...],
) -> None:
    """O [b, h, t, d] and L [b, h, t] of Q, K and V; maxima: of Q and K, for what `factors` says."""
    from quatrain.kernels import attention_hopper_forward_triton as kernels

    g, (out, lse) = geometry, outputs
    held, step = (1, 1, ROWS, HEAD_SIZE), (1, 1, FORWARD_STEP, HEAD_SIZE)
    q, k, v = (_tiles(x, block) for x, block in zip(sources, (held, step, step), strict=True))
    launch(
        kernels.hopper_forward_kernel, (ceil_div(g.queries, 2 * ROWS), out.shape[0] * g.heads), q, k, v, *maxima, out,
        lse, g.heads, sources[1].shape[1], g.queries, *out.stride()[:3], factors, STAGES, ROWS, FORWARD_STEP,
        HEAD_SIZE, WARPS, REGISTERS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def launch_query(
    sources: tuple[Tensor, ...],
    numbers: Tensor,
    scalars: tuple[Tensor, ...],
    dq: Tensor,
    geometry: Geometry,
    padded: int,
    constants: tuple[Any, Any],
) -> None:
    """dQ.

    Args:
        sources: Q, K, K along tokens [d, b g padded], V and dO.
        numbers: fp32 [2, b, h, tokens, padded to a multiple of `PADDED`]: base and delta.
        scalars: the bound of dS, maxima of Q, K and K along tokens, the random key.
        dq: [b, h, t, d].
        geometry: sizes.
        padded: tokens of a head in the view along tokens.
        constants: what the kernels call FACTORS and Q.
    """
    from quatrain.kernels import attention_hopper_backward_triton as kernels

    g = geometry
    held, step = (1, 1, ROWS, HEAD_SIZE), (1, 1, STEP, HEAD_SIZE)
    blocks = (held, step, (HEAD_SIZE, STEP), step, held)
    launch(
        kernels.hopper_query_kernel, (ceil_div(g.queries, 2 * ROWS), dq.shape[0] * g.heads),
        *(_tiles(x, block) for x, block in zip(sources, blocks, strict=True)), numbers[0], numbers[1], *scalars, dq,
        g.heads, sources[1].shape[1], g.queries, padded, numbers.shape[3], *dq.stride()[:3], *constants, STAGES, ROWS,
        STEP, HEAD_SIZE, WARPS, REGISTERS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def launch_key(
    sources: tuple[Tensor, ...],
    numbers: Tensor,
    scalars: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    geometry: Geometry,
    padded: int,
    constants: tuple[Any, Any],
    turn: int,
) -> None:
    """What one query head of each group gives to dK and dV [b, g, t, d]; added to them where `turn` is not 0.

    sources: Q, K, Q along tokens [d, b h padded], V and dO; otherwise as for `launch_query`.
    """
    from quatrain.kernels import attention_hopper_backward_triton as kernels

    g, (dk, dv) = geometry, outputs
    b, groups, keys, _ = dk.shape
    held, step = (1, 1, ROWS, HEAD_SIZE), (1, 1, STEP, HEAD_SIZE)
    blocks = (step, held, (HEAD_SIZE, STEP), held, step)
    launch(
        kernels.hopper_key_kernel, (ceil_div(keys, 2 * ROWS), b * groups),
        *(_tiles(x, block) for x, block in zip(sources, blocks, strict=True)),
        _tiles(numbers.view(-1, numbers.shape[3]), (1, STEP)), *scalars, dk, dv, turn, g.heads, groups, keys, padded,
        b * g.heads, *dk.stride()[:3], *dv.stride()[:3], *constants, turn > 0, STAGES, ROWS, STEP, HEAD_SIZE, WARPS,
        REGISTERS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _tiles(x: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor of x for tiles `block`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, x.shape, x.stride(), list(block), _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a tile lies in shared memory: as wgmma reads it."""
    from triton.experimental.gluon import language

    kind = language.float32 if dtype == torch.float32 else language.bfloat16
    return language.NVMMASharedLayout.get_default_for(list(block), kind)
