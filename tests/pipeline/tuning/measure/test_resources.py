from __future__ import annotations

from relaxtune.pipeline.tuning.measure.resources import NO_RESOURCES, Resources, parse_compiler_log

# NVRTC 13.0 with --ptxas-options=-v, two kernels.
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90a'
ptxas info    : Function properties for k2
ptxas         .     800 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 800 bytes cumulative stack size
ptxas info    : Compile time = 176.554 ms
ptxas info    : Compiling entry function 'k1' for 'sm_90a'
ptxas info    : Function properties for k1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 4096 bytes smem
"""


def test_parse_takes_the_largest_kernel_and_all_spills() -> None:
    assert parse_compiler_log(LOG) == Resources(32, 4096, 32)
    assert parse_compiler_log(LOG, dynamic_bytes=1000).smem_bytes == 5096
    assert parse_compiler_log("warning: unused variable") == NO_RESOURCES
