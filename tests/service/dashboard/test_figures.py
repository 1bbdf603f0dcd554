"""The paper's figures before anything was run: their files, and what they say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from service.paper.presets import PAPER
from tests import latex

PANELS = {"vgg": (10, 12, 0), "lipschitz": (2, 21, 39), "speedup": (4, 20, 40), "soc-speedup": (2, 12, 0)}
"""Panels, places of each that were not run, and places with hollow marks in all of them."""


@pytest.mark.parametrize("name", PANELS)
def test_every_place_is_a_mark_in_svg(sqlite_api: TestClient, name: str) -> None:
    panels, places, printed = PANELS[name]
    answer = sqlite_api.get(f"/figures/{PAPER}/{name}.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.headers["content-disposition"] == f'attachment; filename="{PAPER}-{name}.svg"'
    root = ElementTree.fromstring(answer.text)
    said = [str(one.text) for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(one.endswith(": not run") for one in said) == panels * places
    assert len(said) == panels * places + printed
    assert "SMOKE" not in answer.text


@pytest.mark.parametrize("name", PANELS)
def test_latex_has_an_axis_for_each_panel(sqlite_api: TestClient, name: str) -> None:
    panels, places, _ = PANELS[name]
    text = sqlite_api.get(f"/figures/{PAPER}/{name}.tex").text
    for command in ("\\begin{axis}", "\\end{axis}", "\\begin{tikzpicture}", "\\end{tikzpicture}"):
        assert text.count(command) == panels
    assert text.count(": not run\n") == panels * places
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert code.count("{") == code.count("}")
    assert not re.search(r"(?<!\\)[%_&#$]", code.replace("{!}{%", "{!}{"))
    empty = code.count("{nothing measured here; no number is printed}")
    assert code.count("\\addplot") == code.count("\\addlegendentry") + empty
    assert code.count("forget plot") == empty == {"vgg": 10, "soc-speedup": 2, "speedup": 2}.get(name, 0)


def test_latex_has_a_paragraph_for_each_panel_as_wide_as_the_line_at_most(
    sqlite_api: TestClient, tmp_path: Path
) -> None:
    """Two in one line would run off the page, and so would one beside which its legend stands."""
    texts = [sqlite_api.get(f"/figures/{PAPER}/{name}.tex").text for name in PANELS]
    for text in texts:
        panels = text.count("\\begin{tikzpicture}")
        assert text.count("{!}{%\n\\begin{tikzpicture}\n") == text.count("\n\n\\noindent\\resizebox{") == panels
    body = "\n".join(texts)
    around = "\\documentclass{article}\n\\usepackage{pgfplots}\n\\begin{document}\n%s\\end{document}\n"
    latex.compiled({"wide": around % body}, tmp_path)


def test_a_large_number_is_written_out(sqlite_api: TestClient) -> None:
    for form in ("svg", "tex"):
        text = sqlite_api.get(f"/figures/{PAPER}/lipschitz.{form}").text
        assert "lambda_ort 900000" in text
        assert "lambda_ort 1200000" in text


def test_what_table_3_prints_stands_in_the_figure(sqlite_api: TestClient) -> None:
    text = sqlite_api.get(f"/figures/{PAPER}/lipschitz.tex").text
    assert "  (3.69897,0.93) +- (0,0)\n" in text  # lambda_ort 5e3 of LipConvNet-5
    assert "  (3.69897,78.37) +- (0,0)\n" in text
    assert "  (3.69897,78.3) +- (0,0.1)\n" in text  # of the same network in table 1, over several runs


def test_what_there_is_not(sqlite_api: TestClient) -> None:
    for path, status in (
        (f"/figures/{PAPER}/other", 404),
        ("/figures/other/vgg", 404),
        (f"/figures/{PAPER}/vgg?experiment=7", 404),
        (f"/figures/{PAPER}/vgg.png", 422),
    ):
        assert sqlite_api.get(path).status_code == status, path
