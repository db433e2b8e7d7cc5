// Sharing, summing and poisoning rows.
#pragma once
#include "ep/args.h"
#include "ep/ptx.cuh"

namespace ep {

constexpr int kReceiveBarrier = 1;   // a named barrier

struct Range {
  int first, last;   // [first, last)
};

// One warp's run of a row's bytes.
__device__ __forceinline__ Range share(int bytes, int part, int parts) {
  int vectors = bytes / 16;
  return {vectors * part / parts * 16, vectors * (part + 1) / parts * 16};
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

// Up to kTerms terms at once, or, if kVectors is 1, any number in batches.
template <int kVectors, int kTerms, typename Load, typename GetTerm>
__device__ __forceinline__ void sum_run(u64 to, Range run, u32 set, int lane, Load load, GetTerm term) {
  for (int first = run.first + lane * 16; first - lane * 16 < run.last; first += 512 * kVectors) {
    float acc[8] = {};
    u32 left = set;
    do {
      Vec v[kTerms][kVectors];
      float w[kTerms];
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        bool there = left != 0;
        Term t = term(there ? __ffs(left) - 1 : 0);
        left &= left - 1;
        w[i] = there ? t.weight : 0.f;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          v[i][j] = Vec{};
          if (there and first + 512 * j < run.last) v[i][j] = load(reinterpret_cast<const void*>(t.row + first + 512 * j));
        }
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (kVectors > 1)
          for (float& x : acc) x = 0.f;
#pragma unroll
        for (int i = 0; i < kTerms; ++i)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            float2 x = unpack(v[i][j].v[q]);
            acc[2 * q] = fmaf(w[i], x.x, acc[2 * q]);
            acc[2 * q + 1] = fmaf(w[i], x.y, acc[2 * q + 1]);
          }
        Vec out;
#pragma unroll
        for (int q = 0; q < 4; ++q) out.v[q] = pack(acc[2 * q], acc[2 * q + 1]);
        if (left == 0 and first + 512 * j < run.last) store_vec(reinterpret_cast<void*>(to + first + 512 * j), out);
      }
    } while (left != 0);
  }
}

// to = sum of weight x row over the terms of `set`, in that order, in fp32, rounded once to bf16, for one run of the rows.
// `term(k)` is called by whole warps. Six to eight loads are in flight, whatever the number of terms.
template <typename Load, typename GetTerm>
__device__ __forceinline__ void sum_rows(u64 to, Range run, u32 set, int lane, Load load, GetTerm term) {
  int terms = __popc(set);
  if (terms <= 2) {
    sum_run<4, 2>(to, run, set, lane, load, term);
  } else if (terms <= 4) {
    sum_run<2, 4>(to, run, set, lane, load, term);
  } else {
    sum_run<1, 6>(to, run, set, lane, load, term);
  }
}

// All threads of the grid; bf16 and e4m3 alike read all ones as NaN.
__device__ __noinline__ void fill_nan(u64 to, i64 bytes) {
  Vec nan{{~0u, ~0u, ~0u, ~0u}};
  i64 step = i64(gridDim.x) * blockDim.x;
  for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes / 16; i += step) reinterpret_cast<Vec*>(to)[i] = nan;
}

}  // namespace ep
