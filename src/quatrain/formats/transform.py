"""The random Hadamard transform: which one (size, signs) and its exact arithmetic.

It lives with the formats because a stored tensor must be able to undo it (`QTensor.dequantize(inverse=True)`).
Source: arXiv 2509.25149 section 4.2 and appendix C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The constant sign vector that NVIDIA's recipe uses for every tensor, layer and step; as a bit mask 0xD7E8.
FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SIZES = (4, 16, 32, 64, 128)


@dataclass(frozen=True)
class Hadamard:
    """Each run of `size` elements x becomes (x * signs) H / sqrt(size), H in Sylvester order.

    Args:
        size: 4, 16, 32, 64 or 128.
        signs: "fixed" (the first `size` of the constant 16 signs, repeated beyond 16), None (no signs) or
            a tuple of +1 and -1 of length `size`.

    Raises:
        ValueError: a size or signs that are not of that form.
    """

    size: int = 16
    signs: str | tuple[int, ...] | None = "fixed"

    def __post_init__(self) -> None:
        if self.size not in SIZES or type(self.size) is not int:
            raise ValueError(
                f"Hadamard size must be one of {SIZES}, received {self.size!r}; use size=16 as in the paper"
            )
        signs = self.signs
        if signs is None or signs == "fixed":
            return
        if isinstance(signs, str) or len(signs) != self.size or any(s not in (1, -1) for s in signs):
            raise ValueError(
                f'Hadamard signs must be "fixed", None or {self.size} values of +1 and -1, received {signs!r}; '
                f"give one sign for each of the {self.size} positions"
            )
        resolved = tuple(int(s) for s in signs)
        fixed = tuple(FIXED_SIGNS[i % 16] for i in range(self.size))
        object.__setattr__(self, "signs", "fixed" if resolved == fixed else resolved)

    def sign_vector(self) -> tuple[int, ...]:
        """The `size` signs, resolved."""
        if self.signs is None:
            return (1,) * self.size
        if self.signs == "fixed":
            return tuple(FIXED_SIGNS[i % 16] for i in range(self.size))
        return tuple(int(s) for s in self.signs)

    def forward(self, x: Tensor) -> Tensor:
        """Transform along the last dimension, a multiple of `size`; fp32 inside, rounded once to x's dtype."""
        runs = self._runs(x)
        return self._butterfly(runs * self._signs(x)).view(x.shape).to(x.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """Undo `forward` (H is symmetric and orthogonal); fp32 inside, rounded once to x's dtype."""
        runs = self._runs(x)
        return (self._butterfly(runs) * self._signs(x)).view(x.shape).to(x.dtype)

    def _signs(self, x: Tensor) -> Tensor:
        return torch.tensor(self.sign_vector(), dtype=torch.float32, device=x.device)

    def _runs(self, x: Tensor) -> Tensor:
        if x.shape[-1] % self.size:
            raise ValueError(
                f"a Hadamard transform of size {self.size} needs a last dimension that is a multiple of it, "
                f"received {x.shape[-1]}; pad with zeros first"
            )
        return x.float().reshape(-1, self.size)

    def _butterfly(self, runs: Tensor) -> Tensor:
        half = 1
        while half < self.size:  # h = 1, 2, 4, ...: this order is part of the definition of the bits
            pairs = runs.view(-1, self.size // (2 * half), 2, half)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            runs = torch.stack([first + second, first - second], dim=2).view(-1, self.size)
            half *= 2
        return runs * (1.0 / math.sqrt(self.size))
