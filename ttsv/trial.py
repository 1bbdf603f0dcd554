"""A trial from its configuration to its result.

Importing this module loads no torch; running a trial does.
"""

from collections.abc import Generator
from pathlib import Path

from ttsv.config.trial import TrialConfig
from ttsv.results import CHECKPOINTS, EpochMetrics, StageProgress, TrialResult


def run_trial(
    config: TrialConfig, *, data_dir: Path, folder: Path, device: str = "auto", source: Path | None = None
) -> Generator[EpochMetrics | StageProgress | TrialResult, None, None]:
    """Trains and evaluates one trial: yields each epoch's metrics, then where the evaluation is, then a `TrialResult`.

    `data_dir` holds the data sets; `folder` (created) receives what the trial writes. `device`: auto (a GPU if
    there is one), cpu, cuda or cuda:N. Raises a `TrialError`.

    Where an earlier attempt at the same trial left checkpoints in `folder`, training goes on after the newest whole
    one, to the same numbers: finished epochs are not yielded again. An epoch's checkpoint is written once the caller
    asks for more or closes the generator, so that none is finished before it was handed over, and is on disk before the
    next epoch is yielded; an epoch during whose handing over the process is killed, or the caller throws an error in
    here, is trained and yielded once more. An attack goes on where it stopped, too.

    With `source`, the `model.safetensors` of another trial, nothing is trained: that network is evaluated as `config`
    says, and what was noted of its training stays noted. Raises `DataError` where it is not the network that `config`
    describes: of another model, data or training.
    """
    from ttsv.data import load_dataset
    from ttsv.evaluation.stages import check_evaluation
    from ttsv.evaluation.trial_result import evaluate_trial, take_network
    from ttsv.runtime.determinism import require_determinism
    from ttsv.runtime.devices import find_device
    from ttsv.runtime.failures import known_failures
    from ttsv.training.network import train_network

    with known_failures():
        given, config = config, config.canonical()
        place = find_device(device)
        if config.training.deterministic and source is None:
            require_determinism(place)
        data = load_dataset(config.dataset, data_dir)
        given.check_normalization(data.info)
        config.check_images(data.info)
        datasets = Path(data_dir) / "datasets"
        check_evaluation(config.evaluation, data, datasets)
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if source is None:
            alias = given.written_fingerprint()  # what stored it may have had other rules of what has an effect
            network = yield from train_network(config, data, folder=folder, device=place, alias=alias)
        else:
            network = take_network(source, config, data, device=place)
        yield (yield from evaluate_trial(config, data, network, folder=folder, datasets=datasets))
