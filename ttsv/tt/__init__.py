"""The tensor-train (Tucker-2) decomposition of a convolution's kernel: frames k1 and k3 around a core.

`decomposition` makes, merges and orthogonalises the factors; `ranks` (torch-free, as is importing this package) says
what a rank asks for and which frames to merge. Only checks and errors may be imported.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttsv.tt.decomposition import TTFactors, orthogonalize, tt_error, tt_ranks, tt_svd, tt_to_dense

__all__ = ["TTFactors", "orthogonalize", "tt_error", "tt_ranks", "tt_svd", "tt_to_dense"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ttsv.tt import decomposition

    return getattr(decomposition, name)
