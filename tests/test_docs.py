"The plain edition of the site: its pure functions, and the sidebar."

import pytest
from helpers import ROOT, tool

docs, pages = tool("docs"), tool("pages")

BIB = """
@article{kalman1960, author = {Kalman, Rudolf E.}, title = {A New Approach to {Linear} Filtering}, year = {1960},
  journal = {Journal of Basic Engineering}, volume = 82, pages = "35--45", doi = {10.1115/1.3662552}}
@misc{many, author = {Ann {\\"O}z and Bo Li and Cy Wu}, title = {X}, year = {2024}, eprint = {2402.00001}}
"""


@pytest.fixture
def page():
    return pages.Page(bib=pages.parse_bib(BIB))


def test_bibliography():
    bib = pages.parse_bib(BIB)
    assert bib["kalman1960"]["title"] == "A New Approach to Linear Filtering"
    assert bib["kalman1960"]["volume"] == "82" and bib["kalman1960"]["pages"] == "35–45"
    assert pages.short_name(bib["kalman1960"]) == "Kalman"
    assert pages.short_name(bib["many"]) == "Öz et al."
    assert "https://doi.org/10.1115/1.3662552" in pages.reference(bib["kalman1960"])
    assert "https://arxiv.org/abs/2402.00001" in pages.reference(bib["many"])


def test_committed_bibliography_is_whole():
    text = (ROOT / "nbs" / "references.bib").read_text(encoding="utf-8")
    bib = pages.parse_bib(text)
    assert len(bib) == sum(line.startswith("@") for line in text.splitlines())
    for key, entry in bib.items():
        assert {"title", "year"} <= set(entry) and {"author", "editor"} & set(entry), key


def test_citations(page):
    out = pages.markdown("As shown [@kalman1960; see @many, p. 3], and by @kalman1960. Mail me@home.org, `@many`, hr@10.", page)
    assert '(<a class="cite" href="#ref-kalman1960">Kalman 1960</a>; see <a class="cite" href="#ref-many">Öz et al. 2024</a>, p. 3)' in out
    assert '<a class="cite" href="#ref-kalman1960">Kalman (1960)</a>' in out
    assert "me@home.org" in out and "<code>@many</code>" in out and "hr@10" in out
    assert page.cited == ["kalman1960", "many"] and page.problems == []


def test_unknown_citation_and_reference_are_problems(page):
    out = pages.markdown("[@nobody] and @fig-none", page)
    assert "?@nobody" in out and "?@fig-none" in out
    assert page.problems == ["unknown citation @nobody", "unresolved reference @fig-none"]


def test_math_is_kept_from_markdown(page):
    out = pages.markdown("Let $a_1*b*c < d_2$ cost \\$5 and $6.", page)
    assert out.count("<math") == 1 and "<em>" not in out and "$6" in out
    out = pages.markdown("x\n\n$$\n\\sum_i w_i = 1 \\tag{10.2}\n$$\n\ny", page)
    assert '<div class="math" id="eq-10-2"' in out and '<span class="tag">(10.2)</span>' in out
    assert "tag{" not in out and "<p><div" not in out


def test_numbered_equation_and_reference():
    nb = {"cells": [{"cell_type": "markdown", "source": "$$ a = b $$ {#eq-first}\n\nand $$ c \\tag{7} $$ {#eq-second}\n\nby @eq-first and [@eq-second]"}]}
    page = pages.Page()
    out = pages.body_html(nb, page, "x")
    assert '<a class="xref" href="#eq-first">Equation (1)</a>' in out and '<a class="xref" href="#eq-second">Equation (7)</a>' in out
    assert 'id="eq-first"' in out and 'id="eq-second"' in out and page.problems == []


def test_code_is_left_alone(page):
    out = pages.markdown("```python\nx = '$a$ @kalman1960'  # [@many]\n```\n\nand `$b$`", page)
    assert "<math" not in out and page.cited == [] and "<code>$b$</code>" in out


def test_directives():
    d, code = pages.directives('#| label: fig-x\n#| fig-cap: "One: two."\n#| code-fold: true\n#| hide\nx = 1')
    assert d == {"hide": True, "label": "fig-x", "fig-cap": "One: two.", "code-fold": True}
    assert code == "x = 1"
    assert pages.directives("#| fig-cap: a: b\nx")[0] == {"fig-cap": "a: b"}


def code_cell(source, *outputs):
    return {"cell_type": "code", "source": source, "outputs": list(outputs)}


PNG = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}}


def test_figure_has_number_caption_fold_and_file():
    nb = {"cells": [code_cell("#| label: fig-a\n#| fig-cap: The gain $K$ falls.\n#| code-fold: true\nplot()", PNG), {"cell_type": "markdown", "source": "See @fig-a."}]}
    page = pages.Page()
    out = pages.body_html(nb, page, "x")
    assert '<figure id="fig-a"' in out and "<b>Figure 1.</b> The gain <math" in out and "#|" not in out
    assert "<details class='code'><summary>Code</summary>" in out
    assert '<a class="xref" href="#fig-a">Figure 1</a>' in out
    assert list(page.files) == ["x_files/fig-a-png.png"]


def test_only_tables_of_short_cells_keep_each_on_a_line():
    def shown(cell):
        table = f'<table class="dataframe"><tr><th>a long heading may always be broken into lines</th></tr><tr><td>{cell}</td></tr></table>'
        return pages.output_html({"output_type": "execute_result", "data": {"text/html": table}}, pages.Page(), "x", {})

    assert 'class="out scroll short"' in shown("+1.1 [+0.1, +2.3]") and 'class="out scroll"' in shown("an answer that is a sentence, and longer than a line")


def test_hidden_cells_and_hidden_code():
    nb = {"cells": [code_cell("#| hide\nsecret()"), code_cell("#| echo: false\nquiet()", {"output_type": "stream", "name": "stdout", "text": "a < b"}), code_cell("#| include: false\nno()")]}
    out = pages.body_html(nb, pages.Page(), "x")
    assert "secret" not in out and "quiet" not in out and "no()" not in out
    assert "a &lt; b" in out


def test_headings_get_unique_anchors(page):
    out = pages.markdown("## Same\n\n## Same\n\n## The gain $K$", page)
    assert 'id="same"' in out and 'id="same-2"' in out
    assert [t[0] for t in page.toc] == [2, 2, 2] and "<math" in page.toc[2][2]


def test_links_to_notebooks_become_pages():
    names = {"10_kriging.ipynb": "kriging.html", "experiments/recommendation.ipynb": "experiments/recommendation.html", "recommendation.ipynb": "experiments/recommendation.html"}
    to = docs.linker("kriging.html", names, "https://site/bft")
    assert to("10_kriging.ipynb#proof") == "kriging.html#proof"
    assert to("experiments/recommendation.ipynb") == "experiments/recommendation.html"
    assert to("https://site/bft/core.html#belief") == "core.html#belief"
    assert to("https://other.org/x.ipynb") == "https://other.org/x.ipynb"
    assert to("#here") == "#here"
    assert docs.linker("experiments/recommendation.html", names, "https://site/bft")("../10_kriging.ipynb") == "../kriging.html"


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("../data/README.md", "git/blob/main/data/README.md"),
        ("../../.ci/run", "git/blob/main/.ci/run"),
        ("../../CONTRIBUTING.md#the-tree", "git/blob/main/CONTRIBUTING.md#the-tree"),
        ("../interactions.html#thin", "../interactions.html#thin"),
        ("sparsity.html", "sparsity.html"),
        ("https://example.org/../x", "https://example.org/../x"),
    ],
)
def test_links_out_of_the_pages_lead_into_the_repository(url, found):
    assert docs.absolute(url, "git") == found


def test_page_names():
    assert docs.page_name("10_kriging.ipynb") == "kriging.html"
    assert docs.page_name("experiments/recommendation.ipynb") == "experiments/recommendation.html"


def test_check_site_finds_what_is_broken(tmp_path):
    (tmp_path / "a.html").write_text("<p id='x'>?@fig-lost [@who] <a href='b.html#no'>b</a><a href='c.html'>c</a><a href='#x'>x</a><code>[@code]</code></p>")
    (tmp_path / "b.html").write_text("<p id='yes'>fine <a href='a.html#x'>a</a> <a href='https://example.org/none'>out</a></p>")
    assert docs.check_site(tmp_path) == ["a.html: unresolved ?@fig-lost", "a.html: unresolved [@who]", "a.html: no such place b.html#no", "a.html: broken link c.html"]


def test_sidebar_lists_every_notebook():
    nbs = [p.relative_to(ROOT / "nbs").as_posix() for p in (ROOT / "nbs").rglob("*.ipynb") if not any(x[0] in "._" for x in p.relative_to(ROOT / "nbs").parts)]
    conf, problems = docs.read_sidebar(nbs)
    assert problems == []
    assert docs.read_sidebar([*nbs[1:], "new.ipynb"])[1] == [f"nbs/sidebar.yml lists {nbs[0]}, which does not exist", "new.ipynb is not in nbs/sidebar.yml"]
    listed = [p for _, ps in docs.entries(conf["website"]["sidebar"]["contents"]) for p in ps]
    numbered = [p for p in listed if p[0].isdigit()]
    assert len(listed) == len(set(listed)) and numbered == sorted(numbered)
