// Sharing, summing and poisoning rows.
#pragma once
#include "ep/args.h"
#include "ep/stage.cuh"

namespace ep {

constexpr int kReceiveBarrier = 1;   // a named barrier

struct Range {
  int first, last;   // [first, last)
};

// One warp's run of a row's bytes.
__device__ __forceinline__ Range share(int bytes, int part, int parts) {
  int vectors = bytes / 16;
  return {int(u32(vectors * part) / u32(parts) * 16), int(u32(vectors * (part + 1)) / u32(parts) * 16)};
}

__device__ __forceinline__ float2 unpack(u32 bf16x2) {
  return {__uint_as_float(bf16x2 << 16), __uint_as_float(bf16x2 & 0xffff0000u)};
}

// to = sum of weight x row over the lanes of `set`, in order, in fp32, rounded once to bf16, for one run of the rows.
// Each lane of the set holds its term's row and weight.
__device__ __forceinline__ void sum_rows(Stage& stage, u64 to, Range run, u32 set, u64 row, float weight, int lane) {
  const int bytes = run.last - run.first;
  if (set != 0) {
    stage.gather(set, row + run.first, bytes, lane);
    stage.await();
  }
  for (int first = 0; first < bytes; first += 512) {
    int at = first + lane * 16, term = 0;
    bool there = at < bytes;
    float acc[8] = {};
    for (u32 left = set; left != 0; left &= left - 1, ++term) {
      float w = __shfl_sync(kFullWarp, weight, __ffs(left) - 1);
      if (not there) continue;
      Vec v = stage.get<Vec>(term * bytes + at);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float2 x = unpack(v.v[q]);
        acc[2 * q] = fmaf(w, x.x, acc[2 * q]);
        acc[2 * q + 1] = fmaf(w, x.y, acc[2 * q + 1]);
      }
    }
    Vec out;
#pragma unroll
    for (int q = 0; q < 4; ++q) out.v[q] = pack(acc[2 * q], acc[2 * q + 1]);
    if (there) store_vec(reinterpret_cast<void*>(to + run.first + at), out);
  }
}

// One warp's run of what this rank answers to a received record: its compact row, or the weighted sum of its masked rows.
__device__ __forceinline__ void send_back(const Args& a, Stage& stage, u64 to, i64 record, int part, int lane) {
  const i64 row_bytes = 2 * a.hidden;
  Range run = share(int(row_bytes), part, int(a.send_parts));
  if (not a.masked) {
    stage.load(a.y + record * row_bytes + run.first, run.last - run.first, lane);
    stage.await();
    if (lane == 0) bulk_store(to + run.first, stage.at, run.last - run.first);
    bulk_commit();
    bulk_await_stored();
    return;
  }
  i64 pick = record * a.top_k + lane;
  int row = lane < a.top_k ? reinterpret_cast<const int*>(a.position)[pick] : -1;
  float weight = lane < a.top_k ? reinterpret_cast<const float*>(a.pick_weight)[pick] : 0.f;
  sum_rows(stage, to, run, __ballot_sync(kFullWarp, row >= 0), a.y + row * row_bytes, weight, lane);
}

// All threads of a block; bf16 and e4m3 alike read all ones as NaN. A block that failed fills everything: others may have ended well.
__device__ __noinline__ void poison_rows(u64 rows, i64 bytes) {
  Vec nan{{~0u, ~0u, ~0u, ~0u}};
  for (i64 i = threadIdx.x; i < bytes / 16; i += blockDim.x) reinterpret_cast<Vec*>(rows)[i] = nan;
}
__device__ __forceinline__ void poison_sums(const Args& a) { poison_rows(a.out, a.tokens * 2 * a.hidden); }

}  // namespace ep
