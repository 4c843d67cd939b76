"""Notebook → HTML page, without Quarto: the pure functions behind the fallback of tools/docs.py.

Understands what the book uses: cell directives (`#| label`, `fig-cap`, `tbl-cap`, `code-fold`, `echo`, `output`, `include`), `[@key]` citations,
`@fig-x`, `@tbl-x`, `@eq-x` and `@sec-x` references within a page, `\\tag{..}` and `{#eq-x}` on display equations.
"""
import base64
import html
import re
from dataclasses import dataclass, field

import mistune
import yaml
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

CODE = HtmlFormatter(nowrap=True)
KINDS = {"fig": "Figure", "tbl": "Table", "eq": "Equation", "sec": "Section"}


# ---- references.bib

def parse_bib(text):
    "BibTeX → {key: {field: value}}; braces may nest, values may be quoted or bare"
    out = {}
    for m in re.finditer(r"@(\w+)\s*\{\s*([^,\s]+)\s*,", text):
        if m[1].lower() in ("comment", "string", "preamble"): continue
        depth, i = 1, m.end()
        while i < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
        out[m[2]] = {"type": m[1].lower(), **_bib_fields(text[m.end() : i - 1])}
    return out


def _bib_fields(body):
    fields, i = {}, 0
    while m := re.compile(r"\s*,?\s*([\w-]+)\s*=\s*").match(body, i):
        i = m.end()
        if body[i : i + 1] in "{\"":
            close, depth, j = ("}" if body[i] == "{" else '"'), 0, i + 1
            while j < len(body) and (depth or body[j] != close):
                depth += {"{": 1, "}": -1}.get(body[j], 0)
                j += 1
            value, i = body[i + 1 : j], j + 1
        else:
            j = re.compile(r"[^,]*").match(body, i).end()
            value, i = body[i:j].strip(), j
        fields[m[1].lower()] = untex(value)
    return fields


def untex(s):
    "the few TeX habits of bibliographies as plain text"
    import unicodedata

    marks = {'"': "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", "c": "\u0327", "v": "\u030c", "u": "\u0306"}
    s = re.sub(r"\\([\"'`^~])\s*\{?\\?([a-zA-Z])\}?|\\([cvu])\s*\{([a-zA-Z])\}", lambda m: unicodedata.normalize("NFC", (m[2] or m[4]) + marks[m[1] or m[3]]), s)
    for a, b in {"\\ss": "ß", "\\o ": "ø", "\\o}": "ø", "\\&": "&", "\\%": "%", "---": "—", "--": "–", "~": " "}.items(): s = s.replace(a, b)
    return re.sub(r"\s+", " ", s.replace("{", "").replace("}", "")).strip()


def surnames(author):
    "`Long, B. and Agarwal, D.` or `Bo Long and Deepak Agarwal` → [Long, Agarwal]"
    names = [a.strip() for a in re.split(r"\s+and\s+", author) if a.strip()]
    return [n if n == "others" else n.split(",")[0] if "," in n else n.split()[-1] for n in names]


def short_name(entry):
    names = surnames(entry.get("author") or entry.get("editor") or entry.get("title", "?"))
    if "others" in names or len(names) > 2: return f"{names[0]} et al."
    return " and ".join(names)


def reference(entry):
    "one line of the list of references, as HTML"
    e = {k: html.escape(v) for k, v in entry.items()}
    who = re.sub(r"\s+and\s+", "; ", e.get("author") or e.get("editor", "")).replace("; others", " et al.")
    where = e.get("journal") or e.get("booktitle") or e.get("publisher") or e.get("howpublished") or e.get("institution") or ""
    if e.get("volume"): where += f" {e['volume']}" + (f"({e['number']})" if e.get("number") else "")
    if e.get("pages"): where += f", {e['pages']}"
    link = ""
    if e.get("doi"): link = f'<a href="https://doi.org/{e["doi"]}">doi:{e["doi"]}</a>'
    elif e.get("eprint"): link = f'<a href="https://arxiv.org/abs/{e["eprint"]}">arXiv:{e["eprint"]}</a>'
    elif e.get("url"): link = f'<a href="{e["url"]}">{e["url"]}</a>'
    return ". ".join(x.rstrip(".") for x in (f"{who} ({e.get('year', 'n.d.')})", f"<em>{e.get('title', '')}</em>", where, link) if x) + "."


# ---- cells

def directives(source):
    "(`{key: value}` of the `#|` lines, the rest of the cell); nbdev's own words (`#| hide`) are keys with value True"
    lines, d = source.split("\n"), {}
    rest = [ln for ln in lines if not re.match(r"#\s?\|", ln)]
    raw = [re.sub(r"^#\s?\|\s?", "", ln) for ln in lines if re.match(r"#\s?\|", ln)]
    quarto = [ln for ln in raw if ":" in ln or ln[:1] in " -"]
    for ln in raw:
        if ln not in quarto: d.update(dict.fromkeys(ln.split()[:1], True))
    try:
        d.update(yaml.safe_load("\n".join(quarto)) or {})
    except yaml.YAMLError:  # a value with a bare colon: line by line, as text
        d.update((k.strip(), v.strip().strip("\"'")) for k, v in (ln.split(":", 1) for ln in quarto if ":" in ln))
    return d, "\n".join(rest).strip("\n")


def slug(text):
    text = re.sub(r"\$[^$]*\$|`|<[^>]+>|[*_]", lambda m: m[0] if m[0] == "_" else re.sub(r"[^\w]", "", m[0]) if m[0][0] == "$" else "", text)
    return re.sub(r"[^\w]+", "-", text.lower()).strip("-") or "section"


def code_html(source, lang="python"):
    try: lexer = get_lexer_by_name(lang or "text")
    except ClassNotFound: lexer = get_lexer_by_name("text")
    return f'<pre class="highlight" tabindex="0"><code>{highlight(source, lexer, CODE).rstrip()}</code></pre>'


@dataclass
class Page:
    "what is known of a page while it is rendered"
    bib: dict = field(default_factory=dict)
    link: object = None  # href → href
    labels: dict = field(default_factory=dict)  # fig-x → "Figure 1"
    cited: list = field(default_factory=list)
    toc: list = field(default_factory=list)  # (level, id, html)
    problems: list = field(default_factory=list)
    files: dict = field(default_factory=dict)  # name → bytes
    ids: set = field(default_factory=set)
    sources: dict = field(default_factory=dict)  # exported name → address of its source

    def unique(self, name):
        n, out = 1, name
        while out in self.ids: n, out = n + 1, f"{name}-{n + 1}"
        self.ids.add(out)
        return out


# ---- markdown with math, citations and references

class Renderer(mistune.HTMLRenderer):
    def __init__(self, page):
        super().__init__(escape=False)
        self.page = page

    def heading(self, text, level, **attrs):
        if m := re.search(r"\s*\{#([\w-]+)[^}]*\}\s*$", text): text, name = text[: m.start()], m[1]
        else: name = slug(html.unescape(text))
        name = self.page.unique(name)
        self.page.toc.append((level, name, text))
        return f'<h{level} id="{name}"><a class="anchor" href="#{name}" aria-label="link to this section">{text}</a></h{level}>\n'

    def block_code(self, code, info=None): return code_html(code.rstrip("\n"), (info or "text").split()[0].strip("{}.")) + "\n"

    def link(self, text, url, title=None):
        return super().link(text, self.page.link(url) if self.page.link else url, title)

    def table(self, text): return f'<div class="scroll" tabindex="0"><table>{text}</table></div>\n'


CITE = r"-?@([A-Za-z][\w:.#$%&+?<>~/-]*\w)"


def cite(key, page, bare, suffix=""):
    entry = page.bib.get(key)
    if entry is None:
        page.problems.append(f"unknown citation @{key}")
        return f"?@{html.escape(key)}"
    if key not in page.cited: page.cited.append(key)
    year, name = html.escape(entry.get("year", "n.d.")), html.escape(short_name(entry))
    text = f"{name} ({year})" if bare else f"{name} {year}"
    return f'<a class="cite" href="#ref-{key}">{text}</a>{suffix}'


def crossref(label, page):
    if label not in page.labels:
        page.problems.append(f"unresolved reference @{label}")
        return f"?@{html.escape(label)}"
    return f'<a class="xref" href="#{label}">{html.escape(page.labels[label])}</a>'


def inline_marks(text, page):
    "`[@a; @b]`, `@a`, `@fig-x`, `@eq-x` → links"
    def group(m):
        parts = []
        for part in m[1].split(";"):
            k = re.match(rf"\s*([^@]*?){CITE}(.*)$", part, re.DOTALL)
            if not k or re.match(r"(fig|tbl|eq|sec)-", k[2]): return re.sub(rf"(?<![\w.]){CITE}", single, m[0])
            parts.append(html.escape(k[1]) + cite(k[2], page, bare=False, suffix=html.escape(k[3].rstrip())))
        return f"({'; '.join(parts)})"

    def single(m):
        return crossref(m[1], page) if re.match(r"(fig|tbl|eq|sec)-", m[1]) else cite(m[1], page, bare=True)

    text = re.sub(r"\[([^\[\]]*@[^\[\]]*)\](?!\()", group, text)
    return re.sub(rf"(?<![\w.\"#/=>@?-]){CITE}", single, text)


MATH = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)\s*?$|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|\$\$(?P<display>.+?)\$\$(?P<attr>[ \t]*\{#(?P<id>eq-[\w-]+)\})?"
    r"|\\begin\{(?P<env>equation|align|gather|eqnarray)(?P<star>\*?)\}(?P<body>.+?)\\end\{(?P=env)(?P=star)\}"
    r"|(?<![\\$\w])\$(?![\s$])(?P<inline>(?:\\.|[^$\\])+?)(?<!\s)\$(?!\d)", re.DOTALL | re.MULTILINE)


def typeset(tex, display="inline"):
    "TeX → MathML, which browsers draw themselves, off line too; what cannot be converted stands as TeX"
    tex = tex.strip()
    try:
        out = convert(tex, display=display)
    except Exception:
        return f"<code class='tex'>{html.escape(tex)}</code>"
    return out.replace("<math ", f'<math alttext="{html.escape(tex, quote=True)}" ', 1)


def display_math(tex, label=None, number=None):
    "a display equation, its tag beside it"
    tags = re.findall(r"\\tag\*?\{([^{}]*)\}", tex)
    if len(tags) == 1: tex, number = re.sub(r"\s*\\tag\*?\{[^{}]*\}", "", tex), tags[0]
    tag = f'<span class="tag">({html.escape(number)})</span>' if number else ""
    ident = f' id="{label}"' if label else f' id="eq-{slug(number)}"' if number else ""
    return f'<div class="math"{ident} tabindex="0"><span class="tex">{typeset(tex, "block")}</span>{tag}</div>'


def markdown(text, page):
    "Markdown → HTML; math is kept from the parser, code is kept from the marks"
    kept = []

    def keep(s):
        kept.append(s)
        return f"\x02{len(kept) - 1}\x03"

    def protect(m):
        if m["code"]: return keep_code(m["code"])
        if m["inline"] is not None: return keep(typeset(m["inline"]))
        body = m["display"] if m["display"] is not None else rf"\begin{{{m['env']}ed}}{m['body']}\end{{{m['env']}ed}}" if m["env"] in ("align", "gather") else m["body"]
        label = m["id"]
        number = page.labels.get(label, "").partition(" ")[2].strip("()") or None
        if t := re.search(r"\\tag\*?\{([^{}]*)\}", body): label = label or f"eq-{slug(t[1])}"
        if label: label = page.unique(label)
        return f"\n\n{keep(display_math(body, label, number))}\n\n" if not indented(m) else keep(display_math(body, label, number))

    def indented(m):  # an equation inside a list item or a quotation stays where it is
        line = text[text.rfind("\n", 0, m.start()) + 1 : m.start()]
        return bool(line.strip()) and bool(re.match(r"\s*(>|[-*+]\s|\d+[.)]\s)", line)) or line.startswith("  ") or line.startswith(">")

    def keep_code(s): return f"\x04{code.append(s) or len(code) - 1}\x05"

    code = []
    text = MATH.sub(protect, text)
    text = re.sub(r"<[a-zA-Z/!][^>]*>|\]\([^)]*\)|<?https?://\S+", lambda m: keep_code(m[0]), text)  # no marks inside tags and addresses
    text = re.sub(r"\[([^\[\]]*@[^\[\]]*)\](?!\(|\x04)|(?<![\w.\"#/=>@?-])" + CITE, lambda m: keep(inline_marks(m[0], page)), text)
    while "\x04" in text: text = re.sub(r"\x04(\d+)\x05", lambda m: code[int(m[1])], text)
    out = mistune.create_markdown(renderer=Renderer(page), plugins=["table", "strikethrough", "footnotes", "def_list", "task_lists"])(text)
    while "\x02" in out:
        out = re.sub(r"<p>\x02(\d+)\x03</p>", lambda m: kept[int(m[1])] if kept[int(m[1])].startswith("<div") else f"<p>{kept[int(m[1])]}</p>", out)
        out = re.sub(r"\x02(\d+)\x03", lambda m: kept[int(m[1])], out)
    page.toc[:] = [(lv, n, re.sub(r"\x02(\d+)\x03", lambda m: kept[int(m[1])], t)) for lv, n, t in page.toc]
    return out


# ---- notebooks

def number_labels(nb):
    "{label: 'Figure 1'} for figures, tables and equations of a notebook, in order"
    labels, count = {}, dict.fromkeys(KINDS, 0)
    for c in nb["cells"]:
        src = "".join(c["source"])
        if c["cell_type"] == "code":
            lab = directives(src)[0].get("label", "")
            kind = str(lab).split("-")[0]
            if kind in ("fig", "tbl"):
                count[kind] += 1
                labels[lab] = f"{KINDS[kind]} {count[kind]}"
        elif c["cell_type"] == "markdown":
            for m in MATH.finditer(src):
                if m["id"]:
                    count["eq"] += 1
                    t = re.search(r"\\tag\*?\{([^{}]*)\}", m["display"])
                    labels[m["id"]] = f"Equation ({t[1] if t else count['eq']})"
                elif (m["display"] or m["body"]) and (t := re.search(r"\\tag\*?\{([^{}]*)\}", m["display"] or m["body"])):
                    labels[f"eq-{slug(t[1])}"] = f"Equation ({t[1]})"
            for m in re.finditer(r"^#+\s+(.*?)\s*\{#(sec-[\w-]+)[^}]*\}\s*$", src, re.MULTILINE): labels[m[2]] = m[1]
    return labels


def short(table: str, most: int = 32) -> bool:
    "do all cells of a table fit on a line, as numbers with their intervals do?"
    return all(len(html.unescape(cell)) <= most for cell in re.findall(r"<td>(.*?)</td>", table, re.S))


def output_html(out, page, stem, d):
    "one output of a cell"
    if out["output_type"] == "stream": return f'<pre class="out" tabindex="0">{html.escape("".join(out["text"]))}</pre>'
    if out["output_type"] == "error": return f'<pre class="out error">{html.escape(out["ename"] + ": " + out["evalue"])}</pre>'
    data = {k: v if isinstance(v, str) else "".join(v) if isinstance(v, list) else v for k, v in out.get("data", {}).items()}
    if "text/html" in data: return f'<div class="out scroll{" short" if short(data["text/html"]) else ""}" tabindex="0">{data["text/html"]}</div>'
    if "image/png" in data:
        name = f"{stem}_files/{page.unique(str(d.get('label', 'figure')) + '-png')}.png"
        page.files[name] = base64.b64decode(data["image/png"])
        alt = re.sub(r"[$`*\\{}]", "", str(d.get("fig-alt") or d.get("fig-cap") or ""))
        return f'<img src="{name}" alt="{html.escape(alt, quote=True)}" loading="lazy">'
    if "image/svg+xml" in data: return data["image/svg+xml"]
    if "text/latex" in data:
        tex = data["text/latex"].strip()
        tex = re.sub(r"^\$+|\$+$", "", tex).replace(r"\displaystyle", "").strip()
        return f'<div class="out">{display_math(tex)}</div>'
    if "text/markdown" in data: return "" if SHOW_DOC.match(data["text/markdown"]) else markdown(data["text/markdown"], page)
    return f'<pre class="out" tabindex="0">{html.escape(data.get("text/plain", ""))}</pre>'


SHOW_DOC = re.compile(r"---\n\n\[source\]\((?P<src>[^)]*)\)(?:\{[^}]*\})?\n\n#{2,4} (?P<name>[\w.]+)\n")


def sources(nb):
    "{name: address of its source} from nbdev's entries for exported names"
    found = {}
    for c in nb["cells"]:
        for o in c.get("outputs", []):
            if m := SHOW_DOC.match("".join(o.get("data", {}).get("text/markdown", ""))): found[m["name"]] = m["src"]
    return found


def api_head(code, page):
    "heading and anchor of the public name an exported cell defines"
    m = re.search(r"^(?:class|def)\s+([A-Za-z]\w*)|^([A-Za-z]\w*)(?:\s*:[^=\n]+)?\s*=(?!=)", code, re.MULTILINE)
    name = m and (m[1] or m[2])
    if not name: return ""
    ident, src = page.unique(name.lower()), page.sources.get(name)
    link = f' <a class="source" href="{html.escape(src)}">source</a>' if src else ""
    return f'<div class="api" id="{ident}"><a href="#{ident}"><code>{name}</code></a>{link}</div>'


def cell_html(cell, page, stem):
    src = "".join(cell["source"])
    if cell["cell_type"] == "markdown": return markdown(src, page)
    if cell["cell_type"] != "code": return ""
    d, code = directives(src)
    if d.get("hide") or d.get("include") is False: return ""
    parts, outs = [], []
    if code and d.get("echo") is not False:
        shown, fold = code_html(code), d.get("code-fold")
        if fold is True: shown = f"<details class='code'><summary>{html.escape(str(d.get('code-summary', 'Code')))}</summary>{shown}</details>"
        if d.get("code-summary") == "Exported source": shown = api_head(code, page) + shown
        parts.append(shown)
    if d.get("output") is not False: outs = [output_html(o, page, stem, d) for o in cell.get("outputs", [])]
    label = d.get("label", "")
    if outs and str(label).split("-")[0] in ("fig", "tbl"):
        cap = d.get("fig-cap") or d.get("tbl-cap") or ""
        text = f"<figcaption><b>{page.labels.get(label, '')}.</b> {inline(str(cap), page)}</figcaption>"
        body = "".join(outs)
        parts.append(f'<figure id="{page.unique(label)}">{text + body if label.startswith("tbl") else body + text}</figure>')
    else: parts += outs
    if not any(parts): return ""
    kind = "cell exported" if d.get("code-summary") == "Exported source" else "cell"
    return f'<div class="{kind}">{"".join(parts)}</div>\n'


def front_matter(nb):
    "title and description nbdev took from the first cell"
    for c in nb["cells"]:
        src = "".join(c["source"]).strip()
        if c["cell_type"] == "raw" and src.startswith("---"): return yaml.safe_load(src.strip("-\n ")) or {}
    return {}


def inline(text, page):
    "Markdown of one paragraph without its <p>"
    return re.sub(r"^<p>(.*)</p>$", r"\1", markdown(text, page).strip(), flags=re.DOTALL)


def body_html(nb, page, stem):
    "the article of one processed notebook"
    page.labels.update(number_labels(nb))
    page.sources.update(sources(nb))
    out = "".join(cell_html(c, page, stem) for c in nb["cells"] if not "".join(c["source"]).startswith("<!-- WARNING"))
    if page.cited:
        items = "".join(f'<li id="ref-{k}">{reference(page.bib[k])}</li>' for k in sorted(page.cited, key=lambda k: (short_name(page.bib[k]), page.bib[k].get("year", ""))))
        page.toc.append((2, "references", "References"))
        out += f'<h2 id="references">References</h2><ul class="references">{items}</ul>'
    return out
