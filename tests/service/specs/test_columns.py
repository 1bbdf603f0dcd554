"""Which fields tell configurations apart, and what they are called."""

from typing import Any

import pytest

from service.errors import QueryError
from service.specs.columns import columns_of, known_field, short_name, told
from ttsv.config.trial import TrialConfig, field_infos


def config(**fields: object) -> dict[str, Any]:
    return dict(TrialConfig.from_dict({"dataset": "digits", "model": "small-cnn", **fields}).to_dict())


def test_names_are_short_and_no_two_alike() -> None:
    names = {path: short_name(path) for path in field_infos()}
    assert len(set(names.values())) == len(names)
    assert (names["training.lr"], names["clipping.every"], names["division.every"]) == (
        "lr",
        "clipping.every",
        "division.every",
    )
    assert (names["seed"], names["evaluation.seed"]) == ("seed", "evaluation.seed")
    for path, name in names.items():
        assert known_field(path, "where") == known_field(name, "where") == path


def test_what_differs_and_what_is_shared() -> None:
    configs = [config(training={"lr": lr, "epochs": 3}, augmentation={"flip": lr > 0.1}) for lr in (0.1, 0.2)]
    found = columns_of(configs)
    assert [column.name for column in found.fields] == ["lr", "flip"]
    assert found.of(configs[1]) == {"training.lr": 0.2, "augmentation.flip": True}
    assert set(found.common) == set(field_infos()) - {"training.lr", "augmentation.flip"}
    assert found.notable == {"model": "small-cnn", "layer": "dense", "epochs": 3}


def test_what_an_older_configuration_lacks_is_at_its_default() -> None:
    old, new = config(), config()
    del old["augmentation"]
    assert columns_of([old, new]).fields == []
    found = columns_of([old, config(augmentation={"pad": 4})])
    assert found.of(old) == {"augmentation.pad": 0}
    assert told(config(augmentation={"pad": 4}, seed=3)) == {
        "model": "small-cnn",
        "layer": "dense",
        "augmentation.pad": 4,
    }


def test_columns_are_chosen_and_hidden() -> None:
    configs = [config(seed=0, rank=2, layer="tt"), config(seed=1, rank=4, layer="tt")]
    assert [column.field for column in columns_of(configs, hidden=["seed"]).fields] == ["rank"]
    found = columns_of(configs, chosen=["training.lr", "rank"], hidden=["rank"])
    assert [column.field for column in found.fields] == ["training.lr"]
    assert "training.lr" not in found.common
    assert columns_of([]).fields == []


@pytest.mark.parametrize(("name", "near"), [("lern", "lr"), ("training.epoch", "training.epochs"), ("LAYER", "layer")])
def test_an_unknown_field_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(QueryError, match=f"the nearest is {near}"):
        known_field(name, "where")
