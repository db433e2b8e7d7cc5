// A token becomes a record at each destination: its row as it is or cast to FP8, and the words beside the row.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "ep/block.cuh"
#include "ep/routing.cuh"

namespace ep {

// A record's address at each destination: lane r holds that of rank r; `set` says which count.
struct Targets {
  u64 address;
  u32 set;
};

template <typename Store>
__device__ __forceinline__ void to_each(const Targets& t, Store store) {
  for (u32 left = t.set; left != 0; left &= left - 1) store(__shfl_sync(kFullWarp, t.address, __ffs(left) - 1));
}

// What a warp reads of a token: a run of the row, in bytes.
__device__ __forceinline__ Range input_run(const Args& a, const Offsets& f, int part) {
  int parts = int(a.send_parts);
  if (a.cast) {   // in steps of 512 channels
    int steps = (f.row + 511) / 512;
    return {quotient(steps * part, parts) * 1024, min(quotient(steps * (part + 1), parts) * 1024, 2 * f.row)};
  }
  return share(f.row, part, parts);
}
__device__ __forceinline__ u64 input_row(const Args& a, const Offsets& f, i64 token) {
  return a.x + token * (a.cast ? 2 : 1) * f.row;
}

__device__ __forceinline__ u32 largest(u32 a, u32 b) {   // of two bf16 each, by magnitude
  __nv_bfloat162 m = __hmax2(__habs2(reinterpret_cast<__nv_bfloat162&>(a)), __habs2(reinterpret_cast<__nv_bfloat162&>(b)));
  return reinterpret_cast<u32&>(m);
}

// A lane has 16 channels, so that 8 lanes share a scale: scale = max(|x|, 1e-4) / 448, rounded up to a power of two for UE8M0.
__device__ __forceinline__ float magnitude(const Vec (&in)[2]) {
  u32 m = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) m = largest(m, largest(in[0].v[j], in[1].v[j]));
  float2 pair = unpack(m);
  return fmaxf(fmaxf(pair.x, pair.y), 1e-4f);
}
// The scale's word, of UE8M0 the exponent.
__device__ __forceinline__ u32 scale_of(float amax, bool ue8m0, float& inverse) {
  if (not ue8m0) {
    inverse = __fdividef(448.f, amax);
    return __float_as_uint(amax * (1.f / 448.f));
  }
  u32 bits = __float_as_uint(__fdiv_rn(amax, 448.f));
  u32 exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);   // a normal number: amax has a floor
  inverse = __uint_as_float((254 - exponent) << 23);
  return exponent;
}
__device__ __forceinline__ u32 four_exponents(u32 own) {   // of a step of 512 channels
  return __shfl_sync(kFullWarp, own, 0) | __shfl_sync(kFullWarp, own, 8) << 8 | __shfl_sync(kFullWarp, own, 16) << 16 |
         __shfl_sync(kFullWarp, own, 24) << 24;
}
__device__ __forceinline__ Vec to_fp8(const Vec (&in)[2], float inverse) {
  Vec out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float2 lo = unpack(in[j / 2].v[j % 2 * 2]), hi = unpack(in[j / 2].v[j % 2 * 2 + 1]);
    u32 l = __nv_cvt_float2_to_fp8x2({lo.x * inverse, lo.y * inverse}, __NV_SATFINITE, __NV_E4M3);
    u32 h = __nv_cvt_float2_to_fp8x2({hi.x * inverse, hi.y * inverse}, __NV_SATFINITE, __NV_E4M3);
    out.v[j] = l | h << 16;
  }
  return out;
}

// A row in steps of 512 channels. The scales gather in shared memory and leave together. Two steps hide each other's latency.
__device__ __forceinline__ void send_cast(const Args& a, const Targets& t, const Offsets& f, const unsigned char* input,
                                          u32* words, Range run, int lane) {
  constexpr int kSteps = 2;
  bool ue8m0 = a.payload == i64(Payload::kFp8Ue8m0);
  int bytes = run.last - run.first;
  for (int first = lane * 32; first - lane * 32 < bytes; first += 1024 * kSteps) {
    Vec in[kSteps][2], out[kSteps];
    float amax[kSteps], inverse[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      in[i][0] = in[i][1] = Vec{};
      if (first + 1024 * i < bytes) {
        in[i][0] = *reinterpret_cast<const Vec*>(input + first + 1024 * i);
        in[i][1] = *reinterpret_cast<const Vec*>(input + first + 1024 * i + 16);
      }
      amax[i] = magnitude(in[i]);
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) amax[i] = fmaxf(amax[i], __shfl_xor_sync(kFullWarp, amax[i], d));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int at = first + 1024 * i;
      u32 scale = scale_of(amax[i], ue8m0, inverse[i]);
      if (ue8m0) {
        scale = four_exponents(at < bytes ? scale : 0);
        if (lane == 0 and at < bytes) words[at / 1024] = scale;
      } else if (lane % 8 == 0 and at < bytes) {
        words[at / 256] = scale;
      }
      out[i] = to_fp8(in[i], inverse[i]);
    }
    to_each(t, [&](u64 record) {
      u64 to = record + (run.first + first) / 2;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (first + 1024 * i < bytes) store_vec(reinterpret_cast<void*>(to + 512 * i), out[i]);
    });
  }
  __syncwarp();
  int span = ue8m0 ? 1024 : 256, skip = run.first / span, count = (bytes + span - 1) / span;
  to_each(t, [&](u64 record) {
    for (int g = lane; g < count; g += 32) reinterpret_cast<u32*>(record + f.scales)[skip + g] = words[g];
  });
}

// Whatever is not payload, in one run of words: ids, weights, rows (the first is the relay's slot) and source. Word w of a token.
__device__ __forceinline__ u32 pick_word(const Args& a, i64 token, int w, int slot = 0) {
  const int top_k = int(a.top_k);
  if (w < top_k) {
    i64 id = raw_pick(a, token * top_k + w);
    return is_expert(a, id) ? u32(id) : ~0u;
  }
  if (w < 2 * top_k) return reinterpret_cast<const u32*>(a.weights)[token * top_k + w - top_k];
  return w == 3 * top_k ? u32(a.rank * a.max_tokens + token) : w == 2 * top_k ? u32(slot) : 0;
}

// `early` is the lane's first word, asked for long before.
__device__ __forceinline__ void send_picks(const Args& a, const Targets& t, const Offsets& f, u64 epoch, i64 token, u32 early,
                                           int lane, int slot = 0) {
  const int words = 3 * int(a.top_k) + 1;
  for (int first = 0; first < words; first += 32) {
    int w = first + lane;
    u32 word = first == 0 ? early : pick_word(a, token, w, slot);
    to_each(t, [&](u64 record) {
      if (w < words) reinterpret_cast<u32*>(record + f.ids)[w] = word;
    });
  }
  if (lane < a.top_k and early == ~0u) {   // none, or out of range
    i64 id = raw_pick(a, token * a.top_k + lane);
    if (id != -1) report(a, Fault::kBadId, Op::kDispatch, epoch, int(a.rank), token, id);
  }
  __syncwarp();
  for (int first = 0; first < (a.cast ? 0 : f.words); first += 32) {
    int g = first + lane;
    u32 v = g < f.words ? reinterpret_cast<const u32*>(a.scales_in)[token * f.words + g] : 0;
    to_each(t, [&](u64 record) {
      if (g < f.words) reinterpret_cast<u32*>(record + f.scales)[g] = v;
    });
  }
}

}  // namespace ep
