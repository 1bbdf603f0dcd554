"""From a split to batches on the device: out of its own memory or, where that is too small, through the machine's."""

import queue
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ttsv.config.trial import TrialConfig
from ttsv.data.augment import Augmentation
from ttsv.data.loading import Split
from ttsv.runtime.determinism import derived_generator, epoch_order
from ttsv.runtime.devices import free_memory
from ttsv.runtime.headway import get_on

_ROOM = 0.5
"""The share of a GPU's free memory that images may take: the rest is for the network and its activations."""
_AHEAD = 2
"""Batches that lie ready in the machine's memory, beside the one that is being made."""


def place(split: Split, device: torch.device) -> Split:
    """The split with its labels on the device, and its images too, if they leave room there; else as they are."""
    images, labels = split
    if device.type == "cuda" and images.nbytes > _ROOM * free_memory(device):
        return Split(images, labels.to(device))
    return split.to(device)


def batches(train: Split, config: TrialConfig, epoch: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first `count` images of an epoch's order, varied, and their labels, in batches where the labels are.

    Images that are elsewhere are gathered in the background and copied from pinned memory, which nothing waits for:
    the same ones, in the same order.
    """
    device = train.labels.device
    chosen = config.augmentation
    augmentation = Augmentation(flip=chosen.flip, pad=chosen.pad, padding=chosen.padding)
    drawn = epoch_order(len(train.labels), config.seed, epoch)[:count]
    order = drawn.to(device)
    generator = derived_generator(config.seed, "augmentation", epoch)
    draws = augmentation.draw(count, train.images.shape[2:], generator).to(device)
    size = config.training.batch_size
    here = train.images.device == device
    images = (
        (train.images[part] for part in torch.split(order, size))
        if here
        else (part.to(device, non_blocking=True) for part in _gathered(train.images, torch.split(drawn, size), device))
    )
    for start, batch in zip(range(0, count, size), images, strict=True):
        part = slice(start, start + size)
        yield augmentation.apply(batch, draws[part]), train.labels[order[part]]


def whole(split: Split, size: int) -> Iterator[Tensor]:
    """All images in their order, `size` at a time, where the labels are."""
    device = split.labels.device
    if split.images.device == device:
        images: Iterator[Tensor] = iter(torch.split(split.images, size))
    else:
        parts = torch.split(torch.arange(len(split.images)), size)
        images = (part.to(device, non_blocking=True) for part in _gathered(split.images, parts, device))
    for batch in images:
        yield batch
        get_on()


def _gathered(images: Tensor, parts: tuple[Tensor, ...], device: torch.device) -> Iterator[Tensor]:
    """The images of each part, in memory pinned for a GPU, some parts ahead of the taker, by a thread of its own."""
    ready: queue.Queue[Tensor | BaseException] = queue.Queue(_AHEAD)
    over = threading.Event()

    def put(found: Tensor | BaseException) -> None:
        while not over.is_set():
            try:
                ready.put(found, timeout=0.1)
                return
            except queue.Full:
                continue

    def gather() -> None:
        try:
            with torch.cuda.device(device):  # a thread begins with the first GPU, where it would take memory
                for part in parts:
                    if over.is_set():
                        return
                    put(images[part].pin_memory())
        except BaseException as error:  # which is the taker's, wherever it came up
            put(error)

    thread = threading.Thread(target=gather, name="images", daemon=True)
    thread.start()
    try:
        for _ in parts:
            found = ready.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        over.set()
        thread.join()
