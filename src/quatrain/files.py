"""Files: whole ones or none (written beside their place, forced to disk, renamed over it), and paths as people type."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_SIGNATURE = "# written by quatrain; a run overwrites and removes this file\n"


def signed(text: str) -> str:
    """`text` with a first line, a TOML comment, that says who wrote it and may write it again."""
    return _SIGNATURE + text


def unsigned(text: str) -> str:
    """`text` without that line."""
    return text.removeprefix(_SIGNATURE)


def is_signed(path: Path) -> bool:
    """Whether the file at `path` was written by this library as `signed` text."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE.encode()
    except FileNotFoundError:
        return False


def expand(path: str | Path, key: str) -> Path:
    """`path` with "~" and "~user" replaced by the home folder.

    Raises:
        ValueError: there is no such home folder; `key` says which setting asked for it.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{key} = {str(path)!r} begins with a home folder that cannot be found; give a path without ~"
        ) from error


def replace_file(path: Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all."""
    with temporary_beside(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        move_into_place(file, path)


@contextmanager
def temporary_beside(path: Path) -> Iterator[BinaryIO]:
    """An open new file in the folder of `path`, under a name of its own; removed at the end if it still has it.

    Two processes that write the same `path` at once use two such files, so neither reads or cuts the other's.

    Raises:
        OSError: it cannot be written; `path` is named.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x+b") as file, named(path):
            yield file
    finally:
        temporary.unlink(missing_ok=True)


def move_into_place(file: BinaryIO, path: Path) -> None:
    """Force `file` to disk, close it and rename it to `path`; then force the folder's entry to disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    Path(file.name).replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the entries of `folder` to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an OSError that names no file (a write to a full disk) the name of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror}; free space or choose another folder", str(path)) from error
        raise
