"""Whether LaTeX would compile: a strict reader of what tables are made of, for machines without a TeX."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGES = {"booktabs", "graphicx", "fontenc", "geometry"}
TEXT = {
    "\\dots",
    "\\textbackslash",
    "\\textasciicircum",
    "\\textasciitilde",
    "\\textless",
    "\\textgreater",
    "\\textbar",
}
"""Commands that print a character; braces end each."""
ESCAPED = {f"\\{character}" for character in "{}$&#%_"}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|%[^\n]*\n?|[{}$&#_^~]|\n[ \t]*\n|\s+|[^\\%{}$&#_^~\s]+", re.DOTALL)
_TABLE = re.compile(
    r"\\begin\{table\}\n\\centering\n\\caption\{(?P<caption>.*)\}\n\\smallskip\n(?:\\small\n"
    r"\\resizebox\{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi\}\{!\}\{%\n"
    r"\\begin\{tabular\}\{(?P<columns>[lr]+)\}\n\\toprule\n(?P<head>.*) \\\\\n\\midrule\n(?P<rows>(?:.* \\\\\n)*)"
    r"\\bottomrule\n\\end\{tabular\}\}\n)?"
    r"(?:\n\\medskip\n\\parbox\{\\linewidth\}\{\\footnotesize\\raggedright (?P<notes>[^\n]*(?:\\\\\n[^\n]*)*)\}\n)?"
    r"\\end\{table\}\n"
)
_HEAD = "% needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"
_DOCUMENT = re.compile(
    r"\\documentclass\{article\}\n(?P<packages>(?:\\usepackage(?:\[[\w=,]+\])?\{\w+\}\n)+)"
    r"\\begin\{document\}\n(?P<body>.*)\n\\end\{document\}\n",
    re.DOTALL,
)


def check(text: str, *, standalone: bool = False) -> int:
    """Fails where a TeX would, or would print something else than is meant; returns how many tables there are.

    Every byte has to belong to a table of the one form that tables have: as many cells in every row as columns, texts
    without a command that is not a character's, all braces closed, `$` around nothing but plus-minus and minus.
    """
    if standalone:
        document = _DOCUMENT.fullmatch(text)
        assert document is not None, text[:300]
        named = re.findall(r"\{(\w+)\}\n", document["packages"])
        assert sorted(named) == sorted(PACKAGES)
        body = document["body"]
        if body == "No results.":
            return 0
    else:
        assert text.startswith(_HEAD), text[:100]
        body = text.removeprefix(_HEAD)
    place = found = waiting = 0
    body = body if body.endswith("\n") or not body else body + "\n"
    while place < len(body):
        table = _TABLE.match(body, place)
        assert table is not None, f"no table here: {body[place : place + 400]}"
        _check_table(table)
        place, found = table.end(), found + 1
        place += body[place : place + 1] == "\n"
        waiting += 1
        if body.startswith("\\clearpage\n", place):
            place, waiting = place + len("\\clearpage\n"), 0
        assert waiting < 18, "too many tables may wait for a page"
    return found


def _check_table(table: re.Match[str]) -> None:
    _check_text(table["caption"])
    assert (table["rows"] or "").count("\n") + (table["notes"] or "").count("\n") < 40, "longer than a page"
    if table["columns"] is not None:
        _check_rows(table)
    for note in (table["notes"] or "").split("\\\\\n"):
        _check_text(note)
        assert not note.startswith(("[", "*")), note


def _check_rows(table: re.Match[str]) -> None:
    columns = len(table["columns"])
    rows = [table["head"], *(row.removesuffix(" \\\\") for row in table["rows"].splitlines())]
    for row in rows:
        cells = re.split(r" & ", row) if columns > 1 else [row]
        assert len(cells) == columns, f"{len(cells)} cells in {columns} columns: {row}"
        for cell in cells:
            _check_text(cell)
            # What begins a row must be nothing that \\ or a rule takes for its option.
            assert not cell.startswith(("[", "*")), cell


def _check_text(text: str) -> None:
    """A text within a line: characters, what is escaped, groups, bold, and signs in mathematics."""
    text = text.replace("$\\pm$", "+-").replace("$-$", "-")
    depth = 0
    tokens = _TOKEN.findall(text)
    assert "".join(tokens) == text
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            assert depth >= 0, f"a brace too many: {text}"
        elif token.startswith("\\"):
            assert token in TEXT | ESCAPED | {"\\textbf"}, f"{token} in {text}"
            assert token in ESCAPED or following == "{", f"{token} swallows what follows: {text}"
        else:
            assert token[0] not in "%$&#_^~", f"bare {token[0]} in {text}"
            assert "\n" not in token, f"a line ends in {text!r}"
            fonts = (" " <= c <= "~" or ("À" <= c <= "ÿ" and c not in "ÐÞðþ") for c in token)
            assert all(fonts), f"fonts may lack {token!r}"
            assert not re.search("--|,,", token), f"a dash or a quotation mark of {token!r}"
            assert not set(token) & set('<>|"'), f"other fonts print others for {token!r}"
            assert "`" not in token or (tokens[index - 1], following) == ("{", "}"), f"a quotation mark: {text}"
    assert depth == 0, f"a brace is open: {text}"


def together(documents: Iterable[str]) -> str:
    """One document of several whole ones of the same packages: to load these takes longer than a table."""
    first, *rest = (_DOCUMENT.fullmatch(text) for text in documents)
    assert first is not None
    bodies = [first["body"]]
    for one in rest:
        assert one is not None
        assert one["packages"] == first["packages"]
        bodies.append(one["body"])
    return first[0][: first.start("body")] + "\n\\clearpage\n".join(bodies) + first[0][first.end("body") :]


def compiled(documents: Mapping[str, str], folder: Path) -> bool:
    """Has a TeX compile whole documents by name; fails where it does. Whether there is one here that has what they use.

    Lines of those whose names have "wide" may be no wider than the page.
    """
    program = shutil.which("pdflatex")
    used = {
        f"{name}.sty" for text in documents.values() for name in re.findall(r"^\\usepackage.*\{(\w+)\}$", text, re.M)
    }
    if program and subprocess.run(["kpsewhich", *used], capture_output=True, check=False).returncode:
        program = None
    for name, text in documents.items() if program else ():
        (folder / f"{name}.tex").write_text(text)
        command = [str(program), "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", f"{name}.tex"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "Missing character" not in done.stdout
        assert "wide" not in name or "Overfull" not in done.stdout
        assert "Float too large" not in done.stdout
        assert (folder / f"{name}.pdf").stat().st_size > 1000
    return program is not None
