"""Signs of life between two reports: what leaves them, who reads them, and what makes headway at all."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, call

import pytest
import torch

from ttsv.certification.certificates import lipschitz_bound
from ttsv.config.trial import TrialConfig
from ttsv.runtime.headway import get_on, headway
from ttsv.spectral.network import model_spectra
from ttsv.trial import run_trial
from workers.driver.signs import SignReader
from workers.driver.watchdog import Watchdog
from workers.node.notes import Shelf
from workers.trial_process.messages import Job, ResourceReport
from workers.trial_process.signs import Sign, SignsOfLife, signs

if TYPE_CHECKING:
    from pathlib import Path

JOB = Job(trial_id=7, fence=3, stored_epochs=0, config={}, attempt=1)
USED = {"interval": 1.0, "seconds": [1.0], "cpu": [99.0], "memory": [1.0], "gpu": [None], "gpu_memory": [None]}


class Head:
    """Ray's key-value store, as its client shows it; it may be away."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.puts = 0
        self.away = False

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes, timeout: float) -> int:
        self.puts += 1
        if self.away:
            raise RuntimeError("GCS is away")
        self.values[key] = value
        return 0

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        if self.away:
            raise RuntimeError("GCS is away")
        return self.values.get(key)

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes, timeout: float) -> int:
        return int(self.values.pop(key, None) is not None)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr("workers.trial_process.signs.SIGN_SECONDS", 0.02)
    return Head()


def shelf_of(head: Any) -> Shelf[Sign]:
    return Shelf(head, Sign, "sign/")


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_what_gets_on_leaves_signs_and_takes_the_last_one_away(head: Head) -> None:
    shelf, sampler = shelf_of(head), MagicMock()
    sampler.series.side_effect = [USED, *[None] * 10_000]
    with SignsOfLife(JOB, sampler, shelf):
        time.sleep(0.1)
        assert head.puts == 0, "nothing got on"
        get_on()
        wait_for(lambda: shelf.get("7"))
        assert shelf.get("7") == Sign(fence=3, attempt=1, headway=headway(), used=USED)
        get_on()
        wait_for(lambda: shelf.get("7") == Sign(fence=3, attempt=1, headway=headway(), used=USED))
        puts = head.puts
        time.sleep(0.1)
        assert head.puts == puts, "it hangs"
    wait_for(lambda: not head.values)


def test_a_head_that_is_away_ends_no_trial_and_hears_later(head: Head) -> None:
    head.away = True
    sampler = MagicMock()
    sampler.series.return_value = None
    with SignsOfLife(JOB, sampler, shelf_of(head)):
        get_on()
        wait_for(lambda: head.puts > 2)
        head.away = False
        wait_for(lambda: head.values)


def test_outside_a_cluster_there_are_none() -> None:
    assert signs() is None
    with SignsOfLife(JOB, MagicMock(), None):
        get_on()


class TestReading:
    @pytest.fixture
    def watchdog(self) -> Watchdog:
        watchdog = Watchdog(None, None, MagicMock())
        watchdog.began(7, "actor", JOB)
        watchdog._running[7].heard -= 1000
        return watchdog

    def test_a_silent_trial_that_got_on_is_heard_of(self, head: Head, watchdog: Watchdog) -> None:
        shelf, used = shelf_of(head), MagicMock()
        reader = SignReader(watchdog, shelf, used)
        reader.look()
        assert watchdog.silence(7) > 999
        shelf.put("7", Sign(fence=3, attempt=1, headway=5, used=USED))
        reader.look()
        assert watchdog.silence(7) < 1
        pace = {"reported": 0.0, "longest_pause": 0.0}
        assert used.mock_calls == [call(7, ResourceReport({**USED, "pace": pace}))]  # type: ignore[typeddict-item]
        watchdog._running[7].heard -= 1000
        reader.look()
        assert watchdog.silence(7) > 999, "the same sign again says nothing"
        assert len(used.mock_calls) == 1

    @pytest.mark.parametrize(("fence", "attempt"), [(2, 1), (3, 0)])
    def test_signs_of_earlier_attempts_say_nothing(
        self, head: Head, watchdog: Watchdog, fence: int, attempt: int
    ) -> None:
        """Their process may live on, on a node that nobody reaches."""
        shelf = shelf_of(head)
        shelf.put("7", Sign(fence=fence, attempt=attempt, headway=5))
        SignReader(watchdog, shelf, MagicMock()).look()
        assert watchdog.silence(7) > 999

    def test_what_was_killed_leaves_nothing_in_the_head(self, head: Head, watchdog: Watchdog) -> None:
        shelf = shelf_of(head)
        reader = SignReader(watchdog, shelf, MagicMock())
        shelf.put("7", Sign(fence=3, attempt=1, headway=5))
        reader.look()
        assert head.values
        watchdog.ended(7)
        reader.look()
        assert not head.values

    def test_its_thread_outlives_a_head_that_is_away(
        self, head: Head, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("workers.driver.signs.SIGN_SECONDS", 0.02)
        shelf, head.away = shelf_of(head), True
        reader = SignReader(watchdog, shelf, MagicMock())
        reader.start()
        time.sleep(0.1)
        head.away = False
        shelf.put("7", Sign(fence=3, attempt=1, headway=5))
        wait_for(lambda: watchdog.silence(7) < 1)
        reader.close()


def test_every_step_and_every_pass_of_an_attack_makes_headway(tmp_path: Path) -> None:
    """Between the items that a trial yields: two steps of training, and the batches of its evaluation."""
    config = TrialConfig.from_dict(
        {
            "dataset": "digits",
            "model": "small-cnn",
            "seed": 0,
            "training": {"epochs": 1, "batch_size": 1024},
            "evaluation": {"attack": "pgd", "attack_images": 8},
        }
    )
    torch.manual_seed(0)
    items = run_trial(config, data_dir=tmp_path, folder=tmp_path / "trial", device="cpu")
    counts = [headway(), *(headway() for _ in items)]
    epoch, *stages = (after - before for before, after in itertools.pairwise(counts))
    assert epoch >= 2
    assert max(stages) >= 20, "the passes of an attack"


def test_every_layer_of_a_spectrum_and_of_a_bound_makes_headway() -> None:
    """Of a large network each takes a while, and all of them at once longer than many a limit."""
    model = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)), torch.nn.Flatten())
    before = headway()
    assert len(model_spectra(model, 8)) == 4
    middle = headway()
    lipschitz_bound(model, (8, 8), in_channels=3)
    assert min(middle - before, headway() - middle) >= 4
