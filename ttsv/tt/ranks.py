"""TT ranks as they are asked for, and which frames to merge into the core for them. Torch-free."""

from ttsv.errors import ConfigError


def absolute_rank(rank: float, widest: int) -> int:
    """Returns a rank as a number: an int as it is; a fraction in (0, 1] of `widest` channels, rounded, at least 1.

    Raises `ConfigError` for anything else; 1 is a rank, 1.0 a fraction.
    """
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1:
        return rank
    if not isinstance(rank, float) or not 0 < rank <= 1:
        fix = "must be a whole number of at least 1 or a fraction above 0 and at most 1"
        raise ConfigError("rank", rank, fix)
    return max(1, round(rank * widest))


_MERGES = ((False, False), (False, True), (True, False), (True, True))


def cheapest_merge(
    channels: tuple[int, int], ranks: tuple[int, int], taps: int, pixels: tuple[int, int]
) -> tuple[int, tuple[bool, bool]]:
    """Returns the least multiply-accumulates of a forward pass, merging included, and whether it merges k1, and k3.

    `channels` c_in and c_out, `ranks` r1 and r2, `taps` of the kernel, `pixels` of all inputs and of all outputs. What
    merges over a rank of 1 is an elementwise product: it accumulates nothing, and is not counted.
    """
    (c_in, c_out), (r1, r2), (pixels_in, pixels_out) = channels, ranks, pixels
    # Merging, per channel on the other side.
    one_in, one_out = taps * r1 * c_in * (r1 > 1), taps * r2 * c_out * (r2 > 1)

    def cost(merge_in: bool, merge_out: bool) -> int:
        core = pixels_out * taps * (c_in if merge_in else r1) * (c_out if merge_out else r2)
        if merge_in and merge_out:
            first = merges_out_first(c_in, r1, r2, c_out)
            return core + (one_out * r1 + one_in * c_out if first else one_in * r2 + one_out * c_in)
        frame_in = one_in * r2 if merge_in else pixels_in * c_in * r1
        return frame_in + core + (one_out * r1 if merge_out else pixels_out * r2 * c_out)

    # A list: `torch.compile` cannot follow a generator into `min`.
    return min([(cost(*merge), merge) for merge in _MERGES])


def merges_out_first(c_in: int, r1: int, r2: int, c_out: int) -> bool:
    """Whether merging both frames takes fewer multiply-accumulates with the output's first."""
    return r1 * c_out * (r2 + c_in) <= r2 * c_in * (r1 + c_out)
