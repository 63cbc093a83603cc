"""Control groups with CPU quotas, and how many CPUs each allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class QuotaCase:
    """What /proc/self/cgroup says, the files of the groups, and the whole CPUs allowed; 0 for no limit."""

    name: str
    groups: str
    cpus: int
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the files; return the list of groups and the root of their folders."""
        for name, text in self.files.items():
            file = folder / "root" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (folder / "groups").write_text(self.groups)
        return folder / "groups", folder / "root"


def _version_1(quota: str, folder: str) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


QUOTA_CASES = [
    QuotaCase("none", "", 0),
    QuotaCase("unlimited", "0::/\n", 0, {"cpu.max": "max 100000\n"}),
    QuotaCase("container", "0::/\n", 2, {"cpu.max": "150000 100000\n"}),
    QuotaCase("less_than_one", "0::/\n", 1, {"cpu.max": "10000 100000\n"}),
    QuotaCase("of_the_group", "0::/a/b\n", 3, {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "max 100000\n"}),
    QuotaCase("of_a_group_around", "0::/a/b\n", 2, {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}),
    QuotaCase("path_of_the_host", "0::/docker/1f\n", 4, {"cpu.max": "400000 100000\n"}),
    QuotaCase("empty_file", "0::/\n", 0, {"cpu.max": ""}),
    QuotaCase("version_1", "5:memory:/\n4:cpu,cpuacct:/a\n", 2, _version_1("150000", "cpu,cpuacct/a")),
    QuotaCase("version_1_host_path", "1:cpu:/docker/1f\n0::/\n", 3, _version_1("300000", "cpu")),
    QuotaCase("version_1_unlimited", "1:cpu:/\n", 0, _version_1("-1", "cpu")),
    QuotaCase("version_1_other_order", "1:cpuacct,cpu:/\n", 1, _version_1("50000", "cpuacct,cpu")),
    QuotaCase("other_controller", "1:cpuset:/\n", 0, _version_1("100000", "cpuset")),
]
