// The PTX that C++ has no words for.
#pragma once
#include <cstdint>

#include "ep/layout.h"

namespace ep {

using u32 = uint32_t;

constexpr u32 kFullWarp = 0xffffffffu;

struct alignas(16) Vec { u32 v[4]; };   // the widest access of one thread

__device__ __forceinline__ u64 load_acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_relaxed_sys(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed_sys(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_release_sys(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Between the warps of one block.
__device__ __forceinline__ void store_release_cta(u32* p, u32 v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(u32(__cvta_generic_to_shared(p))), "r"(v) : "memory");
}
__device__ __forceinline__ u32 load_acquire_cta(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(u32(__cvta_generic_to_shared(p))) : "memory");
  return v;
}
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Meets, and says whether every thread came with true: nobody goes on where one has given up.
__device__ __forceinline__ bool barrier_and(int id, int threads, bool ok) {
  u32 all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(all) : "r"(id), "r"(threads), "r"(u32(ok)) : "memory");
  return all != 0;
}

// Read-only inputs that nobody reads again: kept out of L1.
__device__ __forceinline__ Vec load_input(const void* p) {
  Vec r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
  return r;
}
// Memory that a peer wrote in this kernel's life: never through the read-only path, which is not coherent.
__device__ __forceinline__ Vec load_vec(const void* p) {
  Vec r;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
  return r;
}
__device__ __forceinline__ void store_vec(void* p, const Vec& r) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"l"(p), "r"(r.v[0]), "r"(r.v[1]), "r"(r.v[2]), "r"(r.v[3]) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace ep
