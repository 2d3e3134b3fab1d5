"""Triton twin of `newton_schulz`, host side: buffers, launches, and which kernel multiplies.

Sides are padded with zeros to whole tiles, which changes nothing: zero rows and columns stay zero, in blocks too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels import cublaslt
from quatrain.kernels import newton_schulz_elements_triton as elements
from quatrain.kernels import newton_schulz_products_triton as products
from quatrain.kernels.launch_triton import ceil_div, launch, next_power_of_2
from quatrain.kernels.newton_schulz import (
    Iteration,
    Triple,
    _product,
    quantized,
    starting_point,
)
from quatrain.kernels.newton_schulz_clip_triton import clip_threshold
from quatrain.kernels.newton_schulz_elements_triton import apply_updates, momentum_updates
from quatrain.kernels.quantize_triton import architecture, constants

__all__ = ["Tuning", "apply_updates", "momentum_updates", "orthogonalize"]

_GROUP = 8  # rows of tiles that share columns in the cache
_BLOCK = 1024  # elements that a program of an elementwise kernel holds at once
_NORM_REPEATS = 32  # blocks of one program of the norm, at least
_NORM_PROGRAMS = 512  # of one matrix, at most: every program of the next kernel adds up what they found
_RULES = ("to-6", "to-4", "four-over-six")


@dataclass(frozen=True)
class Tuning:
    """Which kernels multiply and quantize, and in what tiles; results differ in the order of accumulation alone.

    Args:
        fused: quantize tiles where they are made, instead of in passes of their own.
        library: leave a X + B X to cuBLAS; its operands then take a pass of their own.
        tile: rows and columns of a tile of a symmetric product.
        tall: rows over columns of a tile of X X^T, where nothing is quantized there and sides are multiples of both.
        tile_m: rows of a tile of a X + B X.
        tile_n: its columns.
        step: of the contraction.
        stages: of the symmetric products' pipeline. Three of 128 x 128 leave room for a second program, whose products
            run while the first one quantizes.
        halves: tall tiles of polynomials too, finished half by half: A needs registers beside the sums.
        processors: multiprocessors, each of which has one tall tile at a time; a last wave that would leave most of
            them idle is divided into smaller tiles. 0 for none of this.
        tall_stages: of the pipeline of tall tiles.
        warps: of a program of a symmetric product.
        update_stages: of the pipeline of a X + B X.
        update_warps: of its programs.
        registers: of a thread, at most; 128 with 8 warps let two programs share a multiprocessor.
    """

    fused: bool = True
    library: bool = False
    tile: int = 128
    tall: int = 1
    halves: bool = False
    processors: int = 0
    tile_m: int = 128
    tile_n: int = 128
    step: int = 64
    stages: int = 3
    tall_stages: int = 3
    warps: int = 8
    update_stages: int = 3
    update_warps: int = 8
    registers: int | None = 128


SMALL = Tuning(tile=64, tile_m=64, tile_n=64, warps=4, update_warps=4)  # for sides up to 64
# cuBLAS multiplies faster than Triton where no half of a product can be left out, and codes cost about as much
# arithmetic as a product has pauses: on Hopper passes of their own beside cuBLAS are faster.
LARGE = Tuning(fused=False, library=True, registers=None)
_ROOMY, _HOPPER = (
    (80, 90, 100, 103),
    90,
)  # architectures with shared memory for a fourth stage; tall tiles' measured one


@dataclass(frozen=True)
class _Plan:
    """What the launches of one batch share."""

    iteration: Iteration
    tuning: Tuning
    fast: bool  # operands that the kernels quantize
    q: tuple[float | int, ...]
    arch: int

    @property
    def split(self) -> bool:
        return self.iteration.split is not None

    @property
    def fused(self) -> bool:
        return self.fast and self.tuning.fused


@dataclass
class _Work:
    """Matrices of one batch: X, its operands, A, the polynomial, their operands and diagonals."""

    x: Tensor
    rows: Tensor
    columns: Tensor
    spare: Tensor  # the other of two that take turns: X without quantization, else its columns
    gram: Tensor
    polynomial: Tensor
    left: Tensor
    right: Tensor
    diagonals: Tensor  # fp32 [2, k, m]: of A, of the polynomial


def _arch(x: Tensor) -> int:
    return architecture(x.device.index)


def orthogonalize(updates: Tensor, iteration: Iteration, clip: float | None, tuning: Tuning | None = None) -> Tensor:
    """Approximate polar factors; see `newton_schulz.orthogonalize`.

    Args:
        updates: [k, R, C] with elements, any floating dtype.
        iteration: with BF16 storage.
        clip: quantile of |M|, or None.
        tuning: of the kernels; None chooses tiles by the shorter side.

    Returns:
        BF16 [k, R, C], possibly a view that is not contiguous.
    """
    count, rows, columns = updates.shape
    tall = rows > columns
    if rows * columns >= 1 << 31:
        raise ValueError(
            f"a matrix may have up to 2^31 - 1 elements, received [{rows}, {columns}]; give it to AdamW "
            '(treatment="adamw")'
        )
    plan = make_plan(iteration, min(rows, columns), updates, tuning)
    tile, tile_n = max(64, plan.tuning.tile, plan.tuning.tile_m), max(64, plan.tuning.tile_n)
    m, n = (ceil_div(side, t) * t for side, t in zip(sorted((rows, columns)), (tile, tile_n), strict=True))
    work = _buffers(count, m, n, plan, updates.device)
    if updates.dtype in elements.DTYPES:
        _start(updates.contiguous(), clip, plan, work)
    else:
        wide = starting_point(updates.mT if tall else updates, clip)
        work.x.zero_()[:, : wide.shape[1], : wide.shape[2]] = wide
        _requantize(plan, work)
    found = iterate(plan, work)[:, : min(rows, columns), : max(rows, columns)]
    return found.mT if tall else found


def make_plan(iteration: Iteration, narrow: int, x: Tensor, tuning: Tuning | None) -> _Plan:
    """How matrices with a shorter side of `narrow` are multiplied on x's device."""
    spec = iteration.operands
    fast = (
        spec is not None and spec.format == "nvfp4" and spec.block_shape == (1, 16) and (spec.scale or "to-6") in _RULES
    )
    if tuning is None:
        arch = _arch(x)
        large = replace(LARGE, stages=4) if arch in _ROOMY else LARGE
        if arch == _HOPPER:
            large = replace(large, tall=2, halves=True, processors=_processors(x.device.index))
        tuning = SMALL if narrow <= 64 else large
    q = constants(spec if fast and spec is not None else QuantSpec("nvfp4"))
    return _Plan(iteration, tuning, fast, q, _arch(x))


@functools.cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _buffers(count: int, m: int, n: int, plan: _Plan, device: torch.device) -> _Work:
    def matrices(columns: int) -> Tensor:
        return torch.empty(count, m, columns, dtype=torch.bfloat16, device=device)

    x, gram, separate = matrices(n), matrices(m), plan.iteration.operands is not None
    # The polynomial may take A's place where no program reads another one's tile of A.
    polynomial = gram if plan.fused else matrices(m)
    left = matrices(m) if separate else gram
    right = matrices(m) if separate else polynomial
    diagonals = torch.empty(2, count, m, dtype=torch.float32, device=device)
    rows, columns = (matrices(n), matrices(n)) if separate else (x, x)
    return _Work(x, rows, columns, matrices(n), gram, polynomial, left, right, diagonals)


def _lanes(plan: _Plan, tile_m: int, tile_n: int, warps: int) -> int:
    """Blocks of a tile, or pairs of them, that are quantized at once: one for each thread."""
    pairs = tile_m * tile_n // 32
    return pairs if plan.arch == 0 else min(32 * warps, pairs)


def _start(source: Tensor, clip: float | None, plan: _Plan, work: _Work) -> None:
    """Threshold, norm, and the first X with its operands."""
    count, rows, columns = source.shape
    size, tall = rows * columns, rows > columns
    threshold = torch.empty(count, device=source.device) if clip is None else clip_threshold(source, clip)
    repeats = next_power_of_2(max(_NORM_REPEATS, ceil_div(size, _BLOCK * _NORM_PROGRAMS)))
    programs = ceil_div(size, _BLOCK * repeats)
    peaks = torch.empty(count, programs, dtype=torch.int32, device=source.device)
    sums = torch.empty(count, programs, dtype=torch.float64, device=source.device)
    launch(
        elements.norm_kernel, (programs, count), source, threshold, peaks, sums, size, clip is not None, plan.arch,
        _BLOCK, repeats, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    m, n = work.x.shape[1:]
    tile_m, tile_n = 64, min(128, plan.tuning.tile_n)
    launch(
        elements.start_kernel, ((m // tile_m) * (n // tile_n), count), source, threshold, peaks, sums, work.x,
        work.rows, work.columns, rows, columns, m, n, programs, clip is not None, tall, size == m * n,
        plan.fast, plan.q, plan.arch, next_power_of_2(programs), tile_m, tile_n, _lanes(plan, tile_m, tile_n, 4),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if not plan.fast:
        _requantize(plan, work)


def _requantize(plan: _Plan, work: _Work) -> None:
    """Operands of X in a pass of their own."""
    if plan.fast:
        _operands(plan, work.x, work.rows, work.columns)
    elif plan.iteration.operands is not None:
        work.rows.copy_(quantized(work.x, plan.iteration))
        work.columns.copy_(quantized(work.x.mT, plan.iteration).mT)


def _operands(plan: _Plan, x: Tensor, rows: Tensor, columns: Tensor | None) -> None:
    """x [k, i, l] quantized along rows, and along columns where that is wanted, from one read."""
    tile_m, tile_n = 64, min(128, plan.tuning.tile if columns is None else plan.tuning.tile_n)
    launch(
        products.operands_kernel, (x.numel() // (tile_m * tile_n),), x, x, rows, rows if columns is None else columns,
        x, 0.0, x.shape[2], False, True, columns is not None, plan.q, plan.arch, tile_m, tile_n,
        _lanes(plan, tile_m, tile_n, 4), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def iterate(plan: _Plan, work: _Work) -> Tensor:
    """All steps, from X and its operands; the last X, padded."""
    last = len(plan.iteration.coefficients) - 1
    for index, triple in enumerate(plan.iteration.coefficients):
        step(plan, work, triple, index == last)
    return work.x


def step(plan: _Plan, work: _Work, triple: Triple, last: bool) -> None:
    """One step; the operands of the new X are left out after the last."""
    a, b, c = triple
    _symmetric(plan, work, work.rows, work.gram, work.left, None)
    if not plan.fused:
        _square_operand(plan, work.gram, work.left)
    _symmetric(plan, work, work.left, work.polynomial, work.right, (b, c))
    if not plan.fused:
        _square_operand(plan, work.polynomial, work.right)
    if plan.tuning.library:
        _library_update(plan, work, a, last)
        return
    _update(plan, work, a, last)
    if not last and not plan.fused:
        _requantize(plan, work)


def _square_operand(plan: _Plan, x: Tensor, out: Tensor) -> None:
    if plan.fast:
        _operands(plan, x, out, None)
    elif plan.iteration.operands is not None:
        out.copy_(quantized(x, plan.iteration))


def _symmetric(
    plan: _Plan, work: _Work, x: Tensor, out: Tensor, operand: Tensor, polynomial: tuple[float, float] | None
) -> None:
    """x x^T, or b A + c x x^T, below the diagonal and mirrored; with its operand if that is fused."""
    t = plan.tuning
    count, m, length = x.shape
    b, c = polynomial or (0.0, 0.0)
    tall = 1 if plan.fused or m % (t.tile * t.tall) else t.tall
    halves = tall > 1 and polynomial is not None
    if halves and (plan.split or not t.halves):  # diagonals would need registers too
        tall, halves = 1, False
    side = m // (t.tile * tall)
    tiles = count * tall * side * (side + 1) // 2
    last = tiles % t.processors if tall > 1 and t.processors else 0
    last = last if tall * last <= t.processors else 0  # the last wave, where its tiles can be divided
    launch(
        products.symmetric_kernel, (tiles + (tall - 1) * last,), x, out, operand, work.gram,
        work.diagonals[0], work.diagonals[1], b, c, m, length, tiles - last, polynomial is not None, plan.split,
        plan.fused, plan.q, plan.arch, t.tile, tall, halves, last > 0, t.step,
        _lanes(plan, t.tile, t.tile, t.warps),
        num_warps=t.warps, num_stages=t.stages if tall == 1 else t.tall_stages, maxnreg=t.registers,
        enable_fp_fusion=False,
    )  # fmt: skip


def _update(plan: _Plan, work: _Work, a: float, last: bool) -> None:
    """(a + d) X + B X by Triton's kernel, with the new operands if those are fused."""
    t = plan.tuning
    count, m, n = work.x.shape
    shared = work.columns is work.x
    out = work.spare if shared else work.x
    fused = plan.fused and not last
    launch(
        products.update_kernel, (count * (m // t.tile_m) * (n // t.tile_n),), work.right, work.columns, work.x, out,
        work.rows, work.spare, work.diagonals[1], a, m, n, plan.split, fused, plan.q, plan.arch,
        t.tile_m, t.tile_n, t.step, _GROUP, _lanes(plan, t.tile_m, t.tile_n, t.update_warps),
        num_warps=t.update_warps, num_stages=t.update_stages, maxnreg=t.registers, enable_fp_fusion=False,
    )  # fmt: skip
    if shared:
        work.x, work.rows, work.columns, work.spare = out, out, out, work.x
    elif fused:
        work.columns, work.spare = work.spare, work.columns


def _library_update(plan: _Plan, work: _Work, a: float, last: bool) -> None:
    """The same by cuBLAS, then a pass for the operands; with a split one fp32 product goes through memory."""
    if plan.split:
        product = _product(work.right, work.columns.mT)
        count, m, n = work.x.shape
        launch(
            products.operands_kernel, (count * (m // 64) * (n // 64),), work.x, product, work.rows, work.columns,
            work.diagonals[1], a, n, True, plan.fast and not last, True, plan.q, plan.arch, 64, 64,
            _lanes(plan, 64, 64, 4), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if not plan.fast and not last:
            _requantize(plan, work)
        return
    if work.columns is work.x:
        direct = work.x.is_cuda and cublaslt.obstacle(work.x.device) is None
        if not (direct and cublaslt.add_product(work.spare, work.right, work.columns, work.x, a)):
            torch.baddbmm(work.x, work.right, work.columns, beta=a, out=work.spare)
        work.x, work.rows, work.columns, work.spare = work.spare, work.spare, work.spare, work.x
        return
    work.x.baddbmm_(work.right, work.columns, beta=a)
    if not last:
        _requantize(plan, work)
