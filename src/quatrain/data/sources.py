"""Documents out of files: which files `data.path` means, in which order, and how each kind is cut into documents."""

import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quatrain.data.config import DataConfig
from quatrain.files import expand

SEPARATOR = "<|endoftext|>"
SUFFIXES = (".txt", ".txt.gz", ".txt.xz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
INSTALLED = frozenset({"site-packages", "dist-packages"})  # inside the library's folder, not of the library


@dataclass(frozen=True)
class Document:
    """One document. id: stable name, by which it is held out or not.

    position: share of the whole input that has been read with it, 0 to 1.
    """

    id: str
    text: str
    position: float


@dataclass(frozen=True)
class SourceFile:
    """One input file. name: its path inside `data.path`, with forward slashes. kind: its suffix, of `SUFFIXES`."""

    path: Path
    name: str
    kind: str
    size: int
    modified: int


@dataclass(frozen=True)
class Source:
    """All input files in reading order, with what is needed to read them."""

    files: tuple[SourceFile, ...]
    where: str
    text_key: str
    max_bytes: int | None

    def fingerprint(self) -> str:
        """Hex digest of names, sizes, times of change and settings: equal for equal input, without reading it."""
        state = [
            [[str(file.path.absolute()), file.name, file.size, file.modified] for file in self.files],
            self.text_key,
            self.max_bytes or 0,
        ]
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def find(config: DataConfig) -> Source:
    """The files that `config.path` means, in the order of the hash of their names (so a cap takes a fair sample).

    Raises FileNotFoundError for a missing path; ValueError for an unknown kind of file, an empty file or folder and a
    folder that cannot be read.
    """
    if config.path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [_source_file(path, root, ".py") for path in _walk(root, follow=False) if path.suffix == ".py"]
        remedy = "this Python has no library source on disk; give a file or folder of text as data.path"
    else:
        root = expand(config.path, "data.path")
        if not os.path.lexists(root):  # noqa: PTH110 (Path.exists raises where a folder above cannot be entered)
            raise FileNotFoundError(
                f'data.path is "stdlib", a file or a folder; received {config.path!r}, which does not exist; '
                "correct the path"
            )
        files = _files_under(root, config.path)
        remedy = f"put files that end in {', '.join(SUFFIXES)} there, or correct the path"
    if not files:
        raise ValueError(f"data.path must hold text; received {config.path!r} with no file of text in it; {remedy}")
    if not any(file.size for file in files):
        raise ValueError(f"data.path must hold text; received {config.path!r}, which is empty (0 bytes); {remedy}")
    files.sort(key=lambda file: hashlib.sha256(file.name.encode()).digest())
    return Source(tuple(files), config.path, config.text_key, config.max_bytes)


def read(source: Source) -> Iterator[Document]:
    """Every document that holds more than white space, up to `max_bytes` of UTF-8; the last is cut there.

    Raises ValueError naming file and line for text that is not UTF-8, broken JSON, a missing key, a damaged archive.
    Library files that are not UTF-8 are skipped: some exist to test just that.
    """
    limit = source.max_bytes or None
    total = max(1, sum(file.size for file in source.files))
    before, used = 0, 0
    for file in source.files:
        for ordinal, text, offset in _documents(file, source.text_key):
            if not text or text.isspace():
                continue
            name = file.name if ordinal is None else f"{file.name}:{ordinal}"
            raw = _encode(text, file, ordinal)
            position = (before + min(offset, file.size)) / total
            if limit is not None:
                if used + len(raw) >= limit:
                    cut = raw[: limit - used].decode(errors="ignore")
                    if cut and not cut.isspace():
                        yield Document(name, cut, 1.0)
                    return
                used += len(raw)
                position = max(position, used / limit)
            yield Document(name, text, position)
        before += file.size


def _encode(text: str, file: SourceFile, ordinal: int | None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text is Unicode without lone surrogates; received {text[error.start]!a} in {str(file.path)!r}, "
            f"document {ordinal}; correct or remove that document"
        ) from error


def _files_under(root: Path, received: str) -> list[SourceFile]:
    if root.is_file():
        kind = _kind(root)
        if kind is None:
            raise ValueError(
                f"a file of text ends in {', '.join(SUFFIXES)}; received {received!r}; rename or convert it"
            )
        return [_source_file(root, root.parent, kind)]
    return [_source_file(path, root, kind) for path in _walk(root) if (kind := _kind(path)) is not None]


def _walk(root: Path, *, follow: bool = True) -> Iterator[Path]:
    """Every file under `root`; hidden files and folders, and packages installed into the library, are left out.

    follow: enter links to folders too. A folder is entered once, whatever leads to it, so that no circle is walked and
    no document lies on both sides of the split.
    """
    entered = set()
    for folder, inner, names in os.walk(root, onerror=_unreadable, followlinks=follow):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in entered:
            inner.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in INSTALLED)
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _unreadable(error: OSError) -> None:
    raise ValueError(
        f"a folder of text must be readable; received {str(error.filename)!r}: {error.strerror}; change its "
        "permissions, or move it away"
    ) from error


def _kind(path: Path) -> str | None:
    """Which of `SUFFIXES` the name ends in."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _source_file(path: Path, root: Path, kind: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, path.relative_to(root).as_posix(), kind, status.st_size, status.st_mtime_ns)


def _documents(file: SourceFile, text_key: str) -> Iterator[tuple[int | None, str, int]]:
    """(ordinal inside the file or None for a whole file, text, bytes of the file read) of each document."""
    if file.kind == ".parquet":
        yield from _parquet(file, text_key)
    elif file.kind == ".py":
        try:
            yield None, file.path.read_bytes().decode(), file.size
        except (UnicodeDecodeError, OSError):
            return
    elif file.kind.startswith(".jsonl"):
        yield from _jsonl(file, text_key)
    else:
        yield from _text(file)


def _text(file: SourceFile) -> Iterator[tuple[int | None, str, int]]:
    """Documents of a text file: what lies between separator lines, or the whole."""
    lines: list[str] = []
    ordinal, offset = 0, 0
    for _, line, offset in _lines(file):
        if line.rstrip("\r\n") == SEPARATOR:
            yield ordinal, "".join(lines), offset
            lines, ordinal = [], ordinal + 1
        else:
            lines.append(line)
    yield (ordinal if ordinal else None), "".join(lines), offset


def _jsonl(file: SourceFile, text_key: str) -> Iterator[tuple[int | None, str, int]]:
    """Documents of a file with one JSON object a line; blank lines are skipped, ordinals are line numbers."""
    for number, line, offset in _lines(file):
        if line.isspace():
            continue
        where = f"{str(file.path)!r}, line {number}"
        try:
            record = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:  # besides broken: a number of thousands of digits, deep nesting
            what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(
                f"each line of a .jsonl file is one JSON object; received broken JSON ({what}) at {where}; "
                "correct or remove that line"
            ) from error
        if not isinstance(record, dict):
            raise ValueError(
                f"each line of a .jsonl file is one JSON object; received {type(record).__name__} at {where}; "
                f'write it as {{"{text_key}": ...}}'
            )
        if text_key not in record:
            raise ValueError(
                f"each line of a .jsonl file has the key data.text_key; received {where} without {text_key!r}; "
                f"set text_key to one of its keys: {', '.join(map(str, record)) or 'none'}"
            )
        if not isinstance(record[text_key], str):
            raise ValueError(
                f"data.text_key names a text; received {type(record[text_key]).__name__} under {text_key!r} at "
                f"{where}; set text_key to a key that holds text"
            )
        yield number, record[text_key], offset


def _parquet(file: SourceFile, text_key: str) -> Iterator[tuple[int | None, str, int]]:
    """Documents of a parquet file, one row group in memory at a time; ordinals are row numbers, nulls are skipped."""
    row = 0
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"a .parquet file is read by pyarrow, which is not installed; received {str(file.path)!r}; "
            "run: pip install 'quatrain[train]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            _check_column(table.schema_arrow, file, text_key)
            rows = max(1, table.metadata.num_rows)
            for group in range(table.num_row_groups):
                for text in table.read_row_group(group, columns=[text_key]).column(text_key):
                    row += 1
                    if text.is_valid:
                        yield row, text.as_py(), file.size * row // rows
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text is UTF-8; received byte 0x{error.object[error.start]:02x} in {str(file.path)!r}, row {row}; "
            "write the file again"
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"a .parquet file must be whole; received {str(file.path)!r}: {error}; fetch or write it again"
        ) from error


def _check_column(schema: Any, file: SourceFile, text_key: str) -> None:
    """That the parquet file's schema holds `text_key` once, and as text."""
    if schema.names.count(text_key) != 1:
        number = "without" if text_key not in schema.names else f"with {schema.names.count(text_key)} columns called"
        raise ValueError(
            f"a .parquet file has the column data.text_key; received {str(file.path)!r} {number} {text_key!r}; "
            f"set text_key to one of its columns: {', '.join(schema.names) or 'none'}"
        )
    kind = schema.field(text_key).type
    plain = kind.value_type if hasattr(kind, "index_type") else kind  # of a dictionary column, its texts
    if str(plain) not in ("string", "large_string", "string_view"):
        raise ValueError(
            f"data.text_key names a column of text; received {kind} under {text_key!r} in "
            f"{str(file.path)!r}; set text_key to a column of strings"
        )


def _decompressed(raw: BinaryIO, kind: str) -> Iterator[bytes]:
    """The lines of `raw`."""
    if kind.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw) as opened:
            yield from opened
    elif kind.endswith(".xz"):
        with lzma.LZMAFile(raw) as opened:
            yield from opened
    else:
        yield from raw


def _lines(file: SourceFile) -> Iterator[tuple[int, str, int]]:
    """(number from 1, line with its end, bytes of the file read) of a text file that may be compressed."""
    number, offset = 0, 0
    try:
        with file.path.open("rb") as raw:
            for number, line in enumerate(_decompressed(raw, file.kind), start=1):
                if number % 256 == 1:  # a system call
                    offset = raw.tell()
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8"), offset
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text is UTF-8; received byte 0x{error.object[error.start]:02x} in {str(file.path)!r}, line {number}; "
            "convert the file to UTF-8"
        ) from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"a compressed file must be whole; received {str(file.path)!r}, broken after line {number}: {error}; "
            "fetch or write it again"
        ) from error
    except OSError as error:
        raise ValueError(
            f"a file of text must be readable; received {str(file.path)!r}: {error.strerror}; change its permissions"
        ) from error
