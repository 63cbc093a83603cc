"""The kernel that lists the tokens of a mask on a GPU, in one launch: `relaxtune.models.unpadding.Unpadding.lists`.

A block of threads has a row of the mask [rows, width]. It counts the tokens of all rows before its own, and of all
rows, then goes through its own in steps of a place a thread; a place's rank comes of ballots and sums of warps. Nothing
is waited for between blocks. Each block reads the whole mask (32 x 512 places of 8 bytes: 131 KB from the L2 cache),
which takes less time than a second launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from relaxtune.schedules.templates.emit.device_function import device_call
from relaxtune.schedules.templates.emit.kernel_frame import EmitBody, build_function, flat_view
from relaxtune.schedules.tir.blocks import Size, narrow, shape_of

_THREADS = 256
_SOURCE = """
__forceinline__ __device__ int relaxtune_block_sum(int x, int* sums, int thread) {
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  if (thread % 32 == 0) sums[thread / 32] = x;
  __syncthreads();
  int total = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) total += sums[warp];
  __syncthreads();
  return total;
}
// The flags of threads before this one; `total` is those of all.
__forceinline__ __device__ int relaxtune_block_rank(bool flag, int* sums, int thread, int* total) {
  unsigned flags = __ballot_sync(~0u, flag);
  if (thread % 32 == 0) sums[thread / 32] = __popc(flags);
  __syncthreads();
  int rank = __popc(flags & ((1u << (thread % 32)) - 1));
  *total = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) {
    if (warp < thread / 32) rank += sums[warp];
    *total += sums[warp];
  }
  __syncthreads();
  return rank;
}
__forceinline__ __device__ bool relaxtune_wanted(int place, int width) { return WANTED; }
template <typename M>
__forceinline__ __device__ void relaxtune_list_tokens(
    const M* mask, int* rows, int* spans, int* slots, int* count, int batch, int width, int row, int thread) {
  __shared__ int sums[THREADS / 32];
  int own = row * width, all = batch * width;
  int before = 0, total = 0, shown = 0;
  for (int at = thread; at < all; at += THREADS) {
    bool seen = (float)mask[at] != 0.0f;
    bool taken = seen || relaxtune_wanted(at % width, width);
    total += taken;
    before += taken && at < own;
    shown += seen && at >= own && at < own + width;
  }
  before = relaxtune_block_sum(before, sums, thread);
  total = relaxtune_block_sum(total, sums, thread);
  shown = relaxtune_block_sum(shown, sums, thread);
  int end = before + (shown > 1 ? shown : 1);
  int hidden = before < total ? before : total - 1;
  int next_seen = before, next_kept = before + shown;
  for (int first = 0; first < width; first += THREADS) {
    int place = first + thread, seen_count, kept_count;
    bool seen = place < width && (float)mask[own + place] != 0.0f;
    bool kept = place < width && !seen && relaxtune_wanted(place, width);
    int of_seen = next_seen + relaxtune_block_rank(seen, sums, thread, &seen_count);
    int of_kept = next_kept + relaxtune_block_rank(kept, sums, thread, &kept_count);
    int slot = seen ? of_seen : of_kept;
    if (seen || kept) {
      rows[slot] = own + place;
      spans[2 * slot] = before;
      spans[2 * slot + 1] = end;
    }
    if (place < width) slots[own + place] = seen || kept ? slot : hidden > 0 ? hidden : 0;
    next_seen += seen_count;
    next_kept += kept_count;
  }
  if (row + 1 < batch) return;
  for (int at = total + thread; at < all; at += THREADS) {
    rows[at] = all - 1;
    spans[2 * at] = before;
    spans[2 * at + 1] = end;
  }
  if (thread == 0) count[0] = total;
}
"""


def token_list_kernel(func: tirx.PrimFunc, kept: Sequence[int]) -> tirx.PrimFunc:
    """Return the kernel of a function of (mask, rows, spans, slots, count), which keeps some places of each row."""
    batch, width = shape_of(func.params[0]) or (0, 0)
    wanted = " || ".join(f"place == {place}" if place >= 0 else f"place == width - {-place}" for place in kept)
    source = _SOURCE.replace("THREADS", str(_THREADS)).replace("WANTED", wanted or "false")

    def begin(params: list[tirx.Var]) -> tuple[Size, EmitBody]:
        flat = [flat_view(param) for param in params]

        def emit(block: tirx.Expr, thread: tirx.Expr) -> None:
            at = [view.ptr_to([0]) for view in flat]
            sizes = [tirx.IntImm("int32", one) if isinstance(one, int) else narrow(one) for one in (batch, width)]
            T.evaluate(device_call(source, *at, *sizes, block, thread))

        return narrow(batch), emit

    return build_function(func, _THREADS, False, begin)
