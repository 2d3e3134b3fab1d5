"""From a `DataConfig` to two token streams: find, split, train the tokenizer, tokenise; or take all of it cached."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from quatrain.data.config import DataConfig
from quatrain.data.sources import Document, Source, find, read
from quatrain.data.tokenizer import DocumentTokenizer, load_bpe, load_path, save, train_bpe
from quatrain.data.tokens import TokenStream, TokenWriter, open_tokens
from quatrain.files import expand, temporary_beside

VERSION = 1  # of how documents become tokens; raising it makes old caches unused
PIECE = 1_000_000  # characters tokenised at once; longer documents are cut after a line
SIDES = ("train", "val")

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens held out, and the tokenizer that made them.

    vocab_size: number of token ids, which a model must cover (a BPE may have fewer than asked for).
    end_of_document: id of the token after each document.
    """

    train: TokenStream
    val: TokenStream
    tokenizer: Tokenizer
    vocab_size: int
    end_of_document: int

    @property
    def documents(self) -> tuple[int, int]:
        """Number of documents to train on and held out."""
        return self.train.documents, self.val.documents

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes a token of the held-out text: validation loss / (ln 2 x this) is bits a byte."""
        return self.val.bytes_per_token

    @property
    def fingerprint(self) -> str:
        """Hex digest of all token ids: equal on every machine, for a run that resumes to know its data."""
        return hashlib.sha256(f"{self.train.digest} {self.val.digest}".encode()).hexdigest()


def prepare(config: DataConfig, *, progress: Progress | None = None) -> Corpus:
    """The corpus that `config` describes, made once and then taken from `config.cache`.

    A cached tokenizer or token file is used when names, sizes and times of change of the input and all settings are
    the same and the file is whole; a damaged one is made again. Only what is missing is written, so a filled cache may
    be read-only. Files appear whole or not at all, so a killed process
    or two at once do no harm. Nothing is fetched.

    progress: called with ("tokenizer" | "tokens", share done from 0 to 1) while something is made.

    Raises FileNotFoundError for a missing path; ValueError for input that cannot be read (naming file and line), for
    fewer documents than two sides need and for a side shorter than one sequence.
    """
    source = find(config)
    cache = expand(config.cache, "data.cache")
    report = progress or _silent
    tokenizer = _tokenizer(config, source, cache, report)
    key = _key(source.fingerprint(), config.validation_fraction, tokenizer.to_json(), tokenizer.end)
    paths = [cache / f"tokens-{key[:16]}-{side}.bin" for side in SIDES]
    streams = [open_tokens(path, key, config.sequence_length) for path in paths]
    if any(stream is None for stream in streams):
        _tokenise(config, source, tokenizer, paths, key, report)
        streams = [open_tokens(path, key, config.sequence_length) for path in paths]
    train, val = streams
    if train is None or val is None:
        raise ValueError(
            f"token files stay in place while they are read; received {str(cache)!r}, where one has gone; run again"
        )
    for side, stream in zip(SIDES, (train, val), strict=True):
        if stream.windows < 1:
            raise ValueError(
                f"each side of a corpus holds one sequence at least, {config.sequence_length + 1} tokens; received "
                f"{stream.count} tokens in {side} from {config.path!r}; add text, lower data.sequence_length, "
                "or change data.validation_fraction"
            )
    return Corpus(train, val, tokenizer.tokenizer, tokenizer.size, tokenizer.end)


def held_out(document: str, fraction: float) -> bool:
    """Whether the document of this id belongs to the validation side, which holds about `fraction` of all."""
    return _draw(document) < fraction * 2**64


def _draw(document: str) -> int:
    return int.from_bytes(hashlib.sha256(f"held out? {document}".encode()).digest()[:8], "big")


def _divided(config: DataConfig, source: Source) -> Iterator[tuple[Document, bool]]:
    """Every document with its side, True for held out.

    By the hash of the id. Where that would leave a side empty, the document with the lowest (highest) hash changes
    sides; a single document is cut in two, its end held out.
    """
    fraction = config.validation_fraction
    ids, sides = [], set()
    for document in read(source):  # stops early: among a hundred documents both sides have usually been seen
        ids.append(document.id)
        sides.add(held_out(document.id, fraction))
        if len(sides) == 2:
            break
    moved = None if len(sides) == 2 or not ids else max(ids, key=_draw) if True in sides else min(ids, key=_draw)
    for document in read(source):
        if len(ids) == 1:
            yield from _cut(document, fraction)
        else:
            yield document, held_out(document.id, fraction) != (document.id == moved)


def _cut(document: Document, fraction: float) -> Iterator[tuple[Document, bool]]:
    """The beginning to train on and the end held out, parted after a line if there is one in the last stretch."""
    text = document.text
    at = round(len(text) * (1 - fraction))
    at = text.rfind("\n", at // 2, at) + 1 or at
    yield Document(document.id, text[:at], document.position), False
    yield Document(document.id, text[at:], document.position), True


def _tokenizer(config: DataConfig, source: Source, cache: Path, report: Progress) -> DocumentTokenizer:
    if config.tokenizer != "bpe":
        return load_path(config.tokenizer)
    key = _key(source.fingerprint(), config.validation_fraction, config.vocab_size)
    path = cache / f"bpe-{key[:16]}.json"
    tokenizer = load_bpe(path)
    if tokenizer is None:
        _make_folder(cache)
        report("tokenizer", 0.0)
        tokenizer = train_bpe(_training_texts(config, source, report), config.vocab_size)
        save(tokenizer, path)
        report("tokenizer", 1.0)
    return tokenizer


def _training_texts(config: DataConfig, source: Source, report: Progress) -> Iterator[str]:
    for document, held in _divided(config, source):
        if not held:
            report("tokenizer", min(0.9, document.position))  # the merges come after the last text
            yield document.text


def _tokenise(
    config: DataConfig, source: Source, tokenizer: DocumentTokenizer, paths: list[Path], key: str, report: Progress
) -> None:
    """Write both token files, then move them into place one after the other."""
    _make_folder(paths[0].parent)
    report("tokens", 0.0)
    with temporary_beside(paths[0]) as train, temporary_beside(paths[1]) as val:
        writers = [TokenWriter(file, tokenizer.size) for file in (train, val)]
        for batch in _batches(_pieces(_divided(config, source))):
            texts = [piece.text for piece in batch]
            encodings = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                side = writers[piece.held]
                side.add(encoding.ids, len(piece.text.encode()))
                if piece.last:
                    side.end_document(tokenizer.end)
            report("tokens", min(0.99, batch[-1].document.position))
        counts = [writer.documents for writer in writers]
        if 0 in counts:
            raise ValueError(
                f"training and validation both hold documents; received {counts[0]} for training and {counts[1]} "
                f"held out from {config.path!r} at data.validation_fraction {config.validation_fraction}; add documents"
                ' (in .txt a line "<|endoftext|>" ends one), or raise or lower that fraction'
            )
        for writer, path in zip(writers, paths, strict=True):
            writer.finish(path, key)
    report("tokens", 1.0)


@dataclass(frozen=True)
class _Piece:
    """Part of a document, all of it up to `PIECE` characters; held: its side; last: whether the document ends here."""

    document: Document
    held: bool
    text: str
    last: bool


def _pieces(documents: Iterator[tuple[Document, bool]]) -> Iterator[_Piece]:
    """Documents, cut after a line wherever one would pass `PIECE` characters."""
    for document, held in documents:
        text, start = document.text, 0
        while len(text) - start > PIECE:
            end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
            yield _Piece(document, held, text[start:end], False)
            start = end
        yield _Piece(document, held, text[start:], True)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in runs of about `PIECE` characters."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _make_folder(folder: Path) -> None:
    """Make the cache and its parents; ValueError when that is impossible or it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_beside(folder / "probe"):
            pass
    except OSError as error:
        raise ValueError(
            f"data.cache is a folder that can be written to; received {str(folder)!r}: {error.strerror}; "
            "set data.cache to another folder"
        ) from error


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([VERSION, *parts]).encode()).hexdigest()


def _silent(stage: str, share: float) -> None:
    """Progress that nobody asked for."""
