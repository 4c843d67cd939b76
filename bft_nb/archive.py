"""One file that holds a fitted object: tensors in safetensors format, everything else as JSON in the file's header. No pickle.

A file is written beside its destination and renamed when it is whole, so that a failure of any kind (full disk, killed process,
folder that may not be written) leaves what was there before. Files say what they hold and in which version of the format.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bft_nb.download import written

HEADER = "bft_nb"  # the key of the JSON text in the header of the safetensors file


def write_archive(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],  # JSON values
    kind: str,  # what the file holds
    version: int,  # of the format
) -> Path:
    "Write a file whole or not at all; `OSError` naming the reason, with the earlier file untouched."
    from safetensors.torch import save

    path = Path(path).expanduser()
    header = json.dumps({"kind": kind, "version": version, **meta}, allow_nan=False)
    data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {HEADER: header})
    try:
        with written(path) as part:
            part.write_bytes(data)
    except OSError as e:
        raise OSError(e.errno, f"could not save to {str(path)!r}: {e.strerror or e}. What was there before is untouched") from e
    return path


def read_archive(path: str | Path, kind: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    "Tensors and JSON values; `FileNotFoundError`, `IsADirectoryError`, or `ValueError` for a truncated or damaged file, another kind of file or another version."
    from safetensors import SafetensorError, safe_open

    path = Path(path).expanduser()
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder, give the name of a file")
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as e:
        raise ValueError(f"{str(path)!r} cannot be read, it is truncated or not a safetensors file: {e}") from e
    meta = _meta(path, header.get(HEADER, "{}"))
    if meta.get("kind") != kind:
        raise ValueError(f"{str(path)!r} holds {meta.get('kind', 'something else')!r}, expected {kind!r}")
    if meta.get("version") != version:
        raise ValueError(f"{str(path)!r} is in format {meta.get('version')!r}, this version of the library reads format {version}: save it again, or use the library that wrote it")
    return tensors, meta


def _meta(path: Path, text: str) -> dict[str, Any]:
    "The JSON object of a header; `ValueError` naming the file for text that is none."
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{str(path)!r} cannot be read, its header is damaged: {e}") from e
    if not isinstance(meta, dict):
        raise ValueError(f"{str(path)!r} cannot be read, its header is damaged: expected a JSON object, got {type(meta).__name__}")
    return meta


def ids_to_tensors(name: str, ids: np.ndarray) -> dict[str, Tensor]:
    "Own ids, integers or strings, as tensors."
    if ids.dtype.kind in "iu":
        return {name: torch.from_numpy(ids.astype(np.int64))}
    encoded = [str(i).encode() for i in ids]
    ends = np.cumsum([len(b) for b in encoded], dtype=np.int64)
    return {f"{name}.utf8": torch.from_numpy(np.frombuffer(b"".join(encoded), np.uint8).copy()), f"{name}.ends": torch.from_numpy(ends)}


def ids_from_tensors(name: str, tensors: Mapping[str, Tensor]) -> np.ndarray:
    "What `ids_to_tensors` was given."
    if name in tensors:
        return tensors[name].numpy()
    text, ends = tensors[f"{name}.utf8"].numpy().tobytes(), tensors[f"{name}.ends"].tolist()
    return np.array([text[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)], dtype=str)
