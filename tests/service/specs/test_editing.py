"""Changes in the text of a spec: they are what was asked for, and all the rest is as it was written."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import SpecError
from service.specs.documents import DocumentError, read_yaml, write_yaml
from service.specs.editing import Edit, edited, read_text

TEXT = """\
# what I want to know
name: ranks  # of TT layers
base:
    dataset: digits   # small
    model: 'small-cnn'
    training: {epochs: 12, lr: 0.10}  # quick
    # a remark
grid:
    rank:
        - 4   # the smallest
        - 16
    delta: [null, 1.0]
variants:
- {frames: orthonormal}  # Stiefel
- lambda_ort: 100000.0
notes: |
    two
    lines
"""


def at(*path: str, to: Any) -> Edit:
    return Edit(path, to)


def without(*path: str) -> Edit:
    return Edit(path, remove=True)


class TestYaml:
    @pytest.mark.parametrize(
        ("edit", "old", "new"),
        [
            (at("name", to="new: name"), "name: ranks  #", "name: 'new: name'  #"),
            (at("base", "dataset", to="cifar10"), "dataset: digits   #", "dataset: cifar10   #"),
            (at("base", "model", to="vgg11"), "model: 'small-cnn'", "model: vgg11"),
            (at("base", "training", "lr", to=0.2), "lr: 0.10}  # quick", "lr: 0.2}  # quick"),
            (at("base", "training", "tf32", to=True), "lr: 0.10}", "lr: 0.10, tf32: true}"),
            (without("base", "training", "lr"), "epochs: 12, lr: 0.10}", "epochs: 12}"),
            (without("base", "training", "epochs"), "{epochs: 12, lr: 0.10}", "{lr: 0.10}"),
            (without("base", "dataset"), "    dataset: digits   # small\n", ""),
            (at("base", "layer", to="tt"), "# quick\n", "# quick\n    layer: tt\n"),
            (at("base", "clipping", "every", to=7), "# quick\n", "# quick\n    clipping:\n      every: 7\n"),
            (
                at("grid", "rank", to=[4, 8]),
                "    rank:\n        - 4   # the smallest\n        - 16\n",
                "    rank: [4, 8]\n",
            ),
            (at("grid", "delta", to=[2]), "delta: [null, 1.0]", "delta: [2]"),
            (at("grid", "seed", to=[0, 1]), "[null, 1.0]\n", "[null, 1.0]\n    seed: [0, 1]\n"),
            (at("repeat", to=2), "    lines\n", "    lines\nrepeat: 2\n"),
            (without("notes"), "notes: |\n    two\n    lines\n", ""),
            (at("notes", to="one"), "notes: |\n    two\n    lines\n", "notes: one\n"),
        ],
    )
    def test_one_place_changes(self, edit: Edit, old: str, new: str) -> None:
        assert TEXT.count(old) == 1
        assert edited(TEXT, [edit])[0] == TEXT.replace(old, new)

    def test_what_is_left_empty_goes_too(self) -> None:
        text, value = edited(TEXT, [without("grid", "rank"), without("grid", "delta"), without("nix", "nix")])
        assert "grid" not in value
        assert "grid" not in text
        assert "# a remark" in text
        assert edited("name: x", [without("name")]) == ("{}\n", {})

    def test_an_empty_value_is_filled(self) -> None:
        assert edited("name: x\ngrid:\nbase: {}\n", [at("grid", "rank", to=[4]), at("base", "model", to="m")]) == (
            "name: x\ngrid: {rank: [4]}\nbase: {model: m}\n",
            {"name": "x", "grid": {"rank": [4]}, "base": {"model": "m"}},
        )

    def test_large_numbers_and_words_that_look_like_others_survive(self) -> None:
        text = "name: '1e-3'\nbig: 123456789012345678901234567890\nsmall: 1.50\n"
        assert edited(text, [at("repeat", to=2)])[0] == text + "repeat: 2\n"
        assert read_yaml(edited(text, [at("name", to="0x1F")])[0])["name"] == "0x1F"


class TestJson:
    def test_it_stays_json_in_its_form(self) -> None:
        text = json.dumps({"name": "x", "base": {"training": {"epochs": 1}}, "grid": {"rank": [1, 2]}}, indent=2)
        found, value = edited(text, [at("base", "layer", to="tt"), at("grid", "rank", to=[4]), at("repeat", to=3)])
        assert (
            json.loads(found)
            == value
            == {
                "name": "x",
                "base": {"training": {"epochs": 1}, "layer": "tt"},
                "grid": {"rank": [4]},
                "repeat": 3,
            }
        )
        assert '    },\n    "layer": "tt"\n  },' in found
        found, value = edited(found, [without("name"), without("grid", "rank"), without("repeat")])
        assert json.loads(found) == value == {"base": {"training": {"epochs": 1}, "layer": "tt"}}
        assert edited('{"name": "x"}', [at("repeat", to=2)])[0] == '{"name": "x", "repeat": 2}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("name: [", "line 2"),
        ("- x", "must be an object"),
        ("name: .nan", "name: NaN"),
        ('{"name": 1, "name": 2}', "twice"),
        ("a: &b 1\nc: *b", "anchors"),
    ],
)
def test_a_text_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        edited(text, [at("repeat", to=2)])


def test_what_is_no_object_is_in_the_way() -> None:
    with pytest.raises(SpecError) as caught:
        edited("base: {training: 5}", [at("base", "training", "lr", to=1)])
    assert caught.value.problems[0].field == "base.training"


WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["a", "b", "grid", "1e-3", "no", "~", "2026-01-01", "x: y", "- z", "# c", "two\nlines\n", " l", "[", "'"]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=10,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=4)


def _flow(value: Any) -> str:
    return write_yaml(value) if not value else "# c\n" + "".join(write_yaml({k: v}) for k, v in value.items())


@given(VALUES)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert json.dumps(read_yaml(write_yaml(value))) == json.dumps(value)


@given(OBJECTS, st.data(), st.sampled_from([write_yaml, _flow, json.dumps, lambda v: json.dumps(v, indent=1)]))
def test_every_change_is_what_was_asked_for(
    value: dict[str, Any], data: st.DataObject, write: Callable[[Any], str]
) -> None:
    """Of any document, however it is written: the same as changing the value."""
    text = write(value)
    for _ in range(3):
        inside: Any = value
        path: list[str] = []
        while isinstance(inside, dict) and (not path or data.draw(st.booleans())):
            path.append(data.draw(st.sampled_from([*inside, "new"])))
            inside = inside.get(path[-1], {})
        edit = Edit(tuple(path), data.draw(VALUES), data.draw(st.booleans()))
        expected = json.loads(json.dumps(value))
        parents = [expected]
        for name in path[:-1]:
            parents.append(parents[-1].get(name) or {} if edit.remove else parents[-1].setdefault(name, {}) or {})
            if not edit.remove:
                parents[-2][name] = parents[-1]
        if edit.remove:
            there = path[-1] in parents[-1]
            parents[-1].pop(path[-1], None)
            for parent, child, name in reversed(list(zip(parents, parents[1:], path, strict=False))):
                if there and not child:
                    del parent[name]
        else:
            parents[-1][path[-1]] = edit.value
        text, value = edited(text, [edit])
        assert json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)
        assert json.dumps(read_text(text), sort_keys=True) == json.dumps(expected, sort_keys=True)
