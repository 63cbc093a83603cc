"""The kernel that samples tokens on a GPU, in one launch; `schedules.functions.sampling` says what it computes.

A cluster of PEERS blocks has a sequence, each block a chunk of its tokens, whose x it keeps in its shared memory (in
`scratch` where that is too small). GPUs without clusters have one block a sequence. Blocks of a cluster show each other

    the largest x and logit, and the model's sum of probabilities        greedy rows end here
    selections    for each of 8 bits of a key, the sum of weights of the tokens with each digit

The first selection, over bins of -d, finds the tokens that the first filter may keep. Where these are LIST or fewer,
they move into a list of the first block, which goes on alone with LIST_THREADS threads; else the whole cluster goes on.
A filter selects a key, and a token passes where its own key is at most that; the draw is a selection by the tokens'
numbers. Sums have 64 bits: an atomic addition of 32 bits, and one of its carry.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.functions import sampling as rules
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.targets import Feature, ResolvedTarget
from relaxtune.schedules.templates.base import cuda_limits
from relaxtune.schedules.templates.emit.device_function import device_call, load_source
from relaxtune.schedules.templates.emit.kernel_frame import (
    EmitBody,
    build_function,
    flat_view,
    shared_pool,
    wait_for_predecessor,
)
from relaxtune.schedules.tir.blocks import Size, element_bytes, narrow

_THREADS, _LIST_THREADS, _PEERS, _LIST = 1024, 256, 8, 2048
# Of a block's memory, all but its x.
_SHARED_BYTES = 24 * 1024

_CLUSTER = """
__forceinline__ __device__ void relaxtune_sampling_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__forceinline__ __device__ void relaxtune_sampling_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__forceinline__ __device__ unsigned long long relaxtune_sampling_peer(const void* at, int rank) {
  unsigned long long found;
  asm("mapa.u64 %0, %1, %2;" : "=l"(found) : "l"(at), "r"(rank));
  return found;
}
"""
_ONE_BLOCK = """
__forceinline__ __device__ void relaxtune_sampling_arrive() {}
__forceinline__ __device__ void relaxtune_sampling_wait() { __syncthreads(); }
__forceinline__ __device__ unsigned long long relaxtune_sampling_peer(const void* at, int rank) {
  return (unsigned long long)at;
}
"""
# From `bits`, an unsigned integer of the logits' width.
_LOGITS = {
    "float16": "__half2float(__ushort_as_half(bits))",
    "bfloat16": "__uint_as_float((unsigned)bits << 16)",
    "float32": "__uint_as_float(bits)",
}
_SOURCE = Path(__file__).with_name("sampling_kernel.h")


def sampling_kernel(spec: SamplingSpec, target: ResolvedTarget) -> tirx.PrimFunc:
    """Return the kernel of a sampling function."""
    dependent = Feature.DEPENDENT_LAUNCH in target.features
    peers = _PEERS if Feature.CLUSTERS in target.features else 1
    chunk = math.ceil(spec.vocabulary / peers)
    held = _SHARED_BYTES + 4 * chunk <= cuda_limits(target).shared_bytes_optin
    source = _source(spec, peers, chunk, held)

    def begin(params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        flat = [flat_view(param) for param in params]

        def emit(block: tirx.Expr, thread: tirx.Expr) -> None:
            pool = shared_pool()
            memory = pool.alloc((_SHARED_BYTES + 4 * chunk * held,), "uint8", align=16)
            pool.commit()
            wait_for_predecessor(dependent)
            places = (view.ptr_to([0]) for view in (*flat, memory))
            T.evaluate(device_call(source, *places, block // peers, block % peers, thread))

        return narrow(spec.batch) * peers, emit

    return build_function(spec.declare(), _THREADS, dependent, begin, peers)


def _source(spec: SamplingSpec, peers: int, chunk: int, held: bool) -> str:
    """Return the functions of a kernel, in a namespace of their own: a module may have several."""
    kinds = {"float32": "float", "int32": "int", "int64": "int64_t"}
    size = element_bytes(spec.dtype)
    names = [(name, kinds.get(dtype, "void")) for name, _, dtype in [*spec.inputs, *spec.outputs]]
    optional = len(names) - 7
    absent = {"counts": "int", "bias": "float", "mask": "int"}.items() - set(names)
    name = "_".join(["relaxtune_sampling", spec.dtype, str(spec.vocabulary), *(name for name, _ in names[4:-3])])
    constants = {
        "PARAMETERS": ", ".join(f"{kind}* {name}" for name, kind in names),
        "ABSENT": " ".join(f"{kind}* {name} = nullptr;" for name, kind in sorted(absent)),
        "SCORES": f"(float*)((char*)memory + {_SHARED_BYTES})" if held else "scratch + start + first",
        "LOGIT": _LOGITS[spec.dtype],
        "BITS": "unsigned" if size == 4 else "unsigned short",
        "relaxtune_load_SIZE": f"relaxtune_load_{size}",
        "NAME": name,
        "PARTS": f"{name}_parts",
        "NOTHING": "__int_as_float(0xff800000)",  # -inf
        "VOCABULARY": spec.vocabulary,
        "WORDS": math.ceil(spec.vocabulary / 32),
        "V_SHIFT": 24 - max(1, (spec.vocabulary - 1).bit_length()),
        "CHUNK": chunk,
        "PEERS": peers,
        "THREADS": _THREADS,
        "LIST_THREADS": _LIST_THREADS,
        "LIST": _LIST,
        # Logits of a thread that are on their way together.
        "GROUP": 12 // (optional + 1) if optional else 16 if peers > 1 else 8,
        "SHARED_BYTES": _SHARED_BYTES,
    }
    loads = "".join(load_source(each) for each in sorted({size, 4, 8}))
    text = f"\n{_SOURCE.read_text(encoding='utf-8')}".replace(
        "MEETING", loads + (_CLUSTER if peers > 1 else _ONE_BLOCK)
    )
    text = re.sub(rf"\b({'|'.join(constants)})\b", lambda found: str(constants[found.group(1)]), text)
    return re.sub(r"\brules_(\w+)", lambda found: _literal(getattr(rules, found.group(1))), text)


def _literal(value: int | float | tuple[int | float, ...]) -> str:
    if isinstance(value, tuple):
        return f"{{{', '.join(map(_literal, value))}}}"
    return f"({value!r}f)" if isinstance(value, float) else f"{value}u" if value >= 2**31 else str(value)
