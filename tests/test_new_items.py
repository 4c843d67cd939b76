"The benchmark of new items: nothing that is asked about, or later, is known, and ties count for what they are."

import numpy as np
import pandas as pd
import pytest
from new_items import K, by_count, expected, plan, resemblance

from bft_nb.interactions import from_frame


@pytest.fixture(scope="module", params=[0, 1])
def drawn(request):
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"user": np.repeat([f"u{u:02d}" for u in range(60)], 12), "item": np.concatenate([rng.permutation(40)[:12] for _ in range(60)])})
    return frame, plan(from_frame(frame, "user", "item"), 0.1, request.param)


def test_nothing_that_is_asked_about_or_later_is_known(drawn):
    frame, p = drawn
    assert len(p.new) == 4 and not p.train["item"].isin(p.new).any()
    assert not set(p.asked_new.index) & set(p.told["user"]) and set(p.asked_old.index) <= set(p.told["user"])
    assert p.asked_new.isin(p.new).all() and not p.asked_old.isin(p.new).any() and len(p.asked_new) > 10 and len(p.asked_old) > 20
    for user, item in pd.concat([p.asked_new, p.asked_old]).items():
        history = frame.loc[frame["user"] == user, "item"].tolist()
        before = history[: history.index(item)]
        for known in (p.train, p.told):
            mine = known.loc[known["user"] == user, "item"].tolist()
            assert mine == [i for i in before if i in set(mine)]  # in order, and nothing from the hidden item on
        assert set(before) - set(p.new) == set(p.train.loc[p.train["user"] == user, "item"])
    assert not set(frame.groupby("user")["item"].last()[p.asked_old.index].items()) - set(p.asked_old.items())


def test_the_last_new_item_of_a_user_is_asked(drawn):
    frame, p = drawn
    for user, item in p.asked_new.items():
        history = frame.loc[frame["user"] == user, "item"].tolist()
        assert not set(history[history.index(item) + 1 :]) & set(p.new)


def test_resemblance_is_the_cosine_of_the_users():
    told = pd.DataFrame({"user": [1, 1, 1, 2, 2, 3, 3, 4, 5], "item": ["new", "a", "b", "new", "a", "b", "c", "b", "b"]})
    assert resemblance(told, np.array(["new", "never"]), np.array(["a", "b", "c"]), 5) == {"new": ["a", "b"]}
    assert resemblance(told, np.array(["new"]), np.array(["b", "c"]), 1) == {"new": ["b"]}


def test_ties_count_for_what_random_order_would_give():
    ahead, level = np.array([0.0, 9, 10, 8, 0]), np.array([0.0, 0, 0, 3, 19])
    hits, gains = expected(ahead, level)
    assert hits.tolist() == [1, 1, 0, 0.5, 0.5]
    order = [np.mean([1 / np.log2(1 + r) if r <= K else 0 for r in range(int(a) + 1, int(a + t) + 2)]) for a, t in zip(ahead, level, strict=True)]
    np.testing.assert_allclose(gains, order)
    assert [v.tolist()[-1] for v in expected(ahead, level, missing=2)] == [0, 0]


def test_a_ranking_by_count():
    count = pd.Series({"a": 5, "b": 3, "c": 3, "d": 1})
    ahead, level = by_count(count, pd.Series({1: "c", 2: "d"}), pd.Series({1: ["a"]}))
    assert ahead.tolist() == [0, 3] and level.tolist() == [1, 0]
