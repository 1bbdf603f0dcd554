"""Whose trials go on where trials give way."""

from service.queue.contenders import Contender
from service.queue.shares import Amount, Demand, Usage, allocate
from workers.worker.scheduler import going_on

NODE = [Amount(8, 2)]


def told(demands: list[Demand], usage: Usage) -> tuple[dict[int, int], dict[int, int]]:
    """Their shares, and of each how many go on."""
    shares = allocate(demands, NODE, most_experiments=9, usage=usage)
    holding, firm = (allocate(demands, NODE, most_experiments=9, firm=firm) for firm in (False, True))
    found = [Contender(demand, preempt=True, claimed=True, waiting=None, unfit_since=None) for demand in demands]
    return shares, going_on(found, shares, holding, firm)


def test_turns_that_come_and_go_stop_no_trial() -> None:
    """Three share one place for six processors; who is next changes with each second that one of them runs."""
    usage, turns = Usage(), set[int]()
    for second in range(240):
        holder = (1, 3, 4)[second // 20 % 3]  # as trials end
        asked = [
            Demand(1, 9, Amount(6), priority=1, project_id=2, owner="bob", running=int(holder == 1)),
            Demand(2, 1, Amount(1, 0.3), running=1),
            Demand(3, 9, Amount(6), priority=1, owner="bob", running=int(holder == 3)),
            Demand(4, 1, Amount(6), owner="ada", running=int(holder == 4)),
        ]
        usage.add(asked, NODE, 1)
        shares, going_on = told(asked, usage)
        turns |= shares.keys()
        assert going_on[holder] == 1, second
    assert turns == {1, 2, 3, 4}


def test_who_lacks_what_is_due_to_it_as_a_whole_has_it_at_once() -> None:
    urgent = Demand(2, 2, Amount(2), owner="bob")
    running = Demand(1, 9, Amount(2), owner="ada", running=4)
    assert told([running], Usage())[1] == {1: 4}
    assert told([running, urgent], Usage())[1] == {1: 2, 2: 2}
