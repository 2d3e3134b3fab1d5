"""Attention's NVFP4 products on the FP4 cores of Blackwell: packed operands loaded as they are, dS packed in registers.

`tl.dot_scaled` multiplies E2M1 codes with E4M3 scales of 16 (`kind::mxf4nvf4`). The cores contract at least 64 elements
at once, and those of sm_100 take tiles of 128 rows: smaller ones would be decoded, or not compile at all.
The kernels are compiled by the tests and have never run on such hardware. Triton's interpreter decodes and multiplies.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.attention_block_triton import product_plus, rounded_ds
from quatrain.kernels.triton_math import e2m1_code, e2m1_pair, e4m3_code, e4m3_value


@triton.jit
def packed_rows(source, first, limit, stride, size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                WHOLE: tl.constexpr):  # fmt: skip
    """Codes [ROWS, COLUMNS / 2] and scales [ROWS, COLUMNS / 16] of tokens from `first` on, zeros outside.

    source: pointers to both; stride: bytes of a row of codes, which hold `size` elements and whole blocks.
    """
    BLOCKS: tl.constexpr = (size + 15) // 16
    codes = _bytes(source[0], first, limit, stride, BLOCKS * 8, ROWS, COLUMNS // 2, WHOLE)
    return codes, _bytes(source[1], first, limit, stride // 8, BLOCKS, ROWS, COLUMNS // 16, WHOLE)


@triton.jit
def packed_tokens(source, first, limit, stride, size: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes [COLUMNS, TOKENS / 2] and scales [COLUMNS, TOKENS / 16] of a view [size, tokens], zeros outside.

    first: a multiple of 16; stride: bytes from one element of the head to the next.
    """
    codes = _bytes(source[0] + first // 2, 0, size, stride, (limit - first + 1) // 2, COLUMNS, TOKENS // 2, False)
    blocks = (limit - first + 15) // 16
    return codes, _bytes(source[1] + first // 16, 0, size, stride // 8, blocks, COLUMNS, TOKENS // 16, False)


@triton.jit
def _bytes(ptr, first, limit, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    pointers = ptr + row[:, None].to(tl.int64) * stride + column[None, :]
    inside = (column < size)[None, :]
    if not WHOLE:
        inside = inside & (row < limit)[:, None]
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def packed_ds(ds, start, middle, pair, ideal_factor, decode, Q: tl.constexpr, ARCH: tl.constexpr):
    """dS [M, N] as codes [M, N / 2] and E4M3 scales [M, N / 16], both uint8: those that `quantize_ds` decodes."""
    M: tl.constexpr = ds.shape[0]
    N: tl.constexpr = ds.shape[1]
    rounded, scale, x = rounded_ds(ds, start, middle, pair, ideal_factor, decode, Q, ARCH)
    if ARCH == 0:
        code = e2m1_code(rounded) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
        even, odd = tl.split(tl.reshape(code, [M, N // 2, 2]))
        codes, scales = even | (odd << 4), e4m3_code(scale, False).to(tl.uint8)
    else:
        sign = x.to(tl.int32, bitcast=True) & -2147483648
        value = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        even, odd = tl.split(tl.reshape(value, [M, N // 2, 2]))
        codes, scales = e2m1_pair(even, odd), scale.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes.to(tl.uint8), tl.reshape(scales, [M, N // 16])


@triton.jit
def scaled_product(a, b, acc, ARCH: tl.constexpr):
    """acc + a b^T; a and b: codes [M, K / 2] or [N, K / 2] and scales [., K / 16]."""
    if ARCH == 0:
        out = product_plus(unpacked(a), tl.trans(unpacked(b)), acc, ARCH)
    else:
        out = tl.dot_scaled(
            a[0], a[1].to(tl.float8e4nv, bitcast=True), "e2m1",
            tl.trans(b[0]), b[1].to(tl.float8e4nv, bitcast=True), "e2m1", acc,
        )  # fmt: skip
    return out


@triton.jit
def opaque_zeros(M: tl.constexpr, N: tl.constexpr):
    """Zeros that the compiler cannot know: with an accumulator of known zeros Triton 3.6 drops scales too."""
    return tl.full([M, N], 1.0, tl.float32) * (tl.num_programs(0).to(tl.float32) * 0.0)


@triton.jit
def unpacked(operand):
    """Code x block scale, fp32: what the cores multiply. In plain arithmetic, for the interpreter."""
    M: tl.constexpr = operand[0].shape[0]
    K: tl.constexpr = operand[0].shape[1] * 2
    codes, scales = operand[0].to(tl.int32), operand[1].to(tl.int32)
    code = tl.reshape(tl.join(codes & 0xF, codes >> 4), [M, K // 16, 16])
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    value = tl.where(code >= 8, -magnitude, magnitude) * tl.reshape(e4m3_value(scales), [M, K // 16, 1])
    return tl.reshape(value, [M, K])
