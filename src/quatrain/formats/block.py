"""Block formats: an element format, a scale for each block, and perhaps one scale for the whole tensor.

Sources: arXiv 2509.25149 section 2 (NVFP4); OCP Microscaling Formats v1.0 (MXFP4, MXFP8);
DeepSeek-V3 report section 3.3 (FP8 blockwise).
"""

from __future__ import annotations

from dataclasses import dataclass

from quatrain.formats.minifloat import E2M1, E4M3, E8M0, MiniFloat


@dataclass(frozen=True)
class BlockFormat:
    """Element x block scale x (optionally) tensor scale."""

    name: str
    element: MiniFloat
    scale: MiniFloat | None  # None: an fp32 number for each block
    blocks: tuple[tuple[int, int], ...]  # legal (rows, columns) of one block, the default first
    scale_rules: tuple[str, ...]  # the default first
    tensor_scale: bool = False  # an fp32 scale over the whole tensor

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.element.bits == 4

    @property
    def block_size(self) -> int:
        """Elements of one block along the last dimension."""
        return self.blocks[0][1]

    def bits_per_element(self, block: tuple[int, int]) -> float:
        """Stored bits of one element with its share of the block scale."""
        scale_bits = 32 if self.scale is None else 8
        return self.element.bits + scale_bits / (block[0] * block[1])


NVFP4 = BlockFormat(
    "nvfp4", E2M1, E4M3, ((1, 16), (16, 16)), ("to-6", "to-4", "four-over-six", "search"), tensor_scale=True
)
MXFP4 = BlockFormat("mxfp4", E2M1, E8M0, ((1, 32), (32, 32)), ("rceil", "floor", "ceil", "even"))
MXFP8 = BlockFormat("mxfp8", E4M3, E8M0, ((1, 32), (32, 32)), ("rceil", "floor", "ceil", "even"))
FP8 = BlockFormat("fp8", E4M3, None, ((1, 128), (128, 128)), ("fp32", "pow2"))

FORMATS = {fmt.name: fmt for fmt in (NVFP4, MXFP4, MXFP8, FP8)}
