"""Triton twin of quantization for every spec: square blocks, scales by search, the mx and fp8 formats, any transform.

`nvfp4_triton` is faster where it serves.
"""

# mypy: disable-error-code="no-untyped-def,assignment,misc,annotation-unchecked"
from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.decode_triton import bf16_words, e2m1_values, e4m3_values, e8m0_value, store, store_all
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.quantize_triton import architecture
from quatrain.kernels.runs_triton import (
    block_max,
    block_sum,
    butterfly,
    e2m1_word,
    e4m3_word,
    largest_of,
    load,
    raise_maximum,
    signs_of,
    spread,
    transformed,
)
from quatrain.kernels.triton_math import (
    FLT_MAX,
    block_scale,
    e2m1_nearest,
    e4m3_code,
    encode_scale,
    key_state,
    reciprocal,
    row_state,
)

Parts = tuple[Tensor, Tensor | None, Tensor]
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_REPEATS = 8  # tiles of one program, at most
_PROGRAMS = 4096  # fewer tiles to a program rather than fewer programs than this


@triton.jit
def _block_error(xs, m, scale, amax, Q: tl.constexpr):
    """Error of each block: ((value * scale) * amax) / constant less the input."""
    m, scale = spread(m, Q), spread(scale, Q)
    terms = ()
    for i in tl.static_range(8):
        magnitude = tl.abs(xs[i])
        decoded = tl.div_rn(e2m1_nearest(tl.minimum(magnitude * m, 6.0)) * scale * amax, Q[8])
        difference = decoded - magnitude
        terms = terms + (difference * difference if Q[4] == "mse" else tl.abs(difference),)
    largest = Q[4] == "absmax"
    return block_max(largest_of(terms), Q).to(tl.float32, bitcast=True) if largest else block_sum(terms, Q)


@triton.jit
def _try_scale(ideal, decode, Q: tl.constexpr, ARCH: tl.constexpr):
    _, scale = block_scale(ideal, Q[5], ARCH)
    return scale, tl.minimum(reciprocal(scale * decode, ARCH), FLT_MAX)


@triton.jit
def _nvfp4_scales(xs, largest, amax, encode, decode, Q: tl.constexpr, ARCH: tl.constexpr):
    """Code, value and multiplier of each block; of several candidates the first with the smallest error."""
    ideal = largest * (encode * Q[7]) if Q[3] == "to-6" else tl.div_rn(largest, Q[6]) * encode
    first = ideal * 0.800000011920929 if Q[3] == "search" else ideal
    scale, m = _try_scale(first, decode, Q, ARCH)
    if Q[3] == "search" or Q[3] == "four-over-six":
        error = _block_error(xs, m, scale, amax, Q)
        for i in range(1, 21 if Q[3] == "search" else 2):
            count = tl.zeros([1, 1], tl.float32) + i  # fp32(0.8 + 0.05 i) is (16 + i) / 20 for every i
            factor = tl.div_rn(count + 16.0, 20.0) if Q[3] == "search" else 1.5
            next_scale, next_m = _try_scale(ideal * factor, decode, Q, ARCH)
            next_error = _block_error(xs, next_m, next_scale, amax, Q)
            better = next_error < error
            scale = tl.where(better, next_scale, scale)
            m, error = tl.where(better, next_m, m), tl.where(better, next_error, error)
    # The code once more, of the scale chosen. When the conversion's own bytes are kept, two codes share a register and
    # ptxas of CUDA 12.8 may merge them before the second is there.
    code = e4m3_code(scale, False)
    undefined = amax != amax
    return tl.where(undefined, 0x7F, code), tl.where(undefined, amax, scale), tl.where(undefined, amax, m)


@triton.jit
def _exponent_up(bits):
    """Biased exponent of the smallest power of two that is not below a positive fp32 number."""
    exponent = bits >> 23
    return exponent + ((bits & 0x7FFFFF) > tl.where(exponent == 0, 0x400000, 0)).to(tl.int32)


@triton.jit
def _mx_scales(largest, bits, Q: tl.constexpr):
    """E8M0 code, value and multiplier of each block; 255 and NaN for a block that is not finite."""
    TOP: tl.constexpr = 2 if Q[0] == "mxfp4" else 8  # exponent of the largest element
    HALF: tl.constexpr = 1 << (21 if Q[0] == "mxfp4" else 19)  # half a step of the element's mantissa
    if Q[3] == "rceil":
        code = _exponent_up((largest * Q[7]).to(tl.int32, bitcast=True))
    elif Q[3] == "ceil":
        code = (bits >> 23) - TOP + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    elif Q[3] == "even":
        code = ((bits + HALF) >> 23) - TOP
    else:
        code = (bits >> 23) - TOP
    code = tl.where(bits >= 0x7F800000, 255, tl.minimum(tl.maximum(code, 0), 254))
    inverse = tl.where(code == 255, 255, 254 - code)
    return code, e8m0_value(code), e8m0_value(inverse)


@triton.jit
def _fp8_scales(largest, bits, Q: tl.constexpr, ARCH: tl.constexpr):
    """fp32 scale (twice) and multiplier of each block; 1 for a block of zeros."""
    scale = tl.div_rn(largest, Q[6])
    if Q[3] == "pow2":
        power = e8m0_value(tl.minimum(_exponent_up(scale.to(tl.int32, bitcast=True)), 254))
        scale = tl.where(bits >= 0x7F800000, largest, power)
    scale = tl.where((scale == 0.0) | (largest == 0.0), 1.0, scale)
    scale = tl.where(bits > 0x7F800000, float("nan"), scale)  # one NaN for all devices
    m = reciprocal(scale, ARCH)
    return scale, scale, tl.where(m == float("inf"), FLT_MAX, m)


@triton.jit
def _words(xs, m, scale, start, middle, run, DECODED: tl.constexpr, Q: tl.constexpr, ARCH: tl.constexpr):
    """int32 words of a run: codes, or code x block scale as BF16."""
    LENGTH: tl.constexpr = Q[13]
    words = ()
    for i in tl.static_range(0, LENGTH, 8):
        pair = run * (Q[13] // 2) + i // 2
        if Q[0] == "nvfp4" or Q[0] == "mxfp4":
            word = e2m1_word(xs, m, start, middle, pair, i, Q, ARCH)
            words = words + (bf16_words(e2m1_values(word), scale, ARCH) if DECODED else (word,))
        else:
            low = e4m3_word(xs, m, start, middle, pair, i, Q)
            high = e4m3_word(xs, m, start, middle, pair + 2, i + 4, Q)
            if DECODED:
                words = words + bf16_words(e4m3_values(low) + e4m3_values(high), scale, ARCH)
            else:
                words = words + (low, high)
    return words


@triton.jit
def _first_of(groups_r, groups_w, LOAD: tl.constexpr):
    """Which tile of rows and which run of tiles along them a program takes: neighbours share lines of memory."""
    if LOAD == "columns":
        tile, first = tl.program_id(0) % groups_r, tl.program_id(0) // groups_r
    else:
        tile, first = tl.program_id(0) // groups_w, tl.program_id(0) % groups_w
    return tile, first


@triton.jit
def amax_kernel(
    x_ptr, out_ptr, rows, columns, stride, column_stride, groups_r, groups_w, repeats, DTYPE: tl.constexpr,
    Q: tl.constexpr, LOAD: tl.constexpr, MASK: tl.constexpr, ARCH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of x after the transform, into the int32 at out_ptr as the bits of an fp32 number."""
    LOADED: tl.constexpr = DTYPE if Q[10] else x_ptr.dtype.element_ty
    tile, first = _first_of(groups_r, groups_w, LOAD)
    row = (tile * R + tl.arange(0, R))[:, None]
    signs = signs_of(tl.arange(0, W)[None, :], Q)
    top = tl.zeros([R, W], tl.int32)
    for step in range(repeats):
        run = ((first * repeats + step) * W + tl.arange(0, W))[None, :]
        xs = load(x_ptr, row, run, rows, columns, stride, column_stride, LOADED, Q, LOAD, MASK, ARCH)
        top = tl.maximum(top, largest_of(butterfly(xs, run, signs, Q) if Q[10] else xs))
    raise_maximum(out_ptr, top, DTYPE, Q[12], ARCH)


@triton.jit
def blocks_kernel(
    x_ptr, codes_ptr, scales_ptr, amax_ptr, key_ptr, rows, columns, stride, column_stride, runs, groups_r, groups_w,
    repeats, DTYPE: tl.constexpr, Q: tl.constexpr, LOAD: tl.constexpr, MASK: tl.constexpr, DECODED: tl.constexpr,
    MEASURE: tl.constexpr, ARCH: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Quantize `repeats` tiles of x [rows, columns] side by side.

    codes are int32 words, as many for each of the runs of a row as its codes or, DECODED, its BF16 numbers fill; amax
    is read by nvfp4, and with MEASURE found (formats whose block scales do not need it).
    """
    wide: tl.constexpr = Q[2] // Q[13]  # runs of a block's row
    tile, first = _first_of(groups_r, groups_w, LOAD)
    row = (tile * R + tl.arange(0, R))[:, None]
    block_row = (tile * (R // Q[1]) + tl.arange(0, R // Q[1]))[:, None]
    signs = signs_of(tl.arange(0, W)[None, :], Q)
    start, middle = row, row
    if Q[9]:
        one, two = key_state(key_ptr)
        start, middle = row_state(one, two, row)
    if Q[0] == "nvfp4":
        amax = tl.load(amax_ptr)
        encode = encode_scale(amax, Q[8])
        decode = reciprocal(encode, ARCH)
    top = tl.zeros([R // Q[1], W // wide], tl.int32)
    for step in range(repeats):
        run = ((first * repeats + step) * W + tl.arange(0, W))[None, :]
        xs = load(x_ptr, row, run, rows, columns, stride, column_stride, DTYPE, Q, LOAD, MASK, ARCH)
        xs = transformed(xs, run, signs, DTYPE, Q, ARCH)
        bits = block_max(largest_of(xs), Q)
        top = tl.maximum(top, bits)
        largest = bits.to(tl.float32, bitcast=True)
        if Q[0] == "nvfp4":
            stored, scale, m = _nvfp4_scales(xs, largest, amax, encode, decode, Q, ARCH)
        elif Q[0] == "fp8":
            stored, scale, m = _fp8_scales(largest, bits, Q, ARCH)
        else:
            stored, scale, m = _mx_scales(largest, bits, Q)
        words = _words(xs, spread(m, Q), spread(scale, Q), start, middle, run, DECODED, Q, ARCH)
        place = row.to(tl.int64) * runs + run
        inside = (row < tl.cdiv(rows, Q[1]) * Q[1]) & (run < runs)
        store_all(codes_ptr, place * len(words), inside, words, MASK)
        if not DECODED:
            blocks = runs // wide
            block = ((first * repeats + step) * (W // wide) + tl.arange(0, W // wide))[None, :]
            place = block_row.to(tl.int64) * blocks + block
            whole = (block_row < tl.cdiv(rows, Q[1])) & (block < blocks)
            store(scales_ptr + place, stored.to(scales_ptr.dtype.element_ty), whole, MASK)
    if MEASURE:
        raise_maximum(amax_ptr, top, tl.float32, 1.0, ARCH)


@functools.lru_cache(maxsize=1024)
def constants(spec: QuantSpec) -> tuple[str | int | float, ...]:
    """What the kernels call Q."""
    target, constant, size, mask = np.float32(spec.element_max), np.float32(spec.constant), 0, 0
    if spec.hadamard is not None:
        size = spec.hadamard.size
        mask = sum(1 << i for i in range(max(size, 32)) if spec.hadamard.sign_vector()[i % size] < 0)
    return (
        spec.format,
        spec.block_shape[0],
        spec.block_shape[1],
        str(spec.scale),
        spec.error,
        int(spec.scale_rounding == "up"),
        float(target),
        float(np.float32(1) / target),
        float(constant),
        int(spec.stochastic),
        size,
        mask,
        float(np.float32(1 / size**0.5)) if size else 1.0,
        32 if spec.block_shape == (1, 32) else 8,
    )


def quantize_blocks(
    x: Tensor,
    spec: QuantSpec,
    key: Tensor | None,
    amax: Tensor | None = None,
    decoded: bool = False,
    cast: torch.dtype | None = None,
) -> Parts:
    """Quantize x along its rows.

    Args:
        x: [M, K] of any strides, bfloat16, float16 or float32; fastest where one stride is 1.
        spec: how.
        key: int64 [2], for a stochastic spec.
        amax: fp32 [1], the largest magnitude after the transform where it is known.
        decoded: BF16 code x block scale [M', K'] in place of codes, then there are no scales; M' and K' count whole
            blocks. Not for fp8, whose scales are fp32.
        cast: x is rounded to this dtype first, as `x.to(cast)` would.

    Returns:
        (codes, scales, amax) as `quantize_parts` lays them out.

    Raises:
        ValueError: another dtype, no key, or decoded fp8.
    """
    dtype = x.dtype if cast is None else cast
    if x.dim() != 2 or x.dtype not in _DTYPES or dtype not in _DTYPES:
        raise ValueError(
            f"Triton kernels quantize matrices of {', '.join(map(str, _DTYPES))}, received {x.dim()} dimensions of "
            f'{x.dtype} as {dtype}; flatten and cast, or take backend="reference"'
        )
    if decoded and spec.format == "fp8":
        raise ValueError("fp8 blocks have fp32 scales, so code x scale does not fit BF16; leave out decoded")
    if spec.stochastic and key is None:
        raise ValueError("stochastic rounding needs a key, received none; pass seed and offset")
    with torch.cuda.device(x.device if x.is_cuda else -1):
        measure = amax is None and not spec.block_format.tensor_scale
        if amax is None:
            bits = torch.zeros(1, dtype=torch.int32, device=x.device)
            amax = bits.view(torch.float32)
            if x.numel() and not measure:
                _launch_amax(x, spec, bits, dtype)
        codes, scales = _empty(x, spec, decoded)
        if x.numel():
            _launch(x, spec, key, codes, scales, amax, dtype, measure)
    return codes, scales, amax


def _empty(x: Tensor, spec: QuantSpec, decoded: bool) -> tuple[Tensor, Tensor | None]:
    fmt, (block_rows, block_columns) = spec.block_format, spec.block_shape
    rows, length = _round_up(x.shape[0], block_rows), _round_up(x.shape[1], spec.padding)
    if decoded:
        return torch.empty(rows, length, dtype=torch.bfloat16, device=x.device), None
    dtype = torch.uint8 if fmt.packed else torch.float8_e4m3fn
    codes = torch.empty(rows, length // 2 if fmt.packed else length, dtype=dtype, device=x.device)
    dtype = torch.float32 if fmt.scale is None else fmt.scale.dtype or torch.uint8
    return codes, torch.empty(rows // block_rows, length // block_columns, dtype=dtype, device=x.device)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _launch_amax(x: Tensor, spec: QuantSpec, bits: Tensor, dtype: torch.dtype) -> None:
    q = constants(spec)
    runs, tile = _tile(x, spec, 1, max(8, int(q[10])))
    grid, sizes = _grid(x, runs, tile)
    launch(
        amax_kernel, grid, x, bits, *x.shape, *x.stride(), *sizes, _DTYPES[dtype], q, _load(x),
        _mask(x, spec, runs, tile, sizes[2]), architecture(x.device.index), *tile[:2],
        num_warps=tile[2], enable_fp_fusion=False,
    )  # fmt: skip


def _launch(
    x: Tensor, spec: QuantSpec, key: Tensor | None, codes: Tensor, scales: Tensor | None, amax: Tensor,
    dtype: torch.dtype, measure: bool,
) -> None:  # fmt: skip
    runs, tile = _tile(x, spec, spec.block_shape[0], spec.padding)
    grid, sizes = _grid(x, runs, tile)
    if scales is not None and spec.format != "fp8":
        scales = scales.view(torch.uint8)
    launch(
        blocks_kernel, grid, x, codes.view(torch.int32), codes if scales is None else scales,
        amax.view(torch.int32) if measure else amax,
        x if key is None else key, *x.shape, *x.stride(), runs, *sizes, _DTYPES[dtype], constants(spec), _load(x),
        _mask(x, spec, runs, tile, sizes[2]), scales is None, measure, architecture(x.device.index), *tile[:2],
        num_warps=tile[2], enable_fp_fusion=False,
    )  # fmt: skip


def _load(x: Tensor) -> str:
    return "rows" if x.stride(1) == 1 else "columns"


def _tile(x: Tensor, spec: QuantSpec, block_rows: int, span: int) -> tuple[int, tuple[int, int, int]]:
    """Runs of a row, and (rows, runs, warps) of a tile: whole blocks and transforms, whole lines of memory.

    Along rows a thread takes 32 elements; along columns 64, so that its loads take two rows at least.
    """
    length = int(constants(spec)[13])
    runs = _round_up(x.shape[1], spec.padding) // length
    tall, wide = next_power_of_2(x.shape[0]), next_power_of_2(runs)
    if _load(x) == "rows":
        width = max(span // length, min(8 if block_rows > 1 else 32, wide))
        height = max(block_rows, min(1024 // (width * length), tall))
        return runs, (height, width, _warps(height * width * length // 1024))
    width = max(span // length, min(32 // length, wide))
    height = max(block_rows, min(64, tall))
    return runs, (height, width, _warps(height * width * length // 2048))


def _warps(count: int) -> int:
    return max(1, min(8, count))


def _grid(x: Tensor, runs: int, tile: tuple[int, int, int]) -> tuple[tuple[int], tuple[int, int, int]]:
    """The launch grid, and (tiles of rows, programs for each, tiles of a program)."""
    rows, steps = ceil_div(x.shape[0], tile[0]), ceil_div(runs, tile[1])
    most = min(_REPEATS, max(1, rows * steps // _PROGRAMS), steps)
    repeats = max((n for n in range(most // 2 + 1, most + 1) if steps % n == 0), default=most)
    groups = ceil_div(steps, repeats)
    return (rows * groups,), (rows, groups, repeats)


def _mask(x: Tensor, spec: QuantSpec, runs: int, tile: tuple[int, int, int], repeats: int) -> int:
    if x.shape[1] % 8:
        return 2
    return int(bool(x.shape[0] % tile[0] or runs % (tile[1] * repeats) or x.shape[1] % spec.padding))
