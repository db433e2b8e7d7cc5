// The PTX that C++ has no words for.
#pragma once
#include <cstdint>

#include "ep/layout.h"

namespace ep {

using u32 = uint32_t;

constexpr u32 kFullWarp = 0xffffffffu;

struct alignas(16) Vec { u32 v[4]; };   // the widest access of one thread

// For tests of protocols: one word in eight is stored up to 65 us late. `build.py OUT -DEP_DELAYS` compiles such images.
__device__ __forceinline__ void maybe_delay() {
#ifdef EP_DELAYS
  u32 draw = (u32(clock64()) ^ blockIdx.x << 8 ^ threadIdx.x) * 2654435761u;
  if (draw >> 29 == 0) __nanosleep(draw & 0xffff);
#endif
}

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
  maybe_delay();
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
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

// Meets, and says whether every thread came with true: nobody goes on where one has given up.
__device__ __forceinline__ bool barrier_and(int id, int threads, bool ok) {
  u32 all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(all) : "r"(id), "r"(threads), "r"(u32(ok)) : "memory");
  return all != 0;
}

__device__ __forceinline__ void store_vec(void* p, const Vec& r) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};"
               ::"l"(p), "r"(r.v[0]), "r"(r.v[1]), "r"(r.v[2]), "r"(r.v[3]) : "memory");
}

// A line: one access that no other splits (PTX: .b128 with a scope).
__device__ __forceinline__ void store_line(u64 p, const Vec& r) {
  maybe_delay();
  asm volatile(
      "{ .reg .b64 lo, hi; .reg .b128 v; mov.b64 lo, {%1,%2}; mov.b64 hi, {%3,%4}; mov.b128 v, {lo,hi};\n"
      "st.relaxed.sys.global.b128 [%0], v; }" ::"l"(p), "r"(r.v[0]), "r"(r.v[1]), "r"(r.v[2]), "r"(r.v[3]) : "memory");
}
__device__ __forceinline__ Vec load_line(u64 p) {
  Vec r;
  asm volatile(
      "{ .reg .b64 lo, hi; .reg .b128 v; ld.relaxed.sys.global.b128 v, [%4];\n"
      "mov.b128 {lo,hi}, v; mov.b64 {%0,%1}, lo; mov.b64 {%2,%3}, hi; }"
      : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
  return r;
}

// Two bf16, rounded to nearest even.
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Programmatic launches: the next kernel of the stream may start now; and: the one before has ended.
__device__ __forceinline__ void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Bulk copies run in the async proxy. One thread starts a load and all of a warp may wait for it; whoever starts a store
// commits and awaits it.
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mbarrier_init(u64* bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bar)) : "memory");
}
// Orders ordinary accesses before bulk copies: of shared memory in this thread; or of all memory, wherever a reader of what
// this thread then signals uses them. The latter waits for the block's stores, so only publishing warps have it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void bulk_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, u64 from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
// Brings memory closer, before whoever reads it asks for it.
__device__ __forceinline__ void bulk_prefetch(u64 from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_await(u64* bar, u32 parity) {
  asm volatile(
      "{ .reg .pred p; L%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L%=; }"
      ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_store(u64 to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// This thread's stores have left shared memory; or they are where they went, visible to this thread.
__device__ __forceinline__ void bulk_await_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_await_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

}  // namespace ep
