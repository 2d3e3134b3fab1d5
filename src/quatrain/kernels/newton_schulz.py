"""Newton-Schulz with quantized products: the contract, and the plain PyTorch reference that defines it.

A momentum matrix M is replaced by an approximation of its polar factor U V^T. One step with coefficients (a, b, c):

    A = Q(X) Q(X)^T        B = b A + c Q(A) Q(A)^T        X <- a X + Q(B) Q(X)

Every operand is quantized along its contraction: X along n for A, along m for the last product; A is symmetric, so one
quantization serves both sides. Sums and a X are formed in fp32. With `split="diagonal"` the diagonal of A and of B
never meets a quantizer (A = D + R):

    A^2 = D^2 + D R + R D + Q(R) Q(R)^T        X <- (a + diag B) X + Q(offdiag B) Q(X)

Near convergence R goes to 0 and the noise with it. What is stored between products (X, A, B) is rounded to BF16 first
and quantized from there, diagonals stay fp32; so a kernel may quantize in the epilogue that makes a matrix or in a pass
of its own, and the codes are the same. The twin (`newton_schulz_triton`) has functions of the names used here and
quantizes to the same bits; products and norms differ in the order of accumulation alone.

Legend: k matrices of a batch, m rows, n columns, m <= n.
Sources: Muon (Jordan 2024), ROOT (arXiv 2511.20626); full-stack FP4 training (Ding et al. 2026). BF16 storage, the
fixed tensor scale and the diagonal split are this library's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.dispatch import triton_obstacle
from quatrain.kernels.quantize import quantize
from quatrain.kernels.scaling import SEARCH_MULTIPLIERS, BlockScales, nvfp4_ideal_scale, nvfp4_scales, tree_sum

Triple = tuple[float, float, float]

# The tensor scale of every NVFP4 operand. Entries are bounded: |X| and |A| by about 1.3 and 1.7, |B| by b^2 / 4c = 2.7
# for the sets that are allowed here, so no amax pass is needed. Blocks reach up to 6 x 448 / 1024 = 2.625; as a power
# of two the scale also keeps code x block scale x tensor scale exact in BF16.
TENSOR_SCALE = 2.0**-10
CLIP_SAMPLE = 65_536
SPLITS = (None, "diagonal")
_MAGIC = 0.75 * 2.0**23  # added and subtracted, it rounds to half of the binade's power of two, ties to even


@dataclass(frozen=True)
class Iteration:
    """How matrices are orthogonalized.

    Args:
        coefficients: one (a, b, c) for each step.
        operands: of the products; None multiplies what is stored, unquantized.
        split: None, or "diagonal" to keep diagonals of A and B out of the quantizer.
        storage: dtype of X, A and B between products; fp32 and float64 serve as yardsticks.

    Raises:
        ValueError: no step, an unknown split or storage, or a spec that cannot quantize operands of this iteration.
    """

    coefficients: tuple[Triple, ...]
    operands: QuantSpec | None = None
    split: str | None = None
    storage: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not self.coefficients or any(len(triple) != 3 for triple in self.coefficients):
            raise ValueError(
                f"Newton-Schulz takes one (a, b, c) for each step, received {self.coefficients!r}; "
                "give at least one triple"
            )
        if self.split not in SPLITS:
            raise ValueError(f'split must be None or "diagonal", received {self.split!r}')
        if self.storage not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"storage must be bfloat16, float32 or float64, received {self.storage}")
        if self.operands is not None:
            _check_operands(self.operands)


def _check_operands(spec: QuantSpec) -> None:
    if spec.stochastic or spec.hadamard is not None or spec.block_shape[0] != 1:
        raise ValueError(
            "Newton-Schulz operands have one-dimensional blocks, no transform and rounding to nearest "
            f'(noise would only slow it down), received {spec}; use QuantSpec("nvfp4", scale="four-over-six")'
        )


def runs_on_triton(device: torch.device, backend: str) -> bool:
    """Whether the Triton twin serves tensors on `device`.

    Raises:
        ValueError: an unknown backend, or "triton" where it cannot run.
    """
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend must be auto, reference or triton, received {backend!r}")
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return False
    obstacle = triton_obstacle(device)
    if backend == "triton" and obstacle is not None:
        raise ValueError(f'backend="triton" cannot run here: {obstacle}; use backend="auto" or "reference"')
    return obstacle is None


def momentum_updates(
    grads: Sequence[Tensor], buffers: Sequence[Tensor], momentum: float, nesterov: bool, *, backend: str = "auto"
) -> Tensor:
    """Advance momentum buffers and return what is to be orthogonalized.

    new = buffer + (g - buffer) (1 - momentum) in fp32; the buffer becomes new in its own dtype; the update is
    new + (g - new) (1 - momentum) with Nesterov, else new.

    Args:
        grads: k gradients [R, C], any floating dtype.
        buffers: k buffers [R, C], changed in place; each in its own dtype.
        momentum: of the average.
        nesterov: look one step ahead.
        backend: "auto", "reference" or "triton"; honoured or refused.

    Returns:
        fp32 [k, R, C]: rounding to BF16 before the division by max|M| would make the bits of X, and through
        quantization noise the update's norm, depend on the gradient's scale.
    """
    if runs_on_triton(grads[0].device, backend):
        from quatrain.kernels.newton_schulz_triton import momentum_updates as twin

        return twin(grads, buffers, momentum, nesterov)
    updates = grads[0].new_empty((len(grads), *grads[0].shape), dtype=torch.float32)
    for out, grad, buffer in zip(updates, grads, buffers, strict=True):
        g = grad.to(torch.promote_types(grad.dtype, torch.float32))
        old = buffer.to(g.dtype)
        new = old + (g - old) * (1.0 - momentum)  # not lerp, which may fuse
        buffer.copy_(new)
        out.copy_(new + (g - new) * (1.0 - momentum) if nesterov else new)
    return updates


def apply_updates(
    parameters: Sequence[Tensor],
    updates: Tensor,
    lr: float | Tensor,
    decay: float,
    step: float | Tensor,
    *,
    kept: Sequence[Tensor] | None = None,
    keys: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """parameter <- (1 - lr decay) parameter - step update, in fp32, rounded once to the parameter's dtype; in place.

    Args:
        parameters: k tensors [R, C].
        updates: [k, R, C].
        lr: multiplies the decay; without decay the parameter is not scaled.
        decay: decoupled weight decay.
        step: the learning rate after its adjustment to the shape.
        kept: masters or corrections beside BF16 parameters, for the Triton twin (see there).
        keys: int64 [k, 2], of stochastic rounding by the Triton twin.
        backend: as in `momentum_updates`.

    Raises:
        ValueError: `kept` or `keys` where the twin does not serve.
    """
    keep = 1.0 - lr * decay
    if runs_on_triton(updates.device, backend):
        from quatrain.kernels import newton_schulz_triton as twin

        twin.apply_updates(parameters, updates, keep, step, kept, keys)
        return
    if kept is not None or keys is not None:
        raise ValueError("masters and keys are for the Triton twin, received them elsewhere; widen the weights first")
    for parameter, update in zip(parameters, updates, strict=True):
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        parameter.copy_(wide * keep - update.to(wide.dtype) * step)


def orthogonalize(updates: Tensor, iteration: Iteration, clip: float | None = None, *, backend: str = "auto") -> Tensor:
    """Approximate polar factors of a batch of matrices.

    Args:
        updates: [..., R, C], any floating dtype and magnitude.
        iteration: coefficients, operands and split.
        clip: quantile of |M| at which M is clipped first, or None.
        backend: as in `momentum_updates`.

    Returns:
        [..., R, C] in `iteration.storage`. A zero matrix stays zero; a matrix with a NaN or an infinity becomes NaN.

    Raises:
        ValueError: fewer than two dimensions, or a clip that is no quantile.
    """
    if updates.dim() < 2:
        raise ValueError(f"orthogonalize takes matrices [..., R, C], received shape {tuple(updates.shape)}")
    if not updates.numel():
        return updates.to(iteration.storage)
    rows, columns = updates.shape[-2:]
    flat = updates.reshape(-1, rows, columns)
    if runs_on_triton(updates.device, backend) and iteration.storage == torch.bfloat16:
        from quatrain.kernels.newton_schulz_triton import orthogonalize as twin

        return twin(flat, iteration, clip).reshape(updates.shape)
    tall = rows > columns
    x = newton_schulz(starting_point(flat.mT if tall else flat, clip, iteration.storage), iteration)
    return (x.mT if tall else x).reshape(updates.shape)


def starting_point(matrices: Tensor, clip: float | None, storage: torch.dtype = torch.bfloat16) -> Tensor:
    """Matrices clipped, divided by their largest magnitude and then by their Frobenius norm, as the first X.

    The division by the maximum comes first, so that no square can over- or underflow.

    Args:
        matrices: [k, m, n].
        clip: quantile of |M| at which M is clipped, or None; a quantile of 0 (almost all entries are 0, or below 2^-149
            of the largest: there the Triton twin does clip) clips nothing.
        storage: of the result.

    Returns:
        [k, m, n]; zero where M is zero, NaN where M holds a NaN or an infinity.
    """
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    peak = wide.abs().amax(dim=(1, 2), keepdim=True)  # NaN if there is one
    wide = wide / torch.where(peak == 0, torch.ones_like(peak), peak)  # inf / inf is NaN
    if clip is not None:
        threshold = clip_threshold(wide, clip)[:, None, None]
        wide = torch.minimum(torch.maximum(wide, -threshold), threshold)
    norm = wide.double().square().sum(dim=(1, 2), keepdim=True).sqrt().to(wide.dtype)  # float64: in any order
    return (wide / torch.where(norm == 0, torch.ones_like(norm), norm)).to(storage)


def clip_threshold(matrices: Tensor, quantile: float) -> Tensor:
    """The order statistic ceil(quantile x count) of a strided sample of |M|, at most 65,536 entries of a matrix.

    Entries are taken in row-major order of the matrix as it is given, every s-th from the first, s being the smallest
    number at least numel / 65,536 that has no divisor in common with n: else it would visit a few columns only.

    Args:
        matrices: [k, m, n] floating.
        quantile: in (0, 1].

    Returns:
        [k]; infinite where the order statistic is 0.

    Raises:
        ValueError: the quantile is not in (0, 1].
    """
    if not 0.0 < quantile <= 1.0:
        raise ValueError(f"clip is a quantile in (0, 1], as 0.99, or None; received {quantile!r}")
    flat = matrices.flatten(1)
    sample = flat[:, :: _sample_stride(flat.shape[1], matrices.shape[2])].abs()
    rank = max(1, math.ceil(quantile * sample.shape[1]))
    threshold = sample.sort(dim=1).values[:, rank - 1]
    return torch.where(threshold == 0, torch.full_like(threshold, math.inf), threshold)


def _sample_stride(elements: int, columns: int) -> int:
    stride = max(1, -(-elements // CLIP_SAMPLE))
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return stride


def newton_schulz(x: Tensor, iteration: Iteration) -> Tensor:
    """Run the iteration: [k, m, n] with singular values in [0, 1], m <= n, to the same shape in `iteration.storage`."""
    x = x.to(iteration.storage)
    with torch.autocast(x.device.type, enabled=False):
        for triple in iteration.coefficients:
            x = newton_schulz_step(x, triple, iteration)
    return x


def newton_schulz_step(x: Tensor, triple: Triple, iteration: Iteration) -> Tensor:
    """One step of x [k, m, n] with (a, b, c). The order of operations in fp32 is the definition."""
    a, b, c = triple
    rows = quantized(x, iteration)
    gram = _product(rows, rows)
    wide = x.to(gram.dtype)
    if iteration.split is None:
        stored = gram.to(iteration.storage)
        operand = quantized(stored, iteration)
        polynomial = stored.to(gram.dtype) * b + _product(operand, operand) * c
        scaled = wide * a
    else:
        polynomial, diagonal = _split_polynomial(gram, b, c, iteration)
        scaled = (diagonal + a)[:, :, None] * wide
    left = quantized(polynomial.to(iteration.storage), iteration)
    right = quantized(x.mT, iteration)
    return (scaled + _product(left, right)).to(iteration.storage)


def _split_polynomial(gram: Tensor, b: float, c: float, iteration: Iteration) -> tuple[Tensor, Tensor]:
    """b A + c A^2 with zeros on the diagonal [k, m, m], and that diagonal apart [k, m], from A in fp32."""
    d = gram.diagonal(dim1=1, dim2=2).clone()
    stored = _without_diagonal(gram).to(iteration.storage)
    operand = quantized(stored, iteration)
    square = _product(operand, operand)
    rest = stored.to(gram.dtype)
    diagonal = d * b + (d * d + square.diagonal(dim1=1, dim2=2)) * c
    polynomial = rest * b + ((d[:, :, None] + d[:, None, :]) * rest + square) * c
    return _without_diagonal(polynomial), diagonal


def _without_diagonal(matrices: Tensor) -> Tensor:
    matrices = matrices.clone()
    matrices.diagonal(dim1=1, dim2=2).zero_()
    return matrices


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b^T of [k, i, l] and [k, j, l], accumulated in fp32 (float64 of float64) and left there."""
    if a.dtype != torch.bfloat16:
        return a @ b.mT
    return torch.bmm(a, b.mT, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().mT


def quantized(x: Tensor, iteration: Iteration) -> Tensor:
    """What a product reads for x [k, i, l], quantized along l: the decoded values, in x's dtype, exactly.

    NVFP4 takes the fixed `TENSOR_SCALE` in place of one from amax; the other formats are as `quantize` makes them.
    """
    spec = iteration.operands
    if spec is None:
        return x
    if spec.format == "nvfp4":
        return _nvfp4(x, spec)
    return quantize(x, spec, nonfinite="defer").dequantize(torch.float32).to(x.dtype)


def _nvfp4(x: Tensor, spec: QuantSpec) -> Tensor:
    length = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -length % 16)).unflatten(-1, (-1, 16))
    blocks = blocks.movedim(-1, 0).to(torch.float32, memory_format=torch.contiguous_format)  # long inner loops
    amax = blocks.new_full((1,), spec.constant * TENSOR_SCALE)
    ideal = nvfp4_ideal_scale(blocks.abs().amax(dim=0), amax, spec)
    multipliers = {"four-over-six": (1.0, 1.5), "search": SEARCH_MULTIPLIERS}.get(str(spec.scale), (1.0,))
    best = _decoded(blocks, nvfp4_scales(ideal * multipliers[0], amax, spec))
    if len(multipliers) > 1:
        best_error = _error(best, blocks, spec)
        for multiplier in multipliers[1:]:
            other = _decoded(blocks, nvfp4_scales(ideal * multiplier, amax, spec))
            error = _error(other, blocks, spec)
            better = error < best_error
            best = torch.where(better, other, best)
            best_error = torch.where(better, error, best_error)
    return best.to(x.dtype).movedim(0, -1).flatten(-2)[..., :length]


def _decoded(blocks: Tensor, scales: BlockScales) -> Tensor:
    """Blocks [16, ...] rounded to E2M1 and decoded; each product is exact."""
    return nearest_e2m1(blocks * scales.multiplier).mul_(scales.values * TENSOR_SCALE)


def nearest_e2m1(x: Tensor) -> Tensor:
    """fp32 rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with sign, ties to even; the values of the codes."""
    x = x.clamp(-6.0, 6.0)
    magic = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below |x|
    magic = magic.clamp_(min=1.0).mul_(_MAGIC)
    return x.add_(magic).sub_(magic)  # NaN stays NaN


def _error(decoded: Tensor, blocks: Tensor, spec: QuantSpec) -> Tensor:
    difference = decoded - blocks
    if spec.error == "absmax":
        return difference.abs_().amax(dim=0)
    return tree_sum(difference.square_() if spec.error == "mse" else difference.abs_(), 0)
