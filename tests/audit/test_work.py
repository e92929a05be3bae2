"""What products of matrices in 8 bits count: of shapes, as kernels for them are those of GPUs."""

import pytest
import torch
from torch import Tensor

from fivefold.audit.work import Multiplications
from fivefold.model.eight_bit import fp8
from fivefold.model.eight_bit.fp8 import E4M3, E8M0, MX, Block, Scaled

M, N, K, GROUPS = 24, 32, 16, 3


def _bits(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=E4M3, device="meta")


@pytest.mark.parametrize("block", [(1, None), (1, MX)], ids=["rowwise", "mxfp8"])
def test_zeros_that_a_kernel_is_given_are_no_work(block: Block) -> None:
    dtype = torch.float32 if block[1] is None else E8M0
    inverse = torch.empty(M, 1, dtype=dtype, device="meta")
    a = Scaled(_bits(M, K - 3), inverse, block)  # no kernel takes such rows
    with Multiplications() as work:
        made = fp8.by_kernel(a, a, fast=False)
    assert made.shape == (M, M) and work.flops == 2 * M * M * (K - 3)


def test_each_row_of_a_group_is_multiplied_by_its_matrix() -> None:
    scales, ends = (torch.empty(n, device="meta") for n in (M, GROUPS))
    with Multiplications() as work:
        made = torch._scaled_grouped_mm(
            _bits(M, K),
            _bits(GROUPS, N, K).transpose(1, 2),
            scales,
            torch.empty(GROUPS, N, device="meta"),
            offs=ends.int(),
            out_dtype=torch.bfloat16,
        )
    assert made.shape == (M, N) and work.flops == 2 * M * N * K
