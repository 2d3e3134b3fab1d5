"""The tokenizer: a byte-level BPE trained once on the training documents, or one of Hugging Face's from a path."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quatrain.data.sources import SEPARATOR
from quatrain.files import expand, replace_file

END_NAMES = (SEPARATOR, "<|end_of_text|>", "<|endofdocument|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
SAMPLE = 50_000_000  # characters of text a BPE is trained on at most; merges of a few thousand settle long before


@dataclass(frozen=True)
class DocumentTokenizer:
    """A tokenizer with what packing needs. end: id of the token put after each document. size: largest id + 1."""

    tokenizer: Tokenizer
    end: int
    size: int

    def to_json(self) -> str:
        """The tokenizer in Hugging Face's tokenizer.json form."""
        return str(self.tokenizer.to_str())


def train_bpe(texts: Iterable[str], vocab_size: int) -> DocumentTokenizer:
    """A byte-level BPE with at most `vocab_size` tokens (fewer when the text has no more repeated pairs).

    Token 0 ends a document. The same texts in the same order give the same tokenizer. No text is begun once
    50 million characters are used.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    return _ready(tokenizer, SEPARATOR)


def save(tokenizer: DocumentTokenizer, path: Path) -> None:
    """Write tokenizer.json form to `path`, whole or not at all."""
    replace_file(path, tokenizer.to_json())


def load_bpe(path: Path) -> DocumentTokenizer | None:
    """A tokenizer that `save` wrote, or None when there is none or it is damaged."""
    try:
        return _ready(Tokenizer.from_str(path.read_text(encoding="utf-8")), SEPARATOR)
    except FileNotFoundError:
        return None
    except Exception:  # tokenizers raises bare Exception for a file it cannot parse
        return None


def load_path(received: str) -> DocumentTokenizer:
    """A Hugging Face tokenizer from a folder or a tokenizer.json; no network, no code from the folder.

    The end-of-document token is the eos_token that the folder names, else the first usual one in the vocabulary.
    Raises FileNotFoundError for a missing path, ValueError for what cannot be loaded or has no such token.
    """
    path = expand(received, "data.tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(
            f'data.tokenizer is "bpe" or a path to a tokenizer; received {received!r}, which does not exist; '
            "correct the path"
        )
    try:
        tokenizer, named = _from_file(file) if file.is_file() else _from_transformers(path)
    except Exception as error:  # tokenizers and transformers raise many kinds, bare Exception among them
        raise ValueError(
            "data.tokenizer is a tokenizer.json or a folder with a Hugging Face tokenizer; received "
            f"{received!r}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}; "
            'give another path, or "bpe"'
        ) from error
    known = tokenizer.get_vocab(with_added_tokens=True)
    end = next((name for name in (*named, *END_NAMES) if name in known), None)
    if end is None:
        raise ValueError(
            "a tokenizer names the token that ends a document; received "
            f"{received!r} with no eos_token in tokenizer_config.json and none of {', '.join(END_NAMES)}; "
            "set eos_token there"
        )
    return _ready(tokenizer, end)


def _sample(texts: Iterable[str]) -> Iterable[str]:
    left = SAMPLE
    for text in texts:
        yield text
        left -= len(text)
        if left <= 0:
            return


def _ready(tokenizer: Tokenizer, end: str) -> DocumentTokenizer:
    """Plain text in, ids out: nothing cut, padded or added, and special tokens in the text are only text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return DocumentTokenizer(tokenizer, ids[end], max(ids.values()) + 1)


def _from_file(file: Path) -> tuple[Tokenizer, list[str]]:
    """A tokenizer.json, and the eos_token that the files beside it name."""
    named = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads((file.parent / name).read_text(encoding="utf-8"))["eos_token"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            named.append(token)
    return Tokenizer.from_file(str(file)), named


def _from_transformers(folder: Path) -> tuple[Tokenizer, list[str]]:
    """A folder without tokenizer.json (vocab.json with merges.txt, SentencePiece), which transformers converts."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return loaded.backend_tokenizer, [loaded.eos_token] if loaded.eos_token else []
