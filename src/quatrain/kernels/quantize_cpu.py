"""The compiled CPU twin: builds `quantize_cpu.cpp` once with the system's C++ compiler and calls it through ctypes.

The library lands in the user's cache folder, under a name that holds the source's, the compiler's and the processor's
fingerprints; without a compiler everything still runs, on the reference.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quatrain.formats import QuantSpec
from quatrain.kernels.scaling import SEARCH_MULTIPLIERS

ABI = 1
_FORMATS = {"nvfp4": 0, "mxfp4": 1, "mxfp8": 2, "fp8": 3}
_RULES = {
    name: i
    for i, name in enumerate(
        ("to-6", "to-4", "four-over-six", "search", "floor", "ceil", "even", "rceil", "fp32", "pow2")
    )
}
_ERRORS = {"mse": 0, "mae": 1, "absmax": 2}
# No contraction and no fast-math: the bits are those of the reference. The two -fno flags change no result, they only
# tell the compiler that errno and floating-point traps are not looked at, so that it may vectorize.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_SERIAL_ELEMENTS = 1 << 15  # below this, waking other threads costs more than it saves


class _Job(ctypes.Structure):
    _fields_ = (
        [("x", ctypes.c_void_p)]
        + [(n, ctypes.c_int64) for n in ("rows", "columns", "row_stride", "padded")]
        + [
            (n, ctypes.c_int32)
            for n in (
                "bf16",
                "format",
                "block_rows",
                "block_columns",
                "rule",
                "error",
                "scale_up",
                "stochastic",
                "hadamard",
                "threads",
            )
        ]
        + [("element_max", ctypes.c_float), ("constant", ctypes.c_float)]
        + [("seed", ctypes.c_uint64), ("offset", ctypes.c_uint64)]
        + [("signs", ctypes.POINTER(ctypes.c_float)), ("multipliers", ctypes.POINTER(ctypes.c_float))]
        + [("multiplier_count", ctypes.c_int32), ("unused", ctypes.c_int32)]
        + [("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("amax", ctypes.c_void_p)]
    )


def obstacle() -> str | None:
    """None when the twin can run here (building it at the first call), else the reason why not."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        return None, "no C++ compiler (g++ or clang++) on the PATH"
    try:
        library = _opened(_build(compiler)) or ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the CPU twin could not be built with {compiler}, or its library not be loaded: {error}"
    if library.qt_abi() != ABI:
        return None, f"the CPU twin in the cache has interface {library.qt_abi()}, this release needs {ABI}"
    library.qt_quantize.restype = None
    library.qt_decode.restype = None
    return library, None


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library at `path`; one that does not load here (any more) is removed, so that it can be built anew."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return None


def _build(compiler: str) -> Path:
    source = Path(__file__).with_name("quantize_cpu.cpp")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    native = ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)
    facts = "\n".join([source.read_text(), version, " ".join(_FLAGS + native), _processor()])
    name = f"quantize-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    folder = _cache_folder()
    target, digest = folder / name, folder / f"{name}.sha256"
    if _is_whole(target, digest):
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # OpenMP symbols are left to the runtime that torch has loaded already: two runtimes would fight over the cores.
    attempts = (("-fopenmp", *native), ("-fopenmp",), native, ())
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = _first_that_builds(compiler, source, Path(scratch), attempts)
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        os.replace(built, target)  # noqa: PTH105 (atomic: a second process sees a whole library or none)
    return target


def _is_whole(library: Path, digest: Path) -> bool:
    """Whether the cached library is as it was built: one that was cut short may end the process that loads it."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest.read_text()
    except (OSError, ValueError):
        return False


def _first_that_builds(compiler: str, source: Path, scratch: Path, attempts: tuple[tuple[str, ...], ...]) -> Path:
    error: Exception = OSError("no attempt was made")
    for number, extra in enumerate(attempts):
        unit, library = scratch / f"{number}.o", scratch / f"{number}.so"
        compile_flags = [f for f in _FLAGS if f != "-shared"]
        try:
            for command in (
                [compiler, *compile_flags, *extra, "-c", str(source), "-o", str(unit)],
                [compiler, "-shared", str(unit), "-o", str(library)],
            ):
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            ctypes.CDLL(str(library))  # unresolved OpenMP symbols show up here
        except (OSError, subprocess.SubprocessError) as failure:
            error = failure
            continue
        return library
    raise error


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith(("model name", "flags", "Features"))]
        return "\n".join(sorted(set(lines)))
    return platform.processor() + platform.machine()


def _cache_folder() -> Path:
    """In the home folder; for a user without one, a folder of the user's own among the temporary files.

    Raises:
        OSError: the folder among the temporary files belongs to, or can be written by, someone else.
    """
    try:
        return Path("~/.cache/quatrain/native").expanduser()
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"quatrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} must be a folder that its user alone can enter; remove it")
    return folder


def _threads(elements: int) -> int:
    return 1 if elements < _SERIAL_ELEMENTS else torch.get_num_threads()


def quantize_into(x: Tensor, spec: QuantSpec, key: Tensor | None, parts: tuple[Tensor, Tensor, Tensor]) -> None:
    """Fill codes, scales and amax (see `quantize_parts` for shapes). The caller has checked `obstacle()`."""
    codes, scales, amax = parts
    amax.zero_()
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    if rows == 0 or columns == 0:
        return
    x, hadamard = _prepared(x.reshape(rows, columns), spec)
    padded = codes.shape[-1] * (2 if spec.block_format.packed else 1)
    signs = (ctypes.c_float * hadamard)(*spec.hadamard.sign_vector()) if spec.hadamard and hadamard else None
    multipliers = (ctypes.c_float * len(SEARCH_MULTIPLIERS))(*SEARCH_MULTIPLIERS)
    seed, offset = (int(word) & 0xFFFFFFFFFFFFFFFF for word in key.tolist()) if key is not None else (0, 0)
    job = _Job(
        x=x.data_ptr(),
        rows=rows,
        columns=x.shape[1],
        row_stride=x.stride(0),
        padded=padded,
        bf16=int(x.dtype == torch.bfloat16),
        format=_FORMATS[spec.format],
        block_rows=spec.block_shape[0],
        block_columns=spec.block_shape[1],
        rule=_RULES[str(spec.scale)],
        error=_ERRORS[spec.error],
        scale_up=int(spec.scale_rounding == "up"),
        stochastic=int(spec.stochastic),
        hadamard=hadamard,
        threads=_threads(x.numel()),
        element_max=spec.element_max,
        constant=spec.constant,
        seed=seed,
        offset=offset,
        signs=signs,
        multipliers=multipliers,
        multiplier_count=len(SEARCH_MULTIPLIERS),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        amax=amax.data_ptr(),
    )
    library = _load()[0]
    if library is None:
        raise RuntimeError(f"the CPU twin is not available: {obstacle()}")
    library.qt_quantize(ctypes.byref(job))


def _prepared(x: Tensor, spec: QuantSpec) -> tuple[Tensor, int]:
    """The operand in a dtype and layout that the library reads, and the Hadamard size left for it to do."""
    x = x.resolve_neg()
    hadamard = spec.hadamard.size if spec.hadamard else 0
    if x.dtype not in (torch.float32, torch.bfloat16):
        if spec.hadamard:  # the transform rounds to x's own dtype, which only torch knows
            pad = -x.shape[1] % spec.padding
            x, hadamard = spec.hadamard.forward(torch.nn.functional.pad(x, (0, pad))), 0
        x = x.float()
    return (x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()), hadamard


def decode(codes: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Code x block scale, fp32 [..., K] padded: `QTensor.block_values` of CPU tensors."""
    columns = codes.shape[-1] * (2 if spec.block_format.packed else 1)
    out = torch.empty(*codes.shape[:-1], columns, dtype=torch.float32)
    library = _load()[0]
    if library is None:
        raise RuntimeError(f"the CPU twin is not available: {obstacle()}")
    if out.numel():
        codes, scales = codes.contiguous(), scales.contiguous()
        library.qt_decode(
            ctypes.c_void_p(codes.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(out.numel() // columns),
            ctypes.c_int64(columns),
            _FORMATS[spec.format],
            spec.block_shape[0],
            _threads(out.numel()),
        )
    return out
