"""How much of a GPU's memory this process may take, which may have a share of the card alone."""

import torch


def memory_share(device: torch.device) -> float:
    """Returns the bytes of a GPU's memory that this process may take in all. Raises as `torch.cuda` without a GPU."""
    _, total = torch.cuda.mem_get_info(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(number)  # from torch 2.10 on
    return float(share * total)


def free_memory(device: torch.device) -> float:
    """Returns the bytes of a GPU's memory that this process may still take. Raises as `torch.cuda` without a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(free, memory_share(device) - torch.cuda.memory_reserved(device))
