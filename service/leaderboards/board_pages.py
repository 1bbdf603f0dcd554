"""Which rows of a board a page of it shows, in which order, and in which places they stand.

By the metric that ranks, by the values of a field, or the best row of each group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from service.errors import FieldProblem, QueryError
from service.leaderboards.boards import Group, Position
from service.leaderboards.conditions import COLUMNS
from service.leaderboards.filters import Question
from service.leaderboards.metrics import Metric
from service.leaderboards.source import BEST, WORST, BoardKey, ScoreSource, compared_whole, hashable
from service.specs.columns import value_of
from ttsv.config.fields import FieldValue

_FEW_ROWS = 300
"""Rows that are read whole for one of their fields: of more all the board's values come sooner."""
_GROUPS = 5 * BEST
"""Groups, best first by the ranked metric, that a page is compared with: in another metric others may lead."""


@dataclass(frozen=True)
class BoardPage:
    """Which rows of a board are shown, by their keys and best first; `first` stands in place `place`.

    In another order than that of the metric `places` has their places. `others` are rows that lead or end the board
    where it is made of groups, of which some are not shown.
    """

    board: BoardKey
    order: list[tuple[int, Position]]
    total: int
    following: Position | None
    place: int
    first: int
    groups: dict[int, Group]
    places: dict[int, int] | None = None
    others: Sequence[int] = ()


def page_of(source: ScoreSource, board: BoardKey, question: Question) -> BoardPage:
    """The page of a board that a question asks for."""
    metric, limit = question.metric, question.limit
    if question.group_by:
        return _grouped(source, board, question, question.group_by, question.sort)
    if question.sort:
        return _sorted(source, board, question, question.sort)
    order = list(source.ranked(board, metric, limit + 1, question.after).items())
    following = order[limit - 1][1] if len(order) > limit else None
    better, upto = source.ahead(board, metric, order[0][1]) if question.after is not None and order else (0, 1)
    return BoardPage(board, order[:limit], board.ranked, following, better + 1, upto, {})


def _sorted(source: ScoreSource, board: BoardKey, question: Question, sort: str) -> BoardPage:
    """The rows in the order of a field's values, those without one last; equal ones by the metric."""
    metric = question.metric
    order = source.order(board, metric)
    wanted = _by_field(source, board, order, sort)
    begin = 0 if question.after is None else wanted.index(_at(source, board, metric, order, question.after)) + 1
    shown = wanted[begin : begin + question.limit]
    positions = source.positions(board, metric, shown)
    index = {key: index for index, key in enumerate(order)}
    first: dict[tuple[int, float], int] = {}
    for key, position in source.sharing(board, metric, {one.shared for one in positions.values()}).items():
        first[position.shared] = min(index[key], first.get(position.shared, index[key]))
    places = {key: first[positions[key].shared] + 1 for key in shown}
    following = positions[shown[-1]] if begin + len(shown) < len(wanted) else None
    return BoardPage(board, [(key, positions[key]) for key in shown], len(order), following, 1, 1, {}, places)


def _by_field(source: ScoreSource, board: BoardKey, rows: Sequence[int], sort: str) -> list[int]:
    """Rows, given best first, in the order of a field's values; those without one last."""
    field = sort.removeprefix("-")
    if len(rows) <= _FEW_ROWS and field not in COLUMNS:
        values = {key: hashable(value_of(entry.config, field)) for key, entry in source.entries(rows).items()}
    else:
        values = dict(source.values(board, field))
    alike = _alike(rows, values)
    last = alike.pop(None, [])
    return [*chain(*(alike[value] for value in sorted(alike, reverse=sort.startswith("-"))), last)]


def _grouped(source: ScoreSource, board: BoardKey, question: Question, field: str, sort: str | None) -> BoardPage:
    """The best cell of each group, best first or in the order of a field; places are those among the groups."""
    metric = question.metric
    order, values = source.order(board, metric), source.values(board, field)
    alike = _alike(order, values)
    heads = [rows[0] for rows in alike.values()]
    wanted = heads if sort is None else _by_field(source, board, heads, sort)
    begin = 0
    if question.after is not None:
        ended = values[_at(source, board, metric, order, question.after)]
        begin = wanted.index(alike[ended][0]) + 1
    shown = wanted[begin : begin + question.limit]
    positions = source.positions(board, metric, shown)
    index = {key: place for place, key in enumerate(heads, 1)}
    first: dict[tuple[int, float], int] = {}
    for key, position in source.sharing(board, metric, {one.shared for one in positions.values()}).items():
        if key in index:
            first[position.shared] = min(index[key], first.get(position.shared, index[key]))
    places = {key: first[positions[key].shared] for key in shown}
    following = positions[shown[-1]] if begin + len(shown) < len(wanted) else None
    groups = {key: Group(field, values[key], len(alike[values[key]])) for key in shown}
    page = [(key, positions[key]) for key in shown]
    some = heads if compared_whole(len(heads)) else [*heads[:_GROUPS], *heads[_GROUPS:][-WORST:]]
    return BoardPage(board, page, len(heads), following, 1, 1, groups, places, some)


def _at(source: ScoreSource, board: BoardKey, metric: Metric, order: Sequence[int], after: Position) -> int:
    """The row at a position, `order` being all, best first. Raises `QueryError` where it has another one by now."""
    following = next(iter(source.ranked(board, metric, 1, after)), None)
    index = (len(order) if following is None else order.index(following)) - 1
    if index >= 0 and source.positions(board, metric, [order[index]])[order[index]] == after:
        return order[index]
    raise QueryError([FieldProblem("cursor", "the row that it follows has changed since; begin with the first page")])


def _alike(order: Sequence[int], values: Mapping[int, FieldValue]) -> dict[Any, list[int]]:
    """By value, that of the best row first: the rows that have it, best first."""
    found: dict[Any, list[int]] = {}
    for key in order:
        found.setdefault(values[key], []).append(key)
    return found
