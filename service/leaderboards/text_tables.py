"""Tables as text: CSV, Markdown and LaTeX, in which no name that somebody chose can do anything."""

import csv
import io
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from service.leaderboards.value_texts import column_texts, with_all_digits
from ttsv.config.fields import FieldValue

_LONGEST = 1e15
"""From here on numbers have no digits that a float knows behind the point, and no room in a column."""


def in_digits(value: float, decimals: int) -> str:
    """A number with so many decimals, a very large one by its power of ten; what rounds to zero has no sign."""
    return f"{value:.3e}" if abs(value) >= _LONGEST else f"{value:z.{decimals}f}"


@dataclass(frozen=True)
class Measured:
    """A mean and, over several seeds, its deviation, both in the unit of the column's title; `best` of its column.

    `of` is said behind it: of how many seeds it is.
    """

    mean: float
    std: float | None
    decimals: int
    best: bool = False
    of: str = ""

    def times(self, factor: float) -> Self:
        """The same in another unit."""
        return replace(self, mean=self.mean * factor, std=None if self.std is None else self.std * factor)

    @property
    def printed(self) -> tuple[str, str | None]:
        """Both as printed."""
        return in_digits(self.mean, self.decimals), None if self.std is None else in_digits(self.std, self.decimals)

    @property
    def said(self) -> str:
        """Both in one text."""
        mean, std = self.printed
        return mean if std is None else f"{mean} ± {std}"


Cell = FieldValue | Measured
Value = str | int | float | bool | None
"""What a CSV file has in a place."""


@dataclass(frozen=True)
class Sheet:
    """A table for people: a title, headings (those of numbers stand right), rows, and notes below.

    `above` is said before the rows: what all of them have in common.
    """

    title: str
    headings: list[str]
    numeric: list[bool]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    above: str = ""

    @cached_property
    def texts(self) -> list[list[str | Measured]]:
        """The rows as printed: the numbers of one column share their digits."""
        columns = [_column(column) for column in zip(*self.rows, strict=True)]
        return [[column[index] for column in columns] for index in range(len(self.rows))]

    @cached_property
    def exact(self) -> list[list[str | None]]:
        """Of each place of the rows the value with all of its digits, where it was printed with fewer."""
        return [
            [None if isinstance(shown, Measured) else with_all_digits(cell, shown) for cell, shown in row]
            for row in (zip(*both, strict=True) for both in zip(self.rows, self.texts, strict=True))
        ]


def _column(cells: Sequence[Cell]) -> list[str | Measured]:
    texts = iter(column_texts([cell for cell in cells if not isinstance(cell, Measured)]))
    return [cell if isinstance(cell, Measured) else next(texts) for cell in cells]


def to_csv(header: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """RFC 4180: numbers in full precision, texts that a spreadsheet would take for a formula behind an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in [header, *rows]:
        writer.writerow([defused(value) if isinstance(value, str) else value for value in row])
    return text.getvalue()


def defused(text: str) -> str:
    """A text that no spreadsheet computes: it starts with none of = + - @, tab and carriage return, spaces apart."""
    return f"'{text}" if text.lstrip(" \n")[:1] in tuple("=+-@\t\r") or text[:1] in tuple("\t\r\n") else text


def to_markdown(sheets: Sequence[Sheet]) -> str:
    """GitHub's tables."""
    return "\n".join(_markdown(sheet) for sheet in sheets)


def _markdown(sheet: Sheet) -> str:
    lines = [f"**{escape_markdown(sheet.title)}**", ""]
    lines += [escape_markdown(sheet.above), ""] if sheet.above else []
    lines.append(_bars([escape_markdown(heading) for heading in sheet.headings]))
    lines.append(_bars(["---:" if numeric else "---" for numeric in sheet.numeric]))
    lines += [_bars([_markdown_cell(cell) for cell in row]) for row in sheet.texts]
    lines += ["", *(f"- {escape_markdown(note)}" for note in sheet.notes)]
    return "\n".join(lines) + "\n"


def _bars(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_cell(cell: str | Measured) -> str:
    if isinstance(cell, Measured):
        mean, std = cell.printed
        said = (f"**{mean}**" if cell.best else mean) + ("" if std is None else f" ± {std}")
        return f"{said} ({escape_markdown(cell.of)})" if cell.of else said
    return escape_markdown(cell)


_MARKDOWN = {character: f"\\{character}" for character in "\\`*_{}[]#|~!@$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def escape_markdown(text: str) -> str:
    """Text as text: no emphasis, link, cell border or HTML; control characters by their numbers."""
    escaped = "".join(_MARKDOWN.get(c, c) if not _hidden(c) else _number(c) for c in _one_line(text))
    return escaped.replace("://", ":\\/\\/").replace("www.", "www\\.")  # GitHub makes links of bare addresses


_PAGE = 36
"""Lines of rows and notes that a page has room for, whatever the document: LaTeX prints none that stand below it."""
_LINE = 48
"""Characters of a caption or a note that a line has room for, also where a page has two columns."""
_WAITING = 16
"""LaTeX fails where some fifty tables wait for their pages: after so many it is told to print them."""


def to_latex(sheets: Sequence[Sheet], *, standalone: bool = False) -> str:
    """`table` environments with booktabs' rules, shrunk to the line where they are wider; `standalone`: a document.

    What is longer than a page goes on in further ones.
    """
    tables = [table for sheet in sheets for table in _latex(sheet)]
    groups = ["\n".join(tables[first : first + _WAITING]) for first in range(0, len(tables), _WAITING)]
    body = "\n\\clearpage\n".join(groups)
    if not standalone:
        return f"% needs \\usepackage{{booktabs}} and \\usepackage{{graphicx}}\n{body}"
    packages = ("[T1]{fontenc}", "{booktabs}", "{graphicx}", "[a4paper,landscape,margin=1cm]{geometry}")
    head = "\n".join(["\\documentclass{article}", *(f"\\usepackage{name}" for name in packages)])
    return f"{head}\n\\begin{{document}}\n{body or 'No results.'}\n\\end{{document}}\n"


SHRUNK = "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"
"""Begins what is made as wide as the line where it is wider; a brace ends it."""


def _latex(sheet: Sheet) -> list[str]:
    caption = ". ".join(filter(None, (sheet.title, sheet.above)))
    pages = _pages(sheet, _lines(caption))
    tables = [_latex_page(sheet, caption, *pages[0])]
    return tables + [_latex_page(sheet, f"{sheet.title}, continued", *page) for page in pages[1:]]


_Texts = list[list[str | Measured]]


def _pages(sheet: Sheet, above: int) -> list[tuple[_Texts, list[str]]]:
    """Its rows, then its notes, by page; so many lines stand above them."""
    pages: list[tuple[_Texts, list[str]]] = [([], [])]
    whole = max(_PAGE - above, 1)
    room = whole
    notes = [part for note in sheet.notes for part in textwrap.wrap(note, whole * _LINE, break_on_hyphens=False)]
    entries: list[list[str | Measured] | str] = [*sheet.texts, *notes]
    for one in entries:
        lines = _lines(one) if isinstance(one, str) else 1
        if lines > room and room < whole:
            pages.append(([], []))
            room = whole
        room -= lines
        if isinstance(one, str):
            pages[-1][1].append(one)
        else:
            pages[-1][0].append(one)
    return pages


def _lines(text: str) -> int:
    return -(-len(text) // _LINE)


def _latex_page(sheet: Sheet, caption: str, rows: _Texts, notes: Sequence[str]) -> str:
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{escape_latex(caption)}}}", "\\smallskip"]
    if rows or not notes:
        lines += [
            "\\small",
            SHRUNK,
            f"\\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in sheet.numeric)}}}",
            "\\toprule",
            " & ".join(map(_braced, sheet.headings)) + " \\\\",
            "\\midrule",
            *(" & ".join(map(_latex_cell, row)) + " \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}}",
        ]
    if notes:
        said = "\\\\\n".join(map(_braced, notes))
        lines += ["", "\\medskip", f"\\parbox{{\\linewidth}}{{\\footnotesize\\raggedright {said}}}"]
    return "\n".join([*lines, "\\end{table}"]) + "\n"


def _latex_cell(cell: str | Measured) -> str:
    if isinstance(cell, Measured):
        mean, std = cell.printed
        mean = mean.replace("-", "$-$")
        said = (f"\\textbf{{{mean}}}" if cell.best else mean) + ("" if std is None else f" $\\pm$ {std}")
        return f"{said} ({escape_latex(cell.of)})" if cell.of else said
    return _braced(cell)


def _braced(text: str) -> str:
    """In braces: brackets or a star after \\\\ or \\toprule would be taken for an option."""
    return f"{{{escape_latex(text)}}}" if text else ""


_FONTS = {*map(chr, range(ord(" "), ord("~") + 1)), *map(chr, range(ord("À"), ord("ÿ") + 1))} - set("ÐÞðþ")
"""What the fonts of any document have: TeX's own, OT1, know neither eth nor thorn."""
_LATEX = {
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "$": "\\$",
    "&": "\\&",
    "#": "\\#",
    "%": "\\%",
    "_": "\\_",
    "^": "\\textasciicircum{}",
    "~": "\\textasciitilde{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "|": "\\textbar{}",
    '"': "''",
    "`": "{`}",
    "±": "$\\pm$",
    "…": "\\dots{}",
}


_JOINED = re.compile("(?<=-)(?=-)|(?<=,)(?=,)")


def escape_latex(text: str) -> str:
    """Text as text in any document; what its fonts may not have, and control characters, by their numbers."""
    escaped = "".join(_LATEX.get(c, c) if c in _LATEX or c in _FONTS else _number(c) for c in _one_line(text))
    return _JOINED.sub("{}", escaped)  # two hyphens would be a dash, two commas a quotation mark


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _hidden(character: str) -> bool:
    """Control, format (among them those that turn the direction of writing), surrogate and unassigned characters."""
    return unicodedata.category(character).startswith("C")


def _number(character: str) -> str:
    return f"U+{ord(character):04X}"
