"""The division of GEMMs of few tokens (`ops.py`) into programs, and the choice of these GEMMs.

It depends on the shape alone, so that a model's shapes decide its bits. The table comes from
`scripts/bench/tune_linear.py` on one H200. This module does not import Triton, which the choice does not need.

Shape letters: M tokens, O output features, I input features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from specbatch.kernels.triton.parts.tma import can_use_tma

# Above this number of tokens a GEMM has enough arithmetic for the library's kernels. Exceptions are in the table
# (Hopper, bfloat16).
MAX_TOKENS = 64
_MAX_FMA_TOKENS = 2  # at 4 the tensor cores are faster
_SHARED_SPARE = 5_376  # bytes of shared memory for all but the tiles
_MULTIPROCESSORS = 132  # the number of an H100 and an H200
_ALIKE = 1.5  # the ratio of outputs times that of inputs, up to which two sizes have the same tiles
_WIDE = 8192  # a GEMM with more outputs has enough programs without splits
_MIN_DOT = 16  # the fewest input features that tl.dot sums


@dataclass(frozen=True)
class GemmTile:
    """One way to cut y = x W^T into programs. Sizes are in elements unless they say otherwise.

    kind: "fma" multiplies on the ordinary units (block_m 1 or 2), "dot" on the tensor cores (block_m 8 to 128).
    block_m: rows of x in one program; M <= block_m. block_o, block_i: rows and columns of the tile of weights that is
        read in one step; in a gated GEMM half the rows are gate, half are up.
    num_stages: tiles in flight of one program. num_warps: 32 threads each.
    splits: parts of the input features, summed afterwards in fixed order ("dot" only).
    tma: weights are read by the tensor memory accelerator ("dot" only).
    fuse_norm: every program computes the norm of x itself; otherwise one small kernel does beforehand.
    pdl: programmatic dependent launch: the programs start while the kernel before them drains.
    early: a program reads its first tile of weights into registers before it waits for x.
    prefetch: elements of every weight row, after that tile, that a program loads into L2 before it waits for x.
    """

    kind: Literal["fma", "dot"]
    block_m: int
    block_o: int
    block_i: int
    num_stages: int
    num_warps: int
    splits: int = 1
    tma: bool = False
    fuse_norm: bool = True
    pdl: bool = False
    early: bool = False
    prefetch: int = 0

    def __post_init__(self) -> None:
        assert self.kind == "dot" or (self.splits == 1 and not self.tma and self.block_m <= _MAX_FMA_TOKENS), self
        for size in (self.block_m, self.block_o, self.block_i, self.num_warps):
            assert size.bit_count() == 1, self  # a power of two
        assert self.num_stages >= 1, self
        assert self.splits >= 1, self


# (O, I) of the weight: for up to M tokens, the best measured tile, or None if the library was faster.
# `scripts/bench/tune_linear.py --table` wrote it, from one H200 with torch 2.11 and Triton 3.6. The GEMMs of a
# Llama-3-70B layer on two GPUs take 229 us for 64 tokens, and 259 with four splits.
_MEASURED: dict[tuple[int, int], dict[int, GemmTile | None]] = {
    (6144, 4096): {  # Llama-3-8B: qkv
        1: GemmTile("fma", 1, 8, 1024, 1, 4, pdl=True, early=True),
        2: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        4: GemmTile("dot", 8, 16, 512, 3, 2, fuse_norm=False, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True, prefetch=1024),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
        32: GemmTile("dot", 32, 64, 128, 5, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (4096, 4096): {  # o
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        2: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        4: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, splits=2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (28672, 4096): {  # gate_up
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        2: GemmTile("dot", 8, 128, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
        4: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        128: GemmTile("dot", 128, 256, 64, 4, 8, tma=True, fuse_norm=False, pdl=True),
    },
    (4096, 14336): {  # down
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        2: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True, early=True),
        4: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, splits=2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, fuse_norm=False, pdl=True),
    },
    (128256, 4096): {  # lm_head
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        2: GemmTile("fma", 2, 4, 4096, 1, 8, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        128: GemmTile("dot", 128, 256, 64, 4, 8, tma=True, fuse_norm=False, pdl=True),
    },
    (4096, 12288): {  # draft_fc
        1: GemmTile("fma", 1, 2, 4096, 1, 8, pdl=True, early=True),
        2: GemmTile("fma", 2, 4, 1024, 1, 4, pdl=True, early=True),
        4: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True),
        8: GemmTile("dot", 8, 16, 512, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 32, 256, 5, 2, tma=True, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
        128: GemmTile("dot", 128, 64, 128, 4, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
    },
    (6144, 8192): {  # draft_qkv
        1: GemmTile("fma", 1, 2, 4096, 1, 8, pdl=True, early=True),
        2: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (32000, 4096): {  # draft_head
        1: GemmTile("fma", 1, 4, 2048, 1, 4, pdl=True, early=True),
        2: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (5120, 8192): {  # Llama-3-70B on two GPUs: qkv
        1: GemmTile("fma", 1, 8, 1024, 1, 4, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
        32: GemmTile("dot", 32, 64, 128, 5, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
    },
    (8192, 4096): {  # o
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 32, 256, 5, 2, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True),
    },
    (28672, 8192): {  # gate_up
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        8: GemmTile("dot", 8, 128, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (8192, 14336): {  # down
        1: GemmTile("fma", 1, 2, 4096, 1, 8, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
        32: GemmTile("dot", 32, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True),
    },
    (64128, 8192): {  # lm_head
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True, early=True),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (8192, 24576): {  # draft_fc
        1: GemmTile("fma", 1, 4, 2048, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, tma=True, fuse_norm=False, pdl=True, early=True),
        32: GemmTile("dot", 32, 64, 128, 5, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
    },
    (32000, 8192): {  # draft_head
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        8: GemmTile("dot", 8, 128, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True, early=True),
        32: GemmTile("dot", 32, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    # Llama-3-70B on four GPUs. Tiles of 2 to 8 tokens are guesses. Its head has the tiles of (32000, 8192).
    (2560, 8192): {  # qkv
        1: GemmTile("fma", 1, 8, 2048, 1, 8, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, splits=2, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
        64: None,
    },
    (8192, 2048): {  # o
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True),
    },
    (14336, 8192): {  # gate_up
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (8192, 7168): {  # down
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True, prefetch=512),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True),
    },
    (4096, 2560): {  # Gemma-3-4B: qkv
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True, early=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True),
    },
    (2560, 2048): {  # o
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True, prefetch=512),
        4: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, early=True),
    },
    (20480, 2560): {  # gate_up
        1: GemmTile("fma", 1, 8, 1024, 1, 4, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (2560, 10240): {  # down
        1: GemmTile("fma", 1, 8, 2048, 1, 8, pdl=True, early=True, prefetch=512),
        4: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
    },
    (262208, 2560): {  # lm_head
        1: GemmTile("fma", 1, 8, 1024, 1, 4, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 512, 3, 4, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 5, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (2560, 7680): {  # draft_fc
        1: GemmTile("fma", 1, 2, 4096, 1, 8, pdl=True, early=True),
        4: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True, early=True),
    },
    (4096, 5120): {  # draft_qkv
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        4: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        64: None,
    },
    (32000, 2560): {  # draft_head
        1: GemmTile("fma", 1, 8, 512, 4, 2, pdl=True, early=True),
        4: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    # Phi-4-mini and Granite 3 8B: tiles of 2 to 8 tokens are those of Llama-3-8B.
    (5120, 3072): {  # Phi-4-mini: qkv
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True, prefetch=1024),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (3072, 3072): {  # o
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 64, 128, 6, 4, splits=2, tma=True, fuse_norm=False, pdl=True, early=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (16384, 3072): {  # gate_up
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
    },
    (3072, 8192): {  # down
        1: GemmTile("fma", 1, 2, 4096, 1, 8, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 32, 256, 5, 2, tma=True, fuse_norm=False, pdl=True, early=True, prefetch=512),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (200064, 3072): {  # lm_head
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (3072, 9216): {  # draft_fc
        1: GemmTile("fma", 1, 4, 2048, 1, 4, pdl=True),
        8: GemmTile("dot", 8, 16, 512, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True, early=True),
    },
    (5120, 6144): {  # draft_qkv
        1: GemmTile("fma", 1, 4, 4096, 1, 8, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 256, 4, 4, fuse_norm=False, pdl=True),
        64: None,
    },
    (32000, 3072): {  # draft_head
        1: GemmTile("fma", 1, 4, 2048, 1, 4, pdl=True),
        8: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (25600, 4096): {  # Granite 3 8B: gate_up
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 4, 4, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (4096, 12800): {  # down
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, splits=2, tma=True, fuse_norm=False, pdl=True, early=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
    },
    # Qwen3-30B-A3B, without its experts. Tiles of up to 8 tokens are those of Llama-3-8B's layers.
    (5120, 2048): {  # qkv
        1: GemmTile("fma", 1, 8, 1024, 1, 4, pdl=True, early=True, prefetch=1536),
        2: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 64, 128, 6, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, tma=True, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (2048, 4096): {  # o
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True, prefetch=512),
        2: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        8: GemmTile("dot", 8, 16, 256, 5, 1, fuse_norm=False, pdl=True, early=True, prefetch=512),
        16: GemmTile("dot", 16, 64, 256, 4, 4, splits=2, fuse_norm=False, pdl=True, prefetch=1024),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=4, tma=True, fuse_norm=False, pdl=True, prefetch=1024),
    },
    (151936, 2048): {  # lm_head
        1: GemmTile("fma", 1, 4, 1024, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 128, 128, 5, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
    (2048, 6144): {  # draft_fc
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, splits=2, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, splits=4, tma=True, fuse_norm=False, pdl=True),
    },
    (5120, 4096): {  # draft_qkv
        1: GemmTile("fma", 1, 2, 2048, 1, 4, pdl=True, early=True),
        8: GemmTile("dot", 8, 16, 512, 4, 1, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 64, 128, 6, 4, tma=True, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 64, 128, 5, 4, fuse_norm=False, pdl=True),
    },
    (32000, 2048): {  # draft_head
        1: GemmTile("fma", 1, 4, 2048, 1, 8, pdl=True, early=True),
        8: GemmTile("dot", 8, 32, 256, 3, 2, fuse_norm=False, pdl=True),
        16: GemmTile("dot", 16, 32, 256, 4, 2, fuse_norm=False, pdl=True),
        64: GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True),
    },
}


def is_skinny(M: int, O: int, I: int, dtype: torch.dtype, is_hopper: bool = True) -> bool:  # noqa: E741
    """Return whether M x I times I x O runs here, and not in the library (F.linear)."""
    if M <= 0 or O % 8 or I % 8 or I < _MIN_DOT or dtype not in (torch.bfloat16, torch.float16):
        return False
    if M > MAX_TOKENS:
        return is_hopper and dtype == torch.bfloat16 and _measured(M, O, I, None) is not None
    return _measured(M, O, I, _guess(M, O)) is not None


def gemm_tile_for(M: int, O: int, I: int, dtype: torch.dtype) -> GemmTile:  # noqa: E741
    """Choose the tile for x (M, I) and weights (O, I). In a gated GEMM O counts gate and up.

    It raises AssertionError for more than MAX_TOKENS tokens of a size that the table does not have.
    """
    guess = _guess(M, O) if M <= MAX_TOKENS else None
    # The table was measured for bfloat16. The "fma" kernel needs more registers for other types.
    if dtype == torch.bfloat16:
        like = _like_measured(M, O, I) if M <= MAX_TOKENS else None
        tile = _measured(M, O, I, like or guess) or guess
    else:
        tile = guess
    assert tile is not None, (M, O, I, dtype)
    return tile


def invariant_tile_for(M: int, O: int) -> GemmTile | None:  # noqa: E741
    """Choose a tile that gives a row the same bits for every M, and the bits of every other such tile. Return None for
    more than MAX_TOKENS tokens. The input features are added in order and in one part, on the tensor cores."""
    if M > MAX_TOKENS:
        return None
    tile = _guess(max(M, _MAX_FMA_TOKENS + 1), O)
    if O <= _WIDE and tile.block_m > 8:
        # Programs are smaller, so that there are as many. But for 32 tokens 64 outputs took less time (20 to 24 us,
        # H200).
        block_o, num_warps = 64 if tile.block_m == 32 else 32, 2 if tile.block_m == 16 else 4
        tile = replace(tile, splits=1, block_o=block_o, num_warps=num_warps)
    return replace(tile, pdl=True)


def without_hopper(tile: GemmTile) -> GemmTile:
    """Return the tile for GPUs before compute capability 9, without Hopper's instructions."""
    return replace(tile, tma=False, pdl=False, prefetch=0)


def fitting(tile: GemmTile, shared: int, *, gated: bool = False) -> GemmTile:
    """Return the tile for a GPU with `shared` bytes of shared memory. It can have fewer stages, which changes no bit.
    If one stage does not fit, it has fewer columns in a step, which can change bits."""
    room = shared - _SHARED_SPARE
    while _stage_bytes(tile) > room and tile.block_i > 32:
        tile = replace(tile, block_i=tile.block_i // 2)
    while shared_of(tile, gated=gated) > room and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def shared_of(tile: GemmTile, *, gated: bool = False) -> int:
    """Return the bytes of shared memory that the tiles of weights and of x take at most."""
    # On Hopper an early tile keeps a place of its own. Before Hopper it takes one that the loop has left.
    num_x = num_weights = tile.num_stages + (tile.early and tile.pdl)
    # TMA needs one place less for weights that go to registers.
    if gated and tile.tma and tile.num_stages > 1 and can_use_tma(tile.num_warps, to_registers=True):
        num_weights -= 1
    return 2 * tile.block_i * (num_weights * tile.block_o + num_x * tile.block_m)


def _stage_bytes(tile: GemmTile) -> int:
    return 2 * tile.block_i * (tile.block_o + tile.block_m)


def _measured(M: int, O: int, I: int, default: GemmTile | None) -> GemmTile | None:  # noqa: E741
    """Return the tile of the table, or `default` for a size that is not in it."""
    return _of_rows(_MEASURED.get((O, I), {}), M, default)


def _like_measured(M: int, O: int, I: int) -> GemmTile | None:  # noqa: E741
    """Return the tile of the size of the table that is the most like this one; None: there is no such size."""
    nearest = _most_like(O, I)
    return None if nearest is None else _of_rows(_MEASURED[nearest], M, None)


@cache
def _most_like(O: int, I: int) -> tuple[int, int] | None:  # noqa: E741
    """Return the size of the table that is the most like this one. It is kept, because launches ask for it."""

    def distance(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / O)) + abs(math.log(size[1] / I))

    nearest = min(_MEASURED, key=distance)
    return nearest if distance(nearest) <= math.log(_ALIKE) else None


def _of_rows(tiles: dict[int, GemmTile | None], M: int, default: GemmTile | None) -> GemmTile | None:
    rows = [bound for bound in tiles if bound >= M]
    tile = tiles[min(rows)] if rows else default
    if tile is not None and tile.kind == "fma":
        return replace(tile, block_m=M)
    return tile


def _guess(M: int, O: int) -> GemmTile:  # noqa: E741
    """Choose a tile for sizes that were not measured."""
    if M <= _MAX_FMA_TOKENS:
        return GemmTile("fma", M, block_o=8, block_i=1024, num_stages=3, num_warps=4)
    wide = O > _WIDE
    block_m = max(8, 1 << (M - 1).bit_length())
    if block_m == 8:
        if wide:
            return GemmTile("dot", 8, block_o=32, block_i=256, num_stages=4, num_warps=2, fuse_norm=False)
        return GemmTile("dot", 8, block_o=16, block_i=256, num_stages=5, num_warps=1, fuse_norm=False)
    if block_m == 16:
        if wide:
            return GemmTile("dot", 16, block_o=64, block_i=128, num_stages=6, num_warps=4, fuse_norm=False)
        if _splits(O) == 1:
            return GemmTile("dot", 16, block_o=64, block_i=256, num_stages=4, num_warps=4, fuse_norm=False)
        return GemmTile("dot", 16, block_o=32, block_i=256, num_stages=4, num_warps=2, fuse_norm=False)
    return GemmTile(
        "dot", block_m, block_o=64, block_i=128, num_stages=5, num_warps=4, splits=_splits(O), fuse_norm=False
    )


def _splits(O: int) -> int:  # noqa: E741
    """Return the number of splits with which each multiprocessor has at most one program of 64 outputs. With 4,096 to
    8,192 outputs these were the fastest for 32 and 64 tokens (H200)."""
    return next(splits for splits in (4, 2, 1) if splits * -(-O // 64) <= _MULTIPROCESSORS or splits == 1)
