"""A table of the paper for people: which of its numbers are bold."""

from service.leaderboards.boards import Spread
from service.leaderboards.text_tables import Measured
from service.paper.reference import Label
from service.paper.reproduction import Reproduction, TableRow
from service.paper.sheets import table_sheet


def row(labels: dict[str, Label], metric: str, mean: float, *, status: str = "complete") -> TableRow:
    """Of three seeds that hardly differ."""
    spread = Spread(mean=mean, std=1e-4, min=mean, max=mean, seeds=3)
    return TableRow(labels, status, "cell", 3, 3, {metric: spread}, {}, [])


def bold(labels: list[str], metric: str, rows: list[TableRow]) -> list[bool]:
    sheet = table_sheet(Reproduction("name", "title", labels, [metric], {}, [], rows, "paper"))
    cells = [cells[len(labels)] for cells in sheet.rows]
    assert all(isinstance(cell, Measured) for cell in cells)
    return [isinstance(cell, Measured) and cell.best for cell in cells]


def test_each_data_set_has_its_best() -> None:
    """An accuracy on ten classes says nothing of one on a hundred."""
    accuracies = {("cifar10", None): 0.9, ("cifar100", None): 0.6, ("cifar10", 192): 0.9, ("cifar100", 192): 0.7}
    rows = [row({"dataset": d, "rank": rank}, "accuracy", mean) for (d, rank), mean in accuracies.items()]
    assert bold(["dataset", "rank"], "accuracy", rows) == [False, False, False, True]


def test_each_size_of_a_layer_has_its_fastest() -> None:
    seconds = {(128, None): 0.004, (128, 0.5): 0.002, (256, None): 0.03, (256, 0.5): 0.01}
    rows = [row({"channels": c, "rank": rank}, "spectrum_seconds", mean) for (c, rank), mean in seconds.items()]
    assert bold(["channels", "rank"], "spectrum_seconds", rows) == [False, True, False, True]


def test_a_row_that_lacks_seeds_takes_no_part() -> None:
    rows = [row({"rank": rank}, "accuracy", mean) for rank, mean in ((None, 0.5), (192, 0.6))]
    rows.append(row({"rank": 256}, "accuracy", 0.9, status="3 of 5 seeds"))
    assert bold(["rank"], "accuracy", rows) == [False, True, False]


def test_notes_name_rows_as_the_rows_do() -> None:
    spread = Spread(mean=0.5, std=None, min=0.5, max=0.5, seeds=1)
    labels: dict[str, Label] = {"depth": 30, "lambda_ort": 1_200_000.0, "rank": None}
    one = TableRow(labels, "complete", "cell", 1, 1, {"accuracy": spread}, {}, ["the nearest"])
    sheet = table_sheet(Reproduction("name", "title", [*labels], ["accuracy"], {}, [], [one], "paper"))
    assert sheet.texts[0][:3] == ["30", "1200000", "-"]
    assert sheet.notes == ["depth 30, lambda_ort 1200000, rank -: the nearest"]
