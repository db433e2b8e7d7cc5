// Moving and summing rows, a part of a row a warp.
#pragma once
#include "ep/routing.cuh"

namespace ep {

constexpr int kUnroll = 4;
constexpr int kSendBarrier = 1, kReceiveBarrier = 2, kTeamBarrier = 3;   // named barriers; team t has kTeamBarrier + t

// This warp's share of a row: vectors part * 32 + lane, and on in steps of parts * 32. Warps that share are a team.
struct Part {
  int part, parts, lane, team = 0;
};

__device__ __forceinline__ bool team_agrees(bool ok, const Part& p) {
  if (p.parts > 1) return barrier_and(kTeamBarrier + p.team, 32 * p.parts, ok);
  __syncwarp();
  return ok;
}

// Several independent loads, then what is done with them.
template <int kCount, typename Load, typename Use>
__device__ __forceinline__ void for_vectors(int vectors, const Part& p, Load load, Use use) {
  int stride = 32 * p.parts;
  for (int first = p.part * 32; first < vectors; first += stride * kCount) {
    int at[kCount];
    bool there[kCount];
    Vec v[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      at[i] = first + i * stride + p.lane;
      there[i] = at[i] < vectors;
      if (there[i]) v[i] = load(at[i]);
    }
    use(at, there, v);
  }
}

template <typename Load>
__device__ __forceinline__ void copy_row(u64 to, u64 from, int bytes, const Part& p, Load load) {
  for_vectors<kUnroll>(
      bytes / 16, p, [&](int at) { return load(reinterpret_cast<const Vec*>(from) + at); },
      [&](const int (&at)[kUnroll], const bool (&there)[kUnroll], const Vec (&v)[kUnroll]) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          if (there[i]) store_vec(reinterpret_cast<Vec*>(to) + at[i], v[i]);
      });
}

__device__ __forceinline__ float2 unpack(u32 bf16x2) {
  return {__uint_as_float(bf16x2 << 16), __uint_as_float(bf16x2 & 0xffff0000u)};
}
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

struct Term {
  u64 row;
  float weight;
};

// to = sum of weight x row over the terms of `set`, in that order, in fp32, rounded once to bf16.
// `term(k)` is called by whole warps. Four loads are in flight.
template <typename Load, typename GetTerm>
__device__ __forceinline__ void sum_rows(u64 to, i64 hidden, u32 set, const Part& p, Load load, GetTerm term) {
  constexpr int kTerms = 4;
  int vectors = int(hidden / 8), stride = 32 * p.parts;
  for (int first = p.part * 32; first < vectors; first += stride) {
    int at = first + p.lane;
    bool there = at < vectors;
    float acc[8] = {};
    for (u32 left = set; left != 0;) {
      Vec v[kTerms];
      float w[kTerms];
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        v[i] = Vec{};
        w[i] = 0.f;
        if (left == 0) continue;
        Term t = term(__ffs(left) - 1);
        left &= left - 1;
        w[i] = t.weight;
        if (there) v[i] = load(reinterpret_cast<const Vec*>(t.row) + at);
      }
#pragma unroll
      for (int i = 0; i < kTerms; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2 x = unpack(v[i].v[j]);
          acc[2 * j] = fmaf(w[i], x.x, acc[2 * j]);
          acc[2 * j + 1] = fmaf(w[i], x.y, acc[2 * j + 1]);
        }
    }
    Vec out;
#pragma unroll
    for (int j = 0; j < 4; ++j) out.v[j] = pack(acc[2 * j], acc[2 * j + 1]);
    if (there) store_vec(reinterpret_cast<Vec*>(to) + at, out);
  }
}

// All threads of the grid; bf16 and e4m3 alike read all ones as NaN.
__device__ __noinline__ void fill_nan(u64 to, i64 bytes) {
  Vec nan{{~0u, ~0u, ~0u, ~0u}};
  i64 step = i64(gridDim.x) * kThreads;
  for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < bytes / 16; i += step) reinterpret_cast<Vec*>(to)[i] = nan;
}

}  // namespace ep
