// Lines: three words and the round's tag, of which a reader knows each by itself to be there.
//
// One store writes a line and one load reads it, neither of which any other access splits (PTX, .b128 with a scope), so a line
// with the tag has the words that were stored with it. Nothing else is read because a line is here: no line orders another
// access, so there is no fence, and no signal. Only lines are ever written where lines lie, all zero at first.
#pragma once
#include "ep/rows.cuh"
#include "ep/signal.cuh"

namespace ep {

// A copy that the compiler takes for another value: what one phase derives from it is not kept in registers for the next.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

constexpr int kChunk = int(kChunkBytes);
// Never that of a cleared line.
__device__ __forceinline__ u32 line_tag(u64 epoch) { return u32(epoch) << 1 | 1; }

constexpr int kLineStage = 528;   // bytes of a chunk's words in shared memory
static_assert(kLineStage >= 12 * kChunkLines and kLineStage % 16 == 0, "a chunk's words fit, as vectors");

constexpr int kClearBits = 16;   // 2^16 rounds clear the same slot, and 2^30 all of them: at most 32 ranks x 512 tokens

// The block's first trouble. It is reported when all warps have ended: a call amid a wait would cost registers.
struct Trouble {
  u32 any;
  int peer;
  Fault fault;
  u64 expected, seen;
};
__device__ __forceinline__ void note(Trouble& t, Fault fault, int peer, u64 expected, u64 seen) {
  if (atomicCAS(&t.any, 0u, 1u) != 0) return;
  t.fault = fault;
  t.peer = peer;
  t.expected = expected;
  t.seen = seen;
}
// Whether a wait may go on: nobody has given up, nor has it lasted too long. By one whole warp.
__device__ __forceinline__ bool patient_warp(const Args& a, Trouble& t, int peer, u64 start, u64 expected, u64 seen, int lane) {
  const u64 broken = load_relaxed_sys(&reinterpret_cast<const Control*>(a.control)->failed);   // both under way at once
  const u64 aborted = lane < a.ranks ? load_relaxed_sys(own_word(a, 0, lane)) : 0;
  const u32 who = __ballot_sync(kFullWarp, aborted != 0);
  const bool late = __any_sync(kFullWarp, nanoseconds() - start > u64(a.timeout_ns));   // lanes read clocks apart
  if (lane == 0 and who != 0) note(t, Fault::kAbort, __ffs(who) - 1, 0, 0);
  if (lane == 0 and who == 0 and late and broken == 0) note(t, Fault::kTimeout, peer, expected, seen);
  return not __any_sync(kFullWarp, who != 0 or broken != 0 or late or load_acquire_cta(&t.any) != 0);
}

__device__ __forceinline__ void tell_trouble(const Args& a, const Trouble& t, Op op, u64 epoch) {
  if (t.any != 0) report(a, t.fault, op, epoch, t.peer, t.expected, t.seen);
}

// A run of up to 64 lines, two a lane, here or not.
__device__ __forceinline__ void look_at_lines(u64 from, int lines, Vec (&line)[2], int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (lane + 32 * j < lines) line[j] = load_line(from + (lane + 32 * j) * kLineBytes);
}
// The same once all are here; they have been looked at.
__device__ __forceinline__ bool await_lines(const Args& a, Trouble& t, u64 from, int lines, u64 epoch, int source, Vec (&line)[2],
                                            int lane) {
  u64 start = 0;
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    bool here = true;
#pragma unroll
    for (int j = 0; j < 2; ++j) here = here and (lane + 32 * j >= lines or line[j].v[3] == line_tag(epoch));
    if (__all_sync(kFullWarp, here)) return true;
    look_at_lines(from, lines, line, lane);
    if (turn % 64 != 0) continue;
    if (start == 0) start = nanoseconds();
    if (not patient_warp(a, t, source, start, signal_word(epoch, 1), signal_word(epoch, 0), lane)) return false;
  }
}
__device__ __forceinline__ void unpack_lines(const Vec (&line)[2], int lines, u32* words, int lane) {
  __syncwarp();   // all have read what was there
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (lane + 32 * j < lines)
#pragma unroll
      for (int q = 0; q < 3; ++q) words[3 * (lane + 32 * j) + q] = line[j].v[q];
  __syncwarp();
}

}  // namespace ep
