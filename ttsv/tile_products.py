"""Products of matrices, one for each place of transformed tiles."""

import torch
from llvmlite import binding
from torch import Tensor

from ttsv.compiled import CompiledFunction


class TileProduct(CompiledFunction):
    """`target = left right` for each of a stack of matrices, or with `add` `target + left right`; float32 on the CPU.

    The rows of `right` and `target` lie side by side in memory, those of `left` anyhow. By code of our own on one
    thread of a processor with AVX-512, which it serves better than torch's at such sizes, and by torch elsewhere.
    """

    def __init__(self, *, add: bool = False) -> None:
        super().__init__("product", add)
        self._add = add

    def __call__(self, left: Tensor, right: Tensor, target: Tensor) -> None:
        """`left` (places, rows, inner), `right` (places, inner, columns), `target` (places, rows, columns)."""
        if not own_products():
            torch.baddbmm(target, left, right, beta=float(self._add), out=target)
            return
        sizes = *left.shape, right.shape[2]
        strides = *left.stride(), *right.stride()[:2], *target.stride()[:2]
        self.run(left.data_ptr(), right.data_ptr(), target.data_ptr(), *sizes, *strides)


def own_products() -> bool:
    """Whether `TileProduct` computes by its own code, on this processor with so many threads as torch has now."""
    return _WIDE and torch.get_num_threads() == 1


_WIDE = binding.get_host_cpu_features().get("avx512f", False)
