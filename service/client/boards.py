"""Leaderboards, the paper's tables and its presets."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast
from urllib.parse import quote

from service.client.connection import Connection, checked, covers, of_paper
from service.schemas.comparisons import CompareOut
from service.schemas.experiments import PresetOut
from service.schemas.leaderboards import BoardOut, LeaderboardOut, PivotOut, PlaneOut, RowOut, TableOut
from service.schemas.trials import ColumnOut

if TYPE_CHECKING:
    import pandas as pd


class CellFilter(TypedDict, total=False):
    """Which cells are asked for; what is None is left to the service.

    `where` are conditions on fields (`lr<=0.1`), all of which must hold; `rank` is a number or `none`.
    """

    experiment_id: int | None
    tag: str | None
    model: str | None
    layer: str | None
    constraint: str | None
    rank: float | str | None
    protocol: str | None
    min_seeds: int | None
    where: str | Sequence[str] | None


class BoardQuestion(CellFilter, total=False):
    """What may be asked of a data set's leaderboards; what is None is left to the service.

    `metric` is what rows are ranked by (by default the accuracy), `metrics` are those to be shown (`all`: every one),
    `pareto` two or more whose front is marked, `baseline` the cell to which differences are given. `group_by` is a
    field of whose values only the best cell is kept, `sort` one to order by (`-` before it: largest first), `pivot` two
    over which there is a matrix besides. `columns` are the fields that say which cell a row is, by default those that
    differ; `hide` are not shown.
    """

    metric: str
    metrics: str | Sequence[str] | None
    group_by: str | None
    sort: str | None
    pivot: str | Sequence[str] | None
    pareto: str | Sequence[str] | None
    baseline: str | None
    columns: str | Sequence[str] | None
    hide: str | Sequence[str] | None
    limit: int | None
    cursor: str | None


class PlaneQuestion(CellFilter, total=False):
    """Which two metrics, `x` and `y`, are drawn over each other: by default compression and accuracy."""

    x: str
    y: str


class CompareQuestion(TypedDict, total=False):
    """What is compared, two to ten of one kind: `trials` or `experiments` by their numbers, `cells` by fingerprints.

    `baseline` is the one of them to which differences are taken, by default the first; `metrics` are those to be shown
    (`all`: every one); `protocol` that under which results count; `limit` is of rows.
    """

    trials: Sequence[int] | None
    cells: Sequence[str] | None
    experiments: Sequence[int] | None
    baseline: int | str | None
    metrics: str | Sequence[str] | None
    protocol: str | None
    limit: int | None


class TableQuestion(TypedDict, total=False):
    """Which trials a table of the paper is made from: of an experiment, of a scale, under a protocol."""

    experiment_id: int | None
    scale: str | None
    protocol: str | None


class Boards(Connection):
    """Asks for leaderboards, tables and presets."""

    @covers("getLeaderboard")
    def leaderboard(self, dataset: str, **question: Unpack[BoardQuestion]) -> LeaderboardOut:
        """The leaderboards of a data set, one per protocol, ranked by the mean of a metric over seeds."""
        return self._get(LeaderboardOut, _board(dataset), **_asked(BoardQuestion, question))

    @covers("getLeaderboard")
    def leaderboard_text(
        self, dataset: str, *, format: str, standalone: bool = False, **question: Unpack[BoardQuestion]
    ) -> str:
        """Leaderboards as `csv`, `markdown` or `latex` (`standalone`: a whole document)."""
        asked = _asked(BoardQuestion, question)
        return self._text(_board(dataset), **asked, format=format, standalone=standalone or None)

    def leaderboard_frame(self, dataset: str, **question: Unpack[BoardQuestion]) -> "pd.DataFrame":
        """The first board as a data frame, its columns the fields in which rows differ; pandas must be there."""
        from service.client.frames import board_frame

        boards = self.leaderboard(dataset, **question).boards
        empty = BoardOut(protocol="", record={}, rows=[], total=0, unmeasured=0, apart=[])
        return board_frame(boards[0] if boards else empty)

    def pivot_frame(self, dataset: str, **question: Unpack[BoardQuestion]) -> "pd.DataFrame":
        """The first board's matrix over the two fields of `pivot` as a data frame: means, deviations, n of N trials.

        pandas must be there. Without a result on the data set it has no rows.
        """
        from service.client.frames import pivot_frame

        named = question.get("pivot") or ()
        fields = [name.strip() for name in (named.split(",") if isinstance(named, str) else named)]
        question["limit"] = 1
        boards = self.leaderboard(dataset, **question).boards  # refuses all but two fields
        if boards and boards[0].pivot is not None:
            return pivot_frame(boards[0].pivot)
        if len(fields) != 2:
            raise ValueError("pivot: name the two fields of the matrix, as in pivot=('rank', 'lr')")
        down, across = (ColumnOut(field=name, name=name) for name in fields)
        return pivot_frame(PivotOut(down=down, across=across, rows=[], columns=[], cells=[]))

    @covers("getLeaderboard")
    def board_rows(self, dataset: str, protocol: str, **question: Any) -> Iterator[RowOut]:
        """All rows of one board, best first; pages are fetched as they are needed; `question` as of `leaderboard`."""
        asked = checked(BoardQuestion, question) | {"protocol": protocol}  # a wrong name is told at once
        return self._board_rows(dataset, cast(BoardQuestion, asked))

    def _board_rows(self, dataset: str, question: BoardQuestion) -> Iterator[RowOut]:
        while boards := self.leaderboard(dataset, **question).boards:
            yield from boards[0].rows
            question["cursor"] = boards[0].next
            if boards[0].next is None:
                return

    @covers("getPlane")
    def plane(self, dataset: str, **question: Unpack[PlaneQuestion]) -> PlaneOut:
        """All cells of one board in two metrics, by column, with the Pareto front of both."""
        return self._get(PlaneOut, f"{_board(dataset)}/plane", **_asked(PlaneQuestion, question))

    @covers("getComparison")
    def compare(self, **question: Unpack[CompareQuestion]) -> CompareOut:
        """Trials, cells or experiments beside each other: what differs, and the differences of their results."""
        return self._get(CompareOut, "/v1/compare", **_asked(CompareQuestion, question))

    @covers("getComparison")
    def compare_text(self, *, format: str, standalone: bool = False, **question: Unpack[CompareQuestion]) -> str:
        """The same as `csv`, `markdown` or `latex`."""
        asked = _asked(CompareQuestion, question)
        return self._text("/v1/compare", **asked, format=format, standalone=standalone or None)

    @covers("getTable")
    def table(self, name: str, **question: Unpack[TableQuestion]) -> TableOut:
        """A table of the paper (`senderovich2022/table2`), the printed values beside ours."""
        return self._get(TableOut, f"/v1/tables/{of_paper(name)}", **_asked(TableQuestion, question))

    @covers("getTable")
    def table_text(self, name: str, *, format: str, standalone: bool = False, **question: Unpack[TableQuestion]) -> str:
        """The same as `csv`, `markdown` or `latex`."""
        asked = _asked(TableQuestion, question)
        path = f"/v1/tables/{of_paper(name)}"
        return self._text(path, **asked, format=format, standalone=standalone or None)

    @covers("listPresets")
    def presets(self) -> list[PresetOut]:
        """The tables and figures of the paper that can be asked for."""
        return self._list(PresetOut, "/v1/presets")

    @covers("getPreset")
    def preset(self, name: str, *, scale: str = "full", protocol: str = "code") -> dict[str, Any]:
        """A preset as a spec, to be changed and submitted."""
        path = f"/v1/presets/{of_paper(name)}"
        spec: dict[str, Any] = self._send("GET", path, params={"scale": scale, "protocol": protocol}).json()
        return spec


def _board(dataset: str) -> str:
    return f"/v1/leaderboards/{quote(dataset, safe=':')}"


def _asked(kind: type, question: BoardQuestion | PlaneQuestion | TableQuestion | CompareQuestion) -> dict[str, object]:
    """A question as parameters of the API: several names are one text."""
    asked = checked(kind, question)
    if "experiment_id" in asked:
        asked["experiment"] = asked.pop("experiment_id")
    for name in ("metrics", "pareto", "columns", "hide", "pivot", "trials", "cells", "experiments"):
        if (names := question.get(name)) is not None and not isinstance(names, str):
            asked[name] = ",".join(map(str, cast(Iterable[object], names)))
    return asked
