"""QTensor: a quantized tensor as it is stored, and the equation that gives its values back.

Layout: blocks run along the last dimension; two 4-bit codes share a byte, the even index in the low nibble;
scales are row-major (engines that want the 128x4 tile order get it from `swizzle_scales`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quatrain.formats.minifloat import true_divide
from quatrain.formats.spec import QuantSpec

FILE_VERSION = "1"


@dataclass(frozen=True)
class QTensor:
    """Codes and scales of one tensor.

    Attributes:
        codes: uint8 [..., K/2] (4-bit elements) or float8_e4m3fn [..., K]; K counts whole blocks, zero padding
            included. With two-dimensional blocks the leading dimensions are flattened and padded: [M, K/2].
        scales: one for each block, row-major: float8_e4m3fn (nvfp4), uint8 E8M0 (mx), float32 (fp8);
            [..., K/b], and [M/b, K/b] with two-dimensional blocks.
        amax: fp32 [1], the largest magnitude after the transform; NaN or infinite if the input was.
        shape: of the values, unpadded, the quantized dimension last.
        spec: how the bits were made.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    shape: torch.Size
    spec: QuantSpec

    def __repr__(self) -> str:
        bits = self.spec.bits_per_element
        return f"QTensor(shape={tuple(self.shape)}, {bits:g} bits, device={self.codes.device}, {self.spec})"

    @property
    def tensor_scale(self) -> Tensor:
        """fp32 [1]: amax / constant, the factor a GEMM applies to its accumulator; 1 for formats without one."""
        if not self.spec.block_format.tensor_scale:
            return torch.ones_like(self.amax)
        return true_divide(self.amax, self.spec.constant)

    @property
    def padded_length(self) -> int:
        """Length of the last dimension in whole blocks: what `matmul` contracts."""
        return self.codes.shape[-1] * (2 if self.spec.block_format.packed else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and amax."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.amax))

    def element_values(self) -> Tensor:
        """fp32 values of the codes alone, [..., K] padded."""
        fmt = self.spec.block_format
        return fmt.element.decode(unpack(self.codes) if fmt.packed else self.codes)

    def scale_values(self) -> Tensor:
        """fp32 block scale of every element, broadcastable over `element_values` as blocks repeat."""
        scale = self.spec.block_format.scale
        values = self.scales if scale is None else scale.decode(self.scales)
        rows, columns = self.spec.block_shape
        values = values.repeat_interleave(columns, dim=-1)
        return values if rows == 1 else values.repeat_interleave(rows, dim=-2)

    def block_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Code x block scale, [..., K] padded, without the tensor scale.

        At most 6 significant bits for nvfp4 and mxfp4, so exact in BF16 and in fp32.
        """
        return (self.element_values() * self.scale_values()).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32, inverse: bool = False) -> Tensor:
        """The values the codes stand for: ((code * scale) * amax) / constant in fp32, then one rounding to `dtype`.

        Args:
            dtype: of the result.
            inverse: undo the Hadamard transform, then crop to `shape`. Without it a transformed ragged tensor keeps
                its padded length, since its padding holds information.
        """
        values = self.block_values()
        if self.spec.block_format.tensor_scale:
            values = true_divide(values * self.amax, self.spec.constant)
        if inverse and self.spec.hadamard is not None:
            values = self.spec.hadamard.inverse(values)
        return self._crop(values, keep_padding=self.spec.hadamard is not None and not inverse).to(dtype)

    def _crop(self, values: Tensor, *, keep_padding: bool) -> Tensor:
        length = self.padded_length if keep_padding else self.shape[-1]
        rows = math.prod(self.shape[:-1])
        flat = values.reshape(self.codes.shape[:-1].numel(), self.padded_length)[:rows, :length]
        return flat.reshape(*self.shape[:-1], length)

    def to(self, device: torch.device | str) -> QTensor:
        """The same tensor on another device; never casts."""
        return QTensor(self.codes.to(device), self.scales.to(device), self.amax.to(device), self.shape, self.spec)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; FP4 codes and E8M0 scales as uint8, the spec in the header."""
        tensors = {"codes": self.codes, "scales": self.scales, "amax": self.amax}
        meta = {"quatrain": FILE_VERSION, "spec": self.spec.to_json(), "shape": json.dumps(list(self.shape))}
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, str(path), metadata=meta)

    @staticmethod
    def load(path: str | Path, device: str = "cpu") -> QTensor:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a whole file of this kind, or a newer file version.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no quantized tensor at {path}")
        try:
            with safe_open(str(path), framework="pt", device=device) as handle:
                meta = handle.metadata() or {}
                tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({error}); write it again") from error
        if "quatrain" not in meta:
            raise ValueError(f"{path} is a safetensors file, but holds no quantized tensor that QTensor.save wrote")
        if meta["quatrain"] != FILE_VERSION:
            raise ValueError(
                f"{path} must hold a quantized tensor of file version {FILE_VERSION}, "
                f"received version {meta.get('quatrain')!r}; use a matching release of quatrain"
            )
        shape = torch.Size(json.loads(meta["shape"]))
        return QTensor(tensors["codes"], tensors["scales"], tensors["amax"], shape, QuantSpec.from_json(meta["spec"]))


def pack(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [..., K] (K even) to bytes [..., K/2], the even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even last dimension, received {codes.shape[-1]}; pad with code 0 first")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: bytes [..., K/2] to codes uint8 [..., K]."""
    return (
        torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
        if packed.numel()
        else packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 2)
    )


def swizzle_scales(scales: Tensor) -> Tensor:
    """Row-major block scales [R, C] to the tile order of cuBLAS and CUTLASS, flat and zero-padded.

    Rows pad to 128 and columns to 4; each 128x4 tile is 512 bytes, row r of a tile at (r % 32) * 16 + (r // 32) * 4.
    One-byte dtypes only.
    """
    rows, columns = _swizzle_shape(scales.shape)
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    tiles = padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def unswizzle_scales(flat: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of `swizzle_scales`: flat tile order to row-major [R, C] = `shape`.

    Raises:
        ValueError: `flat` does not hold the padded size that `shape` needs.
    """
    rows, columns = _swizzle_shape(torch.Size(shape))
    if flat.numel() != rows * columns:
        raise ValueError(
            f"swizzled scales of shape {tuple(shape)} must hold {rows} x {columns} = {rows * columns} values "
            f"(padded to 128 x 4), received {flat.numel()}"
        )
    tiles = flat.view(torch.uint8).view(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)[: shape[0], : shape[1]].contiguous().view(flat.dtype)


def _swizzle_shape(shape: torch.Size) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"the scale swizzle takes a matrix [rows, blocks], received shape {tuple(shape)}")
    return -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
