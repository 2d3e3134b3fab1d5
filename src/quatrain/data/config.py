"""What a run file's [data] table says: one frozen value, checked when it is made."""

from dataclasses import dataclass

SMALLEST_BPE = 257  # 256 bytes and the end-of-document token


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it is cut into tokens.

    path: "stdlib" (the library source of the running Python), or a file or folder of .txt, .jsonl (both also .gz and
    .xz) and .parquet; in .txt a line ``<|endoftext|>`` ends a document, a file without one is one document.
    tokenizer: "bpe" (byte-level, trained once on the training documents) or a path to a Hugging Face tokenizer.
    vocab_size: tokens of "bpe"; a tokenizer from a path has its own. sequence_length: tokens that a model sees at
    once. text_key: the text's key in .jsonl, its column in .parquet. validation_fraction: share of documents held
    out, by the hash of the document's id (a single document is cut, its end held out). max_bytes: UTF-8 bytes of
    text to read at most, 0 or None for all; files are taken in the order of the hash of their path inside `path`.
    cache: folder for tokenizers and token files.

    Raises ValueError when a value breaks its rule.
    """

    path: str = "stdlib"
    tokenizer: str = "bpe"
    vocab_size: int = 1024
    sequence_length: int = 128
    text_key: str = "text"
    validation_fraction: float = 0.02
    max_bytes: int | None = 20_000_000
    cache: str = "~/.cache/quatrain"

    def __post_init__(self) -> None:
        for name in ("path", "tokenizer", "text_key", "cache"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"data.{name} is a text that is not empty; received {value!r}; write it in quotes")
        for name in ("vocab_size", "sequence_length"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise ValueError(f"data.{name} is a whole number of at least 1; received {value!r}; raise it")
            if value >= 1 << 31:
                raise ValueError(f"data.{name} is under 2^31; received {value!r}; lower it")
        if self.tokenizer == "bpe" and self.vocab_size < SMALLEST_BPE:
            raise ValueError(
                f"data.vocab_size of a byte-level BPE is at least {SMALLEST_BPE} (256 bytes and the end of a document);"
                f" received {self.vocab_size}; raise it to {SMALLEST_BPE} or more"
            )
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
            raise ValueError(
                "data.validation_fraction lies between 0 and 1, both excluded, since both sides need text; "
                f"received {fraction!r}; use a fraction such as 0.02"
            )
        if self.max_bytes is not None and (not _is_whole(self.max_bytes) or self.max_bytes < 0):
            raise ValueError(
                f"data.max_bytes is a whole number of bytes, 0 for no limit; received {self.max_bytes!r}; correct it"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
