"""What makes float32 training on a CPU faster, and nothing else: Winograd's convolutions, by machine code of our own.

The training loop enters here, by one line, and nothing else does. Without this room and that line networks are trained
by torch's convolutions. Of the other rooms only errors may be imported.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["faster_convolutions"]


def faster_convolutions(model: "nn.Module") -> AbstractContextManager[object]:
    """A context in which the model's convolutions are Winograd's where they pay, and torch's where none may."""
    # Here, as the process that compiles enters this package as well, and torch would be the most of its time.
    from ttsv.winograd import convolution

    return convolution.faster_convolutions(model)
