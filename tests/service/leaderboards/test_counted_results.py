"""Of results of the same trial the newest counts."""

import itertools

from service.leaderboards.counted_results import Counted, newest


def test_of_results_in_any_order_the_newest_trials_count() -> None:
    def counted(trial_id: int, fingerprint: str, protocol: str = "p") -> Counted:
        return Counted(trial_id, fingerprint, None, protocol, [float(trial_id)])

    results = [counted(7, "b"), counted(3, "a"), counted(9, "a"), counted(5, "b"), counted(4, "a", "q")]
    for order in itertools.permutations(results):
        assert [one.trial_id for one in newest(order)] == [4, 7, 9]
