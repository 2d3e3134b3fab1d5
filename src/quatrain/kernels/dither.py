"""The first moment in NVFP4 with a dither that is taken off again: E2M1 codes, errors that follow no value.

As in stochastic rounding a random number is added to a magnitude's place among the codes and the sum cut off. Whoever
decodes draws the same number and subtracts it from the middle of the code's interval: what is left is spread evenly
over one step whatever the value, with half the variance. A code read as plain E2M1 is about a step away at most.

Where E2M1's steps change their width, at codes 4 and 6, the interval around a place covers both widths and its mean
lies above. Places are lowered there: with s the width below and w the distance from the change over s, to -3/2 +
sqrt(2 + 2 w) codes from it instead of w or w / 2, where that is within 1/2. It is concave: the lowest of some
straight lines.

Source: subtractive dither, L. G. Roberts, IRE Trans. Information Theory 8 (1962); L. Schuchman, IEEE Trans. Comm.
Technology 12 (1964). Its use for moments and over steps of unequal width is this project's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quatrain.kernels.moments import STOCHASTIC_TABLE, Encoded, encode_blocks

PARTS = 64  # of a step: random numbers that are told apart when they are taken off; half a part when they are added
# Slope and end of the lines near codes 4 and 6, exact in half precision as 8 + end: fitted to the root above such that
# the bias vanishes over each change and over normally distributed blocks with the scales' own rounding.
LINES = (
    (3308.0 / 2048.0, 89.0 / 128.0),
    (2738.0 / 2048.0, 159.0 / 128.0),
    (2366.0 / 2048.0, 209.0 / 128.0),
    (1706.0 / 2048.0, 333.0 / 128.0),
    (1464.0 / 2048.0, 391.0 / 128.0),
    (1229.0 / 2048.0, 452.0 / 128.0),
)


def encode_dithered(x: Tensor, draws: Tensor) -> Encoded:
    """Rotated blocks, half precision [16, N], to E2M1 codes and units, four-over-six scales rounded up.

    Args:
        x: the blocks.
        draws: int32 [16, N], random bits of which the lowest seven are added to each element's place.
    """
    return encode_blocks(x, STOCHASTIC_TABLE, draws & (2 * PARTS - 1), up=True, lines=LINES)


def decode_dithered(codes: Tensor, draws: Tensor) -> Tensor:
    """The value of code + 1/2 less the random number, in parts of the value of code 1.0; half precision, exact.

    The lowest bit of a draw is left out, and half a part with it. E2M1's value is the largest of three lines.
    """
    place = ((codes & 7).to(torch.int32) * PARTS - ((draws >> 1) & (PARTS - 1))).float().add_(0.5 * PARTS - 0.5)
    magnitude = torch.maximum(torch.maximum(place * 0.5, place - 2.0 * PARTS), place.mul_(2.0).sub_(8.0 * PARTS))
    return torch.where(codes > 7, -magnitude, magnitude).half()
