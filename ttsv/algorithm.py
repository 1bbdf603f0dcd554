"""Which algorithm works on the Gram matrices of a symbol, by their side and the device that holds them.

`eigh` decomposes each matrix. `krylov` (`ttsv.krylov`) finds the few eigenpairs above delta squared, and decomposes
where there are many. `sign` (`ttsv.matrix_sign`) multiplies matrices, some 50 times in float32 and 85 in float64, and
decomposes where rounding spoils the result. All leave out what a Cholesky test shows to need no work.

| device | side | clip | norm |
| --- | --- | --- | --- |
| CPU | below 96 | eigh | power iteration, Cholesky tests, eigenvalues of few matrices |
| CPU | 96 and more | krylov | the same |
| CUDA | to 32 | eigh | the same |
| CUDA | above 32 | sign | the same, with repeated squaring for eigenvalues |

A complex product takes a fifth or sixth of a decomposition's time on a CPU: 50 of them never pay. On CUDA a batch of
matrices with more than 32 rows may be decomposed one by one, and products run at the device's full rate; that half of
the table follows from counts and has not been measured. `benchmarks/clipping.py --device cuda` measures all three
algorithms for each shape.
"""

from typing import Literal

import torch

Algorithm = Literal["eigh", "krylov", "sign"]

LEAST_KRYLOV_SIDE = 96
BATCHED_SIDE = 32
"""CUDA's libraries decompose matrices of at most so many rows as a batch, whatever their version."""


def clip_algorithm(side: int, device: torch.device) -> Algorithm:
    """How `ttsv.clipping` clips blocks whose Gram matrices have `side` rows, unless told: the table above."""
    if decomposes_in_batches(side, device):
        return "krylov" if device.type == "cpu" and side >= LEAST_KRYLOV_SIDE else "eigh"
    return "sign"


def decomposes_in_batches(side: int, device: torch.device) -> bool:
    """Whether decomposing a batch of matrices with `side` rows takes no more than the work in it."""
    return device.type == "cpu" or side <= BATCHED_SIDE
