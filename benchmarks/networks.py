"""The convolutions of WRN-16-10 with 32x32 input, and seeded weights for them; shared by the benchmarks."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DELTA = 2.0
"""Where the benchmarks clip: a value of the paper (1 and 2 there)."""

WINDOWS = torch.tensor([[0.25, 0.5, 0.25], [-0.5, 0.0, 0.5], [-0.25, 0.5, -0.25]])
"""Smooth, edge and curvature: 1-d filters whose symbols reach 1 and are smooth in frequency."""


class Layer(NamedTuple):
    """A 3x3 convolution without groups; `size` is its input's side in pixels, `times` how often it occurs."""

    c_in: int
    c_out: int
    size: int
    stride: int
    times: int

    @property
    def name(self) -> str:
        """Channels, input side and stride."""
        return f"{self.c_in}-{self.c_out} at {self.size}, stride {self.stride}"

    def truncated(self, rank: int | None) -> "Layer":
        """The core's shape at this TT rank; the layer itself for None."""
        if rank is None:
            return self
        return self._replace(c_in=min(self.c_in, rank), c_out=min(self.c_out, rank))


@dataclass(frozen=True)
class Network:
    """The convolutions of a network, and the TT ranks at which it is measured."""

    layers: tuple[Layer, ...]
    ranks: dict[str, int | None]

    def distinct(self, rank: int | None) -> list[Layer]:
        """Each shape of the network once, with the number of its layers; at a TT rank those of the cores."""
        times: dict[Layer, int] = {}
        for layer in self.layers:
            shape = layer.truncated(rank)._replace(times=1)
            times[shape] = times.get(shape, 0) + layer.times
        return [shape._replace(times=number) for shape, number in times.items()]


WRN_16_10 = Network(
    (
        Layer(3, 16, 32, 1, 1),
        Layer(16, 160, 32, 1, 1),
        Layer(160, 160, 32, 1, 3),
        Layer(160, 320, 32, 2, 1),
        Layer(320, 320, 16, 1, 3),
        Layer(320, 640, 16, 2, 1),
        Layer(640, 640, 8, 1, 3),
    ),
    {"dense": None, "rank 192": 192},
)
"""With 32x32 input: two blocks per stage of width 160, 320, 640; shortcuts have no convolutions."""

TOY = Network((Layer(3, 16, 8, 1, 1), Layer(16, 16, 8, 2, 1)), {"dense": None, "rank 8": 8})
"""For runs that only show that a benchmark works."""


def weights(layer: Layer, kind: str, seed: int = 0) -> Tensor:
    """A seeded float32 kernel `(c_out, c_in, 3, 3)`.

    `kaiming`: normal, variance 2 / (9 c_out), as networks start. `mix`, as trained kernels are: noise whose singular
    values reach 1.5, plus one smooth term of rank 1 for every 16 channels, the j-th of norm about 6 / sqrt(j), each
    with an outer product of two random `WINDOWS` in space.
    """
    generator = torch.Generator().manual_seed(1000 * seed + layer.c_in + 7 * layer.c_out + layer.size)
    noise = torch.randn(layer.c_out, layer.c_in, 3, 3, generator=generator)
    if kind == "kaiming":
        return noise * math.sqrt(2 / (9 * layer.c_out))
    kernel = noise * (1.5 / (3 * (math.sqrt(layer.c_out) + math.sqrt(layer.c_in))))
    terms = max(1, min(layer.c_in, layer.c_out) // 16)
    left = torch.linalg.qr(torch.randn(layer.c_out, terms, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(layer.c_in, terms, generator=generator)).Q
    sizes = 6 / torch.arange(1, terms + 1).sqrt()
    rows, columns = (WINDOWS[torch.randint(3, (terms,), generator=generator)] for _ in range(2))
    return kernel + torch.einsum("j,oj,ij,ja,jb->oiab", sizes, left, right, rows, columns)
