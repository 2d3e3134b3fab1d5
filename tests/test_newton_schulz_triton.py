"""The Triton twin of Newton-Schulz: operands, momentum, first X and weights to the bit, products to their rounding.

On a GPU where there is one, else in Triton's interpreter with small matrices.
"""

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels import newton_schulz as reference
from quatrain.kernels.adamw import split_master
from quatrain.kernels.newton_schulz import Iteration, newton_schulz_step, orthogonalize, quantized, starting_point
from quatrain.optim.clock import key_of
from quatrain.optim.plain import keep_weight, wide_weight
from quatrain.optim.root import Root

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels import newton_schulz_triton as twin  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FOUR_OVER_SIX = QuantSpec("nvfp4", scale="four-over-six")
HYBRID = ((3.131, -3.588, 1.261),) * 3 + ((2.0, -1.5, 0.5),) * 2


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def padded(x: Tensor, tile: int = 64) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[2] % tile, 0, -x.shape[1] % tile))


def prepared(
    updates: Tensor, iteration: Iteration, clip: float | None, tuning: twin.Tuning = twin.SMALL
) -> tuple[twin._Plan, twin._Work]:
    narrow, wide = sorted(updates.shape[1:])
    plan = twin.make_plan(iteration, narrow, updates, tuning)
    work = twin._buffers(len(updates), -(-narrow // 64) * 64, -(-wide // 64) * 64, plan, updates.device)
    twin._start(updates, clip, plan, work)
    return plan, work


SPECS = [
    FOUR_OVER_SIX,
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", scale="to-4", scale_rounding="up"),
    QuantSpec("nvfp4", scale="four-over-six", error="mae", scale_max=448),
    QuantSpec("nvfp4", scale="four-over-six", error="absmax"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_operands_to_the_bit(spec: QuantSpec) -> None:
    """Along both directions; from blocks of zeros and of subnormal scales to ones that saturate."""
    x = random(2, 64, 128) * torch.logspace(-6, 1, 64, device=DEVICE)[:, None]
    x[0, 5], x[1, :, 17] = 0.0, 3.0
    x = x.bfloat16()
    iteration = Iteration(HYBRID, spec)
    plan = twin.make_plan(iteration, 64, x, twin.SMALL)
    rows, columns = torch.full_like(x, 7.0), torch.full_like(x, 7.0)
    twin._operands(plan, x, rows, columns)
    assert torch.equal(rows, quantized(x, iteration))
    assert torch.equal(columns, quantized(x.mT, iteration).mT)


@pytest.mark.parametrize("shape", [(3, 40, 60), (2, 100, 48), (1, 257, 300), (1, 700, 100)])
@pytest.mark.parametrize("quantile", [1e-9, 0.5, 0.99, 1.0])
def test_clip_thresholds_are_those_of_a_sort(shape: tuple[int, int, int], quantile: float) -> None:
    """Ties, subnormal numbers, zeros, infinity and NaN included; of tall matrices the transpose is sampled."""
    x = random(*shape)
    x[0] = (x[0] * 4).round() / 4
    x[0, :3] *= 1e-39
    if shape[0] > 1:
        x[1, :, ::2] = 0.0
    if shape[0] > 2:
        x[2, 1] = float("inf")
        x[2, 2] = float("nan")
    wanted = reference.clip_threshold(x.mT if shape[1] > shape[2] else x, quantile)
    torch.testing.assert_close(twin.clip_threshold(x, quantile), wanted, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 40, 60), (1, 100, 48), (1, 64, 128)])
@pytest.mark.parametrize("clip", [None, 0.9])
def test_first_x_to_the_bit(shape: tuple[int, int, int], clip: float | None) -> None:
    updates = random(*shape)
    if shape[0] == 2:
        updates[0] *= 1e-30
        updates[1, :, 1:] = 0.0  # the order statistic is 0: nothing is clipped
    iteration = Iteration(HYBRID, FOUR_OVER_SIX)
    _, work = prepared(updates, iteration, clip)
    wanted = padded(starting_point(updates.mT if shape[1] > shape[2] else updates, clip))
    assert torch.equal(work.x, wanted)
    assert torch.equal(work.rows, quantized(wanted, iteration))
    assert torch.equal(work.columns, quantized(wanted.mT, iteration).mT)


@pytest.mark.parametrize("split", [None, "diagonal"])
def test_operands_made_with_the_product_are_those_of_what_is_stored(split: str | None) -> None:
    """Each operand is the quantized matrix, mirrored tiles included, and a pass of its own gives the same."""
    iteration, size = Iteration(HYBRID, FOUR_OVER_SIX, split), 128 if GPU else 64
    updates, results = random(1, size, size), []
    for fused in (True, False):
        tuning = twin.Tuning(fused, tile=size // 2, tile_m=size // 2, tile_n=64, warps=4, update_warps=4)
        plan, work = prepared(updates, iteration, None, tuning)
        twin.step(plan, work, HYBRID[0], False)
        results.append((work.x, work.rows, work.columns, work.left, work.right))
    lower = torch.ones(size, size, dtype=torch.bool, device=DEVICE).tril()
    gram, polynomial = work.gram, work.polynomial  # of the unfused path: whole
    assert torch.equal(gram, torch.where(lower, gram, gram.mT))
    wanted = quantized(work.x, iteration), quantized(work.x.mT, iteration).mT
    wanted = (work.x, *wanted, quantized(gram, iteration), quantized(polynomial, iteration))
    for found in results:
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("halves", "processors"), [(False, 0), (True, 0), (True, 5), (False, 7)])
@pytest.mark.parametrize("split", [None, "diagonal"])
def test_tall_tiles_of_symmetric_products(split: str | None, halves: bool, processors: int) -> None:
    """Blocks of 64 x 64 as two tiles of 64 x 32, the last two or five of twelve divided: the same matrices."""
    iteration, found = Iteration(HYBRID, None, split), []
    for tall in (1, 2):
        tuning = twin.Tuning(
            fused=False, tile=32, tall=tall, halves=halves, processors=processors, tile_m=32, tile_n=64, step=32,
            warps=4, update_warps=4,
        )  # fmt: skip
        torch.manual_seed(0)
        plan, work = prepared(random(2, 128, 128), iteration, None, tuning)
        work.diagonals.zero_()
        twin.step(plan, work, HYBRID[0], False)
        found.append((work.gram, work.polynomial, work.x, *(work.diagonals if split else ())))
    for one, other in zip(*found, strict=True):
        assert relative(other, one) < (2e-3 if one.dtype == torch.bfloat16 else 1e-6)
    assert all(torch.equal(m, m.mT) for m in found[1][:2])


@pytest.mark.parametrize("spec", [None, FOUR_OVER_SIX], ids=str)
@pytest.mark.parametrize("split", [None, "diagonal"])
def test_one_step_is_the_references(spec: QuantSpec | None, split: str | None) -> None:
    """From the same X: sums differ in their order, so nearly every BF16 number is the same and diagonals to 1e-6."""
    iteration = Iteration(HYBRID, spec, split)
    plan, work = prepared(random(1 if spec else 2, 64, 128), iteration, None)
    x, operand = work.x.clone(), work.rows.clone()
    twin.step(plan, work, HYBRID[0], False)
    wanted = newton_schulz_step(x, HYBRID[0], iteration)
    assert float((work.x == wanted).float().mean()) > 0.98
    assert relative(work.x, wanted) < 1e-3
    gram = operand.double() @ operand.double().mT
    if split:
        assert relative(work.diagonals[0], gram.diagonal(dim1=1, dim2=2)) < 1e-6
        gram.diagonal(dim1=1, dim2=2).zero_()
    if spec is None:  # else the polynomial has taken its place
        assert float((work.gram == gram.bfloat16()).float().mean()) > 0.999
        assert torch.equal(work.gram, work.gram.mT) and torch.equal(work.polynomial, work.polynomial.mT)


CASES = [((2, 64, 128), None), ((2, 100, 72), None), ((1, 60, 60), FOUR_OVER_SIX), ((1, 90, 70), FOUR_OVER_SIX),
         ((2, 60, 100), QuantSpec("mxfp8"))]  # fmt: skip


@pytest.mark.parametrize(("shape", "spec"), CASES, ids=str)
def test_whole_iteration(shape: tuple[int, int, int], spec: QuantSpec | None) -> None:
    updates = random(*shape)
    for split in (None, "diagonal") if spec is None or GPU else (None if shape[1] == 60 else "diagonal",):
        iteration = Iteration(HYBRID, spec, split)
        found = orthogonalize(updates, iteration, 0.99, backend="triton")
        wanted = orthogonalize(updates, iteration, 0.99, backend="reference")
        assert found.shape == wanted.shape and found.dtype == torch.bfloat16
        assert relative(found, wanted) < 1e-2


@pytest.mark.parametrize("split", [None, "diagonal"])
@pytest.mark.parametrize("spec", [None, FOUR_OVER_SIX], ids=str)
def test_the_library_multiplies_too(spec: QuantSpec | None, split: str | None) -> None:
    """Its product in the place of the kernel's: the same X to the order of accumulation."""
    updates, iteration = random(1, 64, 64), Iteration(HYBRID[:2], spec, split)
    found = twin.orthogonalize(updates, iteration, None, dataclasses.replace(twin.SMALL, library=True))
    assert relative(found, orthogonalize(updates, iteration, None, backend="reference")) < 1e-2


def test_zero_stays_zero_and_nan_stays_in_its_matrix() -> None:
    updates = random(4, 64, 64)
    updates[0], updates[1, 3, 5], updates[2, 0, 0] = 0.0, float("nan"), float("inf")
    for spec in (FOUR_OVER_SIX, None):
        found = orthogonalize(updates, Iteration(HYBRID[:1], spec, "diagonal"), 0.99, backend="triton")
        assert not found[0].any()
        assert found[1].isnan().all() and found[2].isnan().all()
        assert found[3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_momentum_to_the_bit(dtype: torch.dtype) -> None:
    """More tensors than one launch takes, of a size that is no multiple of a block."""
    grads = [random(33, 127).to(dtype) for _ in range(10)]
    buffers = [[random(33, 127).to(torch.bfloat16 if i < 9 else torch.float32) for i in range(10)]]
    buffers.append([b.clone() for b in buffers[0]])
    for nesterov in (True, False):
        found = reference.momentum_updates(grads, buffers[0], 0.95, nesterov, backend="triton")
        wanted = reference.momentum_updates(grads, buffers[1], 0.95, nesterov, backend="reference")
        assert torch.equal(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_to_the_bit(dtype: torch.dtype, tall: bool) -> None:
    updates = random(9, 40, 70).bfloat16()
    updates = updates.mT if tall else updates
    weights = [[random(*updates.shape[1:]).to(dtype) for _ in range(9)]]
    weights.append([w.clone() for w in weights[0]])
    for lr in (0.1, torch.tensor(0.2, device=DEVICE)):
        reference.apply_updates(weights[0], updates, lr, 0.5, lr * 3, backend="triton")
        reference.apply_updates(weights[1], updates, lr, 0.5, lr * 3, backend="reference")
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("shape", [(40, 70), (17, 1024)])
@pytest.mark.parametrize("master", ["fp32", "bf16+int8", "bf16-sr"])
def test_narrow_weights_to_the_bit(master: str, shape: tuple[int, int]) -> None:
    """As the optimizer's own arithmetic keeps them. One weight was written by someone else, one becomes NaN."""
    updates, wide = random(2, *shape).bfloat16(), [random(*shape) for _ in range(2)]
    updates[1, 5, 5] = float("nan")
    parts = []
    for weight in wide:
        low, correction = split_master(weight)
        extra = {"fp32": {"master": weight.clone()}, "bf16+int8": {"correction": correction}, "bf16-sr": {}}[master]
        parts.append({"parameter": low} | extra)
    parts[1]["parameter"][3] = 5.0
    found = [{key: t.clone() for key, t in part.items()} for part in parts]
    count = torch.tensor(7, device=DEVICE)
    for index, (part, update) in enumerate(zip(parts, updates, strict=True)):
        new = wide_weight(part) * torch.tensor(0.9, device=DEVICE) - update.float() * torch.tensor(0.25, device=DEVICE)
        keep_weight(new, part, (3, index, count, 0))
    beside = [part[key] for part in found for key in ("master", "correction") if key in part]
    keys = torch.stack([weight_key((3, index, count, 0)) for index in range(2)]) if master == "bf16-sr" else None
    twin.apply_updates([part["parameter"] for part in found], updates, 0.9, 0.25, beside or None, keys)
    for part, wanted in zip(found, parts, strict=True):
        for name, tensor in part.items():
            assert torch.equal(tensor.nan_to_num(123.0), wanted[name].nan_to_num(123.0)), name


def weight_key(words: tuple[int, int, Tensor, int]) -> Tensor:
    """What `keep_weight` draws a weight's random bits from."""
    seed, tensor_id, step, index = words
    return key_of(((seed * 0x9E3779B97F4A7C15) ^ (tensor_id << 32) ^ index) & 0x7FFFFFFFFFFFFFFF, step * 4 + 2)


def test_root_steps_through_the_twin() -> None:
    start, grad, results = random(96, 48), random(96, 48), []
    for backend in ("triton", "reference"):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = Root([("layers.0.weight", parameter)], 0.1, ns_steps=2, coefficients="hybrid", backend=backend)
        parameter.grad = grad
        optimizer.step()
        results.append(parameter.detach() - start)
    assert relative(*results) < 1e-2


def test_a_clip_that_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="quantile in"):
        twin.orthogonalize(random(1, 16, 16), Iteration(HYBRID), 1.5)
