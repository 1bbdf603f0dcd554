"""Tables as text: hostile names stay text in CSV, Markdown and LaTeX."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.leaderboards.boards import Hole, Leaderboard
from service.leaderboards.comparison_sheets import field_texts
from service.leaderboards.metrics import Metric, unit_of
from service.leaderboards.sheets import board_sheets, configuration_sheet, read
from service.leaderboards.sides import DifferingField
from service.leaderboards.text_tables import (
    Cell,
    Measured,
    Sheet,
    defused,
    escape_latex,
    escape_markdown,
    to_csv,
    to_latex,
    to_markdown,
)
from service.specs.columns import columns_of
from tests import latex
from ttsv.config.fields import TrialFields

HOSTILE = [
    "=HYPERLINK(1)",
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    " =1",
    "\n=1",
    "a|b",
    "<script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "`code` *bold* _em_ ~s~ # & http://example.org",
    "\\input{/etc/passwd}",
    "\\write18{id}",
    "\\\\[1cm]",
    "[1cm]",
    "100% $x$ _a ^b #c &d {e} ~f",
    "^^5cinput",
    '"quoted" `` ?` ,,so,, --hide --- ÐÞðþ',
    "\u202eright to left\u200b",
    "a\x00b\x07\x1b[31m\x85\u2028c",
    "中文 é ß ÿ 🎉 \ufeff",
    "line\nbreak",
    "and so on …",
    "",
]


def sheet(names: list[str]) -> Sheet:
    rows: list[list[Cell]] = [
        [name, 1, 0.25, Measured(97.125, 0.5, 2, best=True), Measured(96.0, None, 2), None] for name in names
    ]
    numeric = [False, True, True, True, True, True]
    return Sheet(names[0], [names[-1], "#", "lr", "accuracy (%)", "ECE (%)", "none"], numeric, rows, names)


class TestCsv:
    @pytest.mark.parametrize("text", HOSTILE)
    def test_no_cell_is_a_formula(self, text: str) -> None:
        (row,) = list(csv.reader(io.StringIO(to_csv([text], []), newline="")))
        assert row[0] in (text, f"'{text}")
        assert row[0].lstrip(" \n\r\t")[:1] not in tuple("=+-@")

    @given(st.text(max_size=8))
    def test_whatever_the_text(self, text: str) -> None:
        assert defused(text) in (text, f"'{text}")
        first = defused(text).lstrip(" \n")[:1]
        assert first == "" or first not in "=+-@\t\r"

    def test_numbers_stay_numbers(self) -> None:
        text = to_csv(["a", "b", "c"], [[-0.125, 1e-7, None], [-3, True, "-3"]])
        assert text == "a,b,c\r\n-0.125,1e-07,\r\n-3,True,'-3\r\n"

    def test_line_breaks_and_commas_stay_in_their_cell(self) -> None:
        rows = list(csv.reader(io.StringIO(to_csv(["a,b", 'c"d', "e\nf"], []), newline="")))
        assert rows == [["a,b", 'c"d', "e\nf"]]


class TestMarkdown:
    def test_a_table(self) -> None:
        text = to_markdown(
            [Sheet("t", ["name", "x"], [False, True], [["a", Measured(1.5, 0.25, 1, best=True)]], ["n"])]
        )
        assert text == "**t**\n\n| name | x |\n| --- | ---: |\n| a | **1.5** ± 0.2 |\n\n- n\n"

    @pytest.mark.parametrize("text", HOSTILE)
    def test_text_is_text(self, text: str) -> None:
        escaped = escape_markdown(text)
        assert "<" not in escaped
        assert ">" not in escaped
        assert "\n" not in escaped
        assert not re.search(r"(?<!\\)[|`*_\[\]~#]", escaped)
        assert escaped.isprintable()

    def test_columns_are_equal(self) -> None:
        lines = [line for line in to_markdown([sheet(HOSTILE)]).splitlines() if line.startswith("|")]
        assert len(lines) == 2 + len(HOSTILE)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}


COMMANDS = {
    *("begin", "end", "centering", "caption", "small", "toprule", "midrule", "bottomrule", "textbf", "pm", "medskip"),
    "smallskip",
    *("parbox", "linewidth", "footnotesize", "raggedright", "textbackslash", "textasciicircum", "textasciitilde"),
    *("dots", "textless", "textgreater", "textbar", "resizebox", "ifdim", "width", "else", "fi"),
}


class TestLatex:
    @pytest.mark.parametrize("text", HOSTILE)
    def test_text_is_text(self, text: str) -> None:
        escaped = escape_latex(text)
        assert set(re.findall(r"\\([a-zA-Z]+)", escaped)) <= COMMANDS
        assert "^^" not in escaped
        assert all(" " <= c <= "~" or "À" <= c <= "ÿ" for c in escaped)
        bare = re.sub(r"\\([{}$&#%_]|[a-z]+)", "", escaped).replace("$$", "")
        assert not set(bare) & set("\\$&#%_^~")
        assert bare.count("{") == bare.count("}")

    def test_structure(self) -> None:
        """Commands that are ours, balanced braces and environments, equal columns."""
        text = to_latex([sheet(HOSTILE)])
        assert set(re.findall(r"\\([a-zA-Z]+)", text)) - {"usepackage"} <= COMMANDS
        opened = re.findall(r"\\(begin|end)\{(\w+)\}", text)
        notes = [("begin", "table"), ("end", "table")]  # the last of them, on a page of their own
        assert opened == [("begin", "table"), ("begin", "tabular"), ("end", "tabular"), ("end", "table"), *notes]
        bare = re.sub(r"\\[\\{}$&#%_]", "", text.replace("{%", "{"))
        assert bare.count("{") == bare.count("}")
        body = text[text.index("\\toprule") : text.index("\\bottomrule")]
        rows = [line for line in body.splitlines() if line.endswith("\\\\")]
        assert len(rows) == 1 + len(HOSTILE)
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {5}
        assert "\\textbf{97.12} $\\pm$ 0.50" in text
        assert "\n$-$0.50 " in to_latex([Sheet("t", ["B - A"], [True], [[Measured(-0.5, None, 2)]])])

    def test_it_compiles(self, tmp_path: Path) -> None:
        """Alone, and put into a document as the comment says."""
        packages = "\\usepackage{booktabs}\n\\usepackage{graphicx}"
        around = f"\\documentclass{{article}}\n{packages}\n\\begin{{document}}\n%s\n\\end{{document}}\n"
        wide = Sheet("wide", ["a long heading"] * 24, [True] * 24, [[1.5] * 24] * 3, ["a note"])
        documents = {
            "alone": to_latex([sheet(HOSTILE)], standalone=True),
            "wide": to_latex([wide], standalone=True),
            "inside": around % to_latex([sheet(HOSTILE)]),
            "wide inside": around % to_latex([wide]),
        }
        assert latex.check(documents["alone"], standalone=True) == 2
        assert latex.check(documents["wide"], standalone=True) == 1
        if not latex.compiled(documents, tmp_path):
            pytest.skip("there is no TeX here; it was read by our own reader alone")

    def test_nothing_stands_below_a_page(self, tmp_path: Path) -> None:
        """LaTeX prints neither rows nor notes that a page has no room for, and fails where many tables wait."""
        rows: list[list[Cell]] = [[number, 0.5, Measured(number, 0.25, 1)] for number in range(130)]
        notes = [f"note {number}" for number in range(60)] + ["missing: " + "soc-tt 8: seed 3 diverged; " * 200]
        long = Sheet("long", ["#", "lr", "accuracy (%)"], [True] * 3, rows, notes, "All rows: lr 0.5.")
        text = to_latex([long])
        assert latex.check(text) > 6
        assert re.findall(r"^\{(\d+)\} & \{0\.5\} & (\d+)\.0 \$", text, re.MULTILINE) == [
            (str(number), str(number)) for number in range(130)
        ]
        assert re.findall(r"\{note (\d+)\}", text) == [str(number) for number in range(60)]
        assert text.count("diverged;") == 200
        assert text.count("\\caption{long. All rows: lr 0.5.}") == 1
        assert text.count("\\caption{long, continued}") == latex.check(text) - 1
        many = [Sheet(f"{number}", ["x"], [True], [[number]]) for number in range(70)]
        packages = "\\usepackage{booktabs}\n\\usepackage{graphicx}"
        around = f"\\documentclass{{article}}\n{packages}\n\\begin{{document}}\n%s\n\\end{{document}}\n"
        assert latex.check(to_latex(many)) == 70
        documents = {"long": around % text, "long alone": to_latex([long], standalone=True)}
        latex.compiled(documents | {"many": around % to_latex(many)}, tmp_path)

    @given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
    def test_any_names_are_read(self, names: list[str]) -> None:
        assert latex.check(to_latex([sheet(names), sheet(names[::-1])])) == 2
        assert latex.check(to_latex([sheet(names)], standalone=True), standalone=True) == 1

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (" & \\textbf", " \\textbf"),
            ("\\textbf{97.12}", "\\textbf{97.12"),
            ("{x}", "{x_y}"),
            ("{x}", "[x]"),
            ("{x}", "{\\x}"),
            ("{x}", "{50% x}"),
            ("{x}", "{$x$}"),
            ("{x}", "{a & x}"),
            ("{x}", "{\\textbackslash x}"),
            ("{x}", "{\u202ex}"),
            ("\\end{tabular}}", "\\end{tabular}"),
            ("\\end{table}", ""),
            ("\\midrule\n", "\\midrule\n\n"),
            ("\\begin{tabular}{lr", "\\begin{tabular}{l"),
        ],
    )
    def test_the_reader_sees_what_is_wrong(self, old: str, new: str) -> None:
        good = to_latex([sheet(["x", "y"])])
        assert latex.check(good) == 1
        assert good.replace(old, new, 1) != good
        with pytest.raises(AssertionError):
            latex.check(good.replace(old, new, 1))


class TestDigits:
    def test_none_among_the_values_of_a_side_is_a_word(self) -> None:
        delta = DifferingField("delta", "delta", [[None, 1.5], [None]], [2, 1])
        assert field_texts(delta) == ["none, 1.5", "-"]

    def test_other_values_are_as_in_a_spec(self) -> None:
        rows: list[list[Cell]] = [[None, True, [1, 2]], ["none", False, []]]
        assert Sheet("", ["a", "b", "c"], [False] * 3, rows).texts == [["-", "true", "[1, 2]"], ["none", "false", "[]"]]

    def test_what_is_shown_with_fewer_digits_is_there_with_all(self) -> None:
        rows: list[list[Cell]] = [[0.1, [1 / 3], "a", Measured(1 / 3, None, 2)], [0.25, [0.5], None, None]]
        assert Sheet("", ["a", "b", "c", "d"], [False] * 4, rows).exact == [
            [None, "[0.3333333333333333]", *[None] * 2],
            [None] * 4,
        ]

    def test_a_count_of_a_small_network_is_no_part_of_a_million(self) -> None:
        small, large = (unit_of(Metric.PARAMETERS, means) for means in ([2319, 486], [2319, 11_000_000]))
        assert (small.title, read(Metric.PARAMETERS, 2319, None, unit=small).printed[0]) == ("parameters", "2319")
        assert large.title == Metric.PARAMETERS.reading.title == "parameters (millions)"
        assert read(Metric.PARAMETERS, 1e7, None, unit=large) == read(Metric.PARAMETERS, 1e7, None)

    def test_zero_has_no_sign(self) -> None:
        """A difference that nobody sees is none that is worse."""
        assert [Measured(mean, 0.1, 2).said for mean in (-1e-6, -0.0, -0.006)] == ["0.00 ± 0.10"] * 2 + ["-0.01 ± 0.10"]

    def test_a_number_longer_than_a_column_is_a_power_of_ten(self) -> None:
        assert Measured(2.5e38, 1e21, 2).said == "2.500e+38 ± 1.000e+21"
        assert Measured(-123456789.0, None, 1).said == "-123456789.0"

    def test_what_is_shared_stands_above(self) -> None:
        found = Sheet("t", ["a"], [True], [[1]], [], "All rows: x_y 1.")
        assert "**t**\n\nAll rows: x\\_y 1.\n\n| a |" in to_markdown([found])
        assert "\\caption{t. All rows: x\\_y 1.}" in to_latex([found])


def test_of_what_is_no_column_few_values_are_said() -> None:
    methods: list[dict[str, Any]] = [
        {"layer": "tt", "rank": 8, "lambda_ort": 10.0},
        {"layer": "dense", "rank": None},
        {"layer": "soc", "rank": None},
    ]
    configs: list[TrialFields] = [{**one, "training": {"lr": lr}} for one in methods for lr in (0.1, 0.2)]
    sheet = configuration_sheet(columns_of(configs, without_decided=True), configs)
    assert sheet.headings == ["layer", "lr"]
    rank, lambda_ort = "rank (8 with layer tt, else none)", "lambda_ort (10 with layer tt, else 0)"
    assert sheet.above == f"Decided by the other fields: {rank}, {lambda_ort}."
    holes, shape = [Hole("a", one, 1, []) for one in configs], columns_of(configs, without_decided=True)
    none_ranked = Leaderboard([], holes, len(holes), [], 0, shape.fields, shape.common, shape.decided)
    assert board_sheets(none_ranked, "digits", Metric.ACCURACY)[0].above == sheet.above
    many: list[TrialFields] = [
        {"rank": n, "lambda_ort": n, "training": {"lr": lr}} for n in range(1, 6) for lr in (1, 2)
    ]
    assert configuration_sheet(columns_of(many, without_decided=True), many).above.endswith("fields: lambda_ort.")
