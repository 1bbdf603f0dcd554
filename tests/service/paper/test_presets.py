"""The paper's tables and figures as specs."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from service.errors import NotFoundError
from service.paper.presets import Scale, preset_spec, presets
from service.paper.recipes import Protocol
from service.paper.reference import headline, paper_table
from service.specs.grid import Plan, expand_grid
from service.specs.spec import ExperimentSpec
from ttsv.config.evaluation import EVALUATION, EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import dataset_info
from ttsv.models.shapes import layer_shapes, shape_compression

NAMES = [preset.name for preset in presets()]


def plan(name: str, **options: Any) -> Plan:
    return expand_grid(ExperimentSpec.model_validate(preset_spec(f"senderovich2022/{name}", **options)), max_trials=500)


def configs(name: str, **options: Any) -> list[TrialConfig]:
    return [planned.config for planned in plan(name, **options).trials]


def test_every_table_and_figure_is_there() -> None:
    assert [name.removeprefix("senderovich2022/") for name in NAMES] == [
        "table1",
        "table2",
        "table3",
        "table4",
        "figure-vgg",
        "figure-lipschitz",
        "figure-speedup",
        "figure-soc-speedup",
    ]


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("name", NAMES)
def test_every_trial_has_a_network_for_its_images(name: str, scale: Scale, protocol: Protocol) -> None:
    found = plan(name.removeprefix("senderovich2022/"), scale=scale, protocol=protocol)
    assert scale is Scale.SMOKE or found.points == len(found.trials), "no two cells are one"
    for planned in found.trials:
        config = planned.config
        info = dataset_info(config.dataset)
        assert info is not None
        shapes = layer_shapes(
            config.model, in_channels=info.channels, image_size=info.image_size, num_classes=info.classes
        )
        assert shapes
        if scale is Scale.SMOKE:
            assert info.embedded
            assert config.training.epochs * (config.training.steps or 99) <= 4


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(NotFoundError, match="no preset 'table1'; the nearest is senderovich2022/table1; there are "):
        preset_spec("table1")


COMPRESSIONS: dict[tuple[str, float | None], float] = {  # of every compressed row that the paper prints
    ("lipconvnet-5", 128): 2.9,
    ("lipconvnet-5", 256): 1.2,
    ("lipconvnet-20", 128): 3.3,
    ("lipconvnet-20", 256): 1.4,
    ("lipconvnet-30", 128): 3.5,
    ("lipconvnet-30", 256): 1.5,
    ("wrn16-10", 192): 3.6,
    ("wrn16-10", 256): 2.4,
    ("wrn16-10", 320): 1.8,
}


@pytest.mark.parametrize("name", ["table1", "table2", "table4"])
def test_compressions_are_those_printed(name: str) -> None:
    seen = set()
    for config in configs(name):
        shapes = layer_shapes(config.model, num_classes=10)
        found = shape_compression(shapes, config.rank, config.layer)
        key = (config.model, config.rank)
        assert round(found, 1) == COMPRESSIONS.get(key, 1.0)
        seen.add(key)
    assert len(seen) == (9 if name == "table1" else 4)


def test_rows_are_those_printed() -> None:
    table1 = {(c.model, c.layer, c.rank) for c in configs("table1")}
    assert table1 == {
        (f"lipconvnet-{depth}", "soc" if rank is None else "soc-tt", rank)
        for depth in (5, 20, 30)
        for rank in (None, 128, 256)
    }
    for name, dataset in (("table2", "cifar10"), ("table4", "cifar100")):
        rows = {(c.constraint, c.delta, c.rank) for c in configs(name)}
        assert rows == {
            (constraint, delta, rank)
            for constraint, delta in (("none", None), ("clip", 1.0), ("clip", 2.0), ("divide", None))
            for rank in (None, 192, 256, 320)
        }
        assert {c.dataset for c in configs(name)} == {dataset}
    table3 = {(c.model, c.lambda_ort) for c in configs("table3")}
    assert len(table3) == len(configs("table3")) == 18
    assert {("lipconvnet-5", 5e3), ("lipconvnet-20", 4e5), ("lipconvnet-30", 1.2e6)} <= table3


def test_where_text_and_programs_differ_both_are_there() -> None:
    both = (Protocol.CODE, Protocol.TEXT)
    assert [{c.training.gamma for c in configs("table2", protocol=p)} for p in both] == [{0.2}, {0.1}]
    normalizers = [{c.ort_normalizer for c in configs("table3", protocol=p)} for p in both]
    assert normalizers == [{"code"}, {"paper"}]
    rates = [
        {c.training.lr for c in configs("table1", protocol=p) if c.model == "lipconvnet-30" and c.rank} for p in both
    ]
    assert rates == [{0.05}, {0.1}]
    iterations = [
        {c.division.power_iterations for c in configs("table2", protocol=p) if c.constraint == "divide"} for p in both
    ]
    assert iterations == [{2}, {1}]
    selections = [{c.training.select for c in configs("table2", protocol=p)} for p in Protocol]
    assert selections == [{"last"}, {"last"}, {"best"}]


@pytest.mark.parametrize("name", ["table1", "table3", "figure-lipschitz"])
def test_the_authors_evaluate_the_last_epoch_of_lipconvnets_and_keep_the_best_certified_one(name: str) -> None:
    for protocol in Protocol:
        found = {
            (c.training.validation, c.training.select, c.training.keep_best, c.training.best_by)
            for c in configs(name, protocol=protocol)
        }
        theirs = protocol is Protocol.AUTHORS
        assert found == {("test", "last", theirs, "certified" if theirs else "accuracy")}
        schedules = {c.training.soc_iterations for c in configs(name, protocol=protocol)}
        assert schedules == {"code" if theirs else "one"}


@pytest.mark.parametrize("name", ["table2", "table4", "figure-vgg"])
def test_the_authors_evaluate_what_training_left(name: str) -> None:
    for protocol in Protocol:
        found = {(c.constraint != "none", c.training.final_projection) for c in configs(name, protocol=protocol)}
        assert found == {(False, True), (True, protocol is not Protocol.AUTHORS)}


def test_networks_are_evaluated_as_the_paper_does() -> None:
    for name in ("table1", "table2", "table3", "table4", "figure-vgg", "figure-lipschitz"):
        for config in configs(name):
            found = config.evaluation
            assert (found.attack, found.attack_norm, found.attack_eps, found.attack_version) == (
                "autoattack",
                "L2",
                0.5,
                "standard",
            )
            assert (found.attack_images, found.corruptions, found.corruption_images) == (None, "published", None)
            assert found.certified
            assert (found.lipschitz == "both") == (name in ("table3", "figure-lipschitz"))
        for config in configs(name, scale=Scale.SMOKE):
            found = config.evaluation
            assert (found.attack, found.corruptions, found.certified) == ("pgd", "generated", True)
            assert (found.attack_images, found.corruption_images) == (4, 1)
            assert (found.lipschitz, found.lipschitz_images) == (
                ("fgsm", 2) if name in ("table3", "figure-lipschitz") else ("none", None)
            )
    for name in ("figure-speedup", "figure-soc-speedup"):
        assert {config.evaluation for config in configs(name)} == {EVALUATION}


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("scale", Scale)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_measures_what_its_table_shows(name: str, scale: Scale, protocol: Protocol) -> None:
    """Each column has its evaluation, and each trial its row."""
    table = paper_table(*name.split("/"))
    asked: dict[str, Callable[[EvaluationConfig], bool]] = {
        "robust_accuracy": lambda evaluation: evaluation.attack != "none",
        "corruption_accuracy": lambda evaluation: evaluation.corruptions != "none",
        "assumed_certified_36": lambda evaluation: evaluation.certified,
        "lipschitz_fgsm": lambda evaluation: "fgsm" in evaluation.lipschitz_methods,
    }
    rows = {headline(row.smoke if scale is Scale.SMOKE else row.config) for row in table.rows}
    for planned in plan(name.partition("/")[2], scale=scale, protocol=protocol).trials:
        config = planned.config
        assert [column for column in table.columns if column in asked and not asked[column](config.evaluation)] == []
        assert headline(config.to_dict()) in rows


def test_cells_with_other_hyperparameters() -> None:
    decays = {c.constraint: c.training.weight_decay for c in configs("table4")}
    assert decays == {"none": 1e-4, "clip": 1e-4, "divide": 5e-5}
    for config in configs("table1"):
        assert config.training.weight_decay == (5e-4 if config.layer == "soc" else 0.0)
        assert (config.training.nesterov, config.augmentation.padding) == (False, "zeros")
        assert config.mean == (0.4914, 0.4822, 0.4465)
        assert config.std == (0.2507,)
    vgg = configs("figure-vgg")
    assert {c.training.amsgrad for c in vgg} == {True}
    assert {(c.dataset, c.rank, c.constraint) for c in vgg} == {
        (dataset, rank, constraint)
        for dataset in ("cifar10", "cifar100")
        for rank in (None, 192, 256, 320)
        for constraint in ("none", "clip", "divide")
        if rank is None or constraint != "divide"
    }


def test_vgg_is_divided_as_it_is_unless_the_text_is_asked_for() -> None:
    for protocol, iterations, ranks in (
        (Protocol.CODE, 2, {None}),
        (Protocol.AUTHORS, 2, {None}),
        (Protocol.TEXT, 1, {None, 192, 256, 320}),
    ):
        divided = [c for c in configs("figure-vgg", protocol=protocol) if c.constraint == "divide"]
        assert {c.division.power_iterations for c in divided} == {iterations}
        assert {(c.dataset, c.rank, c.layer) for c in divided} == {
            (dataset, rank, "tt" if rank else "dense") for dataset in ("cifar10", "cifar100") for rank in ranks
        }
        # The small stand-in takes every way, too.
        small = {(c.constraint, c.layer) for c in configs("figure-vgg", scale=Scale.SMOKE, protocol=protocol)}
        assert small >= {("none", "dense"), ("clip", "dense"), ("clip", "tt"), ("divide", "dense")}


class TestApi:
    def test_listing_showing_posting(self, api: TestClient) -> None:
        assert [preset["name"] for preset in api.get("/v1/presets").json()] == NAMES
        shown = api.get("/v1/presets/senderovich2022/table2", params={"scale": "smoke", "protocol": "text"}).json()
        assert shown["name"] == "senderovich2022/table2 (smoke, text)"
        headers = {"Idempotency-Key": "once"}
        url = "/v1/presets/senderovich2022/table2?scale=smoke&protocol=text"
        first, again = (api.post(url, headers=headers) for _ in range(2))
        assert first.status_code == 201
        assert first.json() == again.json()
        assert first.headers["Location"] == f"/v1/experiments/{first.json()['id']}"
        assert first.json()["trial_count"] == 8
        posted = api.post("/v1/experiments", json=shown).json()
        assert posted["spec"] == first.json()["spec"]

    def test_refusals(self, api: TestClient) -> None:
        for answer in (api.get("/v1/presets/senderovich2022/table9"), api.post("/v1/presets/x/y")):
            assert answer.status_code == 404
            assert "senderovich2022/table1" in answer.json()["detail"]
        wrong = api.get("/v1/presets/senderovich2022/table1?scale=large")
        assert wrong.status_code == 422
        assert wrong.json()["errors"][0]["field"] == "scale"


@pytest.mark.parametrize("name", [name.removeprefix("senderovich2022/") for name in NAMES])
def test_singular_values_are_looked_at_twenty_times_and_change_no_trial(name: str) -> None:
    spec = preset_spec(f"senderovich2022/{name}")
    every = spec["base"]["training"].pop("spectra_every", None)
    plain = expand_grid(ExperimentSpec.model_validate(spec), max_trials=500)
    epochs = {one.config.training.epochs for one in plain.trials}
    assert every == (None if "speedup" in name else max(epochs) // 20)
    fingerprints = [one.config.fingerprint() for one in plain.trials]
    assert [one.fingerprint() for one in configs(name)] == fingerprints
