"""The token file, and the order in which its windows are read.

A token file is 1,024 bytes of JSON (padded with spaces, so `head -c 1024` shows it), then `count` little-endian uint16
or uint32 token ids. Every document ends with the tokenizer's end-of-document token; nothing else separates them.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from quatrain.files import move_into_place

VERSION = 1
HEADER_BYTES = 1024
WORD = (1 << 64) - 1
WHOLE_BYTES = 1 << 30  # up to this size every byte is looked at when a token file is opened, above it a sample
SAMPLES, SAMPLE_BYTES = 256, 1 << 16
ROUNDS = 6  # of the Feistel network; four already pass for random to a reader of windows


class TokenWriter:
    """Appends token ids to an open file and puts the header in front at the end."""

    def __init__(self, file: BinaryIO, vocab_size: int) -> None:
        """file: empty, open for reading and writing bytes. vocab_size: decides between two and four bytes a token."""
        self._file = file
        self._dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
        self._hash = hashlib.sha256()
        self.count = self.documents = self.text_bytes = 0
        file.write(b" " * HEADER_BYTES)

    def add(self, ids: list[int], text_bytes: int) -> None:
        """Append `ids`, which stand for `text_bytes` of UTF-8."""
        raw = np.asarray(ids, dtype=self._dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(ids)
        self.text_bytes += text_bytes

    def end_document(self, token: int) -> None:
        """Append the end-of-document token."""
        self.add([token], 0)
        self.documents += 1

    def finish(self, path: Path, fingerprint: str) -> None:
        """Write the header and move the whole file to `path`. fingerprint: of what the tokens were made from."""
        header = {
            "format": "quatrain-tokens",
            "version": VERSION,
            "dtype": "uint16" if self._dtype.itemsize == 2 else "uint32",
            "count": self.count,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "fingerprint": fingerprint,
            "digest": self._hash.hexdigest(),
            "sample": _sample(self._file, self._file.tell()),
        }
        self._file.seek(0)
        self._file.write(json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        move_into_place(self._file, path)


@dataclass(frozen=True)
class TokenStream:
    """One side of a corpus: windows of `sequence_length` + 1 tokens, one token shared by neighbours.

    tokens: the memory-mapped ids, [count]. documents, text_bytes: what they were made from, end tokens not counted.
    digest: SHA-256 of the ids, equal on every machine for equal tokens.
    """

    tokens: npt.NDArray[np.unsignedinteger[Any]]
    documents: int
    text_bytes: int
    digest: str
    sequence_length: int

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def windows(self) -> int:
        """Number of whole windows; every token but the first and a last remainder is predicted once in them."""
        return max(0, (self.count - 1) // self.sequence_length)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token stands for: loss in nats / (ln 2 x this) is bits a byte."""
        return self.text_bytes / self.count

    def batch(self, step: int, batch_size: int, *, seed: int | None = None) -> torch.Tensor:
        """The windows of one step, int64 [batch_size, sequence_length + 1] on the CPU.

        seed: None reads windows in the order of the text; a number reads them in an order of its own, each window
        once an epoch and each epoch anew. The result depends on (step, batch_size, seed) only, not on earlier calls,
        and takes the same time and memory at any step: run after run can start anywhere. Past the last window the
        next epoch begins.

        Raises ValueError when step is negative or batch_size under 1.
        """
        if step < 0 or batch_size < 1:
            raise ValueError(
                f"a batch has step >= 0 and batch_size >= 1; received step {step}, batch_size {batch_size}; correct it"
            )
        index = step * batch_size + np.arange(batch_size, dtype=np.int64)
        window = index % self.windows
        if seed is not None:
            epochs = index // self.windows
            for epoch in np.unique(epochs):
                rows = epochs == epoch
                window[rows] = permute(window[rows], self.windows, (seed, int(epoch)))
        offsets = window[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        return torch.from_numpy(self.tokens[offsets].astype(np.int64))


def open_tokens(path: Path, fingerprint: str, sequence_length: int) -> TokenStream | None:
    """The token file at `path`, or None when it is missing, damaged, cut short or made from something else.

    Of a file over `WHOLE_BYTES` only a sample of its tokens is compared with what was written.
    """
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(HEADER_BYTES))
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[header["dtype"]])
        count = header["count"]
        size = path.stat().st_size
        whole = size == HEADER_BYTES + count * dtype.itemsize
        if not whole or header["version"] != VERSION or header["fingerprint"] != fingerprint:
            return None
        if not _untouched(path, size, header):
            return None
        tokens = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
        return TokenStream(tokens, header["documents"], header["text_bytes"], header["digest"], sequence_length)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _untouched(path: Path, size: int, header: dict[str, Any]) -> bool:
    """Whether the tokens are those that were written: disks and copies do lose bits."""
    with path.open("rb") as file:
        if size > WHOLE_BYTES:
            return header.get("sample") in (None, _sample(file, size))  # older files have none
        file.seek(HEADER_BYTES)
        return hashlib.file_digest(file, "sha256").hexdigest() == header["digest"]


def _sample(file: BinaryIO, size: int) -> str:
    """Hex digest of parts of the tokens, spread evenly over the file, its end among them."""
    digest = hashlib.sha256()
    for part in range(SAMPLES):
        file.seek(HEADER_BYTES + max(0, size - HEADER_BYTES - SAMPLE_BYTES) * part // (SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def permute(positions: npt.NDArray[np.int64], size: int, key: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Where a pseudo-random permutation of 0 .. size - 1 puts `positions`; `key` selects the permutation.

    A Feistel network over the next power of four, walked on until it lands inside: no table, and the same on every
    version of numpy. (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, cycle walking.)
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(_mix(key[0] & WORD) ^ (key[1] & WORD)) + turn & WORD) for turn in range(ROUNDS)]
    image = positions.astype(np.uint64)
    outside = np.ones(len(image), dtype=bool)
    while outside.any():
        image[outside] = _feistel(image[outside], half, keys)
        outside = image >= size
    return image.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), modulo 2^64, on an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    """One step of SplitMix64 on a Python integer."""
    value = value + 0x9E3779B97F4A7C15 & WORD
    return int(_mix_array(np.array([value], dtype=np.uint64))[0])
