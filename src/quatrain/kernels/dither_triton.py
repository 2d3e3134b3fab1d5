"""The first moment's dither taken off, in Triton: the arithmetic of `dither.py`."""

# mypy: disable-error-code="no-untyped-def,assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from quatrain.kernels.halves_triton import butterfly, line_halves, max_halves, unpack_block


@triton.jit
def decoded_dithered(low, high, draws, ARCH: tl.constexpr):
    """The inverse transform of two words of codes, without signs and factors: sixteen fp32 in parts of code 1.0."""
    words = ()
    for h in tl.static_range(2):
        codes = high if h == 1 else low
        for k in tl.static_range(4):
            moved = (codes << (7 - 4 * k)) if k < 2 else (codes >> (4 * k - 7))
            # The bits of 512.5 + 64 * code + 63 - draw / 2, in half precision: 544 more than the place.
            place = (moved & 0x03800380) ^ ((draws[4 * h + k] & 0x007E007E) ^ 0x607F607F)
            half = line_halves(place, 0.5, -272.0, 0x3800, 0xDC40, ARCH)
            half = max_halves(half, line_halves(place, 1.0, -672.0, 0x3C00, 0xE140, ARCH), ARCH)
            half = max_halves(half, line_halves(place, 2.0, -1600.0, 0x4000, 0xE640, ARCH), ARCH)
            words = words + (half ^ ((codes << (12 - 4 * k)) & -2147450880),)
    return unpack_block(butterfly(words, ARCH), ARCH)
