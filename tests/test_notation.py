"A newcomer reads chapters 10–22 in order and never meets a letter that the notation chapter does not list."
import re
from pathlib import Path

import pytest

TWINS = Path(__file__).resolve().parent.parent / "nbs" / "_py"
PARTS_I_AND_II = sorted([*TWINS.glob("1[0-4]_*.py"), *TWINS.glob("2[0-2]_*.py")])
LAYOUT = set(
    "Big big bigg left right frac tfrac sqrt sum text qquad quad underbrace overset overbrace cdot le ge to equiv approx sim times top propto "
    "infty min max log ln exp tanh mathbf operatorname operatornamewithlimits partial star not in circ".split()
)
WITH_WORDS = re.compile(r"\\(?:text|operatorname|tag|mathrm|rm|begin|end)\*?\s*\{[^}]*\}|\\rm\s+\w+")


def prose(twin: Path) -> str:
    return "\n".join(line[2:] for line in twin.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def formulas(text: str) -> list[str]:
    displayed = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    return displayed + re.findall(r"\$([^$\n]+)\$", re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL))


def letters(twin: Path) -> set[str]:
    "Latin letters, Greek letters and accents of a chapter's formulas, words and layout left out."
    found: set[str] = set()
    for formula in formulas(prose(twin)):
        bare = WITH_WORDS.sub(" ", formula)
        found |= {name for name in re.findall(r"\\([A-Za-z]+)", bare) if name not in LAYOUT}
        found |= set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", bare)))
    return found


def test_letters_are_found():
    assert letters(TWINS / "10_kriging.py") >= {"alpha", "bar", "lambda", "w", "e", "T"}


@pytest.mark.parametrize("twin", PARTS_I_AND_II, ids=lambda p: p.stem)
def test_every_letter_is_introduced(twin):
    assert letters(twin) - letters(TWINS / "00_notation.py") == set()
