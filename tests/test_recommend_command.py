"`bft recommend`: nothing of the user's is lost, the model's order is kept, every file is looked at before the training."

import gzip
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from test_recommender import FAST, QUICK, ring

from bft_nb import cli, recommender as module
from bft_nb.recommender import Recommender


@pytest.fixture
def here(tmp_path, monkeypatch):
    "A folder to work in, with interactions in in.csv (texts) and numbers.csv (items are integers)."
    ring(users=40).to_csv(tmp_path / "in.csv", index=False)
    numbered().to_csv(tmp_path / "numbers.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numbered(users=40):
    frame = ring(users=users)
    return frame.assign(item=frame.item.str[1:].astype(int))


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    "A model whose histories are ordered by time, and whose columns have names of their own."
    renamed = ring(users=40).rename(columns={"user": "customer", "item": "product"})
    return Recommender(**QUICK | {"max_epochs": 1}).fit(renamed, "customer", "product", "t").save(tmp_path_factory.mktemp("m") / "m.st")


@pytest.fixture
def untrained(monkeypatch):
    monkeypatch.setattr(module, "fit", lambda *_, **__: pytest.fail("it was trained"))


def recommend(*arguments):
    return cli.main(["recommend", *map(str, arguments), "--device", "cpu", "--quiet"])


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "both"), [
    ("in.csv -o in.csv", ("--out 'in.csv'", "the interactions")),
    ("in.csv -o ./../{here}/in.csv", ("--out", "the interactions")),
    ("in.csv -o ~/in.csv", ("--out", "the interactions")),
    ("in.csv -o hard.csv", ("--out 'hard.csv'", "the interactions")),
    ("in.csv -o soft.csv", ("--out 'soft.csv'", "the interactions")),
    ("soft.csv -o in.csv", ("--out 'in.csv'", "the interactions")),
    ("in.csv -o out.csv --save in.csv", ("--save 'in.csv'", "the interactions")),
    ("in.csv -o new.csv --save new.csv", ("--save 'new.csv'", "--out")),
    ("in.csv -o other.csv --candidates other.csv", ("--out 'other.csv'", "--candidates")),
    ("in.csv -o other.csv --histories other.csv", ("--out 'other.csv'", "--histories")),
    ("in.csv -o out.csv --save other.csv --histories other.csv", ("--save 'other.csv'", "--histories")),
    ("in.csv -o other.csv --model other.csv", ("--out 'other.csv'", "--model")),
])  # fmt: skip
def test_a_file_that_is_read_is_never_written(here, capsys, monkeypatch, untrained, arguments, both):
    monkeypatch.setenv("HOME", str(here))
    os.link("in.csv", "hard.csv")
    os.symlink("in.csv", "soft.csv")
    (here / "other.csv").write_text("user,item\nu1,i01\n")
    before = {p.name: p.read_bytes() for p in here.iterdir()}
    assert recommend(*arguments.format(here=here.name).split()) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in both) and "same file" in err
    assert {p.name: p.read_bytes() for p in here.iterdir()} == before


@pytest.mark.parametrize(("name", "content", "says"), [
    ("empty.csv", b"", "empty.csv cannot be read: Empty CSV file"),
    ("cut.csv.gz", gzip.compress(b"user,item,t\n" + b"u1,i01,1\nu1,i02,2\n" * 9)[:-12], "cut.csv.gz cannot be read: "),
    ("no.csv.gz", b"user", "no.csv.gz cannot be read: "),
    ("bad.parquet", b"PAR1....", "bad.parquet cannot be read: "),
    ("latin.csv", "user,item,t\nu1,Brötchen,1\n".encode("latin-1"), "latin.csv cannot be read: it is not text in UTF-8 (it holds the byte 0xf6; Latin-1, perhaps)"),
    ("wide.csv", "user,item,t\nu1,i01,1\n".encode("utf-16"), "wide.csv cannot be read: it is not text in UTF-8 (UTF-16, perhaps)"),
    ("ragged.csv", b"user,item,t\nu1,i01,1\nu1\n", "ragged.csv cannot be read: CSV parse error: Expected 3 columns, got 1"),
    ("twice.csv", b"user,item,t,item\nu1,i01,1,i02\n", "twice.csv has the column 'item' twice"),
    ("twice.parquet", None, "twice.parquet cannot be read: it has the column 'item' twice"),
    ("semi.csv", b"user;item;t\nu1;i01;1\n", "semi.csv: missing columns ['user', 'item', 't']: the file has ['user;item;t']. Separated by ';'? This reads commas"),
    ("tab.csv", b"user\titem\tt\nu1\ti01\t1\n", "Separated by a tab?"),
    ("head.csv", b"user,item,t\n", "head.csv has no row"),
    ("null.csv", b"user,item,t\nu1,,1\n", "null.csv: column 'item' has 1 missing values"),
    ("lost.csv", b"user,item\nu1,i01\n", "lost.csv: missing columns ['t']"),
    ("late.csv", b"user,item,t\nu1,i01,noon\n", "late.csv: column 't' has type String"),
    ("odd.csv", b"user,item,t\nu1,i01,1\nu1,i99,2\n", "odd.csv: 1 events of 1 items the model does not know (first: 'i99')"),
    ("none.csv", b"user,item,t\nu1,i99,2\n", "none.csv: 1 events of 1 items"),
    ("gone.csv", ..., "no file 'gone.csv'"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_before_the_training(here, capsys, untrained, name, content, says):
    if content is None:
        columns = [pa.array(["u1"]), pa.array(["i01"]), pa.array(["i02"]), pa.array([1])]
        pa.parquet.write_table(pa.Table.from_arrays(columns, names=["user", "item", "item", "t"]), name)
    elif content is not ...:
        (here / name).write_bytes(content)
    assert recommend("in.csv", "-o", "out.csv", "--histories", name, *FAST) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_ids_need_a_column(here, capsys, untrained):
    assert recommend("in.csv", "-o", "out.csv", "--user", "", *FAST) == 2 and "in.csv: missing columns ['']" in capsys.readouterr().err


@pytest.mark.parametrize(("seed", "status"), [(2**32 - 1, 0), (2**32, 2), (10**20, 2), (-1, 2)])
def test_a_seed_beyond_the_generators_is_refused_by_name(here, capsys, seed, status):
    assert recommend("in.csv", "-o", "out.csv", "--seed", seed, *FAST) == status
    assert not status or f"--seed must be {'below 2³²' if seed > 0 else 'at least 0'}, got {seed}" in capsys.readouterr().err


# ---- what the model was trained with ------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "columns"), [
    ([], {"customer": "u", "product": "i", "t": "t"}),
    (["--user", "who"], {"who": "u", "product": "i", "t": "t"}),
    (["--user", "user", "--item", "item", "--timestamp", "when"], {"user": "u", "item": "i", "when": "t"}),
    (["--timestamp", ""], None),
])  # fmt: skip
def test_the_models_columns_and_order_hold_unless_others_are_named(here, capsys, ordered, given, columns):
    newest_first = pd.DataFrame({"customer": "x", "product": [f"i{n:02d}" for n in range(6)], "t": range(6, 0, -1)})
    want = Recommender.load(ordered, "cpu").recommend(newest_first if columns else newest_first.drop(columns="t").assign(t=range(6)), 3)
    file = newest_first.rename(columns=dict(zip(newest_first, columns))) if columns else newest_first.drop(columns="t")
    file.to_csv("new.csv", index=False)
    assert cli.main(["recommend", "new.csv", "-o", "out.csv", "--model", str(ordered), "-k", "3", "--device", "cpu", *given]) == 0
    got = pd.read_csv("out.csv")
    assert got.iloc[:, 1].tolist() == want["product"].tolist() and list(got)[:2] == list(file)[:2]
    order = repr(list(columns)[2]) if columns else "their place in the file"
    assert f"users in column {list(file)[0]!r}, items in {list(file)[1]!r}, ordered by {order}" in capsys.readouterr().err


def test_a_column_of_the_model_that_is_missing_is_named_with_a_way_out(here, capsys, ordered):
    assert recommend("in.csv", "-o", "out.csv", "--model", ordered) == 2
    err = capsys.readouterr().err
    assert "in.csv: missing columns ['customer', 'product']: the file has ['user', 'item', 't']" in err and "--user" in err
    assert recommend("in.csv", "-o", "out.csv", "--model", ordered, "--user", "user", "--item", "item") == 0 and not capsys.readouterr().err


# ---- unknown items of the other type --------------------------------------------------------------------------------

MIXED = "user,item,t\na,3,1\na,sale,2\nb,sale,1\nc,007,1\nc,5,2\nd,99999999999999999999,1\n"  # of integers as the catalogue's, only 3 and 5


@pytest.mark.parametrize("trained", [True, False], ids=["before training", "with a model"])
def test_items_that_are_no_integers_are_unknown_to_a_model_of_integers(here, capsys, trained):
    (here / "mixed.csv").write_text(MIXED)
    (here / "stock.csv").write_text("item\n7\n8\nsale\n")
    assert recommend("numbers.csv", "-o", "out.csv", "--save", "m.st", *FAST) == 0
    if trained:
        arguments = ["numbers.csv", "--histories", "mixed.csv", *FAST]
    else:
        arguments = ["mixed.csv", "--model", "m.st"]
    capsys.readouterr()
    assert recommend(*arguments, "-o", "out.csv") == 2 and "histories: 4 of 6 rows have items the model does not know, which are no integers as its own are (first: 'sale')" in capsys.readouterr().err
    assert recommend(*arguments, "-o", "out.csv", "--unknown", "skip") == 0
    err = capsys.readouterr().err
    assert set(pd.read_csv("out.csv").user) == {"a", "c"} and "left out: histories: 4 of 6 rows" in err and "left out: 2 users" in err
    assert recommend(*arguments, "-o", "out.csv", "--unknown", "skip", "--candidates", "stock.csv") == 0
    assert set(pd.read_csv("out.csv").item) == {7, 8} and "left out: candidates: 1 of 3 rows" in capsys.readouterr().err


def test_nothing_is_left_where_no_item_is_an_integer(here, capsys, untrained):
    (here / "texts.csv").write_text("user,item,t\na,sale,1\n")
    for option, says in (("--histories", "no history has an item that the model knows"), ("--candidates", "no item is left to recommend")):
        assert recommend("numbers.csv", "-o", "out.csv", option, "texts.csv", "--unknown", "skip", *FAST) == 2
        assert f"texts.csv: {says}" in capsys.readouterr().err
