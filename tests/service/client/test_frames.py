"""Data frames of what the API says."""

from service.api.openapi_examples.leaderboards import LEADERBOARD
from service.client.frames import board_frame
from service.schemas.leaderboards import LeaderboardOut


def test_a_leaderboard_has_the_fields_that_differ() -> None:
    (board,) = LeaderboardOut.model_validate(LEADERBOARD).boards
    frame = board_frame(board)
    assert list(frame.columns)[:6] == ["place", "rank", "seeds", "trials", "accuracy", "accuracy_std"]
    assert frame.loc[board.rows[0].cell, "accuracy_std"] == 0.00197
    assert frame.loc[board.rows[0].cell, "rank"] == 16
    assert frame.attrs["common"]["training.lr"] == 0.05
