"""The launcher of parallel loops that is linked into code for CPUs, called as compiled code calls it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi.libinfo

from relaxtune.pipeline.codegen.library_objects import compile_library_objects, list_library_sources
from relaxtune.pipeline.workers.linking import link_to_load, run_compiler
from tests.schedules.targets.quota_cases import QUOTA_CASES, QuotaCase

BODY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int32 * 4), ctypes.c_void_p)
# What the file keeps to itself.
EXPORTS = """
#include "cpu_threads.c"
int launch_on(Body body, int blocks, int threads) { return launch(body, NULL, blocks, threads); }
int quota_at(const char *groups, const char *root) { return quota_of(groups, root); }
void *shared_pool(void) { return &relaxtune_cpu_pool_1; }
int pool_threads(void) { return atomic_load(&pool.threads); }
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    (source,) = list_library_sources([], "llvm")
    (folder / "exports.c").write_text(EXPORTS)
    folders = [f"-I{path}" for path in (source.parent, *tvm_ffi.libinfo.include_paths())]
    made = str(folder / "exports.o")
    done = run_compiler(["cc", "-O2", "-fPIC", *folders, "-c", str(folder / "exports.c"), "-o", made], folder)
    assert done.returncode == 0, done.stderr
    link_to_load(str(folder / "one.so"), [made])
    return folder / "one.so"


@pytest.fixture(scope="module")
def library(code: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(code))


def launch(library: ctypes.CDLL, run: Callable[[int], int], blocks: int, threads: int) -> int:
    return int(library.launch_on(BODY(lambda block, _group, _data: run(block)), blocks, threads))


@pytest.mark.parametrize("threads", [1, 2, 3, 70])
@pytest.mark.parametrize("blocks", [1, 2, 7, 33, 1001])
def test_each_block_runs_once(library: ctypes.CDLL, blocks: int, threads: int) -> None:
    ran: list[int] = []
    for _ in range(20):
        ran.clear()
        assert launch(library, lambda block: ran.append(block) or 0, blocks, threads) == 0  # type: ignore[func-returns-value]
        assert sorted(ran) == list(range(blocks))


def test_a_loop_of_no_given_number_gets_several_blocks_a_thread(library: ctypes.CDLL) -> None:
    ran: list[int] = []
    assert launch(library, lambda block: ran.append(block) or 0, 0, 3) == 0  # type: ignore[func-returns-value]
    assert sorted(ran) == list(range(48))


def test_callers_share_the_pool(library: ctypes.CDLL) -> None:
    counts: list[Counter[int]] = [Counter() for _ in range(40)]

    def call(number: int) -> None:
        count = counts[number]
        for _ in range(30):
            launch(library, lambda block: count.update([block]) or 0, 9, 2 + number % 3)  # type: ignore[func-returns-value]

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(counts))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(count == dict.fromkeys(range(9), 30) for count in counts)
    assert library.pool_threads() < 70


def test_a_slow_thread_costs_one_block(library: ctypes.CDLL) -> None:
    caller, slow_s = threading.get_ident(), 0.2

    def run(_block: int) -> int:
        if threading.get_ident() != caller:
            time.sleep(slow_s)
        return 0

    began = time.perf_counter()
    launch(library, run, 64, 2)
    assert time.perf_counter() - began < 3 * slow_s


def test_a_failed_block_fails_the_launch(library: ctypes.CDLL) -> None:
    assert launch(library, lambda block: -(block == 5), 32, 2) == -1
    assert launch(library, lambda _block: 0, 32, 2) == 0


def test_all_libraries_of_a_process_have_one_pool(code: Path, library: ctypes.CDLL) -> None:
    other = code.with_name("other.so")
    other.write_bytes(code.read_bytes())
    pools = []
    for one in (library, ctypes.CDLL(str(other))):
        one.shared_pool.restype = ctypes.c_void_p
        pools.append(one.shared_pool())
    assert pools[0] == pools[1]
    (source,) = list_library_sources([], "llvm")
    assert compile_library_objects([source], code.parent)[0].stat().st_size < 64 << 10


@pytest.mark.parametrize("case", QUOTA_CASES, ids=lambda case: case.name)
def test_quotas_of_control_groups(library: ctypes.CDLL, tmp_path: Path, case: QuotaCase) -> None:
    groups, root = case.write(tmp_path)
    assert library.quota_at(str(groups).encode(), str(root).encode()) == case.cpus
