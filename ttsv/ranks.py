"""TT ranks as they are asked for: a number, or a fraction of a network's widest layer. Torch-free."""

from ttsv.errors import ConfigError


def absolute_rank(rank: float, widest: int) -> int:
    """A rank as a number: an int as it is; a fraction in (0, 1] of `widest` channels, rounded, at least 1.

    Raises `ConfigError` for anything else; 1 is a rank, 1.0 a fraction.
    """
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1:
        return rank
    if not isinstance(rank, float) or not 0 < rank <= 1:
        fix = "must be a whole number of at least 1 or a fraction above 0 and at most 1"
        raise ConfigError("rank", rank, fix)
    return max(1, round(rank * widest))
