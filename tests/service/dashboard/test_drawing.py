"""Drawings as SVG and PDF: well formed, every text a text, every object where the file says."""

import re
from xml.etree import ElementTree

from service.dashboard.drawing import Circle, Drawing, Path, Said, Words, text_width

HOSTILE = '</title><script>alert("1")</script> & (a) \\ ± \u05e9'
DRAWING = Drawing(
    200,
    100,
    HOSTILE,
    (
        Path(((0, 0), (10, 10)), "line"),
        Said(HOSTILE, (Circle(20, 20, 5, "series0", filled=False), Words(50, 50, HOSTILE, turn=12, anchor="end"))),
        Path(((0, 0), (10, 0), (5, 8)), "series1", closed=True, filled=True),
    ),
)


def test_texts_are_texts_in_svg() -> None:
    root = ElementTree.fromstring(str(DRAWING.svg()))
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("aria-label") == HOSTILE
    assert [one.text for one in root.iter(f"{space}title")] == [HOSTILE]
    assert [one.text for one in root.iter(f"{space}text")] == [HOSTILE]
    assert not list(root.iter(f"{space}script"))
    assert "style=" not in DRAWING.svg()  # which the pages' policy forbids


def test_every_object_of_a_pdf_is_where_its_table_says() -> None:
    file = DRAWING.pdf()
    start = int(re.findall(rb"startxref\n(\d+)\n%%EOF\n$", file)[0])
    assert file[start:].startswith(b"xref\n0 7\n")
    places = [int(place) for place in re.findall(rb"(\d{10}) 00000 n \n", file[start:])]
    assert len(places) == 6
    for number, place in enumerate(places, 1):
        assert file[place:].startswith(b"%d 0 obj\n" % number)
    length, stream = re.findall(rb"/Length (\d+) >>\nstream\n(.*)\nendstream", file, re.DOTALL)[0]
    assert int(length) == len(stream)


def test_parentheses_end_no_text_of_a_pdf() -> None:
    texts = re.findall(rb"\(((?:\\.|[^\\()])*)\) Tj ET", DRAWING.pdf())
    assert len(texts) == 1
    said = re.sub(rb"\\(.)", rb"\1", texts[0]).decode("cp1252")
    assert said == HOSTILE.replace("\u05e9", "?")


def test_words_are_as_wide_as_in_helvetica() -> None:
    assert text_width("Hello", 10) == (722 + 556 + 222 + 222 + 556) / 100
