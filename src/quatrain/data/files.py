"""Whole files or none: written beside their place, forced to disk, then renamed over it."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents; ValueError when that is impossible or it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_beside(folder / "probe"):
            pass
    except OSError as error:
        raise ValueError(
            f"data.cache is a folder that can be written to; received {str(folder)!r}: {error.strerror}; "
            "set data.cache to another folder"
        ) from error


@contextmanager
def temporary_beside(path: Path) -> Iterator[BinaryIO]:
    """An open new file in the folder of `path`, under a name of its own; removed at the end if it still has it.

    Two processes that write the same `path` at once use two such files, so neither reads or cuts the other's.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(file: BinaryIO, path: Path) -> None:
    """Force `file` to disk, close it and rename it to `path`; then force the folder's entry to disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    Path(file.name).replace(path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with temporary_beside(path) as file:
        file.write(content)
        move_into_place(file, path)
