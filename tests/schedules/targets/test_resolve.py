from __future__ import annotations

import json
import logging

import pytest
import tvm

from relaxtune.schedules.errors import ScheduleError, TargetError
from relaxtune.schedules.targets import CpuLimits, CudaLimits, host, resolve_target, target_limits
from tests.schedules.targets.quota_cases import QUOTA_CASES

HAS_GPU = tvm.cuda(0).exist
WITHOUT_GPU = pytest.mark.skipif(HAS_GPU, reason="a GPU is here")


@pytest.mark.parametrize(
    ("text", "kind", "arch"),
    [
        ("cuda:sm_90a", "cuda", "sm_90a"),
        ("cuda:sm_80", "cuda", "sm_80"),
        ("nvidia/geforce-rtx-3090", "cuda", "sm_86"),
        ("nvidia/nvidia-h100", "cuda", "sm_90a"),
        ('{"tag": "nvidia/nvidia-h100"}', "cuda", "sm_90a"),
        ('{"kind": "cuda", "arch": "sm_89"}', "cuda", "sm_89"),
        ('{"kind": "llvm"}', "llvm", "generic"),
        ("aws/cpu/c5.large", "llvm", "skylake-avx512"),
    ],
)
def test_resolve_target_names_kind_and_arch_when_text_is_accepted(text, kind, arch):
    resolved = resolve_target(text)
    assert (resolved.kind, resolved.arch) == (kind, arch)
    assert resolved.target.kind.name == kind
    assert resolved.target.host is not None


@pytest.mark.parametrize(
    ("config", "vector_bytes", "registers"),
    [
        ({"mcpu": "nehalem"}, 16, 16),
        ({"mcpu": "haswell"}, 32, 16),
        ({"mcpu": "znver5"}, 64, 32),
        ({"mcpu": "skylake-avx512", "mattr": ["-avx512f"]}, 32, 16),
    ],
)
def test_vectors_and_registers_are_those_of_the_processor_when_it_is_named(config, vector_bytes, registers):
    limits = resolve_target(json.dumps({"kind": "llvm", "mtriple": "x86_64-linux-gnu", **config})).limits
    assert (limits.vector_bytes, limits.vector_registers) == (vector_bytes, registers)


@pytest.mark.parametrize("text", ["llvm", pytest.param("auto", marks=WITHOUT_GPU)])
def test_resolve_target_detects_this_processor_when_asked(text, caplog):
    with caplog.at_level(logging.DEBUG, "relaxtune.schedules.targets"):
        resolved = resolve_target(text)
    assert resolved.arch == str(tvm.target.codegen.llvm_get_system_cpu())
    assert isinstance(resolved.limits, CpuLimits)
    assert resolved.limits.cores == resolved.target.attrs["num-cores"] == host.physical_cores()
    assert resolved.limits.vector_bytes in (16, 32, 64)
    assert resolved.source in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo", "'foo' is not known. Accepted: auto"),
        ("", "is not known"),
        ('{"kind": "llvm"', "not valid JSON"),
        ('{"kind": "rocm"}', "kind 'rocm' is not supported; expected llvm or cuda"),
        ('{"mcpu": "znver4"}', "kind None is not supported"),
        ('{"kind": "cuda"}', "needs its architecture"),
        ('{"kind": "llvm", "mcpux": "a"}', "TVM does not take"),
        ('{"kind": "llvm", "mcpu": "pentium9"}', "LLVM does not know the processor 'pentium9'"),
        ('{"tag": "nvidia/none"}', "tag 'nvidia/none' is not known"),
        ("cuda:sm_30", "'sm_30' is not known; expected one of sm_75"),
        ("cuda:hopper", "'hopper' is not known"),
    ],
)
def test_resolve_target_says_what_is_wrong_when_text_is_not_accepted(text, message):
    with pytest.raises(TargetError, match=message):
        resolve_target(text)


@WITHOUT_GPU
def test_resolve_target_asks_for_the_arch_when_there_is_no_gpu():
    with pytest.raises(ScheduleError, match="architecture must be given, for example cuda:sm_90a"):
        resolve_target("cuda")


@pytest.mark.parametrize(("arch", "optin_kib"), [("sm_75", 64), ("sm_86", 99), ("sm_90a", 227), ("sm_100a", 227)])
def test_cuda_limits_follow_the_table_when_arch_is_known(arch, optin_kib):
    limits = resolve_target(f"cuda:{arch}").limits
    assert isinstance(limits, CudaLimits)
    assert limits.shared_bytes_optin == optin_kib * 1024
    assert limits == target_limits(resolve_target(f"cuda:{arch}").target)


def test_json_host_is_kept_when_it_is_given():
    text = json.dumps({"kind": "cuda", "arch": "sm_90a", "host": {"kind": "llvm", "mcpu": "skylake-avx512"}})
    assert resolve_target(text).target.host.attrs["mcpu"] == "skylake-avx512"


def test_target_limits_refuse_when_kind_is_neither_llvm_nor_cuda():
    with pytest.raises(TargetError, match="'opencl' is not supported"):
        target_limits(tvm.target.Target("opencl"))


def make_cpu(folder, cpu, core, package="0"):
    topology = folder / f"cpu{cpu}" / "topology"
    topology.mkdir(parents=True)
    (topology / "core_id").write_text(core)
    (topology / "physical_package_id").write_text(package)


def test_physical_cores_counts_a_core_once_when_it_has_two_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "usable_cpus", lambda: [0, 1, 2, 3])
    for cpu, core in enumerate("0011"):
        make_cpu(tmp_path, cpu, core)
    assert host.physical_cores(tmp_path, tmp_path / "none") == 2


@pytest.mark.parametrize("case", QUOTA_CASES, ids=lambda case: case.name)
def test_physical_cores_stay_under_the_quota_when_there_is_one(tmp_path, monkeypatch, case):
    monkeypatch.setattr(host, "usable_cpus", lambda: list(range(8)))
    assert host.physical_cores(tmp_path / "none", *case.write(tmp_path)) == (case.cpus or 8)


def test_cache_sizes_skip_instructions_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "usable_cpus", lambda: [0])
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1M")]
    ):
        folder = tmp_path / "cpu0" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value)
    assert host.cache_sizes(tmp_path) == host.CacheSizes(32 * 1024, 1024 * 1024)


def test_hidden_feature_is_taken_away_when_the_kernel_does_not_report_it(monkeypatch):
    full = tvm.target.codegen.llvm_get_cpu_features(resolve_target("llvm").target)
    if "fma" not in full:
        pytest.skip("this processor has no fma to hide")
    monkeypatch.setattr("relaxtune.schedules.targets.host.cpu_flags", lambda: frozenset({"avx2"}))
    resolved = resolve_target("llvm")
    assert "-fma" in list(resolved.target.attrs["mattr"])
    assert "-fma" in resolved.source


def test_feature_is_added_when_the_kernel_reports_more_than_the_processors_name_promises(monkeypatch):
    """A hypervisor that names an older processor, with the tiles of the one that it runs on."""
    old = "sse sse2 pni ssse3 sse4_1 sse4_2 movbe popcnt avx f16c abm bmi1 avx2 bmi2 fma avx512f avx512dq avx512cd"
    flags = frozenset([*old.split(), "avx512bw", "avx512vl", "amx_tile", "amx_bf16"])
    monkeypatch.setattr("relaxtune.schedules.targets.host.cpu_flags", lambda: flags)
    monkeypatch.setattr("relaxtune.schedules.targets.resolve.codegen.llvm_get_system_cpu", lambda: "skylake-avx512")
    resolved = resolve_target("llvm")
    assert list(resolved.target.attrs["mattr"]) == ["+amx-bf16", "+amx-tile"]
    assert "+amx-bf16, +amx-tile by /proc/cpuinfo" in resolved.source
    assert resolved.limits.has_tiles


@pytest.mark.parametrize(
    ("changes", "has_tiles"),
    [
        ({}, True),
        ({"mattr": ["-amx-bf16"]}, False),
        ({"mcpu": "icelake-server"}, False),
        ({"mtriple": "x86_64"}, False),
    ],
)
def test_tiles_are_taken_where_the_processor_has_them_and_linux_gives_them(changes, has_tiles):
    """Other systems have other calls for it, or none."""
    config = {"kind": "llvm", "mcpu": "sapphirerapids", "mtriple": "x86_64-linux-gnu", **changes}
    assert resolve_target(json.dumps(config)).limits.has_tiles is has_tiles


def test_cpu_flags_are_unknown_when_there_is_no_cpuinfo(tmp_path):
    assert host.cpu_flags(tmp_path / "none") is None
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\n")
    assert host.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"}
