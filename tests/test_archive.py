"Files of fitted objects: whole or not at all, and clear about what they are."

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bft_nb import archive
from bft_nb.archive import ids_from_tensors, ids_to_tensors, read_archive, write_archive

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def saved(tmp_path):
    return write_archive(tmp_path / "m.safetensors", {"x": torch.arange(4.0)}, {"a": [1, "ü"]}, "thing", 3)


def nothing_half_written(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_round_trip(saved):
    tensors, meta = read_archive(saved, "thing", 3)
    torch.testing.assert_close(tensors["x"], torch.arange(4.0))
    assert meta["a"] == [1, "ü"]
    assert oct(saved.stat().st_mode)[-3:] == "644" and nothing_half_written(saved.parent)


@pytest.mark.parametrize("ids", [np.array([5, -1, 2**40]), np.array(["a", "", "dé ü", "日本"]), np.array(["x"]), np.array([], dtype=np.int64)])
def test_ids_survive(ids):
    got = ids_from_tensors("i", ids_to_tensors("i", ids))
    assert got.tolist() == ids.tolist() and got.dtype.kind == ids.dtype.kind


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_truncated_file_is_named(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[:keep])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        read_archive(saved, "thing", 3)


@pytest.mark.parametrize(("header", "message"), [
    ('{"kind": "thing", ', "its header is damaged: Expecting"),
    ("", "its header is damaged: Expecting value"),
    ("[" * 100_000, "its header is damaged"),
    ("[1, 2]", "its header is damaged: expected a JSON object, got list"),
    ("null", "its header is damaged: expected a JSON object, got NoneType"),
])  # fmt: skip
def test_a_damaged_header_is_named(tmp_path, header, message):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors", {archive.HEADER: header})
    with pytest.raises(ValueError, match=f"m.safetensors' cannot be read, {message}"):
        read_archive(tmp_path / "m.safetensors", "thing", 3)


def test_another_version_kind_or_file(saved, tmp_path):
    with pytest.raises(ValueError, match="format 3, this version of the library reads format 4"):
        read_archive(saved, "thing", 4)
    with pytest.raises(ValueError, match="holds 'thing', expected 'recommender'"):
        read_archive(saved, "recommender", 3)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="something else"):
        read_archive(tmp_path / "foreign.safetensors", "thing", 3)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_archive(tmp_path / "nowhere", "thing", 3)


def test_unwritable_place(saved, tmp_path):
    with pytest.raises(OSError, match="could not save to .*What was there before is untouched"):
        write_archive(saved / "inside_a_file", {}, {}, "thing", 3)
    with pytest.raises(OSError, match="it is a folder"):
        write_archive(tmp_path, {}, {}, "thing", 3)
    assert read_archive(saved, "thing", 3) and nothing_half_written(tmp_path)


def test_a_link_stays_and_its_file_is_renewed(saved):
    link = saved.with_name("link")
    link.symlink_to(saved.name)
    write_archive(link, {"x": torch.zeros(2)}, {}, "thing", 3)
    assert link.is_symlink() and read_archive(saved, "thing", 3)[0]["x"].tolist() == [0, 0] and nothing_half_written(saved.parent)


def test_a_device_or_pipe_is_refused(saved):
    os.mkfifo(pipe := saved.with_name("pipe"))
    with pytest.raises(OSError, match="could not save to .*pipe': it is a device or a pipe, give the name of a file"):
        write_archive(pipe, {}, {}, "thing", 3)
    assert pipe.is_fifo() and nothing_half_written(saved.parent)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_archive(saved.parent, "thing", 3)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(saved):
    saved.parent.chmod(0o500)
    try:
        with pytest.raises(OSError, match="could not save"):
            write_archive(saved, {}, {}, "thing", 3)
    finally:
        saved.parent.chmod(0o700)
    assert read_archive(saved, "thing", 3)


def test_full_disk_by_error(saved, monkeypatch):
    def full(self, data):
        with open(self, "wb") as f:
            f.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_on_flush(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name, failing in ((archive.Path, "write_bytes", full), (os, "fsync", full_on_flush)):
        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(OSError, match="No space left on device") as e:
            write_archive(saved, {"x": torch.zeros(9)}, {}, "thing", 3)
        assert e.value.errno == errno.ENOSPC
        monkeypatch.undo()
    torch.testing.assert_close(read_archive(saved, "thing", 3)[0]["x"], torch.arange(4.0))
    assert nothing_half_written(saved.parent)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files the Linux way")
def test_a_file_that_may_not_grow_leaves_the_earlier_one(saved):
    code = (
        "import resource, sys, torch\nfrom bft_nb.archive import write_archive\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: write_archive(sys.argv[1], {'x': torch.zeros(100_000)}, {}, 'thing', 3)\n"
        "except OSError as e: print(e)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "could not save" in out
    torch.testing.assert_close(read_archive(saved, "thing", 3)[0]["x"], torch.arange(4.0))
    assert nothing_half_written(saved.parent)


def test_no_pickle():
    source = Path(archive.__file__).read_text()
    assert "torch.save" not in source and "torch.load" not in source and "import pickle" not in source
