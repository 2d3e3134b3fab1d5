"""cuBLASLt products: against a stand-in for the library that reads memory column-major, and on a GPU itself."""

import ctypes
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quatrain.kernels import cublaslt

SIZES = {0: np.float32, 2: np.float16}


def at(address: int, dtype: type, rows: int, columns: int, leading: int) -> np.ndarray:
    """The column-major matrix at `address`, writable."""
    item = np.dtype(dtype).itemsize
    memory = (ctypes.c_char * (item * (leading * (columns - 1) + rows))).from_address(address)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, dtype), (rows, columns), (item, item * leading), writeable=True
    )


class Library:
    """What cuBLASLt documents of the functions in use, on the CPU."""

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.failing: dict[str, int] = {}
        self.found = 1

    def __getattr__(self, name: str) -> Any:
        method = getattr(self, "on_" + name.removeprefix("cublasLt").lower())

        def call(*arguments: Any) -> int:
            assert len(arguments) == len(cublaslt._SIGNATURES[name])
            for value, kind in zip(arguments, cublaslt._SIGNATURES[name], strict=True):
                kind.from_param(value)
            return self.failing.get(name) or method(*arguments) or 0

        return call

    def _new(self, target: Any, **values: Any) -> None:
        number = len(self.objects) + 1
        self.objects[number] = values
        target._obj.value = number

    def on_create(self, target: Any) -> None:
        self._new(target, kind="handle")

    def on_matmuldesccreate(self, target: Any, compute: int, scale: int) -> None:
        assert (compute, scale) == (68, 0)
        self._new(target, kind="operation")

    def on_matmuldescsetattribute(self, which: int, attribute: int, value: Any, size: int) -> None:
        assert size == (8 if attribute == 8 else 4)
        self.objects[which][attribute] = value._obj.value

    def on_matrixlayoutcreate(self, target: Any, dtype: int, rows: int, columns: int, leading: int) -> None:
        assert leading >= rows
        self._new(target, kind="layout", of=(SIZES[dtype], rows, columns, leading))

    def on_matrixlayoutsetattribute(self, which: int, attribute: int, value: Any, size: int) -> None:
        assert size == {5: 4, 6: 8}[attribute]
        self.objects[which][attribute] = value._obj.value

    def on_matmulpreferencecreate(self, target: Any) -> None:
        self._new(target, kind="preference")

    def on_matmulpreferencesetattribute(self, which: int, attribute: int, value: Any, size: int) -> None:
        assert size == (8 if attribute == 1 else 4)
        self.objects[which][attribute] = value._obj.value

    def on_destroy(self, which: int) -> None:
        self.objects[which]["destroyed"] = True

    on_matmuldescdestroy = on_matrixlayoutdestroy = on_matmulpreferencedestroy = on_destroy

    def on_matmulalgogetheuristic(self, *a: Any) -> None:
        handle, operation, left, right, c, out, preference, wanted, result, count = a
        kinds = [self.objects[i]["kind"] for i in (handle, operation, left, right, c, out, preference)]
        assert kinds == ["handle", "operation", *["layout"] * 4, "preference"] and wanted == 1
        assert self.objects[preference][3] == 2  # sums of split products in fp32 only
        result._obj.workspace, result._obj.state, count._obj.value = 512, 0, self.found

    def on_matmul(self, *a: Any) -> None:
        _, operation, alpha, left, left_layout, right, right_layout, beta, c, _, out, out_layout, *rest = a
        op, layouts = self.objects[operation], [self.objects[i] for i in (left_layout, right_layout, out_layout)]
        if 5 in layouts[0]:  # a batch
            strides = [layout[6] * np.dtype(layout["of"][0]).itemsize for layout in layouts]
            assert {layout[5] for layout in layouts} == {layouts[0][5]}
            for i in range(layouts[0][5]):
                places = (left + i * strides[0], right + i * strides[1], c + i * strides[2], out + i * strides[2])
                self.add(alpha, beta, layouts, *places)
            return
        one, two = (at(p, *self.objects[layout]["of"]) for p, layout in ((left, left_layout), (right, right_layout)))
        factor, other = ((ctypes.c_float * 1).from_address(p)[0] for p in (alpha, beta))
        assert (other != 0.0 or c == out) and rest[2] == 512 and rest[1] % 64 == 0
        product = (one.T if op[3] else one).astype(np.float64) @ (two.T if op[4] else two).astype(np.float64) * factor
        target = at(out, *self.objects[out_layout]["of"])
        product = product + (at(c, *self.objects[out_layout]["of"]) * other if other else 0.0)
        if op.get(7) == 4:
            product = product + at(op[8], target.dtype.type, target.shape[0], 1, target.shape[0])
        target[:] = product

    def add(self, alpha: int, beta: int, layouts: list[Any], *places: int) -> None:
        """One product of a batch: out = alpha left right + beta c, which may be an operand."""
        one, two, c, out = (at(p, *layouts[i]["of"]) for p, i in zip(places, (0, 1, 2, 2), strict=True))
        factors = [float((ctypes.c_float * 1).from_address(p)[0]) for p in (alpha, beta)]
        out[:] = one.astype(np.float64) @ two.astype(np.float64) * factors[0] + c * factors[1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setattr(cublaslt, "_library", lambda: (fake, ""))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # of tensors without a GPU
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    cublaslt._handle.cache_clear()
    cublaslt._plan.cache_clear()
    yield fake
    cublaslt._handle.cache_clear()
    cublaslt._plan.cache_clear()
    gc.collect()  # plans give their descriptors back while the stand-in is there
    kinds = [o["kind"] for o in fake.objects.values() if "destroyed" not in o]
    assert kinds in ([], ["handle"])


def matrix(rows: int, columns: int, layout: str) -> torch.Tensor:
    make = {
        "row": lambda: torch.randn(rows, columns),
        "column": lambda: torch.randn(columns, rows).t(),
        "row view": lambda: torch.randn(rows, columns + 5)[:, :columns],
        "column view": lambda: torch.randn(columns, rows + 3)[:, :rows].t(),
        "strided": lambda: torch.randn(2 * rows, 2 * columns)[::2, ::2],
        "broadcast": lambda: torch.randn(1, columns).expand(rows, columns),
    }
    return make[layout]()


LAYOUTS = ("row", "column", "row view", "column view", "strided", "broadcast")


@pytest.mark.parametrize(("left", "right"), itertools.product(LAYOUTS, LAYOUTS))
def test_every_layout_reaches_the_library_as_it_is(library: Library, left: str, right: str) -> None:
    for m, n, k in ((5, 7, 3), (1, 6, 4), (6, 1, 4), (4, 6, 1), (1, 1, 1)):
        a, b = matrix(m, k, left), matrix(k, n, right)
        assert torch.allclose(cublaslt.matmul(a, b, torch.float32), a @ b, atol=1e-5)
        factors, bias = torch.tensor([0.37, 0.0]), torch.randn(n)
        out = cublaslt.matmul(a, b, torch.float32, factors, bias)
        assert torch.allclose(out, 0.37 * (a @ b) + bias, atol=1e-5) and out.is_contiguous()


def test_layouts_that_need_no_copy() -> None:
    stored = cublaslt.stored
    assert stored(torch.zeros(4, 6)).leading == 6 and not stored(torch.zeros(4, 6)).transposed
    assert stored(torch.zeros(4, 6).t()).transposed and stored(torch.zeros(4, 8)[:, :6]).leading == 8
    assert stored(torch.zeros(8, 8)[::2, ::2]) is None and stored(torch.zeros(1, 6).expand(4, 6)) is None
    assert stored(torch.zeros(64)[1:49].view(4, 12)).alignment == 4
    assert stored(torch.zeros(3, 1)).leading >= 1 and stored(torch.zeros(1, 3)).leading >= 1


def test_plans_are_made_once_and_scales_stay_on_the_device(library: Library) -> None:
    a, b, factors = torch.randn(8, 4), torch.randn(4, 8), torch.tensor([2.0, 0.0])
    first = cublaslt.matmul(a, b, torch.float32, factors)
    count = len(library.objects)
    factors[0] = 3.0
    assert torch.allclose(cublaslt.matmul(a, b, torch.float32, factors), first * 1.5, atol=1e-6)
    assert len(library.objects) == count
    assert [o[2] for o in library.objects.values() if o["kind"] == "operation"] == [1]  # alpha by device pointer


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_of_products_added_to_another_matrix(library: Library, count: int) -> None:
    a, x, out = torch.randn(count, 8, 8), torch.randn(count, 8, 16), torch.zeros(count, 8, 16)
    before = x.clone()
    assert cublaslt.add_product(out, a, x, x, 0.5) and torch.equal(x, before)
    assert torch.allclose(out, a @ x + 0.5 * x, atol=1e-5)
    library.found = 0
    assert not cublaslt.add_product(out, a[:, :, :4].contiguous(), x[:, :4].contiguous(), x, 0.5)
    for wrong in ((out, a.mT, x, x), (out, a, x[:, :4], x), (out.half(), a, x, x)):
        with pytest.raises(ValueError, match="a batch of products needs contiguous"):
            cublaslt.add_product(*wrong, 0.5)


def test_nothing_to_contract_and_unaligned_bias(library: Library) -> None:
    bias = torch.randn(9)[1:]
    assert cublaslt.matmul(torch.randn(0, 4), torch.randn(4, 8), torch.float32).shape == (0, 8)
    out = cublaslt.matmul(torch.randn(3, 0), torch.randn(0, 8), torch.float16, None, bias)
    assert torch.equal(out, bias.half().expand(3, 8)) and not library.objects
    a, b = torch.randn(3, 4), torch.randn(4, 8)
    assert torch.allclose(cublaslt.matmul(a, b, torch.float32, None, bias), a @ b + bias, atol=1e-5)


def test_no_algorithm_is_none_and_failures_are_named(library: Library) -> None:
    a, b = torch.randn(8, 4), torch.randn(4, 8)
    library.found = 0
    assert cublaslt.matmul(a, b, torch.float32) is None
    library.failing["cublasLtMatmulAlgoGetHeuristic"] = 15
    assert cublaslt.matmul(a, b, torch.float16) is None
    library.failing["cublasLtMatmulAlgoGetHeuristic"] = 7
    with pytest.raises(RuntimeError, match=r"cublasLtMatmulAlgoGetHeuristic failed with cuBLAS status 7 for Problem"):
        cublaslt.matmul(a[:4], b, torch.float32)
    library.found, library.failing = 1, {"cublasLtMatmul": 13}
    with pytest.raises(RuntimeError, match="cublasLtMatmul failed with cuBLAS status 13"):
        cublaslt.matmul(a[:2], b, torch.float32)


def test_bad_operands_are_refused(library: Library) -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 4)
    with pytest.raises(ValueError, match=r"\[M, K\] and \[K, N\], received \(4, 8\) and \(4, 8\)"):
        cublaslt.matmul(a, a, torch.float32)
    with pytest.raises(ValueError, match="one dtype among float16"):
        cublaslt.matmul(a, b.half(), torch.float32)
    with pytest.raises(ValueError, match="one dtype among float16"):
        cublaslt.matmul(a.double(), b.double(), torch.float64)
    with pytest.raises(ValueError, match=r"factors must be fp32 \[2\]"):
        cublaslt.matmul(a, b, torch.float32, torch.ones(1))


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_obstacle_without_cuda() -> None:
    assert cublaslt.obstacle() == "this build of torch has no CUDA" and cublaslt.version() == 0
    with pytest.raises(RuntimeError, match="not available: this build of torch has no CUDA"):
        cublaslt.matmul(torch.ones(2, 2), torch.ones(2, 2), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize(("left", "right"), itertools.product(LAYOUTS, LAYOUTS))
    def test_every_layout(self, left: str, right: str) -> None:
        assert cublaslt.obstacle() is None
        for m, n, k in ((33, 77, 48), (64, 40, 27), (1, 16, 32), (128, 1, 64), (257, 129, 515)):
            a, b = matrix(m, k, left).cuda().bfloat16(), matrix(k, n, right).cuda().bfloat16()
            factors, exact = torch.tensor([0.37, 0.0], device="cuda"), a.double() @ b.double()
            for out_dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 1e-5)):
                bias = torch.randn(n, device="cuda").to(out_dtype)
                out = cublaslt.matmul(a, b, out_dtype, factors, bias)
                want = exact * factors[0].double() + bias.double()
                assert out is not None and (out.double() - want).norm() <= bound * want.norm()

    @pytest.mark.parametrize("count", [1, 5])
    def test_a_batch_added_to_one_of_its_operands(self, count: int) -> None:
        a, x = (torch.randn(count, 128, n, device="cuda").bfloat16() for n in (128, 256))
        before, out = x.clone(), torch.empty_like(x)
        assert cublaslt.add_product(out, a, x, x, 3.5) and torch.equal(x, before)
        exact = a.double() @ x.double() + 3.5 * x.double()
        assert (out.double() - exact).norm() <= 4e-3 * exact.norm()

    def test_a_graph_replays_with_new_scales(self) -> None:
        a, b = torch.randn(64, 128, device="cuda").bfloat16(), torch.randn(128, 48, device="cuda").bfloat16()
        factors = torch.tensor([2.0, 0.0], device="cuda")
        before = cublaslt.matmul(a, b, torch.float32, factors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cublaslt.matmul(a, b, torch.float32, factors)
        factors[0] = 4.0
        graph.replay()
        assert torch.equal(out, before * 2)

    def test_fp32_operands_stay_fp32(self) -> None:
        """Whatever the flag that lets torch's own products round them to TF32."""
        a, b = torch.randn(256, 512, device="cuda"), torch.randn(512, 128, device="cuda")
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            out = cublaslt.matmul(a, b, torch.float32)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        exact = a.double() @ b.double()
        assert (out - exact).norm() <= 1e-6 * exact.norm()
