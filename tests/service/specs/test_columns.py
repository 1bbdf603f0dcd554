"""Which fields tell configurations apart, and what they are called."""

import itertools
import json
import random
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


def test_a_last_part_of_several_fields_is_refused_with_all_of_them() -> None:
    with pytest.raises(
        QueryError, match=r"batch_size may be training\.batch_size or evaluation\.batch_size: write which"
    ):
        known_field("batch_size", "sort")


def drawn(rng: random.Random) -> list[dict[str, Any]]:
    """A grid in which some fields follow from others, a part of its trials, each with several seeds."""
    lrs, pads = rng.sample([0.1, 0.05, 0.01, 0.2], 3), rng.sample([0, 2, 4], 2)
    cells = []
    for rank, lr, pad in itertools.product((None, 2, 4, 8), lrs, pads):
        part = {"lambda_ort": rng.choice([0.1, 1.0])} if rank else {}
        layer = "tt" if rank else "dense"
        training = {"lr": lr, "epochs": 3 + lrs.index(lr), "batch_size": rng.choice([32, 64])}
        cells.append({"layer": layer, "rank": rank, **part, "training": training, "augmentation": {"pad": pad}})
    kept = rng.sample(cells, rng.randint(2, len(cells)))
    return [config(**cell, seed=seed) for cell in kept for seed in range(rng.randint(1, 3))]


@pytest.mark.parametrize("seed", range(20))
def test_rows_tell_themselves_apart_without_what_others_decide(seed: int) -> None:
    configs = drawn(random.Random(seed))
    found = columns_of(configs, without_decided=True)
    shown = [found.of(one) for one in configs]
    assert len({json.dumps(one) for one in shown}) == len(configs)
    kept = [column.field for column in found.fields]
    columns = {json.dumps([one[path] for path in kept]) for one in shown}
    assert len(columns) == len(configs)
    every = {column.field for column in columns_of(configs).fields}
    assert {*kept, *(column.field for column in found.decided)} == every
    assert [column.field for column in columns_of(configs, chosen=["layer"], without_decided=True).fields] == ["layer"]


def test_what_one_field_decides_is_no_column_of_its_own() -> None:
    grid = itertools.product((None, 2, 4, 8), (0.1, 0.2), (0, 1, 2))
    configs = [
        config(rank=rank, layer="tt" if rank else "dense", training={"lr": lr, "epochs": round(lr * 10)}, seed=seed)
        for rank, lr, seed in grid
    ]
    found = columns_of(configs, without_decided=True)
    assert [column.name for column in found.fields] == ["rank", "seed", "lr"]
    assert [column.name for column in found.decided] == ["layer", "epochs"]
    hidden = columns_of(configs, hidden=["rank"], without_decided=True)
    assert "layer" in [column.name for column in hidden.fields]


def test_a_value_that_each_row_has_for_itself_decides_nothing() -> None:
    rng = random.Random(0)
    configs = [
        config(layer="tt", rank=rng.choice([2, 4]), lambda_ort=rng.random(), training={"lr": rng.random()}, seed=seed)
        for _ in range(20)
        for seed in (0, 1)
    ]
    assert not columns_of(configs, without_decided=True).decided


def test_of_many_fields_those_that_people_ask_for_are_shown_first() -> None:
    configs = [
        config(rank=2 + index, layer="tt", training={"lr": 0.1 + index, "epochs": index}, augmentation={"pad": index})
        for index in (1, 2)
    ]
    shape, others = columns_of(configs).first(2)
    assert [column.name for column in shape.fields] == ["rank", "lr"]
    assert [column.name for column in others] == ["epochs", "pad"]


def test_seeds_are_told_apart_however_much_differs() -> None:
    configs = [
        config(seed=seed, rank=2 + seed, layer="tt", lambda_ort=seed, model=model)
        for seed, model in enumerate(("small-cnn", "vgg11"))
    ]
    assert [column.name for column in columns_of(configs).first(2)[0].fields] == ["model", "seed"]
