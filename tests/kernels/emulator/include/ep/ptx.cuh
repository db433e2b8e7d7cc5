// Stands in for kernels/include/ep/ptx.cuh: the same names over simt.h.
#pragma once
#include <emmintrin.h>

#include "ep/layout.h"
#include "simt.h"

namespace ep {

using u32 = uint32_t;

constexpr u32 kFullWarp = 0xffffffffu;

struct alignas(16) Vec { u32 v[4]; };

inline u64 load_acquire_sys(const u64* p) {
  simt::pass();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline u64 load_relaxed_sys(const u64* p) {
  simt::pass();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed_sys(u64* p, u64 v) {
  simt::maybe_delay();
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void fence_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void store_release_cta(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u32 load_acquire_cta(const u32* p) {
  simt::pass();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline bool barrier_and(int id, int threads, bool ok) { return simt::sync_some_and(id, threads, ok) != 0; }
inline void store_vec(void* p, const Vec& r) {
  if (reinterpret_cast<uintptr_t>(p) % 16) simt::misaligned();
  memcpy(p, &r, sizeof r);
}
// An aligned vector move is a single access on the CPUs that this runs on.
inline void store_line(u64 p, const Vec& r) {
  if (p % 16) simt::misaligned();
  simt::maybe_delay();
  _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm_loadu_si128(reinterpret_cast<const __m128i*>(&r)));
}
inline Vec load_line(u64 p) {
  simt::pass();
  __atomic_signal_fence(__ATOMIC_SEQ_CST);   // loaded anew each time
  Vec r;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&r), _mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  return r;
}
inline void allow_next() {}
inline void await_previous() {}
inline void mbarrier_init(u64* bar) { *bar = 0; }
inline void fence_async_shared() {}
inline void fence_async() {}
inline void bulk_expect(u64* bar, u32 bytes) { simt::bulk_expect(reinterpret_cast<uint64_t*>(bar), bytes); }
inline void bulk_prefetch(u64 from, u32 bytes) {
  if (from % 16 or bytes % 16) simt::misaligned();
}
inline void bulk_load(void* to, u64 from, u32 bytes, u64* bar) {
  simt::bulk_load(to, reinterpret_cast<const void*>(from), bytes, reinterpret_cast<uint64_t*>(bar));
}
inline void bulk_await(u64* bar, u32 parity) { simt::bulk_await(reinterpret_cast<uint64_t*>(bar), parity); }
inline void bulk_store(u64 to, const void* from, u32 bytes) { simt::bulk_store(reinterpret_cast<void*>(to), from, bytes); }
inline void bulk_commit() {}
inline void bulk_await_read() { simt::bulk_await_read(); }
inline void bulk_await_stored() { simt::bulk_await_stored(); }
inline u64 nanoseconds() { return simt::nanoseconds(); }
inline u32 pack(float lo, float hi) {   // bf16, nearest even
  auto half = [](float f) {
    u32 b = __float_as_uint(f);
    return f != f ? 0x7fffu : (b + 0x7fffu + (b >> 16 & 1)) >> 16;
  };
  return half(lo) | half(hi) << 16;
}

}  // namespace ep
