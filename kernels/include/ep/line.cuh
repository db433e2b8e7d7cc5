// Lines: 16 bytes of a row, of which a reader knows each by itself to be there, for it is no longer blank.
//
// One store writes a line and one load reads it, neither of which any other access splits (PTX, .b128 with a scope), so a line
// whose last word is not zero is whole. Nothing else is read because a line is here: no line orders another access, so there
// is no fence, and no signal. Only lines are ever written where lines lie, all blank at first; whoever has read one blanks it.
#pragma once
#include "ep/rows.cuh"
#include "ep/signal.cuh"

namespace ep {

// A copy that the compiler takes for another value: what one phase derives from it is not kept in registers for the next.
__device__ __forceinline__ int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

constexpr int kLine = 16, kChunk = 32 * kLine;   // bytes of a line, and of what a warp takes at a time

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

// Of a sum, never blank: a zero there becomes a negative one.
__device__ __forceinline__ void send_line(u64 to, Vec sum) {
  if (sum.v[3] == 0) sum.v[3] = 0x80008000;
  store_line(to, sum);
}
// Reads the line, which has been looked at, once it is here, and blanks it. Lanes that ask for none come with false.
__device__ __forceinline__ bool take_line(const Args& a, Trouble& t, u64 from, bool asks, u64 epoch, int source, Vec& line, int lane) {
  u64 start = 0;
#pragma unroll 1
  for (int turn = 1; not __all_sync(kFullWarp, not asks or line.v[3] != 0); ++turn) {
    if (asks) line = load_line(from);
    if (turn % 64 != 0) continue;
    if (start == 0) start = nanoseconds();
    if (not patient_warp(a, t, source, start, signal_word(epoch, 1), signal_word(epoch, 0), lane)) return false;
  }
  if (asks) store_vec(reinterpret_cast<void*>(from), Vec{});
  return true;
}

}  // namespace ep
