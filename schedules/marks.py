"""The attributes that PrimFuncs carry: who sets each, and what it tells the code that reads it."""

from __future__ import annotations

from tvm.ir import BaseFunc
from tvm.tirx import PrimFunc

# --- Ours -------------------------------------------------------------------------------------------------------------
#: The JSON text of an attention's `AttentionSpec` (`schedules.functions.attention`).
ATTENTION_ATTR = "relaxtune.attention"
#: The JSON text of a recurrent layer (`schedules.functions.recurrence`).
RECURRENCE_ATTR = "relaxtune.recurrence"
#: The function's float32 matmul may multiply in tf32.
TF32_ATTR = "relaxtune.tf32"
#: Positions of the parameters that no kernel writes (weights).
CONSTANT_PARAMS_ATTR = "relaxtune.constant_params"
#: Positions of the parameters that are inputs of a graph whose kernels run as one CUDA graph.
INPUT_PARAMS_ATTR = "relaxtune.input_params"
#: Positions of the parameters that are results of such a graph, in memory that no other kernel of it reads or writes.
OWN_OUTPUTS_ATTR = "relaxtune.own_outputs"
#: The function is a TIRx kernel (explicit threads, memory and barriers), not a schedule of blocks.
KERNEL_ATTR = "relaxtune.tirx_kernel"
#: The function launches one of so many kernels (`schedules.templates.launch_table`).
KERNELS_ATTR = "relaxtune.kernels"
#: The function is one of symbolic sizes at one set of them. No trace is searched for it: a table's kernels take others.
AT_SIZES_ATTR = "relaxtune.at_sizes"
#: The most rows that calls of a function with a symbolic number of rows have; more are right too, and may be slow.
ROWS_MAX_ATTR = "relaxtune.rows_max"
#: Numbers of rows that calls are said to have, the likeliest first: those of a profile's sizes, or of real calls.
NAMED_ROWS_ATTR = "relaxtune.named_rows"
#: Names of the C sources of `schedules/libraries` that a module with the function must be linked with.
SOURCES_ATTR = "relaxtune.library_sources"
#: On the root block of a schedule: its copies to shared memory are asynchronous where its loops ask for it.
ASYNC_COPIES = "relaxtune.async_copies"

# --- TVM's ------------------------------------------------------------------------------------------------------------
#: The function carries a schedule.
SCHEDULED_ATTR = "tirx.is_scheduled"
#: Its name, and what kind of operator it is for fusion: no code depends on them, and two models may differ in them.
INCIDENTAL_ATTRS = ("op_pattern", "global_symbol")
#: The function is made of blocks, which a kernel is not.
BLOCKS_ATTR = "s_tir"
#: Launch attributes of a kernel, such as `DEPENDENT_LAUNCH` (the spelling is TVM's).
LAUNCH_ATTR = "tirx.kernel_launch_params"
DEPENDENT_LAUNCH = "tirx.use_programtic_dependent_launch"
#: Blocks that a multiprocessor holds at least, which caps a thread's registers.
MIN_BLOCKS_ATTR = "tirx.launch_bounds_min_blocks_per_sm"


def is_scheduled(func: PrimFunc) -> bool:
    """Whether a PrimFunc already carries a schedule."""
    return bool(func.attrs.get(SCHEDULED_ATTR, False)) if func.attrs else False


def as_scheduled(func: PrimFunc) -> PrimFunc:
    """Return a function marked as scheduled, without the name of its task."""
    return func.without_attr("global_symbol").with_attr(SCHEDULED_ATTR, True)


def is_kernel(func: BaseFunc) -> bool:
    """Whether a function is a TIRx kernel of a template: one without blocks, all of whose loops are bound already."""
    return isinstance(func, PrimFunc) and bool(func.attrs) and bool(func.attrs.get(KERNEL_ATTR, False))


def constant_params(func: PrimFunc) -> frozenset[int]:
    """Return the positions of the parameters that are marked as constant."""
    return _positions(func, CONSTANT_PARAMS_ATTR)


def unwritten_params(func: PrimFunc) -> frozenset[int]:
    """Return the positions of the parameters that no kernel writes while the graph runs: constants and inputs."""
    return constant_params(func) | _positions(func, INPUT_PARAMS_ATTR)


def own_outputs(func: PrimFunc) -> frozenset[int]:
    """Return the positions of the parameters that no other kernel of the graph reads or writes."""
    return _positions(func, OWN_OUTPUTS_ATTR)


def _positions(func: PrimFunc, mark: str) -> frozenset[int]:
    marked = func.attrs.get(mark, ()) if func.attrs else ()
    return frozenset(int(position) for position in marked)
