"""Requests about leaderboards, the paper's tables and its presets."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx2 as httpx

from service.client.calls import Call, Paged, covers, joined, parsed, parsed_list, query, segment, text
from service.schemas.experiments import PresetOut
from service.schemas.leaderboards import LeaderboardOut, RowOut, TableOut


@covers("getLeaderboard")
def leaderboard(
    dataset: str,
    *,
    metric: str = "accuracy",
    metrics: str | Sequence[str] | None = None,
    experiment_id: int | None = None,
    tag: str | None = None,
    model: str | None = None,
    layer: str | None = None,
    constraint: str | None = None,
    rank: float | str | None = None,
    protocol: str | None = None,
    min_seeds: int | None = None,
    group_by: str | None = None,
    pareto: str | Sequence[str] | None = None,
    baseline: str | None = None,
    limit: int | None = None,
    cursor: str | None = None,
) -> Call[LeaderboardOut]:
    """The leaderboards of a data set, one per protocol, ranked by the mean of `metric` over seeds.

    `metrics` are those to be shown (`all`: every one), `pareto` two or more whose front is marked, `baseline` the cell
    to which differences are given, `group_by` a field of whose values only the best cell is kept.
    """
    params = query(
        metric=metric,
        metrics=joined(metrics),
        experiment=experiment_id,
        tag=tag,
        model=model,
        layer=layer,
        constraint=constraint,
        rank=rank,
        protocol=protocol,
        min_seeds=min_seeds,
        group_by=group_by,
        pareto=joined(pareto),
        baseline=baseline,
        limit=limit,
        cursor=cursor,
    )
    return Call("GET", f"/v1/leaderboards/{segment(dataset)}", parsed(LeaderboardOut), params=params)


@covers("getLeaderboard")
def leaderboard_text(dataset: str, *, format: str, standalone: bool = False, **asked: Any) -> Call[str]:
    """Leaderboards as `csv`, `markdown` or `latex` (`standalone`: a whole document); `asked` as of `leaderboard`."""
    return _as_text(leaderboard(dataset, **asked), format, standalone)


@covers("getLeaderboard")
def board_rows(dataset: str, protocol: str, **asked: Any) -> Paged[RowOut]:
    """All rows of one board, best first; pages are fetched as they are needed; `asked` as of `leaderboard`."""
    first = leaderboard(dataset, protocol=protocol, **asked)
    return Paged(first, lambda page: page.boards[0].rows if page.boards else (), _next_of_board)


@covers("getTable")
def table(
    name: str, *, experiment_id: int | None = None, scale: str | None = None, protocol: str | None = None
) -> Call[TableOut]:
    """A table of the paper (`senderovich2022/table2`), the printed values beside ours."""
    params = query(experiment=experiment_id, scale=scale, protocol=protocol)
    paper, _, rest = name.partition("/")
    return Call("GET", f"/v1/tables/{segment(paper)}/{segment(rest)}", parsed(TableOut), params=params)


@covers("getTable")
def table_text(name: str, *, format: str, standalone: bool = False, **asked: Any) -> Call[str]:
    """The same as `csv`, `markdown` or `latex`; `asked` as of `table`."""
    return _as_text(table(name, **asked), format, standalone)


@covers("listPresets")
def presets() -> Call[list[PresetOut]]:
    """The tables and figures of the paper that can be asked for."""
    return Call("GET", "/v1/presets", parsed_list(PresetOut))


@covers("getPreset")
def preset(name: str, *, scale: str = "full", protocol: str = "code") -> Call[dict[str, Any]]:
    """A preset as a spec, to be changed and submitted."""
    path = "/v1/presets/" + "/".join(segment(part) for part in name.split("/"))
    return Call("GET", path, _plain, params=query(scale=scale, protocol=protocol))


def _as_text(call: Call[Any], format: str, standalone: bool) -> Call[str]:
    asked = call.asking(format=format, standalone=standalone or None)
    return Call(asked.method, asked.path, text, params=asked.params)


def _plain(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()
    return found


def _next_of_board(page: LeaderboardOut) -> Mapping[str, Any] | None:
    following = page.boards[0].next if page.boards else None
    return None if following is None else {"cursor": following}
