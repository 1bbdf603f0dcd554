"""Where a trial computes."""

import torch

from ttsv.errors import ConfigError


def find_device(name: str) -> torch.device:
    """The device of a name: auto (a GPU if there is one), cpu, cuda or cuda:N. Raises `ConfigError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, "must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", name, f"is not here: there are cpu and {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
