"""Quantize: the contract, and the plain PyTorch reference that defines every bit.

The twins, compiled for the CPU (`quantize_cpu`) and in Triton (`quantize_triton`), give the same codes and scales.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quatrain.formats import QTensor, QuantSpec, pack, true_divide
from quatrain.kernels import quantize_cpu
from quatrain.kernels.dispatch import choose
from quatrain.kernels.rounding import encode_nearest, encode_stochastic, make_key, random_bits
from quatrain.kernels.scaling import (
    SEARCH_MULTIPLIERS,
    BlockScales,
    block_error,
    fp8_scales,
    mx_scales,
    nvfp4_ideal_scale,
    nvfp4_scales,
)

NONFINITE = ("raise", "saturate", "defer")
Parts = tuple[Tensor, Tensor, Tensor]  # codes, scales, amax


def quantize(
    x: Tensor,
    spec: QuantSpec | str,
    dim: int = -1,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    nonfinite: str = "raise",
    *,
    backend: str = "auto",
) -> QTensor:
    """Quantize along one dimension.

    Args:
        x: any floating dtype, strides and number of leading dimensions (at least one dimension). Leading
            dimensions are flattened to rows; zero rows are fine. A ragged last dimension is padded inside with
            zeros, which never changes amax, choice or bits of real elements.
        spec: how; a format's name stands for its defaults.
        dim: the quantized (contracted) dimension; the result is stored with it last.
        seed: key of the random bits of stochastic rounding: an integer, or an int64 tensor of one element.
        offset: a second word of the key, to draw anew.
        nonfinite: "raise" on NaN or infinity (one device synchronisation); "saturate": infinities become the largest
            finite magnitude of the tensor and NaN becomes 0; "defer": no check, `amax` is then NaN or infinite
            and so is every decoded value, and the caller looks at it later.
        backend: "auto" chooses; "reference", "cpu", "triton" (any recent GPU) and "blackwell" (with its conversion
            instructions) are honoured or refused. The bits are the same.

    Returns:
        QTensor; codes and scales by definition equal in every backend.

    Raises:
        ValueError: no dimension, a non-floating dtype, an unknown policy or backend, non-finite input with "raise".

    Sources: arXiv 2509.25149 section 2 and appendices B to D; arXiv 2512.02010.
    """
    spec = QuantSpec(spec) if isinstance(spec, str) else spec
    _check_input(x, nonfinite)
    x = x.detach().movedim(dim, -1)
    if x.element_size() == 1:  # 8-bit floats have no arithmetic of their own; BF16 holds them exactly
        x = x.bfloat16()
    if nonfinite == "saturate":
        x = _saturate(x)
    key = make_key(seed, offset, x.device) if spec.stochastic else None
    codes, scales, amax = quantize_parts(x, spec.to_json(), key, backend)
    if nonfinite != "defer" and not bool(torch.isfinite(amax)):
        _raise_nonfinite(x)
    return QTensor(codes, scales, amax, torch.Size(x.shape), spec)


def _check_input(x: Tensor, nonfinite: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"quantize takes a torch tensor, received {type(x).__name__}; use torch.as_tensor(x)")
    if x.dim() == 0:
        raise ValueError("quantize needs at least one dimension, received a 0-d tensor; use x.reshape(1)")
    if not x.is_floating_point():
        raise ValueError(f"quantize needs a floating dtype, received {x.dtype}; cast it first")
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, received {nonfinite!r}")


def _raise_nonfinite(x: Tensor) -> None:
    bad = int((~torch.isfinite(x)).sum())
    if bad == 0:
        raise ValueError(
            f"quantize needs values that stay finite in fp32 and, with a transform, in {x.dtype}, received some that "
            f"overflow there (largest magnitude {float(x.abs().max()):.3g}); scale the tensor down first"
        )
    raise ValueError(
        f"quantize needs finite values, received NaN or infinity ({bad} of {x.numel()} elements); "
        'find their origin, or pass nonfinite="saturate" (clip) or nonfinite="defer" (decodes to NaN)'
    )


def _saturate(x: Tensor) -> Tensor:
    finite = torch.isfinite(x)
    largest = torch.where(finite, x.abs(), torch.zeros_like(x)).amax() if x.numel() else x.new_zeros(())
    clipped = torch.where(torch.isnan(x), torch.zeros_like(x), x)
    return torch.maximum(torch.minimum(clipped, largest), -largest)


def quantize_parts(x: Tensor, spec: str, key: Tensor | None, backend: str = "auto") -> Parts:
    """The same without checks, on bare tensors: what autograd functions call; one opaque operation to compilers.

    Args:
        x: [..., K], the quantized dimension last.
        spec: `QuantSpec.to_json` text.
        key: int64 [2] on x's device, needed when `spec` is stochastic.
        backend: as in `quantize`.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return _quantize_op(x, spec, key, backend)
    return _quantize(x, QuantSpec.from_json(spec), key, backend)


@torch.library.custom_op("quatrain::quantize", mutates_args=())
def _quantize_op(x: Tensor, spec: str, key: Tensor | None, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return _quantize(x, QuantSpec.from_json(spec), key, backend)


@_quantize_op.register_fake
def _(x: Tensor, spec: str, key: Tensor | None, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    return empty_parts(x, QuantSpec.from_json(spec))


def empty_parts(x: Tensor, spec: QuantSpec) -> Parts:
    """Uninitialised codes, scales and amax of the right shapes for x [..., K]."""
    fmt, (block_rows, block_columns) = spec.block_format, spec.block_shape
    length = _round_up(x.shape[-1], spec.padding)
    lead = list(x.shape[:-1])
    code_lead, scale_lead = lead, lead
    if block_rows > 1:
        tiles = _round_up(math.prod(lead), block_rows) // block_rows
        code_lead, scale_lead = [tiles * block_rows], [tiles]
    codes = x.new_empty(
        [*code_lead, length // 2 if fmt.packed else length], dtype=torch.uint8 if fmt.packed else torch.float8_e4m3fn
    )
    scale_dtype = torch.float32 if fmt.scale is None else fmt.scale.dtype or torch.uint8
    scales = x.new_empty([*scale_lead, length // block_columns], dtype=scale_dtype)
    return codes, scales, x.new_empty([1], dtype=torch.float32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _quantize(x: Tensor, spec: QuantSpec, key: Tensor | None, backend: str) -> Parts:
    choice = choose(x.device, backend, quantize_cpu.obstacle)
    if x.is_meta:
        return empty_parts(x, spec)
    if choice.backend == "cpu":
        parts = empty_parts(x, spec)
        quantize_cpu.quantize_into(x, spec, key, parts)
        return parts
    if choice.backend != "reference" and x.dtype != torch.float64:
        from quatrain.kernels.quantize_triton import quantize_matrix

        codes, scales, amax = quantize_matrix(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), spec, key)
        out_codes, out_scales, _ = empty_parts(x.new_empty(x.shape, device="meta"), spec)
        return codes.view(out_codes.shape), scales.view(out_scales.shape), amax
    return quantize_reference(x, spec, key)


def quantize_reference(x: Tensor, spec: QuantSpec, key: Tensor | None) -> Parts:
    """The definition, in plain PyTorch: transform, amax, block scales, rounding. Shapes as in `quantize_parts`."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    values, amax = _transformed(x.reshape(rows, columns).contiguous(), spec)  # outputs are row-major, always
    block_rows, block_columns = spec.block_shape
    blocks = values.view(values.shape[0] // block_rows, block_rows, values.shape[1] // block_columns, block_columns)
    scales = _choose_scales(blocks, amax, spec)
    scaled = (blocks * scales.multiplier[:, None, :, None]).reshape(values.shape)
    codes = _encode(scaled, spec, key)
    out_codes, out_scales, _ = empty_parts(x, spec)
    codes = pack(codes) if spec.block_format.packed else codes
    return codes.view(out_codes.shape), scales.stored.view(out_scales.shape), amax


def _transformed(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """x [M, K] as fp32, zero-padded to whole blocks and transformed; with its amax [1], which propagates NaN."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % spec.padding))
    if spec.hadamard is not None:
        x = spec.hadamard.forward(x)  # rounded once to x's own dtype, as the paper's kernels do
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % spec.block_shape[0]))
    amax = x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1)
    return x, amax


def _choose_scales(blocks: Tensor, amax: Tensor, spec: QuantSpec) -> BlockScales:
    """Scales of blocks [M/b, rows, K/b, columns]."""
    block_max = blocks.abs().amax(dim=(1, 3)) if blocks.numel() else blocks.new_zeros(blocks.shape[0], blocks.shape[2])
    if not spec.block_format.tensor_scale:
        return (fp8_scales if spec.format == "fp8" else mx_scales)(block_max, spec)
    ideal = nvfp4_ideal_scale(block_max, amax, spec)
    if spec.scale == "four-over-six":
        return _best_of(blocks, amax, spec, [ideal, ideal * 1.5])
    if spec.scale == "search":
        return _best_of(blocks, amax, spec, [ideal * m for m in SEARCH_MULTIPLIERS])
    return nvfp4_scales(ideal, amax, spec)


def _best_of(blocks: Tensor, amax: Tensor, spec: QuantSpec, candidates: list[Tensor]) -> BlockScales:
    """For each block the candidate with the smallest round-to-nearest error; ties go to the earlier one."""
    best = nvfp4_scales(candidates[0], amax, spec)
    best_error = _candidate_error(blocks, amax, spec, best)
    for ideal in candidates[1:]:
        scales = nvfp4_scales(ideal, amax, spec)
        error = _candidate_error(blocks, amax, spec, scales)
        better = error < best_error
        best = BlockScales(
            torch.where(better, scales.stored.view(torch.uint8), best.stored.view(torch.uint8)).view(best.stored.dtype),
            torch.where(better, scales.values, best.values),
            torch.where(better, scales.multiplier, best.multiplier),
        )
        best_error = torch.where(better, error, best_error)
    return best


def _candidate_error(blocks: Tensor, amax: Tensor, spec: QuantSpec, scales: BlockScales) -> Tensor:
    element = spec.block_format.element
    rounded = element.decode(encode_nearest(blocks * scales.multiplier[:, None, :, None], element))
    decoded = true_divide(rounded * scales.values[:, None, :, None] * amax, spec.constant)  # left to right
    return block_error(decoded - blocks, spec.error)


def _encode(scaled: Tensor, spec: QuantSpec, key: Tensor | None) -> Tensor:
    element = spec.block_format.element
    if not spec.stochastic:
        return encode_nearest(scaled, element)
    if key is None:
        raise ValueError("stochastic rounding needs a key, received none; pass seed and offset")
    # Positions of the padding draw too: a transform spreads real values into them.
    return encode_stochastic(scaled, element, random_bits(key, scaled.shape[0], scaled.shape[1]))


@functools.cache
def supported_specs() -> tuple[QuantSpec, ...]:
    """One spec of every kind that backends must agree on: what the parity tests walk through."""
    specs = []
    for block in ((1, 16), (16, 16)):
        for rounding in ("nearest", "stochastic", "stochastic-unbiased"):
            specs += [QuantSpec("nvfp4", block, scale, rounding=rounding) for scale in ("to-6", "to-4", "search")]
            specs += [
                QuantSpec("nvfp4", block, "four-over-six", error, scale_max, rounding=rounding)
                for error in ("mse", "mae", "absmax")
                for scale_max in (256, 448)
            ]
            specs.append(QuantSpec("nvfp4", block, scale_rounding="up", rounding=rounding))
    for rounding in ("nearest", "stochastic"):
        for name, blocks in (("mxfp4", ((1, 32), (32, 32))), ("mxfp8", ((1, 32), (32, 32)))):
            specs += [
                QuantSpec(name, block, scale, rounding=rounding)
                for block in blocks
                for scale in ("floor", "ceil", "even", "rceil")
            ]
        specs += [QuantSpec("fp8", b, s, rounding=rounding) for b in ((1, 128), (128, 128)) for s in ("fp32", "pow2")]
    return tuple(specs)
