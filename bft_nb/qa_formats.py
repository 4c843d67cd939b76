"""Read question-answering files into rows: id, title, context, question, answers, answer_starts (−1 where the file says none)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bft_nb.download import DownloadError
from bft_nb.formats import json_lines

Row = dict[str, Any]


def documents(passages: Iterable[tuple[str, str]]) -> str:
    "Numbered passages of (title, text), one a line: the context of a question over several documents."
    lines = ((title, text.replace("\n", " ")) for title, text in passages)
    return "\n".join(f"[{n}] {title}: {text}" for n, (title, text) in enumerate(lines, 1))


def squad_json(path: Path) -> list[Row]:
    "SQuAD v1.1 and what follows its format (`data` → `paragraphs` → `qas`)."
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            {
                "id": q["id"], "title": article.get("title", ""), "context": paragraph["context"], "question": q["question"],
                "answers": [a["text"] for a in q["answers"]], "answer_starts": [a["answer_start"] for a in q["answers"]],
            }
            for article in articles for paragraph in article["paragraphs"] for q in paragraph["qas"]
        ]  # fmt: skip
    except (ValueError, LookupError, TypeError) as e:
        raise DownloadError(f"{path.name} is not in the format of SQuAD v1.1 ({type(e).__name__}: {e})") from e


def litm_jsonl(path: Path) -> list[Row]:
    "Lost in the Middle's `nq-open-….jsonl.gz`: NQ-Open questions with their passages, in the file's order."
    try:
        return [
            {
                "id": f"nq-{n}", "title": "", "context": documents((c["title"], c["text"]) for c in line["ctxs"]), "question": line["question"],
                "answers": line["answers"], "answer_starts": [-1] * len(line["answers"]),
            }
            for n, line in enumerate(json_lines(path))
        ]  # fmt: skip
    except (LookupError, TypeError) as e:
        raise DownloadError(f"{path.name} is not in the format of Lost in the Middle ({type(e).__name__}: {e})") from e


def parquet(path: Path, columns: Iterable[str]) -> list[Row]:
    "Rows of a Parquet file; `ValueError` where it is damaged or lacks a column."
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{path.name} cannot be read as Parquet: {e}") from e
    if missing := [c for c in columns if c not in table.column_names]:
        raise ValueError(f"{path.name} has no column {missing[0]!r} (it has {', '.join(table.column_names)})")
    return table.to_pylist()
