"""Where the compiled twin's library is kept, and what happens to one that is broken."""

import hashlib
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from quatrain.kernels import quantize_cpu


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_cpu, "_cache_folder", lambda: tmp_path / "native")
    quantize_cpu._load.cache_clear()
    yield tmp_path / "native"
    quantize_cpu._load.cache_clear()


def library_in(cache: Path) -> Path:
    (path,) = cache.glob("*.so")
    return path


@pytest.mark.skipif(quantize_cpu.obstacle() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_a_library_that_was_cut_short_is_built_again(cache, keep):
    assert quantize_cpu.obstacle() is None
    whole = library_in(cache).read_bytes()
    library_in(cache).unlink()  # not cut in place: this process has it loaded
    next(cache.glob("*.sha256")).with_suffix("").write_bytes(whole[:keep])
    quantize_cpu._load.cache_clear()
    assert quantize_cpu.obstacle() is None and library_in(cache).stat().st_size == len(whole)


@pytest.mark.skipif(quantize_cpu.obstacle() is not None, reason="needs a C++ compiler")
def test_a_whole_file_that_does_not_load_is_built_again(cache, tmp_path, monkeypatch):
    assert quantize_cpu.obstacle() is None
    other = tmp_path / "other" / library_in(cache).name  # a path that this process has not loaded yet
    other.parent.mkdir()
    other.write_bytes(b"no library")
    other.with_name(other.name + ".sha256").write_text(hashlib.sha256(b"no library").hexdigest())
    monkeypatch.setattr(quantize_cpu, "_cache_folder", lambda: other.parent)
    quantize_cpu._load.cache_clear()
    assert quantize_cpu.obstacle() is None and other.stat().st_size > 1000


def test_a_user_without_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = quantize_cpu._cache_folder()
    assert folder == tmp_path / f"quatrain-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert quantize_cpu._cache_folder() == folder
    folder.chmod(0o777)
    with pytest.raises(OSError, match="its user alone"):
        quantize_cpu._cache_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="its user alone"):
        quantize_cpu._cache_folder()
