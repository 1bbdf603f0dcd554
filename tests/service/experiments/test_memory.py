"""What trials will take of a card: worked out, or by what was measured; and the fraction of a card that is enough."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.database.engine import Database
from service.experiments import submission
from service.experiments.memory import GIB, HELD_IN_PIECES, Memory, MemoryEstimator, advise
from service.queue.leases import Lease
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from ttsv.config.memory import CONTEXT_BYTES, TrialMemory, allocator_share, trial_memory
from ttsv.config.trial import TrialConfig

MIB = 2**20
BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 2, "batch_size": 64}}


def config(**change: Any) -> TrialConfig:
    return TrialConfig.from_dict(BASE | change).canonical()


def trained(**training: Any) -> TrialConfig:
    return config(training=BASE["training"] | training)


def computed(of: TrialConfig) -> TrialMemory:
    found = trial_memory(of)
    assert found is not None
    return found


def test_by_what_was_measured(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    """Of the newest on a GPU, scaled by what is worked out of both; of a network that nobody measured worked out."""
    submit(seeds=3)
    lease = claim()
    finish(lease, 1, peak_memory=900 * MIB)
    finish(lease, 2, peak_memory=600 * MIB)
    finish(lease, 3, peak_memory=None)
    same, larger, other = config(), trained(batch_size=4096), config(layer="tt", rank=4)
    with database.read() as session:
        estimator = MemoryEstimator(session, [same, larger, other])
        nobodys = MemoryEstimator(session, [same], project_id=7)
    found = estimator.estimate(same)
    assert found is not None
    assert found.most == 600 * MIB
    assert found.basis == "what trial 2 took, the newest of this data set, network, layer and rank on a GPU"
    found = estimator.estimate(larger)
    assert found is not None
    assert found.most == pytest.approx(600 * MIB * computed(larger).training / computed(same).training)
    assert "for another batch or training" in found.basis
    for one, whose in ((other, estimator), (same, nobodys)):
        found = whose.estimate(one)
        assert found is not None
        assert (found.most, found.basis.partition(",")[0]) == (computed(one).most, "worked out of its layers")


def test_of_a_network_that_is_known_only_once_built(
    database: Database, claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    unknown = config(model="torchvision:resnet18", dataset="cifar10")
    with database.read() as session:
        assert MemoryEstimator(session, [unknown]).estimate(unknown) is None
    spec = ExperimentSpec(name="unknown", base=BASE | {"model": unknown.model, "dataset": unknown.dataset})
    database.write(lambda session: submission.submit(session, submission.Draft(spec, expand_grid(spec, max_trials=1))))
    finish(claim(), 1, peak_memory=2 * GIB)
    for training, times in (({}, 1), ({"batch_size": 128}, 2), ({"batch_size": 16}, 1), ({"precision": "bf16"}, 1)):
        wanted = TrialConfig.from_dict({**unknown.to_dict(), "training": BASE["training"] | training}).canonical()
        with database.read() as session:
            found = MemoryEstimator(session, [wanted]).estimate(wanted)
        assert found is not None
        assert found.most == times * 2 * GIB
        assert ("at most" in found.basis) == (times > 1)


@given(st.floats(1, 200 * GIB), st.floats(0.5, 200), st.floats(0.001, 1))
def test_a_fraction_is_enough_and_one_more_trial_would_not_fit(most: float, card: float, gpus: float) -> None:
    memory = Memory(most, "said")
    found = advise([memory], card, gpus)
    need = most * HELD_IN_PIECES + CONTEXT_BYTES
    if found.gpus is None:
        assert need > 0.9999 * card * GIB
        assert found.notes == ()
    else:
        count = int(1 / found.gpus)
        assert found.gpus * card * GIB >= need
        may_fill = allocator_share(found.gpus, card * GIB) * card * GIB
        assert may_fill >= 0.999_999 * most * HELD_IN_PIECES
        assert count * (may_fill + CONTEXT_BYTES) <= 1.000_001 * card * GIB, "whatever they hold, all have room"
        assert int(10_000 / (count + 1)) / 10_000 * card * GIB < need
        (note,) = found.notes
        assert f"resources.gpus: {found.gpus:g} " in note
    assert bool(found.warnings) == (gpus * card * GIB < need)


def test_what_is_said() -> None:
    small, large = Memory(GIB, "said"), Memory(2 * GIB, "said")
    found = advise([small, small], 80, 0.25)
    assert found.notes == (
        "each of these trials needs about 1.6 GiB of a card: resources.gpus: 0.02 would run 50 side by side on a card "
        "of 80 GiB, as far as memory goes",
    )
    assert found.warnings == ()
    found = advise([small, large, None], 80, 0.02)
    assert found.largest == large
    assert found.warnings == (
        "the largest of the trials whose memory is known needs about 2.7 GiB of a card, and resources.gpus: 0.02 of "
        "the smallest one there, of 80 GiB, is 1.6 GiB: it would run out of memory; ask for 0.0344 or more",
    )
    assert "up to about 2.7 GiB" in advise([small, large], 80, 1).notes[0]
    found = advise([large], 2, 1)
    assert (found.gpus, found.notes) == (None, ())
    assert found.warnings[0].endswith("it would run out of memory; take smaller batches, or a larger card")
    assert "runs one at a time" in advise([large], 4, 1).notes[0]


@pytest.mark.parametrize(("card", "gpus"), [(None, 0.5), (80, 0), (80, 2)])
def test_nothing_is_suggested_without_a_card_or_a_share_of_one(card: float | None, gpus: float) -> None:
    found = advise([Memory(GIB, "said")], card, gpus)
    assert (found.gpus, found.notes, found.warnings) == (None, (), ())
    assert found.largest is not None
    assert advise([None], card, gpus).largest is None


def test_images_that_do_not_fit_are_no_reason_to_warn() -> None:
    worked_out = TrialMemory(training=GIB, evaluation=GIB // 4, images=800 * MIB)
    memory = Memory(worked_out.most, "said", worked_out)
    assert not advise([memory], 1.4, 1).warnings, "they stay in the machine's memory"
    assert advise([Memory(worked_out.most, "said")], 1.4, 1).warnings
