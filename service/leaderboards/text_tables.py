"""Tables as text: CSV, Markdown and LaTeX, in which no name that somebody chose can do anything."""

import csv
import io
import json
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, Self

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


_SIGNIFICANT = 6
"""Digits that are printed as they are. A number with more was drawn, not typed: of all such ones in a column so few are
printed, `_FEWEST` at least, that none looks as another does, and no fraction as a whole number: 0.9999999 is not 1."""
_FEWEST = 3
_MOST_SIGNIFICANT = 17
"""Digits that tell any two numbers apart."""
_MOST_SHARED = 4
"""Decimals that all numbers of a column share. Where one needs more, each has its own: 0.1 is not 0.1000000; so it is
where that would add digits that nobody reads: 100000 is not 100000.0000 as 0.0001 stands below it."""
_MOST_DECIMALS = 8
"""More of them are written with an exponent, as are numbers with more digits than `_MOST_DIGITS`."""
_MOST_DIGITS = 15


def number_texts(values: Sequence[float]) -> list[str]:
    """Numbers as one column prints them: all with the same few decimals, or each as short as it is."""
    rounded = _told_apart(values)
    decimals = max((_decimals(value) for value in rounded), default=0)
    if decimals <= _MOST_SHARED and all(abs(value) < 10 ** (_SIGNIFICANT - decimals) for value in rounded):
        return [f"{value:.{decimals}f}" for value in rounded]
    return [_shortest(value) for value in rounded]


def _told_apart(values: Sequence[float]) -> list[float]:
    """Numbers with as few digits as tell them apart; those that somebody typed are as they were."""
    exact = [float(value) for value in values]
    if any(abs(value) >= 10**_SIGNIFICANT for value in exact):
        return exact
    typed = [float(f"{value:.{_SIGNIFICANT}g}") == value for value in exact]
    for digits in range(_FEWEST, _SIGNIFICANT + 1):
        rounded = [value if kept else float(f"{value:.{digits}g}") for value, kept in zip(exact, typed, strict=True)]
        whole = any(seen.is_integer() and not value.is_integer() for seen, value in zip(rounded, exact, strict=True))
        if len(set(rounded)) == len(set(exact)) and not whole:
            return rounded
    return exact


def _shortest(value: float) -> str:
    decimals = _decimals(value)
    if decimals <= _MOST_DECIMALS and abs(value) < 10**_MOST_DIGITS:
        return f"{value:.{decimals}f}"
    digits = len(Decimal(repr(value)).normalize().as_tuple().digits)
    return f"{value:.{digits - 1}e}"


def column_texts(values: Sequence[Any]) -> list[str]:
    """Values of a configuration as one column prints them."""
    return [text for text in _column(values) if isinstance(text, str)]


def value_text(value: Any) -> str:
    """One value of a configuration, by itself."""
    (text,) = column_texts([value])
    return text


def exact_text(value: Any) -> str:
    """One value of a configuration with all of its digits, as a name that no other value has."""
    return _shortest(float(value)) if type(value) in (int, float) else value_text(value)


def _decimals(value: float) -> int:
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _column(cells: Sequence[Cell]) -> list[str | Measured]:
    numbers = {
        index: float(cell)
        for index, cell in enumerate(cells)
        if isinstance(cell, int | float) and not isinstance(cell, bool)
    }
    printed: dict[int, str] = {}
    # Of a rank whole numbers are channels and fractions a share of them: neither has the other's digits.
    for whole in (True, False):
        mine = {index: number for index, number in numbers.items() if (type(cells[index]) is int) == whole}
        printed |= dict(zip(mine, number_texts(list(mine.values())), strict=True))
    return [
        printed[index] if index in printed else cell if isinstance(cell, Measured) else _plain(cell)
        for index, cell in enumerate(cells)
    ]


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


def _plain(cell: Any) -> str:
    if isinstance(cell, dict):
        return in_words(cell)
    return "-" if cell is None else cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def in_words(value: Any, digits: int = _SIGNIFICANT) -> str:
    """A value of a record in words: `pgd (eps 0.03, steps 10)`, its fractions with so many digits at most."""
    if isinstance(value, Mapping):
        parts = (
            f"{name} ({in_words(one, digits)})" if isinstance(one, Mapping) else f"{name} {in_words(one, digits)}"
            for name, one in value.items()
        )
        return ", ".join(parts) or "none"
    if value is None or isinstance(value, float):
        return "none" if value is None else f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_words_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two values that differ in words, with as many digits as tell them apart."""
    for digits in range(_SIGNIFICANT, _MOST_SIGNIFICANT):
        said = in_words(one, digits), in_words(other, digits)
        if said[0] != said[1]:
            return said
    return in_words(one, _MOST_SIGNIFICANT), in_words(other, _MOST_SIGNIFICANT)
