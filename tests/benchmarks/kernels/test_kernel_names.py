"""Which of cuBLASLt's kernels count as those without wgmma; what runs them needs a GPU."""

from __future__ import annotations

import pytest

from benchmarks.kernels.cublaslt import is_without_wgmma

SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, __half, __half, float>(...)"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (["ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn"], True),
        (["ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn", SPLIT], True),
        (["sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64_stage6_warpsize2x2x1_tensor16x8x16_kernel"], True),
        (["void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_128x128_32x4_tn_align8>(...)"], True),
        (["turing_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_tn"], True),
        (["nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"], False),
        (["sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"], False),
        (["void cutlass::device_kernel<cutlass_90_tensorop_f16_s64x128x16gemm_f16>(...)"], False),
        (["ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "nvjet_hsh_128x256"], False),
        (["gemm_of_another_name"], False),
        ([SPLIT], False),
        ([], False),
    ],
)
def test_kernels_before_hopper_are_told_by_their_names(kernels: list[str], expected: bool) -> None:
    assert is_without_wgmma(kernels) is expected
