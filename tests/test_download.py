"Fetching from a publisher on this machine: whole and right, or an error and nothing left behind."

import errno
import gzip
import hashlib
import http.server
import json
import os
import stat
import subprocess
import sys
import threading
import zipfile

import pytest
from helpers import ROOT

from bft_nb import formats
from bft_nb import interactions as I
from bft_nb.download import DownloadError, Source, cache_dir, check_member, data_dir, fetch, md5_of, unzip, written
from bft_nb.results import _replacing


def leftovers(folder): return sorted(p.name for p in folder.rglob("*") if p.is_file()) if folder.exists() else []


def test_fetch_once_then_from_disk(publisher, tmp_path):
    root, url = publisher
    (root / "a.bin").write_bytes(b"content")
    source = Source(url + "a.bin", md5=hashlib.md5(b"content").hexdigest())
    path = fetch(source, tmp_path / "out", progress=False)
    assert path.read_bytes() == b"content" and leftovers(tmp_path / "out") == ["a.bin"]
    (root / "a.bin").unlink()
    assert fetch(source, tmp_path / "out", progress=False) == path


def test_wrong_checksum_names_both_and_leaves_nothing(publisher, tmp_path):
    root, url = publisher
    (root / "a.bin").write_bytes(b"other")
    with pytest.raises(DownloadError, match="got md5 795f3202b17cb6bc3d4b771d8c6c9eaf, the publisher states 0000"):
        fetch(Source(url + "a.bin", md5="0000"), tmp_path / "out", progress=False)
    assert leftovers(tmp_path / "out") == []


def test_wrong_file_on_disk_is_replaced(publisher, tmp_path):
    root, url = publisher
    (root / "a.bin").write_bytes(b"content")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.bin").write_bytes(b"cont")
    path = fetch(Source(url + "a.bin", md5=hashlib.md5(b"content").hexdigest()), tmp_path / "out", progress=False)
    assert path.read_bytes() == b"content"


def test_truncated_file_is_refused(publisher, tmp_path):
    with pytest.raises(DownloadError, match="truncated: 10 of 1000 bytes"):
        fetch(Source(publisher[1] + "truncated.bin"), tmp_path / "out", progress=False)
    assert leftovers(tmp_path / "out") == []


def test_missing_and_unreachable(publisher, tmp_path):
    with pytest.raises(DownloadError, match="could not download .*none.bin"):
        fetch(Source(publisher[1] + "none.bin"), tmp_path / "out", progress=False)
    with pytest.raises(DownloadError, match="could not download"):
        fetch(Source("http://127.0.0.1:9/a.bin"), tmp_path / "out", progress=False)
    assert leftovers(tmp_path / "out") == []


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match="a.bin' cannot be written: Not a directory: set BFT_CACHE to a folder where it can be kept"):
        fetch(Source("http://127.0.0.1:9/a.bin"), tmp_path / "file" / "cache", progress=False)


def test_written_leaves_nothing_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError), written(tmp_path / "x.txt") as part:
        part.write_text("half")
        raise RuntimeError
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:\\evil"])
def test_members_that_leave_the_folder_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z: z.writestr(name, "x")
    with pytest.raises(DownloadError, match="outside its folder"): unzip(tmp_path / "a.zip", tmp_path / "out")
    with pytest.raises(DownloadError, match="outside"): check_member(name)
    assert leftovers(tmp_path) == ["a.zip"]


def test_unzip_all_or_nothing(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z: z.writestr("b/c.txt", "x" * 1000)
    assert (unzip(tmp_path / "a.zip", tmp_path / "out") / "b" / "c.txt").read_text() == "x" * 1000
    (tmp_path / "bad.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:60])
    with pytest.raises(DownloadError, match="not a whole zip archive"): unzip(tmp_path / "bad.zip", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("BFT_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.setenv("BFT_DATA", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="is not a folder"): data_dir()
    monkeypatch.delenv("BFT_DATA")
    assert data_dir() is None


# interruptions -------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 8192  # 2 MiB
HALF = len(CONTENT) // 2
FETCH = "import sys; from pathlib import Path; from bft_nb.download import Source, fetch; fetch(Source(*sys.argv[2:]), Path(sys.argv[1]), progress=False)"


class Slow:
    "A publisher who sends half of a file and the rest when allowed to, and keeps what it was asked for."

    def __init__(self):
        self.asked, self.half_sent, self.go_on = [], threading.Semaphore(0), threading.Event()
        slow = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_): pass

            def do_GET(self):
                slow.asked.append(dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", str(len(CONTENT)))
                self.end_headers()
                self.wfile.write(CONTENT[:HALF])
                slow.half_sent.release()
                assert slow.go_on.wait(60)
                try: self.wfile.write(CONTENT[HALF:])
                except OSError: pass  # the one who asked is dead

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.source = Source(f"http://127.0.0.1:{self.server.server_port}/a.bin", hashlib.md5(CONTENT).hexdigest())

    def fetching(self, folder): return subprocess.Popen([sys.executable, "-c", FETCH, str(folder), *self.source], cwd=ROOT, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def slow():
    made = Slow()
    yield made
    made.go_on.set()
    made.server.shutdown()
    made.server.server_close()


def test_killed_in_the_middle_then_run_again(slow, tmp_path):
    child = slow.fetching(tmp_path / "out")
    assert slow.half_sent.acquire(timeout=60)
    child.kill()
    child.communicate()
    assert not (tmp_path / "out" / "a.bin").exists()  # at most a temporary file, which is never taken for the real one
    slow.go_on.set()
    assert fetch(slow.source, tmp_path / "out", progress=False).read_bytes() == CONTENT
    assert len(slow.asked) == 2 and not any("Range" in headers for headers in slow.asked)  # started again, so the server need not know ranges


def test_two_processes_at_once(slow, tmp_path):
    children = [slow.fetching(tmp_path / "out") for _ in range(2)]
    for _ in children: assert slow.half_sent.acquire(timeout=60)
    slow.go_on.set()
    for child in children: assert child.communicate(timeout=60)[1] == "" and child.returncode == 0
    assert (tmp_path / "out" / "a.bin").read_bytes() == CONTENT and leftovers(tmp_path / "out") == ["a.bin"]


def test_a_broken_connection_leaves_nothing_and_another_file_is_fetched(publisher, tmp_path):
    root, url = publisher
    out = tmp_path / "out"
    with pytest.raises(DownloadError, match="truncated"): fetch(Source(url + "truncated.bin", "0" * 32), out, progress=False)
    (root / "whole.bin").write_bytes(CONTENT)
    assert fetch(Source(url + "whole.bin", hashlib.md5(CONTENT).hexdigest()), out, progress=False).read_bytes() == CONTENT
    assert leftovers(out) == ["whole.bin"]


def test_full_disk(publisher, tmp_path, monkeypatch):
    root, url = publisher
    (root / "a.bin").write_bytes(CONTENT)

    class Full:
        def __init__(self, file): self.file = file

        def __enter__(self): return self

        def __exit__(self, *_): self.file.close()

        def write(self, block):
            self.file.write(block[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bft_nb.download.open", lambda path, mode: Full(open(path, mode)), raising=False)
    with pytest.raises(DownloadError, match="could not download .*a.bin: .*No space left on device"):
        fetch(Source(url + "a.bin"), tmp_path / "out", progress=False)
    assert leftovers(tmp_path / "out") == []
    monkeypatch.undo()
    assert fetch(Source(url + "a.bin"), tmp_path / "out", progress=False).read_bytes() == CONTENT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files the Linux way")
def test_a_file_that_may_not_grow(publisher, tmp_path):
    root, url = publisher
    (root / "a.bin").write_bytes(CONTENT)
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); " + FETCH
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out"), url + "a.bin"], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 1 and "DownloadError: could not download" in child.stderr and "File too large" in child.stderr
    assert leftovers(tmp_path / "out") == []


# official formats, in small ------------------------------------------------------------------------------------------


def core(n=5):
    "n users × n items, all pairs: a 5-core where n ≥ 5, plus one stray user"
    return [(f"u{u}", f"i{i}", 100 + 10 * i - u) for i in range(n) for u in range(n)] + [("stray", "i0", 7)]


def amazon_2014(path):
    with gzip.open(path, "wt") as f:
        for u, i, t in core(): f.write(json.dumps({"reviewerID": u, "asin": i, "overall": 1.0, "unixReviewTime": t}) + "\n")


def entry(url, files, reader, n=(5, 5, 25), **kw):
    return I.Dataset("tiny", "Tiny", "https://example.org", "test", *n, files=tuple(Source(url + f, m) for f, m in files), reader=reader, **kw)


@pytest.fixture
def register(monkeypatch): return lambda e: monkeypatch.setitem(I.REGISTRY, "tiny", e)


def test_amazon_2014_end_to_end(publisher, home, register):
    root, url = publisher
    amazon_2014(root / "reviews_Tiny_5.json.gz")
    register(entry(url, [("reviews_Tiny_5.json.gz", None)], "amazon_2014"))
    data = I.load("tiny", progress=False)
    assert list(data.user_ids) == [f"u{u}" for u in range(5)] and list(data.item_ids) == [f"i{i}" for i in range(5)]
    assert list(data.sequences[0]) == [1, 2, 3, 4, 5] and data.times is not None
    (root / "reviews_Tiny_5.json.gz").unlink()
    again = I.load("tiny", progress=False)  # from the cache
    assert I.leave_one_out(again).hash == I.leave_one_out(data).hash and list(again.item_ids) == list(data.item_ids)
    assert leftovers(home) == ["reviews_Tiny_5.json.gz", "tiny.parquet"]


def test_statistics_that_differ_are_refused_and_not_cached(publisher, home, register):
    root, url = publisher
    amazon_2014(root / "reviews_Tiny_5.json.gz")
    register(entry(url, [("reviews_Tiny_5.json.gz", None)], "amazon_2014", n=(5, 5, 26)))
    with pytest.raises(ValueError, match=r"found .* \(5, 5, 25, 0\), the published data set has \(5, 5, 26, 0\)"): I.load("tiny", progress=False)
    assert "tiny.parquet" not in leftovers(home)


def test_damaged_gzip_is_named(tmp_path):
    amazon_2014(tmp_path / "a.json.gz")
    (tmp_path / "b.json.gz").write_bytes((tmp_path / "a.json.gz").read_bytes()[:-20])
    with pytest.raises(DownloadError, match="b.json.gz is damaged"): formats.amazon_2014([tmp_path / "b.json.gz"])


def test_amazon_2018(tmp_path):
    rows = [f"{i},{u},5.0,{t}\n" for u, i, t in core()]
    (tmp_path / "r.csv").write_text("".join(rows) + "untitled,u0,5.0,1\n" + rows[0])
    with gzip.open(tmp_path / "m.json.gz", "wt") as f:
        for i in range(5): f.write(json.dumps({"asin": f"i{i}", "title": "T"}) + "\n")
        f.write(json.dumps({"asin": "untitled", "title": ""}) + "\n")
    events = formats.amazon_2018([tmp_path / "r.csv", tmp_path / "m.json.gz"])
    assert len(events) == 25 and {e.item for e in events} == {f"i{i}" for i in range(5)}


def test_amazon_2018_end_to_end(publisher, home, register):
    root, url = publisher
    (root / "r.csv").write_text("".join(f"{i},{u},5.0,{t}\n" for u, i, t in core()))
    with gzip.open(root / "m.json.gz", "wt") as f:
        for i in range(5): f.write(json.dumps({"asin": f"i{i}", "title": "T"}) + "\n")
    register(entry(url, [("r.csv", None), ("m.json.gz", None)], "amazon_2018"))
    data = I.load("tiny", progress=False)
    assert (data.n_users, data.n_items, data.n_interactions) == (5, 5, 25)
    assert leftovers(home) == ["m.json.gz", "r.csv", "tiny.parquet"]


@pytest.mark.parametrize(("name", "cut", "message"), [
    ("unsized.json.gz", lambda b: b[:-20], "unsized.json.gz is damaged"),
    ("unsized.json", lambda b: b[: b.index(b"\n", len(b) // 2) + 1], r"unsized.json: not as .*the frame is empty"),  # at the end of a line: of half a 5-core nothing is left
    ("unsized.json", lambda b: b + b.replace(b': "u', b': "w'), r"unsized.json: found .* \(10, 5, 50, 0\), the published"),
    ("unsized.json", lambda b: b + b"{}\n", r"unsized.json: not as https://example.org describes it \(KeyError: 'reviewerID'\)"),
])  # fmt: skip
def test_a_download_that_turns_out_wrong_is_fetched_again(publisher, home, register, name, cut, message):
    "No length announced, no checksum published: what is wrong with the file shows only when it is read or counted."
    root, url = publisher
    amazon_2014(root / name)
    if not name.endswith("gz"): (root / name).write_bytes(gzip.decompress((root / name).read_bytes()))
    whole = (root / name).read_bytes()
    register(entry(url, [(name, None)], "amazon_2014"))
    (root / name).write_bytes(cut(whole))
    with pytest.raises((DownloadError, ValueError), match=message): I.load("tiny", progress=False)
    assert leftovers(home) == []
    (root / name).write_bytes(whole)
    assert I.load("tiny", progress=False).n_interactions == 25


def test_a_damaged_file_of_the_users_is_left_alone(home, register, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.json.gz").write_bytes(b"not gzip")
    monkeypatch.setenv("BFT_DATA", str(mine))
    register(entry("http://127.0.0.1:9/", [("a.json.gz", None)], "amazon_2014"))
    with pytest.raises(DownloadError, match="a.json.gz is damaged"): I.load("tiny", progress=False)
    assert leftovers(mine) == ["a.json.gz"]


def test_movielens_end_to_end_with_checksum(publisher, home, register):
    root, url = publisher
    with zipfile.ZipFile(root / "ml-1m.zip", "w") as z:
        z.writestr("ml-1m/ratings.dat", "".join(f"{u}::{10 * i}::5::{9 - i // 2}\n" for u in (2, 1) for i in range(4)))
    register(entry(url, [("ml-1m.zip", md5_of(root / "ml-1m.zip"))], "movielens_1m", n=(2, 4, 8)))
    data = I.load("tiny", progress=False)
    assert list(data.user_ids) == [1, 2] and list(data.item_ids) == [0, 10, 20, 30]
    assert data.item_ids[data.sequences[0] - 1].tolist() == [20, 30, 0, 10]  # by time, ties in file order
    assert I.ties(data).last_two == 1.0


def test_movielens_wrong_checksum(publisher, home, register):
    root, url = publisher
    (root / "ml-1m.zip").write_bytes(b"not it")
    register(entry(url, [("ml-1m.zip", "c4d9")], "movielens_1m"))
    with pytest.raises(DownloadError, match="(?s)wrong checksum for ml-1m.zip.*set BFT_DATA"): I.load("tiny", progress=False)
    assert leftovers(home) == []


def test_movielens_100k_and_missing_member(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z: z.writestr("ml-100k/u.data", "196\t242\t3\t881250949\n1\t2\t3\t4\n")
    assert [tuple(e) for e in formats.movielens_100k([tmp_path / "a.zip"])] == [(1, 2, 4), (196, 242, 881250949)]
    with pytest.raises(DownloadError, match="holds no 'ml-1m/ratings.dat'"): formats.movielens_1m([tmp_path / "a.zip"])


def test_yelp_own_copy(home, register, tmp_path, monkeypatch):
    e = entry("", [], "yelp_2019", own_copy="reviews.json", repeats=1, n=(5, 5, 26))
    register(e)
    with pytest.raises(DownloadError, match="put tiny.parquet or reviews.json into a folder and set BFT_DATA"): I.load("tiny")
    rows = [{"user_id": u, "business_id": i, "stars": 1, "date": f"2019-03-01 00:0{int(i[1])}:{int(u[1:] or 0):02}"} for u, i, _ in core() if u != "stray"]
    rows += [rows[0] | {"date": "2019-12-30 00:00:00"}, rows[0] | {"date": "2018-12-31 23:59:59"}, rows[0] | {"date": "2020-01-01 00:00:00"}]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "reviews.json").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("BFT_DATA", str(folder))
    data = I.load("tiny")
    assert data.n_interactions == 26 and data.times.min() == 1551398400


def test_offline_names_both_ways(home, register):
    register(entry("http://127.0.0.1:9/", [("a.json.gz", None)], "amazon_2014"))
    with pytest.raises(DownloadError, match="(?s)could not download.*Either run again with access to https://example.org, or put tiny.parquet or a.json.gz"):
        I.load("tiny", progress=False)


def test_k_core_is_iterated():
    chain = [formats.Event("a", "x", 0), formats.Event("a", "y", 0), formats.Event("b", "x", 0), formats.Event("b", "z", 0)]
    assert formats.k_core(chain, 2) == []
    assert formats.k_core(chain, 1) == chain




# ---- the mode of what is written ---------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="modes of files")
@pytest.mark.parametrize(("umask", "before", "after"), [(0o022, None, 0o644), (0o077, None, 0o600), (0o002, None, 0o664), (0o022, 0o600, 0o600), (0o077, 0o664, 0o664), (0o022, 0o400, 0o400), (0o022, 0o755, 0o755)])
@pytest.mark.parametrize("how", ["written", "rows"])
def test_what_is_written_is_as_private_as_what_was_there_or_as_the_umask_says(tmp_path, how, umask, before, after):
    path = tmp_path / "x.csv"
    old = os.umask(umask)
    try:
        if before is not None:
            path.touch()
            path.chmod(before)
        with {"written": written, "rows": _replacing}[how](path) as part:
            meanwhile = part.stat().st_mode
            part.write_text("new")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == after and path.read_text() == "new" and leftovers(tmp_path) == ["x.csv"]
    assert not meanwhile & 0o077 & ~after  # nor does anybody see it before it is whole


def test_a_link_stays_one_and_the_file_it_leads_to_keeps_its_mode(tmp_path):
    path, link = tmp_path / "x.txt", tmp_path / "link.txt"
    path.touch(0o600)
    link.symlink_to(path)
    with written(link) as part: part.write_text("new")
    assert link.is_symlink() and path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
