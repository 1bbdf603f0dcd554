"""The printed numbers: against the paper's rows, and beside results of the same configurations."""

from typing import Any

import pytest

from service.errors import NotFoundError
from service.leaderboards.metrics import Metric
from service.leaderboards.protocols import Record, measured_otherwise
from service.paper import reference
from service.paper.presets import PAPER, presets
from service.paper.reference import RATIOS, SPEEDUP, paper_table, references
from tests.effort import effort
from ttsv.config.trial import TrialConfig

NAMES = [preset.name.partition("/")[2] for preset in presets()]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_its_table(name: str) -> None:
    table = paper_table(PAPER, name)
    assert table.rows
    assert all(set(row.labels) == set(table.labels) for row in table.rows)
    assert all(column in RATIOS or column in set(Metric) for column in table.columns)
    assert len({tuple(row.labels.values()) for row in table.rows}) == len(table.rows)
    for row in table.rows:
        assert set(row.values) <= set(table.columns)
    assert [column for column in table.columns if column in RATIOS] == list(table.ratios)


@pytest.mark.parametrize(("name", "rows"), [("table1", 9), ("table2", 16), ("table3", 18), ("table4", 16)])
def test_printed_rows_belong_to_their_configurations(name: str, rows: int) -> None:
    """The file's labels, entered by hand, are those that the presets' configurations give."""
    printed = reference._published().tables[name]["rows"]
    table = paper_table(PAPER, name)
    assert len(table.rows) == len(printed) == rows
    for row, entered in zip(table.rows, printed, strict=True):
        assert {label: entered[label] for label in table.labels} == row.labels
        assert row.values["accuracy"].mean * 100 == pytest.approx(
            entered["accuracy"][0] if isinstance(entered["accuracy"], list) else entered["accuracy"]
        )


def test_a_few_numbers_as_printed() -> None:
    """Taken from the paper's text once more."""
    row = next(r for r in paper_table(PAPER, "table1").rows if r.labels == {"rank": 256, "depth": 20})
    assert (row.values["accuracy"].mean, row.values["accuracy"].spread) == (0.784, 0.002)
    assert (row.values["assumed_certified_36"].mean, row.values[SPEEDUP].mean) == (0.656, 1.1)
    row = next(r for r in paper_table(PAPER, "table2").rows if r.labels == {"method": "clip to 2", "rank": None})
    assert (row.values["accuracy"].mean, row.values["robust_accuracy"].mean) == (0.9599, 0.5577)
    assert not row.values["robust_accuracy"].comparable
    row = next(r for r in paper_table(PAPER, "table4").rows if r.labels == {"method": "division", "rank": 320})
    assert (row.values["ece"].mean, row.values["compression"].mean) == (0.1218, 1.8)
    row = next(r for r in paper_table(PAPER, "table3").rows if r.labels == {"depth": 30, "lambda_ort": 1.2e6})
    assert row.values["lipschitz_fgsm"].mean == 0.56


def test_a_row_that_the_text_alone_has_stands_in_the_figure() -> None:
    """The text has division of the compressed VGG-19, too; the others are configured as the programs have them."""
    rows = paper_table(PAPER, "figure-vgg").rows
    methods = {(row.labels["dataset"], row.labels["method"], row.labels["rank"]) for row in rows}
    assert methods == {
        (dataset, method, rank)
        for dataset in ("cifar10", "cifar100")
        for method in ("baseline", "clip to 0.5", "division")
        for rank in (None, 192, 256, 320)
    }
    divided = {
        row.labels["rank"]: TrialConfig.from_dict(row.config).division
        for row in rows
        if row.labels["method"] == "division"
    }
    assert {rank: d.power_iterations for rank, d in divided.items()} == {None: 2, 192: 1, 256: 1, 320: 1}


def test_unknown_tables() -> None:
    for name, asked in (
        (("nobody2000", "table1"), "nobody2000/table1"),
        ((PAPER, "table9"), f"{PAPER}/table9"),
        (("-", "table1"), "table1"),  # as the client asks for a name alone
    ):
        with pytest.raises(NotFoundError, match=f"no table '{asked}'; there are senderovich2022/table1"):
            paper_table(*name)


Config = dict[str, Any]


@pytest.fixture
def clipped() -> Config:
    """WRN-16-10, clip to 2, rank 256, as the preset has it."""
    table = paper_table(PAPER, "table2")
    return next(dict(r.config) for r in table.rows if r.labels == {"method": "clip to 2", "rank": 256})


class TestReferences:
    RECORD: Record = {"weights": "last epoch", "images": {"autoattack": 1000}}  # noqa: RUF012 - nobody changes it

    def test_a_cell_of_the_paper_is_found(self, clipped: Config) -> None:
        (found,) = references(clipped, self.RECORD)
        assert (found.table, found.row) == ("table2", {"method": "clip to 2", "rank": 256})
        assert found.values["accuracy"].mean == 0.9573
        said = "\n".join(found.notes)
        assert "weights: last epoch here; in the paper the epoch is the best one on the test images" in said
        assert "AutoAttack: 1000 images here, 10000 in the paper" in said
        assert "not comparable" in said
        assert "seeds: one run in the paper" in said
        assert not any("training" in note for note in found.notes)

    def test_other_hyperparameters_are_named(self, clipped: Config) -> None:
        training = clipped["training"] | {"epochs": 20, "lr": 0.05}
        (found,) = references(clipped | {"training": training}, self.RECORD)
        assert "training.epochs: 20 here, 200 in the paper" in found.notes
        assert "training.lr: 0.05 here, 0.1 in the paper" in found.notes

    @pytest.mark.parametrize(
        "change",
        [
            {"dataset": "synthetic:3x32x32:10:200"},
            {"dataset": "cifar100"},
            {"rank": 255},
            {"delta": 1.5},
            {"lambda_ort": 1.0},
            {"model": "wrn16-8"},
        ],
    )
    def test_other_cells_are_none_of_it(self, clipped: Config, change: Config) -> None:
        others = references(clipped | change, self.RECORD)
        assert [ref for ref in others if ref.table == "table2"] == []

    def test_a_cell_of_two_tables_has_both(self) -> None:
        row = next(r for r in paper_table(PAPER, "table1").rows if r.labels == {"rank": 256, "depth": 5})
        assert [ref.table for ref in references(row.config, {})] == ["table1", "table3"]


def test_small_stand_ins_are_what_smoke_presets_post() -> None:
    from service.paper.presets import Scale, preset_spec
    from service.specs.grid import expand_grid
    from service.specs.spec import ExperimentSpec

    for name in NAMES:
        spec = ExperimentSpec.model_validate(preset_spec(f"{PAPER}/{name}", scale=Scale.SMOKE))
        posted = {reference.headline(t.config.to_dict()) for t in expand_grid(spec, max_trials=1000).trials}
        stand_ins = {reference.headline(row.smoke) for row in paper_table(PAPER, name).rows}
        assert posted <= stand_ins, name


def test_references_of_many_cells_are_quick() -> None:
    config = {"dataset": "cifar10", "model": "vgg11"}
    references(config, {})  # what is read once is read
    assert effort(lambda: [references(config, {}) for _ in range(1000)]) < 0.5


def test_in_what_data_sets_were_measured_otherwise() -> None:
    records = {name: {"dataset": name, "images": {"accuracy": 9}, "ece": {"bins": 15}} for name in ("one", "two")}
    assert measured_otherwise(records) == measured_otherwise({}) == []
    records["two"] |= {"images": {"accuracy": 8}, "ece": {"bins": 10}}
    assert measured_otherwise(records) == ["two was not measured as one: ece.bins: 10 here, 15 there"]


def test_numbers_have_the_digits_with_which_they_are_printed() -> None:
    """As the file has them: 75.6 ± 0.3 is not 75.60 ± 0.30."""
    table1, table3 = paper_table(PAPER, "table1"), paper_table(PAPER, "table3")
    assert (table1.rows[0].values["accuracy"].decimals, table3.rows[0].values["accuracy"].decimals) == (1, 2)
    for row, first in ((table1.rows[0], "75.6"), (table3.rows[0], "78.37")):
        accuracy = row.values["accuracy"]
        assert f"{accuracy.mean * 100:.{accuracy.decimals}f}" == first


def test_looking_on_is_no_difference_to_the_paper() -> None:
    plain = TrialConfig.from_dict({"dataset": "cifar10", "model": "vgg11"})
    looked = TrialConfig.from_dict({"dataset": "cifar10", "model": "vgg11", "training": {"spectra_every": 5}})
    assert reference.complete(plain.to_dict()) == reference.complete(looked.to_dict())


def test_a_normalisation_written_otherwise_is_no_difference_to_the_paper() -> None:
    """As trials have it that were under way when it was given one form."""
    plain = TrialConfig.from_dict({"dataset": "cifar10", "model": "vgg11"})
    written = TrialConfig.from_dict({"dataset": "cifar10", "model": "vgg11", "mean": [0.5], "std": [0.5, 0.5, 0.5]})
    assert reference.complete(plain.to_dict()) == reference.complete(written.to_dict())
