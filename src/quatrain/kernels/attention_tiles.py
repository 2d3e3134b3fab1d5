"""Tiles of the Triton kernels of attention, as measured on Hopper and as they fit elsewhere."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """How one kernel runs.

    Attributes:
        rows, columns: that a program holds, and of one step.
        warps: of a program.
        stages: steps whose loads are under way at once.
        hold: operands that the kernel for dQ keeps in registers: none, dO, or dO and Q.
        registers: of a thread, at most.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    hold: int = 0
    registers: int | None = None


class Tuning(NamedTuple):
    """Tiles of the kernels for O, for dQ, and for dK and dV."""

    forward: Tile
    query: Tile
    key: Tile


_SMALL = Tuning(Tile(32, 16, 1, 1), Tile(32, 16, 1, 1), Tile(32, 16, 1, 1))
# By the larger head size, up to so much: shared memory of 99 KB, and of 227 KB (Hopper, data-center Blackwell).
_TUNING = {
    False: {
        64: Tuning(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        128: Tuning(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
        256: Tuning(Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
    },
    True: {
        64: Tuning(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3, 2), Tile(64, 64, 4, 2)),
        128: Tuning(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3, 2), Tile(64, 32, 4, 3)),
        256: Tuning(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
}
# Packed operands: 64 elements are contracted at once; rows of data-center Blackwell's tiles are 128 (`sm_100`).
_NATIVE = {
    False: {
        64: Tuning(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
        128: Tuning(Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
    },
    True: {
        64: Tuning(Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
        128: Tuning(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    },
}
NATIVE_SIZE = 128  # the largest head size of those tiles


def tuning_for(size: int, arch: int, native: bool = False) -> Tuning:
    """Tiles for the larger head size of Q and V; native: packed operands."""
    if arch == 0:
        return _SMALL
    if native:
        return _NATIVE[arch in (100, 103)][max(64, 1 << (size - 1).bit_length())]
    found = _TUNING[arch in (90, 100, 103)][max(64, 1 << (size - 1).bit_length())]
    # Only Hopper's products read registers at will.
    return found if arch == 90 else found._replace(query=found.query._replace(hold=0))
