"""Dense products whose scale stays on the device: D = round(alpha * (A @ B) + bias), through cuBLASLt.

torch.mm takes no scale, so multiplying its result by one costs a pass over the output in fp32. cuBLASLt reads alpha
through a device pointer and rounds once. It is called in the copy of the library that torch has loaded.
Source: cuBLAS documentation, "Using the cuBLASLt API"; the constants are those of cublasLt.h 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FP32 = 0
_COMPUTE_FP32 = 68  # of fp32 operands too: no TF32, whatever torch's flags say
_SUCCESS, _NOT_SUPPORTED = 0, 15
_POINTER_MODE, _TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _EPILOGUE, _BIAS_POINTER = 2, 3, 4, 7, 8
_ON_DEVICE, _WITH_BIAS = 1, 4
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENT_A, _ALIGNMENT_B = 1, 3, 5, 6
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_REDUCE_IN_FP32 = 2  # a split contraction is summed in the compute type, never in the output's
_WORKSPACE_BYTES = 32 << 20  # the library's own recommendation for Hopper
_BIAS_ALIGNMENT = 16


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first member is the algorithm (64 opaque bytes)."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_HANDLE, _SIZE, _INT, _INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_SIGNATURES = {
    "cublasLtCreate": [_HANDLE],
    "cublasLtMatmulDescCreate": [_HANDLE, _INT, _INT],
    "cublasLtMatmulDescSetAttribute": [_HANDLE, _INT, _HANDLE, _SIZE],
    "cublasLtMatmulDescDestroy": [_HANDLE],
    "cublasLtMatrixLayoutCreate": [_HANDLE, _INT, ctypes.c_uint64, ctypes.c_uint64, _INT64],
    "cublasLtMatrixLayoutSetAttribute": [_HANDLE, _INT, _HANDLE, _SIZE],
    "cublasLtMatrixLayoutDestroy": [_HANDLE],
    "cublasLtMatmulPreferenceCreate": [_HANDLE],
    "cublasLtMatmulPreferenceSetAttribute": [_HANDLE, _INT, _HANDLE, _SIZE],
    "cublasLtMatmulPreferenceDestroy": [_HANDLE],
    "cublasLtMatmulAlgoGetHeuristic": [*[_HANDLE] * 7, _INT, _HANDLE, _HANDLE],
    "cublasLtMatmul": [*[_HANDLE] * 14, _SIZE, _HANDLE],
}


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason."""
    if torch.version.cuda is None:
        return None, "this build of torch has no CUDA"
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    for mode in (getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW, os.RTLD_NOW):  # the copy in use; else the loader's own
        try:
            library = ctypes.CDLL(name, mode=mode)
            for function, arguments in _SIGNATURES.items():
                getattr(library, function).argtypes = arguments
                getattr(library, function).restype = ctypes.c_int
            return library, ""
        except (OSError, AttributeError) as error:
            reason = f"{name} cannot be used ({error})"
    return None, reason


def obstacle(device: torch.device | None = None) -> str | None:
    """Why products cannot run through cuBLASLt here, or None."""
    library, reason = _library()
    if library is None:
        return reason
    if device is not None and device.index is not None:
        return _device_obstacle(device.index)
    return _device_obstacle(torch.cuda.current_device()) if torch.cuda.is_available() else "no CUDA device"


@functools.cache
def _device_obstacle(index: int) -> str | None:
    """Asked before each product: the driver's answers do not change."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    old = torch.cuda.get_device_capability(index)[0] < 8
    return "BF16 products need compute capability 8.0 or newer" if old else None


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Makes `device` the current one, which costs more than to see that it is already."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def version() -> int:
    """Of the library, as in 130000; 0 where there is none."""
    library = _library()[0]
    if library is None:
        return 0
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def _call(function: str, *arguments: object) -> None:
    """One call; any other answer than success is a RuntimeError that names it."""
    status = _status(function, *arguments)
    if status != _SUCCESS:
        raise RuntimeError(f"{function} failed with cuBLAS status {status}")


def _status(function: str, *arguments: object) -> int:
    return int(getattr(_needed(), function)(*arguments))


def _needed() -> ctypes.CDLL:
    library, reason = _library()
    if library is None:
        raise RuntimeError(f"cuBLASLt is not available: {reason}")
    return library


class Stored(NamedTuple):
    """How a row-major matrix lies in memory, in the terms of a column-major library."""

    transposed: bool  # memory read column-major holds the matrix itself rather than its transpose
    leading: int  # elements from one row (or column) to the next
    alignment: int  # bytes, up to 256


def stored(matrix: Tensor) -> Stored | None:
    """The layout of `matrix` [R, C], or None unless its strides are (ld, 1) or (1, ld) with ld large enough."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    address = matrix.data_ptr()
    alignment = min(address & -address, 256) if address else 256
    leading = down if rows > 1 else columns
    if (across == 1 or columns == 1) and leading >= columns:
        return Stored(False, leading, alignment)
    leading = across if columns > 1 else rows
    if (down == 1 or rows == 1) and leading >= rows:
        return Stored(True, leading, alignment)
    return None


class Problem(NamedTuple):
    """A product as cuBLASLt sees it: the transpose, D^T [N, M] = B^T [N, K] @ A^T [K, M], all column-major."""

    rows: int  # M
    columns: int  # N
    length: int  # K
    a: Stored
    b: Stored
    dtype: torch.dtype  # of the operands
    out_dtype: torch.dtype
    scaled: bool
    biased: bool
    batch: int = 1  # matrices one behind the other


class _Plan:
    """Descriptors and the algorithm of one problem on one device; `algorithm` is None if the library knows none."""

    def __init__(self, problem: Problem, handle: int) -> None:
        p = problem
        self.lock = threading.Lock()  # the bias pointer is part of the descriptor
        self.operation = _new(
            self, "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", _COMPUTE_FP32, _TYPES[torch.float32]
        )
        self._set(_TRANSPOSE_LEFT, ctypes.c_int32(p.b.transposed))
        self._set(_TRANSPOSE_RIGHT, ctypes.c_int32(p.a.transposed))
        if p.scaled:
            self._set(_POINTER_MODE, ctypes.c_int32(_ON_DEVICE))
        if p.biased:
            self._set(_EPILOGUE, ctypes.c_uint32(_WITH_BIAS))
            self.set_bias(_BIAS_ALIGNMENT)  # the search only looks at the alignment of this address
        self.left = self._layout(p.columns, p.length, p.b, p.dtype, p.batch)
        self.right = self._layout(p.length, p.rows, p.a, p.dtype, p.batch)
        self.out = self._layout(p.columns, p.rows, Stored(False, p.columns, 256), p.out_dtype, p.batch)
        self.algorithm: ctypes.Array[ctypes.c_uint64] | None = None
        self.workspace = 0
        self._search(handle, p)

    def _set(self, attribute: int, value: ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_uint64) -> None:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), size)

    def set_bias(self, address: int) -> None:
        """Where the next product finds its bias."""
        self._set(_BIAS_POINTER, ctypes.c_uint64(address))

    def _layout(self, rows: int, columns: int, how: Stored, dtype: torch.dtype, batch: int) -> int:
        size = (columns, rows) if how.transposed else (rows, columns)
        create, destroy = "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy"
        layout = _new(self, create, destroy, _TYPES[dtype], *size, how.leading)
        if batch > 1:
            for attribute, value in (
                (_BATCH_COUNT, ctypes.c_int32(batch)),
                (_BATCH_STRIDE, ctypes.c_int64(rows * columns)),
            ):
                size_of = ctypes.sizeof(value)
                _call("cublasLtMatrixLayoutSetAttribute", layout, attribute, ctypes.byref(value), size_of)
        return layout

    def _search(self, handle: int, p: Problem) -> None:
        preference = _new(self, "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
        for attribute, value in (
            (_MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_FP32)),
            (_ALIGNMENT_A, ctypes.c_uint32(p.b.alignment)),
            (_ALIGNMENT_B, ctypes.c_uint32(p.a.alignment)),
        ):
            size = ctypes.sizeof(value)
            _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        found, count = _Heuristic(), ctypes.c_int(0)
        descriptors = (self.operation, self.left, self.right, self.out, self.out, preference)
        answer = (1, ctypes.byref(found), ctypes.byref(count))
        status = _status("cublasLtMatmulAlgoGetHeuristic", handle, *descriptors, *answer)
        if status not in (_SUCCESS, _NOT_SUPPORTED):
            raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic failed with cuBLAS status {status} for {p}")
        if status == _SUCCESS and count.value and found.state == _SUCCESS:
            self.algorithm, self.workspace = found.algorithm, found.workspace


def _new(owner: object, create: str, destroy: str, *arguments: object) -> int:
    """A library object that lives as long as `owner`."""
    pointer = ctypes.c_void_p()
    _call(create, ctypes.byref(pointer), *arguments)
    weakref.finalize(owner, _status, destroy, pointer.value).atexit = False  # the process' end frees all
    return pointer.value or 0


@functools.cache
def _handle(device: int) -> int:
    pointer = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(pointer))  # never destroyed: one for each device
    return pointer.value or 0


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, device: int) -> _Plan:
    return _Plan(problem, _handle(device))


def matmul(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, factors: Tensor | None = None, bias: Tensor | None = None
) -> Tensor | None:
    """alpha * (a @ b) + bias with fp32 accumulation, rounded once; no host synchronisation, fit for CUDA graphs.

    Args:
        a: [M, K] float16, bfloat16 or float32 on a CUDA device; any strides ((ld, 1) and (1, ld) are not copied).
        b: [K, N], alike.
        out_dtype: float16, bfloat16 or float32.
        factors: fp32 [2] on the device: alpha, and the zero that the library reads as beta; None is alpha = 1.
        bias: [N]; taken in `out_dtype`, as nn.Linear does, and added before the rounding.

    Returns:
        [M, N] contiguous, or None where the library knows no algorithm for this problem.

    Raises:
        ValueError: shapes or dtypes that cannot be multiplied.
        RuntimeError: the library is missing, or one of its functions failed.
    """
    _needed()
    _check(a, b, out_dtype, factors)
    (rows, length), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    if 0 in (rows, columns, length):
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    if bias is not None:
        bias = bias.to(out_dtype).contiguous()
        bias = bias.clone() if bias.data_ptr() % _BIAS_ALIGNMENT else bias
    a, a_stored = _readable(a)
    b, b_stored = _readable(b)
    problem = Problem(
        rows, columns, length, a_stored, b_stored, a.dtype, out_dtype, factors is not None, bias is not None
    )
    with _on(a.device):
        plan = _plan(problem, a.device.index)
        if plan.algorithm is None:
            return None
        _launch(plan, a, b, out, factors, bias)
    return out


def add_product(out: Tensor, a: Tensor, b: Tensor, c: Tensor, beta: float) -> bool:
    """out = a @ b + beta c for a batch, accumulated in fp32 and rounded once; no copy of c on the way.

    torch.baddbmm copies c to another output first, which costs a pass over it.

    Args:
        out: [k, M, N], contiguous; neither a nor b.
        a: [k, M, K], contiguous, on a CUDA device.
        b: [k, K, N], contiguous.
        c: [k, M, N], contiguous, of out's dtype; may be b or out.
        beta: multiplies c.

    Returns:
        False where the library knows no algorithm for this problem; then nothing is written.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
        RuntimeError: the library is missing, or one of its functions failed.
    """
    (count, rows, length), columns = a.shape, b.shape[2]
    fits = b.shape == (count, length, columns) and out.shape == c.shape == (count, rows, columns)
    if not fits or out.dtype != c.dtype or not all(t.is_contiguous() for t in (out, a, b, c)):
        raise ValueError(
            "a batch of products needs contiguous a [k, M, K], b [k, K, N], and c and out [k, M, N] of one dtype, "
            f"received {[(tuple(t.shape), t.dtype, t.stride()) for t in (a, b, c, out)]}"
        )
    _needed()
    _check(a[0], b[0], out.dtype, None)
    if out.numel() == 0:
        return True
    (a_how, b_how), together = map(_contiguous, (a, b)), min(t.data_ptr() & -t.data_ptr() for t in (c, out))
    if length == 0 or together < _BIAS_ALIGNMENT:
        return False
    problem = Problem(rows, columns, length, a_how, b_how, a.dtype, out.dtype, False, False, count)
    with _on(a.device):
        plan = _plan(problem, a.device.index)
        if plan.algorithm is None:
            return False
        _launch(plan, a, b, out, None, None, c, beta)
    return True


def _contiguous(matrices: Tensor) -> Stored:
    """How each matrix of a batch lies; the alignment is that of all of them."""
    step = matrices.stride(0) * matrices.element_size() if matrices.shape[0] > 1 else 256
    together = matrices.data_ptr() | step
    return Stored(False, matrices.shape[2], min(together & -together, 256))


def _launch(
    plan: _Plan, a: Tensor, b: Tensor, out: Tensor, factors: Tensor | None, bias: Tensor | None,
    c: Tensor | None = None, beta: float = 0.0,
) -> None:  # fmt: skip
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=a.device)  # freed in the stream's order
    if factors is None:
        host = (ctypes.c_float * 2)(1.0, beta)
        alpha = ctypes.addressof(host)
    else:
        alpha = factors.data_ptr()
    with plan.lock:
        if bias is not None:
            plan.set_bias(bias.data_ptr())
        _call(
            "cublasLtMatmul",
            _handle(a.device.index),
            plan.operation,
            alpha,
            b.data_ptr(),
            plan.left,
            a.data_ptr(),
            plan.right,
            alpha + 4,  # beta
            (out if c is None else c).data_ptr(),
            plan.out,
            out.data_ptr(),
            plan.out,
            ctypes.addressof(plan.algorithm) if plan.algorithm is not None else None,
            workspace.data_ptr() if plan.workspace else None,
            plan.workspace,
            torch.cuda.current_stream(a.device).cuda_stream,
        )


def _readable(matrix: Tensor) -> tuple[Tensor, Stored]:
    how = stored(matrix)
    if how is None:
        matrix = matrix.contiguous()
        return matrix, Stored(False, matrix.shape[1], 256)
    return matrix, how


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype, factors: Tensor | None) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a product needs [M, K] and [K, N], received {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in _TYPES or out_dtype not in _TYPES:
        raise ValueError(
            f"cuBLASLt products take two operands of one dtype among float16, bfloat16 and float32 and give one of "
            f"them, received {a.dtype}, {b.dtype} and out_dtype {out_dtype}; cast first"
        )
    if factors is not None and (factors.dtype != torch.float32 or factors.shape != (2,)):
        raise ValueError(
            f"factors must be fp32 [2] (alpha and 0), received {factors.dtype} {tuple(factors.shape)}; "
            "make them with torch.nn.functional.pad(alpha, (0, 1))"
        )
