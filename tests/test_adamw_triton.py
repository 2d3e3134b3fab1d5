"""The AdamW kernel gives the reference's bits: on a GPU where there is one, else in Triton's interpreter.

The interpreter takes about a second for each program, so there the shapes are small.
"""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no build for this platform")

from quatrain.kernels import adamw_triton, moments, moments_triton  # noqa: E402
from quatrain.kernels.adamw import Item, MomentSpec, adamw_step, empty_state  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def quiet_interpreter() -> Iterator[None]:
    """NumPy, which runs the interpreter, warns of what fp32 on a GPU does in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def scalars(step: int, beta2: float) -> torch.Tensor:
    """beta1 = 0.9, lr = 0.01, weight decay 0.1, eps = 1e-8."""
    bound = math.sqrt(1 - beta2) * math.sqrt(1 - 0.81 / beta2) / 0.1
    values = (0.01, 0.999, 0.01 / (1 - 0.9**step), (1 - beta2**step) ** -0.5, 1e-8, 0.9, 0.1, beta2, 1 - beta2, bound)
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def new_state(weight: torch.Tensor, spec: MomentSpec) -> dict[str, torch.Tensor]:
    state = empty_state(*weight.shape, spec, weight.device)
    if weight.dtype == NARROW and spec.master == "fp32":
        state["master"] = weight.float()
    if spec.master == "bf16+int8":
        state["correction"] = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
    return state


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit; NaN to NaN."""
    if a.is_floating_point() and a.element_size() > 1:
        both = a.isnan() & b.isnan()
        a, b = a.masked_fill(both, 0.0), b.masked_fill(both, 0.0)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gradients(shape: tuple[int, int], kind: str, step: int) -> torch.Tensor:
    g = torch.randn(shape)
    if kind == "zeros":
        g[:, ::3] = 0
        g[0] = 0
    elif kind == "mixed":
        g *= torch.logspace(-30, 10, shape[1])
    elif kind == "lost" and step == 1:
        g[0, 3], g[1, 200], g[0, 140] = math.nan, math.inf, 1e30
    elif kind not in ("plain", "lost"):
        g *= float(kind)
    return g


CASES = [
    ((1, 528), WIDE, WIDE, "fp32", "plain", {}),
    ((2, 256), WIDE, NARROW, "fp32", "zeros", {}),
    ((5, 17), WIDE, WIDE, "fp32", "plain", {}),
    ((3, 100), NARROW, WIDE, "bf16-sr", "zeros", {}),
    ((2, 272), NARROW, NARROW, "bf16+int8", "plain", {}),
    ((2, 256), NARROW, NARROW, "fp32", "mixed", {}),
    ((2, 256), NARROW, NARROW, "bf16-sr", "lost", {}),
    ((2, 256), WIDE, WIDE, "fp32", "mixed", {"tile": 256}),
    ((2, 256), WIDE, WIDE, "fp32", "1e-30", {"tile": 16}),
    ((2, 256), WIDE, WIDE, "fp32", "1e30", {}),
    ((2, 256), WIDE, WIDE, "fp32", "plain", {"faithful": True}),
]
LARGE = [
    ((2, 256), NARROW, NARROW, "fp32", "lost", {}),
    ((2, 256), NARROW, NARROW, "bf16+int8", "lost", {}),
    ((1, 2056), WIDE, WIDE, "fp32", "plain", {}),
    ((64, 8192), WIDE, WIDE, "fp32", "plain", {}),
    ((64, 14336), NARROW, NARROW, "bf16-sr", "zeros", {}),
    ((5, 65536 + 48), WIDE, WIDE, "fp32", "plain", {}),
    ((4099, 100), NARROW, WIDE, "bf16+int8", "zeros", {}),
    ((512, 2048), NARROW, NARROW, "bf16-sr", "plain", {}),
]


@pytest.mark.parametrize("beta2", [0.95, 0.999] if GPU else [0.95])
@pytest.mark.parametrize("case", CASES + LARGE if GPU else CASES, ids=str)
def test_bits(case: tuple[tuple[int, int], torch.dtype, torch.dtype, str, str, dict[str, int]], beta2: float) -> None:
    shape, dtype, gradient_dtype, master, kind, options = case
    torch.manual_seed(0)
    spec = MomentSpec(master=master, **options)
    weight = torch.randn(shape).to(dtype).to(DEVICE)
    want = Item(weight.clone(), weight, new_state(weight, spec), 7)
    got = Item(weight.clone(), weight, {name: tensor.clone() for name, tensor in want.state.items()}, 7)
    for step in (1, 2, 3) if GPU else (1, 2):
        gradient = gradients(shape, kind, step).to(gradient_dtype).to(DEVICE)
        key = torch.tensor([(1 << 40) + 3, step], device=DEVICE)
        for item, backend in ((want, "reference"), (got, "triton")):
            item.gradient = gradient
            adamw_step([item], scalars(step, beta2), key, spec, backend)
        assert same(got.parameter, want.parameter), step
        for name, tensor in want.state.items():
            assert same(got.state[name], tensor), (step, name)
    assert not torch.equal(want.parameter, weight) or kind == "lost"


def test_many_tensors() -> None:
    """Items of several widths, dtypes and alignments at once: each as if alone."""
    torch.manual_seed(0)
    spec = MomentSpec()
    key, vector = torch.tensor([1, 1], device=DEVICE), scalars(1, 0.95)
    weights = [torch.randn(shape, device=DEVICE) for shape in ((3, 64), (2, 64), (2, 48), (0, 64))]
    odd = torch.randn(2 * 64 + 1, device=DEVICE)[1:].view(2, 64)  # starts 4 bytes after a multiple of 16
    items = [Item(w, torch.randn_like(w), new_state(w, spec), 5 + i) for i, w in enumerate([*weights, odd])]
    alone = [Item(i.parameter.clone(), i.gradient, new_state(i.parameter, spec), i.tensor_id) for i in items]
    adamw_step(items, vector, key, spec, "triton")
    for item, other in zip(items, alone, strict=True):
        adamw_step([other], vector, key, spec, "reference")
        assert same(item.parameter, other.parameter)
        assert all(same(item.state[name], other.state[name]) for name in item.state)
    codes = torch.zeros(2 * 32 + 1, dtype=torch.uint8, device=DEVICE)[1:].view(2, 32)
    moved = Item(odd, odd, items[-1].state | {"m_codes": codes}, 0)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        adamw_step([moved], vector, key, spec, "triton")


def test_long_rows_have_several_scales() -> None:
    places = adamw_triton._places(DEVICE, (3, 2), 1, 2).tolist()
    assert places == [[0, r, c] for r in range(3) for c in range(2)] + [[1, r, c] for r in range(2) for c in range(2)]
    assert adamw_triton._geometry(1) == (32, 32, 1) and adamw_triton._geometry(128) == (32, 1, 4)
    for blocks in (1, 5, 32, 33, 128, 512, 896, 4096, 9000):
        lanes, rows, steps = adamw_triton._geometry(blocks)
        assert lanes * steps >= min(blocks, 4096) * rows and steps <= 16


def test_tables_survive_byte_permutation() -> None:
    """What two permutations of bytes add up to, as the hardware does them, is the table."""
    for table in (moments.NEAREST_TABLE, moments.STOCHASTIC_TABLE):
        words = moments_triton._table_words(table)
        data = b"".join((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)
        signed = [b - 256 if b > 127 else b for b in data]

        def picked(half: int, nibble: int, signed: list[int] = signed) -> int:
            value = signed[8 * half + nibble % 8]
            return value if nibble < 8 else -int(value < 0)

        assert [picked(0, i) + picked(1, i ^ 8) for i in range(16)] == list(table)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_in_a_graph() -> None:
    torch.manual_seed(0)
    spec = MomentSpec()
    weights = [torch.randn(64, 256, device=DEVICE) for _ in range(3)]
    items = [Item(w, torch.zeros_like(w), new_state(w, spec), i) for i, w in enumerate(weights)]
    alone = [Item(i.parameter.clone(), i.gradient, new_state(i.parameter, spec), i.tensor_id) for i in items]
    vector, key = scalars(1, 0.95), torch.tensor([1, 1], device=DEVICE)
    for item, other in zip(items, alone, strict=True):
        item.gradient, other.gradient = torch.randn_like(item.gradient), torch.zeros_like(item.gradient)
    adamw_step(items, vector, key, spec, "triton")  # compiles; the copies stay at their first step
    items = [Item(o.parameter.clone(), o.gradient, new_state(o.parameter, spec), o.tensor_id) for o in alone]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw_step(items, vector, key, spec, "triton")
    for step in (1, 2, 3):
        vector.copy_(scalars(step, 0.95))
        key[1] = step
        for other in alone:
            other.gradient.normal_()
        graph.replay()
        for item, other in zip(items, alone, strict=True):
            adamw_step([other], vector, key, spec, "reference")
            assert same(item.parameter, other.parameter), step
