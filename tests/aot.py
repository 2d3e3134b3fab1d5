"""Compile every Triton kernel ahead of time, without a GPU, as the host code would launch it: one JSON line each.

    python tests/aot.py 90 100 120

The host functions run on CPU tensors; their launches are recorded, not executed, and compiled for each architecture.
"""

import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import quatrain as qt
from quatrain.kernels import (
    adamw_triton,
    attention,
    attention_backward_triton,
    attention_hopper_backward_triton,
    attention_hopper_forward_triton,
    attention_triton,
    attention_views_triton,
    blocks_triton,
    decode_triton,
    lowrank_gradients_triton,
    lowrank_triton,
    matmul_triton,
    nvfp4_triton,
    quantize_triton,
)
from quatrain.kernels import newton_schulz_clip_triton as clip
from quatrain.kernels import newton_schulz_elements_triton as around
from quatrain.kernels import newton_schulz_products_triton as products
from quatrain.kernels import newton_schulz_triton as newton_schulz
from quatrain.kernels.adamw import Item, MomentSpec, empty_state
from quatrain.kernels.attention_layout import Geometry
from quatrain.kernels.attention_rows import NVFP4_ROWS
from quatrain.kernels.attention_tiles import Tuning, tuning_for
from quatrain.kernels.newton_schulz import Iteration
from quatrain.kernels.rounding import make_key
from quatrain.nn.attention import attention_keys

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64",
    torch.int32: "*i32", torch.float64: "*fp64", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
MODULES = (
    nvfp4_triton, blocks_triton, decode_triton, lowrank_triton, lowrank_gradients_triton, matmul_triton, adamw_triton,
    products, clip, around, attention_triton, attention_backward_triton, attention_views_triton,
    attention_hopper_forward_triton, attention_hopper_backward_triton,
)  # fmt: skip
HOSTS = (
    quantize_triton, blocks_triton, decode_triton, lowrank_triton, lowrank_gradients_triton, adamw_triton, clip,
    around, newton_schulz, attention_triton, attention_views_triton,
)  # fmt: skip
SCALED = r"tcgen05\.mma\.\S*kind::mxf4nvf4\.block_scale|mma\.sync\.\S*kind::mxf4nvf4\.block_scale"
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Recorder:
    """Stands for a kernel; keeps the arguments of each launch."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int) -> Any:
    """The kernel for one architecture, specialized as a launch would."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in options.items() if k in kernel.arg_names
    }
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif type(value).__name__ == "TensorDescriptor":
            kind = TYPES[value.base.dtype][1:]
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""  # Gluon's has one
            signature[parameter.name] = f"tensordesc<{kind}{list(value.block_shape)}{layout}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    settings = {k: v for k, v in options.items() if k not in kernel.arg_names} | {"enable_fp_fusion": False}
    kind_of_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind_of_source(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=settings)


def said(cubin: bytes, *command: str) -> str:
    """What one of CUDA's tools says of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        line = [str(BINARIES / command[0]), *command[1:], file.name]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def spills(cubin: bytes) -> int:
    """Bytes of stack: what ptxas spilled (these kernels have no other use for it)."""
    return sum(int(n) for n in re.findall(r"STACK:(\d+)", said(cubin, "cuobjdump", "-res-usage")))


def merges(cubin: bytes) -> int:
    """E4M3 conversions that take their upper half from a register that no such conversion has filled.

    ptxas 12.8 can merge the shifted copy of a conversion's result before that result is there.
    """
    writer: dict[str, str] = {}
    count = 0
    for line in said(cubin, "nvdisasm", "-c").splitlines():
        found = re.match(r"\s*/\*\w+\*/\s+(?:@!?U?P\d+ )?(\S+) (R\d+)(.*);", line)
        if found is None:
            continue
        operation, target, rest = found.groups()
        merged = re.search(r", (R\d+)\S* $", rest)
        if "E4M3" in operation and "MERGE_C" in operation and merged:
            count += "E4M3" not in writer.get(merged[1], "")
        writer[target] = operation
    return count


def launch_attention(native: bool = False, tuning: Tuning | None = None, groups: int = 2) -> None:
    """Causal attention of head size 128 with the rows of recipes; natively the products of packed codes alone."""
    keys = attention_keys(1, 2, torch.device("cpu"))
    geometry, rows = Geometry(2, 256, 128, 128**-0.5, causal=True), NVFP4_ROWS
    q = torch.zeros(1, 2, 256, 128).bfloat16()
    k = q[:, :groups]
    tensors = attention.pack_views(q, k, rows.to_json(), geometry, keys, True)
    views = attention._views(tensors, rows.slots(True))
    out, lse = attention_triton.forward(views, k, rows, geometry, tuning, native)
    attention_triton.backward(q, views, k, out, lse, rows, geometry, keys, tuning, native)


def launch_lowrank(drawn_too: bool) -> None:
    """A linear's branch of rank 32: X packed along its columns and, as it takes longest, not always dY both ways."""
    spec = qt.QuantSpec
    x, key, amax = torch.zeros(256, 1024).bfloat16(), make_key(1, 2, torch.device("cpu")), torch.ones(2)
    rht, both = spec(transform="hadamard"), spec(rounding="stochastic", transform="hadamard")
    u, basis = torch.zeros(256, 64).bfloat16(), torch.zeros(32, 1024).bfloat16()
    wide, w = torch.zeros(256, 1088).bfloat16(), torch.zeros(1024, 1088).bfloat16()
    packed = torch.zeros(1024, 128, dtype=torch.uint8), torch.zeros(1024, 16, dtype=torch.float8_e4m3fn)
    one = (amax[:1], 2688.0)
    lowrank_triton.projected_amaxes(x, u[:, 32:], basis, rht)
    lowrank_triton.quantize_projected(x, u[:, 32:], basis, (spec(), rht), (None, None), wide, packed, amax)
    if drawn_too:
        drawn = spec(rounding="stochastic")
        lowrank_triton.quantize_projected(x, u[:, 32:], basis, (drawn, both), (key, key), wide, (wide, None), amax)
    lowrank_triton.place_narrow(u[:, :32], 1.0, wide[:, :32], (one, one), (basis, w[:, 1024:1056].t()))
    placed = (wide[:, 32:64], both, one, one)
    lowrank_triton.place_narrow(u[:, :32], 1.0, wide[:, :32], (one, one), (basis, basis), placed)
    narrow, square = torch.zeros(256, 32), torch.zeros(32, 32)
    lowrank_gradients_triton.factor_gradients(narrow, wide[:32, :1024], square, basis, 1.0, torch.bfloat16)


def launch_all() -> None:
    """Every host function with the specs that recipes use."""
    spec = qt.QuantSpec
    x, key, amax = torch.zeros(256, 1024).bfloat16(), make_key(1, 2, torch.device("cpu")), torch.ones(2)
    rht, drawn = spec(transform="hadamard"), spec(rounding="stochastic")
    both = spec(rounding="stochastic", transform="hadamard")
    quantize_triton.amaxes(x, spec(), rht)
    for row in (spec(), drawn, spec(scale="four-over-six"), spec(scale="four-over-six", error="mae")):
        quantize_triton.quantize_pair(x, row, None, key, None, amax)
    quantize_triton.quantize_pair(x, spec(), rht, key, key, amax, decoded=(True, False))
    quantize_triton.quantize_pair(x, drawn, both, key, key, amax, decoded=(True, True))
    quantize_triton.quantize_pair(x, None, both, None, key, amax)
    for general in (spec(block=(16, 16)), spec("mxfp4", rounding="stochastic"), spec("mxfp8"), spec("fp8")):
        blocks_triton.quantize_blocks(x, general, key)
    blocks_triton.quantize_blocks(x.float(), spec(block=(16, 16)), None, cast=torch.bfloat16)
    blocks_triton.quantize_blocks(x[:130, :264].float(), spec(scale="search"), None)
    q, w = qt.quantize(x, "nvfp4"), qt.quantize(x, "fp8")
    decode_triton.decode(q.codes, q.scales, q.spec)
    decode_triton.decode(q.codes, q.scales, q.spec, out=torch.zeros(256, 1088).bfloat16()[:, :1024], clear=amax)
    narrow = qt.quantize(x.view(2048, 128), "nvfp4")
    decode_triton.decode(narrow.codes, narrow.scales, narrow.spec, heads=4, tokens=256)
    matmul_triton.fp8_matmul(w.codes, w.scales, w.codes, w.scales, (256, 256), torch.bfloat16, None)
    matmul_triton.factors([(amax[:1], 2688.0)])
    for dtype, master in ((torch.float32, "fp32"), (torch.bfloat16, "bf16-sr")):
        weight, moments = torch.zeros(16, 2048, dtype=dtype), MomentSpec(master=master)
        state = empty_state(16, 2048, moments, torch.device("cpu"))
        adamw_triton.step([Item(weight, weight, state, 0)], torch.ones(10), key, moments)
    found = newton_schulz.momentum_updates([x.float()] * 2, [x] * 2, 0.95, True)
    iteration = Iteration(((2.0, -1.5, 0.5),) * 2, spec(scale="four-over-six"))
    for tuning in (None, newton_schulz.Tuning()):
        newton_schulz.orthogonalize(found, iteration, 0.99, tuning)
    newton_schulz.apply_updates([x, x], found.bfloat16(), 0.9, 0.1, [x.float()] * 2)
    attention_views_triton.center_keys(torch.zeros(1, 2, 256, 128).bfloat16(), Geometry(2, 256, 128, 1.0))
    attention_views_triton.dense_rows(torch.zeros(1, 2, 250, 128).bfloat16())


def launches_for(arch: int, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Fill `launches`, kernels being recorders, with each kernel once for each set of constants that matters."""
    for module in HOSTS:
        module.architecture = lambda device: arch  # type: ignore[attr-defined]
    newton_schulz._processors = lambda device: 132  # type: ignore[attr-defined]
    launch_all()
    launch_lowrank(arch == 90)
    launch_attention(tuning=tuning_for(128, arch))
    same = ["norms_kernel", "delta_kernel"]
    if arch >= 100:
        launch_others(launches, same, native=True)
    if arch == 90:  # its own kernels, and where heads of a group are summed
        launch_others(launches, same)
        launch_others(launches, [*same, "hopper_forward_kernel", "hopper_query_kernel"], groups=1)


def launch_others(launches: list[Any], same: list[str], **options: Any) -> None:
    """`launch_attention`, less the kernels that are the same as before."""
    first = len(launches)
    launch_attention(**options)
    launches[first:] = [call for call in launches[first:] if call[0].__name__ not in same]


def main(architectures: list[int]) -> None:
    """Record the launches once for each architecture, compile them, print a line for each."""
    kernels = {
        (module, name): value
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, triton.runtime.JITFunction) and re.fullmatch(r"\w*_?kernel", name)
    }
    for arch in architectures:
        launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        for (module, name), kernel in kernels.items():
            setattr(module, name, Recorder(kernel, launches))
        launches_for(arch, launches)
        for kernel, args, options in launches:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                binary = compiled(kernel, args, options, arch)
            ptx = binary.asm["ptx"]
            facts = {
                "kernel": kernel.__name__,
                "arch": arch,
                "target": re.findall(r"\.target (\w+)", ptx)[0],
                "to_fp4": ptx.count("cvt.rn.satfinite.e2m1x2.f32"),
                "from_fp4": ptx.count("cvt.rn.f16x2.e2m1x2"),
                "four_over_six": any(isinstance(a, tuple) and a[0] in (2, "four-over-six") for a in args),
                "stochastic": any(isinstance(a, tuple) and len(a) == 8 and a[7] == 1 for a in args),
                "stack": spills(binary.asm["cubin"]),
                "waits": said(binary.asm["cubin"], "nvdisasm", "-c").count("WARPGROUP.DEPBAR"),
                "merges": merges(binary.asm["cubin"]),
                "scaled": len(re.findall(SCALED, ptx)),
                "wgmma": ptx.count("wgmma.mma_async"),
                "shared": binary.metadata.shared,
                "bytes": len(binary.asm["cubin"]),
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([int(a) for a in sys.argv[1:]])
