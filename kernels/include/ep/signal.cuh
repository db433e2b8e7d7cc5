// Signal words and bounded waits.
//
// A word is written by one 64-bit store after a system-wide fence; its reader loads it with acquire. Everything that the
// writing block stored before the fence (its warps tell the publishing warp by block-scope release and acquire, and
// causality is transitive) is visible to the reader and to whoever it synchronises with after that, also to their bulk
// copies, because the writer has a proxy fence on that path.
#pragma once
#include "ep/args.h"
#include "ep/ptx.cuh"

namespace ep {

__device__ __forceinline__ u64* heap_word(const Args& a, int rank, i64 array, i64 index) {
  return reinterpret_cast<u64*>(a.heap[rank] + array + 8 * index);
}
__device__ __forceinline__ const u64* own_word(const Args& a, i64 array, i64 index) {
  return heap_word(a, int(a.rank), array, index);
}
__device__ __forceinline__ bool reached(u64 word, u64 epoch, u64 count) {
  return signal_epoch(word) == epoch && signal_count(word) >= count;
}
__device__ __forceinline__ u64* stats(const Args& a) { return reinterpret_cast<u64*>(a.stats); }
__device__ __forceinline__ void add_stat(const Args& a, i64 index, u64 value) { atomicAdd(stats(a) + index, value); }

// Records, or their answers, that this rank has written to a peer; those for other ranks count as forwarded too.
__device__ __forceinline__ void add_written(const Args& a, Op op, int peer, int records, i64 bytes, bool forwarded) {
  if (records == 0) return;
  const i64 mode = stat_mode(a.ranks, a.mode), row = mode + 2 * int(op) * a.ranks + peer;
  add_stat(a, row, records);
  add_stat(a, row + a.ranks, u64(records) * bytes);
  if (not forwarded) return;
  const i64 scalar = mode + kStatRows * a.ranks + kStatForwarded + 2 * int(op);
  add_stat(a, scalar, records);
  add_stat(a, scalar + 1, u64(records) * bytes);
}

__device__ __forceinline__ void fence_release() {
  fence_async();
  fence_sys();
}

// Keep the first error, make this kernel stop waiting and later ones exit at once, and tell every peer.
__device__ __noinline__ void report(const Args& a, Fault fault, Op op, u64 epoch, int peer, u64 expected, u64 seen) {
  u64* r = reinterpret_cast<u64*>(a.report);
  if (atomicCAS(&reinterpret_cast<Control*>(a.control)->failed, u64(0), u64(1)) != 0) return;
  r[int(Report::kOp)] = u64(op);
  r[int(Report::kMode)] = a.mode;
  r[int(Report::kLane)] = a.lane;
  r[int(Report::kEpoch)] = epoch;
  r[int(Report::kPeer)] = peer;
  r[int(Report::kExpected)] = expected;
  r[int(Report::kSeen)] = seen;
  fence_sys();
  store_relaxed_sys(r, u64(fault));   // the kind last: the host reads the rest only behind it
  for (int p = 0; p < a.ranks; ++p)   // abort words lie at the heap's start; a rank that is not mapped here runs into its timeout
    if (a.heap[p] != 0) store_relaxed_sys(heap_word(a, p, 0, a.rank), 1);
}
__device__ __forceinline__ bool failed(const Args& a) {
  return load_relaxed_sys(&reinterpret_cast<const Control*>(a.control)->failed) != 0;
}

// Whether this rank or a peer has given up. By one whole warp.
__device__ __forceinline__ bool given_up(const Args& a, Op op, u64 epoch, int lane) {
  u64 broken = load_relaxed_sys(&reinterpret_cast<const Control*>(a.control)->failed);   // both under way at once
  u64 aborted = lane < a.ranks ? load_relaxed_sys(own_word(a, 0, lane)) : 0;
  u32 who = __ballot_sync(kFullWarp, aborted != 0);
  if (who != 0 and lane == 0) report(a, Fault::kAbort, op, epoch, __ffs(who) - 1, 0, 0);
  return __any_sync(kFullWarp, who != 0 or broken != 0);   // the same in all lanes, whoever fails meanwhile
}

// Whether a wait may go on: nobody has given up, nor has it lasted too long.
__device__ __forceinline__ bool patient(const Args& a, Op op, int peer, u64 epoch, u64 start, u64 expected, u64 seen) {
  if (failed(a)) return false;
  for (int r = 0; r < a.ranks; ++r)
    if (load_relaxed_sys(own_word(a, 0, r)) != 0) {
      report(a, Fault::kAbort, op, epoch, r, 0, 0);
      return false;
    }
  if (nanoseconds() - start <= u64(a.timeout_ns)) return true;
  report(a, Fault::kTimeout, op, epoch, peer, expected, seen);
  return false;
}

__device__ __noinline__ u64 wait_slow(const Args& a, Op op, int peer, const u64* word, u64 epoch, u64 count) {
  u64 start = nanoseconds(), seen = 0;
  for (int turn = 1;; ++turn) {
    seen = load_acquire_sys(word);
    if (reached(seen, epoch, count)) break;
    if (turn % 64 != 0) continue;
    // A peer in a later epoch cannot have completed this one without us: it refused it.
    if (op == Op::kDispatch and signal_epoch(seen) > epoch) {
      report(a, Fault::kSkipped, op, epoch, peer, epoch, signal_epoch(seen));
      return 0;
    }
    if (not patient(a, op, peer, epoch, start, signal_word(epoch, count), seen)) return 0;
  }
  return seen;
}
// The word once it has this epoch and at least this count; 0 if the buffer has failed.
__device__ __forceinline__ u64 wait_word(const Args& a, Op op, int peer, i64 array, i64 index, u64 epoch, u64 count) {
  const u64* word = own_word(a, array, index);
  u64 seen = load_acquire_sys(word);
  return reached(seen, epoch, count) ? seen : wait_slow(a, op, peer, word, epoch, count);
}

// The last block of combine's last kernel to have read the lane's epoch ends the round. By one thread of a block.
__device__ __forceinline__ void count_reader(const Args& a, u64 epoch) {
  if (not a.advance) return;
  LaneState* state = reinterpret_cast<LaneState*>(a.state);
  __threadfence();
  if (atomicAdd(&state->readers, u64(1)) == gridDim.x - 1) {
    state->readers = 0;
    __threadfence();
    store_relaxed_sys(&state->epoch, epoch + 1);
  }
}
__device__ __forceinline__ u64 read_epoch(const Args& a) {
  u64 epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
  count_reader(a, epoch);
  return epoch;
}

}  // namespace ep
