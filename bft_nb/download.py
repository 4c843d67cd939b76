"""Fetch files from their publishers: temporary file, checksum, atomic rename, nothing half-written left behind."""

import errno
import hashlib
import http.client
import os
import secrets
import shutil
import stat
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import NamedTuple

CHUNK = 1 << 20
STALE = 3600.0  # a temporary file nobody has written to for this long [s] was left by a process that was killed
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)  # what a broken zip archive raises


class Source(NamedTuple):
    "A file as its publisher offers it."

    url: str
    md5: str | None = None  # only where the publisher states one

    @property
    def filename(self) -> str:
        return PurePosixPath(urllib.request.url2pathname(self.url)).name


class DownloadError(RuntimeError):
    "A file could not be fetched whole, or is not the file its publisher describes."


def cache_dir() -> Path:
    "Where downloads are kept: `BFT_CACHE`, else `~/.cache/bft_nb`."
    return Path(os.environ.get("BFT_CACHE") or Path.home() / ".cache" / "bft_nb").expanduser()


def data_dir() -> Path | None:
    "The user's own data folder, `BFT_DATA`, or None where it is not set; `FileNotFoundError` where it is set to no folder."
    value = os.environ.get("BFT_DATA")
    if not value: return None
    if not (path := Path(value).expanduser()).is_dir():
        raise FileNotFoundError(f"BFT_DATA={value!r} is not a folder: set it to the folder that holds rec/NAME.parquet, or unset it")
    return path


def md5_of(path: Path) -> str:
    "Hexadecimal MD5 of a file."
    with open(path, "rb") as f: return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def sweep(folder: Path, pattern: str) -> None:
    "Remove the temporary files that killed processes left; those still being written to stay."
    for left in folder.glob(pattern):
        with suppress(OSError):  # another process may be sweeping, too
            if time.time() - left.stat().st_mtime > STALE: left.unlink()


def destination(path: Path) -> Path:
    "The file that `path` means, links followed; `OSError` unless it is a regular file, or none yet."
    path = path.resolve()
    if path.is_dir(): raise IsADirectoryError(errno.EISDIR, "it is a folder, give the name of a file", str(path))
    if path.exists() and not path.is_file(): raise OSError(errno.EINVAL, "it is a device or a pipe, give the name of a file", str(path))
    return path


def check_writable(path: Path) -> None:
    "Try whether `path`, or the folder that is to hold it, can be made: `OSError` naming it and the reason. Nothing is left behind."
    try:
        folder = next(p for p in destination(path).parents if p.exists())
        NamedTemporaryFile(dir=folder, prefix=f".{path.name}.", suffix=".part").close()
    except OSError as e:
        raise OSError(e.errno, f"{str(path)!r} cannot be written: {e.strerror or e}") from e


def to_disk(path: Path) -> None:
    "Have the system write a file out: a disk that turns out to be full says so here, before anything is replaced."
    with open(path, "r+b") as f: os.fsync(f.fileno())


def beside(path: Path, suffix: str = ".part") -> Path:
    "A new, empty, hidden file in the folder of `path`: as private as that is while it is written, by the umask where there is none yet."
    mode = stat.S_IMODE(path.stat().st_mode) & 0o666 | 0o600 if path.exists() else 0o666  # of which the system takes the umask
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")
        with suppress(FileExistsError):
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            return part


def put_in_place(part: Path, path: Path) -> None:
    "Put a file in the place of another, whose mode it takes over; a new one keeps its own."
    with suppress(FileNotFoundError): part.chmod(stat.S_IMODE(path.stat().st_mode))
    part.replace(path)


@contextmanager
def written(path: Path) -> Iterator[Path]:
    "A temporary path beside `path` (beside the file it links to) that takes its place on success and vanishes on any failure. What was there keeps its mode, a new file has that of the umask. `OSError` unless that is a regular file, or none yet."
    path = destination(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, f".{path.name}.*.part")
    part = beside(path)
    try:
        yield part
        to_disk(part)
        put_in_place(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_md5(path: Path, md5: str | None, name: str = "") -> None:
    "Raise `DownloadError` naming both sums unless the file has this MD5 (`None`: the publisher states none)."
    if md5 and (got := md5_of(path)) != md5:
        raise DownloadError(f"wrong checksum for {name or path.name}: got md5 {got}, the publisher states {md5}")


def _stream(url: str, part: Path, progress: bool, timeout: float) -> None:
    from tqdm import tqdm  # a progress bar is only needed where something is downloaded

    with urllib.request.urlopen(url, timeout=timeout) as answer, open(part, "wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        with tqdm(total=size or None, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1], disable=not progress) as bar:
            while block := answer.read(CHUNK):
                out.write(block)
                bar.update(len(block))
        if size and out.tell() != size: raise DownloadError(f"truncated: {out.tell()} of {size} bytes of {url}")


def fetch(source: Source, folder: Path, progress: bool = True, timeout: float = 60.0) -> Path:
    """The path of `source` in `folder`, downloaded unless it lies there already with the right checksum.

    Raises `DownloadError` when the folder cannot be written to, the publisher cannot be reached, the file arrives truncated or its
    checksum is wrong; a wrong or truncated file is deleted.
    """
    if not source.filename: raise DownloadError(f"{source.url!r} names no file")
    path = folder / source.filename
    if path.is_file():
        try:
            check_md5(path, source.md5)
            return path
        except DownloadError:
            path.unlink()
    try:
        check_writable(path)
    except OSError as e:
        raise DownloadError(f"{e.strerror}: set BFT_CACHE to a folder where it can be kept") from e
    try:
        with written(path) as part:
            _stream(source.url, part, progress, timeout)
            check_md5(part, source.md5, source.filename)
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise DownloadError(f"could not download {source.url}: {getattr(e, 'reason', e)}") from e
    return path


def check_member(name: str) -> None:
    "Raise `DownloadError` for an archive member that would leave the folder it is unpacked into."
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in name:
        raise DownloadError(f"archive member {name!r} would be written outside its folder: refused")


def unzip(archive: Path, folder: Path) -> Path:
    "Unpack a zip archive into `folder` (all or nothing); `DownloadError` where it is damaged or a member would leave the folder."
    temporary = folder.with_name(folder.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as z:
            for name in z.namelist(): check_member(name)
            z.extractall(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except DAMAGED as e:
        raise DownloadError(f"{archive.name} is not a whole zip archive: {e}") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def member(archive: Path, name: str):
    "Open one member of a zip archive for reading as bytes, without unpacking; every member's name is checked first."
    try:
        with zipfile.ZipFile(archive) as z:
            for other in z.namelist(): check_member(other)
            if name not in z.namelist(): raise DownloadError(f"{archive.name} holds no {name!r}, it holds {sorted(z.namelist())[:10]}")
            with z.open(name) as f: yield f
    except DAMAGED as e:
        raise DownloadError(f"{archive.name} is not a whole zip archive: {e}") from e
