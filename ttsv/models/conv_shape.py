"""One convolution of a network as plain data, and what it costs as each kind of layer. Torch-free."""

import math
from dataclasses import dataclass

from ttsv.errors import ConfigError
from ttsv.tt.ranks import cheapest_merge

LAYERS = ("dense", "tt", "soc", "soc-tt", "bcop", "bcop-tt", "aoc", "aoc-tt", "aol", "aol-tt", "cayley", "cayley-tt")
"""Kinds of convolution: dense, skew orthogonal (`ttsv.layers.SOC`), those of `ttsv.layers.prior_art`, and each of
them as the core between the frames of a TT layer."""


def check_torchvision_layer(layer: str) -> None:
    """Raises `ConfigError` for layers that are not put into torchvision's networks: others than dense and tt."""
    if layer not in ("dense", "tt"):
        raise ConfigError("layer", layer, "must be dense or tt for networks of torchvision")


SOC_TERMS = 12
"""Powers of the skew operator that a SOC takes in evaluation mode."""


def core_kind(layer: str) -> str:
    """The kind of layer without frames: "soc" of "soc-tt", "dense" of "tt"."""
    return "dense" if layer == "tt" else layer.removesuffix("-tt")


@dataclass(frozen=True, kw_only=True)
class ConvShape:
    """One convolution: `name` in the network, channels, kernel, stride and padding, the same along each of `dims` axes.

    `input_size`: pixels of its input along an axis. `bias`: whether it has one.
    """

    name: str
    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int
    padding: int
    input_size: int
    dims: int = 2
    bias: bool = False

    @property
    def output_size(self) -> int:
        """Pixels of its output along an axis."""
        return (self.input_size + 2 * self.padding - self.kernel_size) // self.stride + 1

    def check_layer(self, layer: str, rank: int | None = None) -> None:
        """Raises `ConfigError` where a kind of layer, one of `LAYERS`, has no convolution of this shape, or rank."""
        kind, k, s, n = core_kind(layer), self.kernel_size, self.stride, self.input_size
        if kind == "dense":
            return
        fix = None
        if self.dims != 2:
            fix = f"takes images; {self.name} has {self.dims} spatial axes: dense and tt take those"
        elif k % 2 == 0 or self.padding != k // 2:
            fix = f"needs odd kernels that are padded to keep the size; {self.name} has {k}x{k}, padding {self.padding}"
        elif kind in ("aoc", "aol") and k < s:
            fix = f"needs kernels no smaller than their strides; {self.name} has {k}x{k} and stride {s}"
        elif kind == "aoc" and 1 < s < k and max(self._core_channels(layer, rank)) < 2:
            fix = f"needs 2 channels, and a rank of 2, where a kernel is larger than its stride; {self.name} has 1"
        elif kind not in ("aoc", "aol") and n % s:
            fix = f"needs strides that divide the size; {self.name} sees {n} pixels and has stride {s}"
        if fix is not None:
            raise ConfigError("layer", layer, fix)

    def _core_channels(self, layer: str, rank: int | None) -> tuple[int, int]:
        """Those of a layer's kernel: between frames, where it has some."""
        framed = self.ranks(rank) if layer.endswith("tt") else None
        return framed or (self.in_channels, self.out_channels)

    def ranks(self, rank: int | None) -> tuple[int, int] | None:
        """Returns the TT ranks (r1, r2) under a largest rank, or None where the layer stays undecomposed.

        `r1 = min(in_channels, rank)`, `r2 = min(out_channels, rank)`; a rank that reaches both channel counts
        would only add two square frames, so such a layer is not decomposed.
        """
        if rank is None or (rank >= self.in_channels and rank >= self.out_channels):
            return None
        return min(self.in_channels, rank), min(self.out_channels, rank)

    def weights(self, rank: int | None = None, layer: str = "tt") -> int:
        """Counts the weights, without bias, of a kind of layer: of its kernel, or of frame, core and frame.

        A kernel from r1 to r2 channels has `r1 r2 k^d` weights; one behind space-to-depth (bcop, cayley)
        `s^2 r1 r2 k^2`; the square one of SOC `max(s^2 r1, r2)^2 k^2`. Of an orthogonal parametrization this counts
        the kernel it makes. `rank` is the largest TT rank; kinds without frames have none.
        """
        ranks = self.ranks(rank) if layer.endswith("tt") else None
        if ranks is None:
            return self._kernel_weights(core_kind(layer), self.in_channels, self.out_channels)
        r1, r2 = ranks
        core = self._kernel_weights(core_kind(layer), r1, r2)
        return self.in_channels * r1 + core + r2 * self.out_channels

    def macs(self, rank: int | None = None, layer: str = "tt") -> int:
        """Counts multiply-accumulates for one image in evaluation mode, the weights of orthogonal kinds ready made.

        A TT layer merges frames into its core where that takes fewer, as `ttsv.layers.TTConv` does. A SOC takes
        `SOC_TERMS` convolutions. Of "cayley" only the products at its frequencies are counted, one for two complex
        numbers, without the transforms.
        """
        ranks = self.ranks(rank) if layer.endswith("tt") else None
        kind = core_kind(layer)
        if ranks is None:
            return self._core_macs(kind, self.in_channels, self.out_channels)
        (r1, r2), pixels_in, pixels_out = ranks, self._volume(self.input_size), self._volume(self.output_size)
        if kind == "dense":
            channels, taps = (self.in_channels, self.out_channels), self._volume(self.kernel_size)
            return cheapest_merge(channels, ranks, taps, (pixels_in, pixels_out))[0]
        frames = pixels_in * self.in_channels * r1 + pixels_out * r2 * self.out_channels
        return frames + self._core_macs(kind, r1, r2)

    def _kernel_weights(self, kind: str, c_in: int, c_out: int) -> int:
        if kind in ("soc", "bcop", "cayley"):
            c_in *= self.stride**2
        if kind == "soc":
            c_in = c_out = max(c_in, c_out)
        return c_in * c_out * self._volume(self.kernel_size)

    def _core_macs(self, kind: str, c_in: int, c_out: int) -> int:
        weights = self._kernel_weights(kind, c_in, c_out)
        if kind == "cayley":
            frequencies = self.output_size * (self.output_size // 2 + 1)
            return frequencies * weights // self.kernel_size**2
        return self._volume(self.output_size) * weights * (SOC_TERMS if kind == "soc" else 1)

    def _volume(self, side: int) -> int:
        """Pixels, or taps, of a cube of that side."""
        return math.prod((side,) * self.dims)
