"""Text to tokens: every kind of input, every error, the cache under damage and contention, the order of windows."""

import gzip
import itertools
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quatrain.data import Corpus, DataConfig, prepare
from quatrain.data import corpus as corpus_module
from quatrain.data import tokens as tokens_module
from quatrain.data.sources import find, read
from quatrain.data.tokens import open_tokens, permute

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "bake", "naïve"]


def texts(number=40, words=120):
    rng = random.Random(number)
    return ["\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(words // 12)) for _ in range(number)]


def config(tmp_path, path, **settings):
    defaults = {"vocab_size": 300, "sequence_length": 16, "validation_fraction": 0.25}
    return DataConfig(path=str(path), cache=str(tmp_path / "cache"), **(defaults | settings))


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts()), encoding="utf-8")
    return path


def files(tmp_path):
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}


def decoded(corpus: Corpus):
    """Both sides' documents as text."""
    ids = np.concatenate([corpus.train.tokens, corpus.val.tokens]).tolist()
    groups = itertools.groupby(ids, lambda token: token == corpus.end_of_document)
    return [corpus.tokenizer.decode(list(group)) for ends, group in groups if not ends]


# Sources


def test_defaults_are_the_run_file_s():
    assert DataConfig() == DataConfig(
        path="stdlib",
        tokenizer="bpe",
        vocab_size=1024,
        sequence_length=128,
        text_key="text",
        validation_fraction=0.02,
        max_bytes=20_000_000,
        cache="~/.cache/quatrain",
    )
    assert len({DataConfig(), DataConfig(), DataConfig(max_bytes=0)}) == 2


def test_the_library_s_own_source(tmp_path):
    stages = []
    corpus = prepare(
        DataConfig(max_bytes=300_000, validation_fraction=0.2, cache=str(tmp_path)),
        progress=lambda stage, share: stages.append((stage, share)),
    )
    assert corpus.vocab_size == 1024 == corpus.tokenizer.get_vocab_size()
    assert 299_990 <= corpus.train.text_bytes + corpus.val.text_bytes <= 300_000
    assert all(corpus.documents) and 1.5 < corpus.bytes_per_token < 4
    assert corpus.train.tokens.dtype == np.uint16 and corpus.train.tokens.max() < 1024
    text = "".join(decoded(corpus))
    assert "def " in text and "import " in text
    for name in ("tokenizer", "tokens"):
        shares = [share for stage, share in stages if stage == name]
        assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1 and len(shares) > 2


def test_installed_packages_and_text_that_is_no_utf8_are_left_out_of_the_library(tmp_path, monkeypatch):
    for name in ("a.py", "test/b.py", "site-packages/x.py", "dist-packages/y.py", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print(1)\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert sorted(document.id for document in read(find(DataConfig()))) == ["a.py", "test/b.py"]


def test_kinds_of_file_hold_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    documents = texts(30)
    whole = "\n<|endoftext|>\n".join(documents)
    lines = "\n".join(json.dumps({"body": text}) for text in documents) + "\n\n"
    places = {}
    for suffix in ("txt", "txt.gz", "txt.xz", "jsonl", "jsonl.gz", "jsonl.xz", "parquet"):
        folder = tmp_path / suffix.replace(".", "-")
        folder.mkdir()
        places[suffix] = folder / f"docs.{suffix}"
        raw = (whole if suffix.startswith("txt") else lines).encode()
        if suffix == "parquet":
            table = pyarrow.table({"n": range(31), "body": [*documents, None]})
            pyarrow.parquet.write_table(table, places[suffix], row_group_size=7)
        elif suffix.endswith("gz"):
            places[suffix].write_bytes(gzip.compress(raw))
        elif suffix.endswith("xz"):
            places[suffix].write_bytes(lzma.compress(raw))
        else:
            places[suffix].write_bytes(raw)
    for path in places.values():
        found = list(read(find(DataConfig(path=str(path), text_key="body"))))
        assert [document.text.rstrip("\n") for document in found] == documents, path
        assert len({document.id for document in found}) == 30
        positions = [document.position for document in found]
        assert positions == sorted(positions) and positions[-1] <= 1
        assert all(prepare(config(tmp_path, path, text_key="body")).documents)


def test_text_comes_back_whole(tmp_path, jsonl):
    corpus = prepare(config(tmp_path, jsonl))
    assert sorted(decoded(corpus)) == sorted(texts())
    assert corpus.train.text_bytes + corpus.val.text_bytes == sum(len(text.encode()) for text in texts())
    assert corpus.bytes_per_token == corpus.val.text_bytes / corpus.val.count
    assert corpus.train.tokens[-1] == corpus.end_of_document == corpus.val.tokens[-1]


def test_special_tokens_in_the_text_are_text(tmp_path):
    path = tmp_path / "docs.jsonl"
    documents = [f"{text}<|endoftext|> and on" for text in texts(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    corpus = prepare(config(tmp_path, path))
    assert sum(corpus.documents) == 20
    assert int((corpus.train.tokens == corpus.end_of_document).sum()) == corpus.documents[0]


def test_folder_reads_files_of_all_depths_and_skips_hidden_empty_and_unknown_ones(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for index, text in enumerate(texts(12)):
        (folder / ("deep" if index % 2 else ".") / f"{index}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for name in (".git/x.txt", ".hidden.txt", "empty.txt", "notes.md"):
        (folder / name).write_text("" if name == "empty.txt" else "no text of ours")
    found = list(read(find(DataConfig(path=str(folder)))))
    assert sorted(document.text for document in found) == sorted(texts(12))
    assert {document.id for document in found} == {f"deep/{i}.txt" if i % 2 else f"{i}.txt" for i in range(12)}


def test_the_cap_cuts_the_last_document_between_characters(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_text("é" * 10 + "\n<|endoftext|>\n" + "é" * 10, encoding="utf-8")
    for cap, expected in ((None, [21, 20]), (0, [21, 20]), (26, [21, 4]), (7, [6]), (22, [21]), (1, [])):
        found = list(read(find(DataConfig(path=str(path), max_bytes=cap))))
        assert [len(document.text.encode()) for document in found] == expected


def test_long_documents_are_tokenised_in_pieces(tmp_path, jsonl, monkeypatch):
    whole = prepare(config(tmp_path, jsonl))
    monkeypatch.setattr(corpus_module, "PIECE", 150)
    pieces = prepare(config(tmp_path / "other", jsonl))
    assert pieces.documents == whole.documents and pieces.train.text_bytes == whole.train.text_bytes
    assert decoded(pieces) == decoded(whole)


# Tokenizers


def test_a_tokenizer_from_a_path(tmp_path, jsonl):
    trained = prepare(config(tmp_path, jsonl)).tokenizer
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    trained.enable_truncation(4)
    trained.enable_padding(length=9)
    trained.add_special_tokens(["<stop>"])
    trained.save(str(folder / "tokenizer.json"))
    for path in (folder, folder / "tokenizer.json"):
        corpus = prepare(config(tmp_path, jsonl, tokenizer=str(path), vocab_size=7))
        assert corpus.end_of_document == 0 and corpus.vocab_size == trained.get_vocab_size()
        assert sorted(decoded(corpus)) == sorted(texts())
    for token in ("<stop>", {"content": "<stop>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        corpus = prepare(config(tmp_path, jsonl, tokenizer=str(folder)))
        assert corpus.end_of_document == corpus.vocab_size - 1 == corpus.train.tokens[-1]


def test_a_tokenizer_folder_of_the_older_form(tmp_path, jsonl):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained = json.loads(prepare(config(tmp_path, jsonl)).tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = (" ".join(pair) if isinstance(pair, list) else pair for pair in trained["merges"])
    (folder / "merges.txt").write_text("\n".join(merges))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    corpus = prepare(config(tmp_path, jsonl, tokenizer=str(folder)))
    assert sorted(decoded(corpus)) == sorted(texts())


def test_large_vocabularies_take_four_bytes(tmp_path, jsonl):
    trained = prepare(config(tmp_path, jsonl)).tokenizer
    trained.add_tokens([f"<extra {index}>" for index in range(70_000)])
    trained.save(str(tmp_path / "tokenizer.json"))
    corpus = prepare(config(tmp_path, jsonl, tokenizer=str(tmp_path / "tokenizer.json")))
    assert corpus.train.tokens.dtype == np.uint32 and corpus.vocab_size > 70_000
    assert sorted(decoded(corpus)) == sorted(texts())


# Cache


def test_a_second_call_makes_nothing_and_gives_the_same(tmp_path, jsonl):
    first = prepare(config(tmp_path, jsonl))
    before = files(tmp_path)
    assert len(before) == 3 and not any(name.startswith(".") for name in before)

    def no_progress(stage, share):
        raise RuntimeError(stage)

    second = prepare(config(tmp_path, jsonl), progress=no_progress)
    assert files(tmp_path) == before and second.fingerprint == first.fingerprint
    longer = prepare(config(tmp_path, jsonl, sequence_length=20), progress=no_progress)
    assert longer.train.batch(0, 2).shape == (2, 21)


def test_the_same_bits_in_another_cache_and_another_process(tmp_path, jsonl):
    here = prepare(config(tmp_path, jsonl))
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    again = prepare(config(tmp_path / "second", jsonl))
    after = {path.name: path.read_bytes() for path in (tmp_path / "second/cache").iterdir()}
    assert after == before and again.fingerprint == here.fingerprint
    script = (
        "import sys; from quatrain.data import *\n"
        "c = prepare(DataConfig(path=sys.argv[1], cache=sys.argv[2], vocab_size=300, sequence_length=16,"
        " validation_fraction=0.25)); print(c.fingerprint)"
    )
    command = [sys.executable, "-c", script, str(jsonl), str(tmp_path / "shared")]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate(timeout=60)[0].strip() for process in racing} == {here.fingerprint}
    assert {path.name: path.read_bytes() for path in (tmp_path / "shared").iterdir()} == before


@pytest.mark.parametrize("damage", ["short", "long", "header", "empty", "foreign", "gone"])
def test_a_damaged_token_file_is_made_again(tmp_path, jsonl, damage):
    first = prepare(config(tmp_path, jsonl))
    path = next((tmp_path / "cache").glob("tokens-*-train.bin"))
    raw = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(
            {
                "short": raw[:-3],
                "long": raw + b"\0\0",
                "header": b"\0" * 1024 + raw[1024:],
                "empty": b"",
                "foreign": raw.replace(b'"fingerprint": "', b'"fingerprint": "f', 1).replace(b" \n", b"\n", 1),
            }[damage]
        )
    second = prepare(config(tmp_path, jsonl))
    assert path.read_bytes() == raw and second.fingerprint == first.fingerprint


def test_a_damaged_tokenizer_is_made_again(tmp_path, jsonl):
    prepare(config(tmp_path, jsonl))
    path = next((tmp_path / "cache").glob("bpe-*.json"))
    raw = path.read_bytes()
    path.write_bytes(raw[:100])
    prepare(config(tmp_path, jsonl))
    assert path.read_bytes() == raw


def test_what_changes_the_tokens_changes_the_file(tmp_path, jsonl):
    prepare(config(tmp_path, jsonl))
    for number, change in enumerate(({"vocab_size": 310}, {"validation_fraction": 0.4}, {"max_bytes": 20_000}), 2):
        prepare(config(tmp_path, jsonl, **change))
        assert len(list((tmp_path / "cache").glob("tokens-*-val.bin"))) == number
    with jsonl.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert sum(prepare(config(tmp_path, jsonl)).documents) == 41


def test_an_interrupted_call_leaves_no_file(tmp_path, jsonl):
    def interrupt(stage, share):
        if stage == "tokens" and share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(tmp_path, jsonl), progress=interrupt)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


def test_the_header_can_be_read_by_eye(tmp_path, jsonl):
    corpus = prepare(config(tmp_path, jsonl))
    raw = next((tmp_path / "cache").glob("tokens-*-val.bin")).read_bytes()
    header = json.loads(raw[:1024])
    assert raw[1023:1024] == b"\n" and header["version"] == 1 and header["dtype"] == "uint16"
    assert header["count"] == corpus.val.count == (len(raw) - 1024) // 2
    assert open_tokens(Path(corpus.val.tokens.filename), header["fingerprint"], 4).digest == corpus.val.digest
    assert open_tokens(Path(corpus.val.tokens.filename), "another", 4) is None


# Batches


def test_batches_depend_on_step_and_seed_alone(tmp_path, jsonl):
    train = prepare(config(tmp_path, jsonl)).train
    ahead = [train.batch(step, 5, seed=7) for step in range(60)]
    again = prepare(config(tmp_path, jsonl)).train
    for step in reversed(range(60)):
        assert torch.equal(again.batch(step, 5, seed=7), ahead[step])
    assert ahead[0].shape == (5, 17) and ahead[0].dtype == torch.int64
    assert not torch.equal(train.batch(0, 5, seed=8), ahead[0])
    halves = torch.cat([train.batch(2 * 3, 5, seed=7), train.batch(2 * 3 + 1, 5, seed=7)])
    assert torch.equal(halves, train.batch(3, 10, seed=7))


def test_each_epoch_holds_each_window_once_in_an_order_of_its_own(tmp_path, jsonl):
    train = prepare(config(tmp_path, jsonl)).train
    order = train.batch(0, 3 * train.windows, seed=0)
    epochs = order.split(train.windows)
    plain = train.batch(0, train.windows)
    for epoch in epochs:
        assert torch.equal(epoch.unique(dim=0), plain.unique(dim=0))
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], plain)


def test_without_a_seed_windows_follow_the_text(tmp_path, jsonl):
    val = prepare(config(tmp_path, jsonl)).val
    batches = torch.cat([val.batch(step, 3) for step in range(val.windows // 3)])
    assert torch.equal(
        batches[:, :-1].flatten(), torch.from_numpy(val.tokens[: batches.shape[0] * 16].astype(np.int64))
    )
    assert torch.equal(batches[1:, 0], batches[:-1, -1])
    assert torch.equal(val.batch(0, val.windows + 1)[-1], val.batch(0, 1)[0])
    assert (val.count - 1) // 16 == val.windows


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000, 4097])
def test_permutation(size):
    image = permute(np.arange(size), size, (3, 0))
    assert sorted(image.tolist()) == list(range(size))
    if size >= 1000:
        other = permute(np.arange(size), size, (3, 1))
        for order in (image, other, permute(image, size, (4, 0))):
            assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 4 / size**0.5
            assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / size**0.5
        assert (image == other).mean() < 10 / size


def test_permutation_never_changes():
    assert permute(np.arange(8), 1000, (0, 0)).tolist() == [317, 804, 676, 126, 370, 440, 341, 47]
    assert permute(np.array([10**15]), 3 * 10**15, (2**70 + 1, 5)).tolist() == [2226048358697498]


# Errors: the rule, what was received, the remedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ""}, "data.path is a text that is not empty; received ''; write it in quotes"),
        ({"text_key": 3}, "data.text_key is a text that is not empty; received 3; write"),
        ({"sequence_length": 0}, "data.sequence_length is a whole number of at least 1; received 0; raise it"),
        ({"sequence_length": 2.5}, "data.sequence_length is a whole number of at least 1; received 2.5"),
        ({"vocab_size": True}, "data.vocab_size is a whole number of at least 1; received True"),
        ({"vocab_size": 256}, "byte-level BPE is at least 257 .*; received 256; raise it to 257 or more"),
        ({"validation_fraction": 0}, "between 0 and 1, both excluded.*; received 0; use a fraction such as 0.02"),
        ({"validation_fraction": 1.0}, "between 0 and 1, both excluded.*; received 1.0"),
        ({"max_bytes": -1}, "data.max_bytes is a whole number of bytes, 0 for no limit; received -1; correct it"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_paths_without_text(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="is \"stdlib\", a file or a folder; received '.*gone'.*not exist; correct"
    ):
        prepare(config(tmp_path, tmp_path / "gone"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(
        ValueError, match=r"must hold text; received '.*empty.txt', which is empty \(0 bytes\); put files"
    ):
        prepare(config(tmp_path, tmp_path / "empty.txt"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.md").write_text("text")
    with pytest.raises(
        ValueError, match="must hold text; received '.*folder' with no file of text in it; put files that"
    ):
        prepare(config(tmp_path, tmp_path / "folder"))
    with pytest.raises(ValueError, match=r"ends in \.txt, .*\.parquet; received '.*notes\.md'; rename or convert it"):
        prepare(config(tmp_path, tmp_path / "folder/notes.md"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "a',
            r"one JSON object; received broken JSON .Unterminated string.*, column 10. at '.*docs.jsonl', line 2; cor",
        ),
        ("[1]", r"one JSON object; received list at '.*docs\.jsonl', line 2; write it as"),
        ('{"body": "a", "id": 1}', "has the key data.text_key; .*line 2 without 'text'; set text_key to .*: body, id"),
        ('{"text": 5}', "names a text; received int under 'text' at '.*', line 2; set text_key"),
        (r'{"text": "\ud800"}', r"without lone surrogates; received '\\ud800' in '.*', document 2; correct or remove"),
    ],
)
def test_broken_jsonl(tmp_path, line, message):
    path = tmp_path / "docs.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        prepare(config(tmp_path, path))
    assert files(tmp_path) == {}


def test_broken_text_and_archives(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"text is UTF-8; received byte 0xff in '.*docs\.txt', line 2; convert"):
        prepare(config(tmp_path, path))
    for suffix, squeeze in (("gz", gzip.compress), ("xz", lzma.compress)):
        path = tmp_path / f"docs.txt.{suffix}"
        path.write_bytes(squeeze("\n".join(texts()).encode())[:-20])
        with pytest.raises(ValueError, match=rf"must be whole; received '.*docs\.txt\.{suffix}', broken after line"):
            prepare(config(tmp_path, path))
        path.write_bytes(b"not compressed")
        with pytest.raises(ValueError, match=rf"must be whole; received '.*docs\.txt\.{suffix}', broken after line 0"):
            prepare(config(tmp_path, path))


def test_broken_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "docs.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), path)
    with pytest.raises(
        ValueError, match="has the column data.text_key; .* without 'text'; set text_key to .*: id, body"
    ):
        prepare(config(tmp_path, path))
    with pytest.raises(ValueError, match="names a column of text; received int64 under 'id' in '.*'; set text_key"):
        prepare(config(tmp_path, path, text_key="id"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"must be whole; received '.*docs\.parquet'.*; fetch or write it again"):
        prepare(config(tmp_path, path, text_key="body"))


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "docs.txt"
    path.write_text("text")

    def refuse(self, mode="r"):
        raise PermissionError(13, "Permission denied", str(self))

    source = find(DataConfig(path=str(path)))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"must be readable; received '.*docs\.txt': Permission denied; change"):
        list(read(source))


def test_too_little_text(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_text("one document\nof two lines\n")
    with pytest.raises(ValueError, match=r"one sequence at least, 17 tokens; received \d+ tokens in"):
        prepare(config(tmp_path, path))
    path.write_text("\n<|endoftext|>\n".join(texts(20, 12)))
    with pytest.raises(
        ValueError, match=r"one sequence at least, 4097 tokens; received \d+ tokens in train .*; add text"
    ):
        prepare(config(tmp_path, path, sequence_length=4096))
    path.write_text(" \n<|endoftext|>\n\t\n")
    with pytest.raises(ValueError, match="received 0 for training and 0 held out"):
        prepare(config(tmp_path, path))


def test_tokenizers_that_do_not_load(tmp_path, jsonl):
    with pytest.raises(
        FileNotFoundError, match="is \"bpe\" or a path to a tokenizer; received 'gone'.*; correct the path"
    ):
        prepare(config(tmp_path, jsonl, tokenizer="gone"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"is a tokenizer\.json or a folder .*; received '.*'.*; give another path, or"
    ):
        prepare(config(tmp_path, jsonl, tokenizer=str(tmp_path / "tokenizer.json")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"is a tokenizer\.json or a folder .*; received '.*nothing'.*; give another"):
        prepare(config(tmp_path, jsonl, tokenizer=str(tmp_path / "nothing")))
    plain = json.loads(prepare(config(tmp_path, jsonl)).tokenizer.to_str())
    plain["added_tokens"] = []
    plain["model"]["vocab"] = {f"x{token}" if i == 0 else token: i for token, i in plain["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(
        ValueError, match=r"names the token that ends a document; received '.*' with no eos_token .*; set"
    ):
        prepare(config(tmp_path, jsonl, tokenizer=str(tmp_path / "tokenizer.json")))


def test_a_cache_that_cannot_be_written_to(tmp_path, jsonl):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        ValueError, match="data.cache is a folder that can be written to; received '.*cache': .*; set data"
    ):
        prepare(config(tmp_path, jsonl))


def test_a_bad_step(tmp_path, jsonl):
    train = prepare(config(tmp_path, jsonl)).train
    for step, size in ((-1, 4), (0, 0)):
        with pytest.raises(
            ValueError, match=f"step >= 0 and batch_size >= 1; received step {step}, batch_size {size}; c"
        ):
            train.batch(step, size)


def test_a_changed_token_is_noticed(tmp_path, jsonl, monkeypatch):
    first = prepare(config(tmp_path, jsonl))
    path = next((tmp_path / "cache").glob("tokens-*-train.bin"))
    raw = path.read_bytes()
    for limit in (tokens_module.WHOLE_BYTES, 0):  # 0: as if it were too large to be looked at as a whole
        monkeypatch.setattr(tokens_module, "WHOLE_BYTES", limit)
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert prepare(config(tmp_path, jsonl)).fingerprint == first.fingerprint
        assert path.read_bytes() == raw


def test_a_token_file_without_a_sample_is_taken(tmp_path, jsonl, monkeypatch):
    prepare(config(tmp_path, jsonl))
    stamps = {}
    for path in (tmp_path / "cache").glob("tokens-*.bin"):
        raw = path.read_bytes()
        header = json.loads(raw[:1024])
        del header["sample"]
        path.write_bytes(json.dumps(header).encode().ljust(1023) + b"\n" + raw[1024:])
        stamps[path] = path.stat().st_mtime_ns
    for limit in (tokens_module.WHOLE_BYTES, 0):
        monkeypatch.setattr(tokens_module, "WHOLE_BYTES", limit)
        prepare(config(tmp_path, jsonl))
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_filled_cache_may_be_read_only(tmp_path, jsonl, monkeypatch):
    first = prepare(config(tmp_path, jsonl))
    real = Path.open

    def reading(self, mode="r", *rest, **more):
        if "r" not in mode:
            raise OSError(30, "Read-only file system", str(self))
        return real(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", reading)
    assert prepare(config(tmp_path, jsonl)).fingerprint == first.fingerprint


def test_links_to_folders_are_followed_once(tmp_path):
    (tmp_path / "text" / "inner").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "far.txt").write_text("far")
    (tmp_path / "text" / "inner" / "near.txt").write_text("near")
    (tmp_path / "text" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "text" / "twice").symlink_to(tmp_path / "far")
    (tmp_path / "text" / "inner" / "circle").symlink_to(tmp_path / "text")
    found = find(DataConfig(path=str(tmp_path / "text")))
    assert sorted(file.name for file in found.files) == ["inner/near.txt", "link/far.txt"]


@pytest.mark.parametrize("closed", ["closed", "text"])  # a folder inside, the folder itself
def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch, closed):
    (tmp_path / "text" / "closed").mkdir(parents=True)
    (tmp_path / "text" / "a.txt").write_text("text")
    real = os.scandir

    def scandir(path):
        if str(path).endswith(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=f"must be readable; received '.*{closed}': Permission denied; change"):
        find(DataConfig(path=str(tmp_path / "text")))


@pytest.mark.parametrize("value", ["[" * 100_000, '{"text": ' + "1" * 5000 + "}"], ids=["nested", "digits"])
def test_json_that_python_cannot_hold(tmp_path, value):
    (tmp_path / "docs.jsonl").write_text(value + "\n")
    with pytest.raises(ValueError, match=r"received broken JSON \(.*\) at '.*docs.jsonl', line 1; correct"):
        prepare(config(tmp_path, tmp_path / "docs.jsonl"))


def test_odd_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "docs.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(ValueError, match="docs.parquet' with 2 columns called 'text'; set text_key"):
        prepare(config(tmp_path, path))
    pyarrow.parquet.write_table(pyarrow.table({"text": [["a"]]}), path)
    with pytest.raises(ValueError, match="names a column of text; received list"):
        prepare(config(tmp_path, path))
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["a", "b"]).dictionary_encode()}), path)
    assert [document.text for document in read(find(DataConfig(path=str(path))))] == ["a", "b"]
    raw = pyarrow.array([b"fine", b"\xff"], type=pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": raw.view(pyarrow.string())}), path)
    with pytest.raises(ValueError, match=r"text is UTF-8; received byte 0xff in '.*docs.parquet', row 2"):
        list(read(find(DataConfig(path=str(path)))))


def test_a_single_document_is_cut_and_its_end_held_out(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("\n".join(texts(30)), encoding="utf-8")
    corpus = prepare(config(tmp_path, path, validation_fraction=0.1))
    assert corpus.documents == (1, 1)
    share = corpus.val.count / (corpus.val.count + corpus.train.count)
    assert 0.08 < share < 0.12
    end = corpus.tokenizer.decode(corpus.val.tokens[-40:-1].tolist())
    assert path.read_text(encoding="utf-8").endswith(end.strip())


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_a_few_documents_always_fill_both_sides(tmp_path, fraction):
    folder = tmp_path / "few"
    folder.mkdir()
    for i, text in enumerate(texts(3)):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    corpus = prepare(config(tmp_path, folder, validation_fraction=fraction))
    assert sorted(corpus.documents) == [1, 2]
    assert corpus.fingerprint == prepare(config(tmp_path, folder, validation_fraction=fraction)).fingerprint
