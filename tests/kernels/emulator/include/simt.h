// CUDA's vocabulary on a CPU: threads of a block are fibers of one OS thread, blocks are OS threads, ranks are processes.
//
// A fiber runs until it meets others (warp operations, barriers) or looks at a word that somebody else may write; then the
// next ready fiber is chosen at random, so that every run takes another interleaving (EP_EMULATOR_SEED fixes the choice).
// Bulk copies are late on purpose: a load may happen as late as its await, a store's source may be read as late as
// await_read, and its bytes may arrive as late as await_stored or the thread's end.
// In every second launch of a kernel that waits for no peer, blocks run one after the other, as on a GPU with no room for two.
// Not modelled: caches, weak order between ordinary stores.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local   // one OS thread a block

namespace simt {

struct Index { unsigned x, y, z; };

uint64_t exchange_begin(uint64_t value);      // meets the warp's lanes; afterwards their values can be read
uint64_t exchange_read(unsigned lane);
void sync_block();
int sync_block_and(int ok);
int sync_some_and(int id, int threads, int ok);
void pass();                                   // lets other fibers run, after a look at a shared word
void bulk_expect(uint64_t* bar, uint32_t bytes);
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar);
void bulk_await(uint64_t* bar, uint32_t parity);
[[noreturn]] void misaligned();
void bulk_store(void* to, const void* from, uint32_t bytes);
void bulk_await_read();
void bulk_await_stored();
void maybe_delay();
uint64_t nanoseconds();

}  // namespace simt

extern thread_local simt::Index threadIdx, blockIdx, blockDim, gridDim;

inline unsigned simt_lane() { return threadIdx.x % 32; }

template <typename T>
uint64_t simt_bits(T v) {
  uint64_t b = 0;
  static_assert(sizeof(T) <= 8, "");
  memcpy(&b, &v, sizeof v);
  return b;
}
template <typename T>
T simt_value(uint64_t b) {
  T v;
  memcpy(&v, &b, sizeof v);
  return v;
}

template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  simt::exchange_begin(simt_bits(v));
  return simt_value<T>(simt::exchange_read(unsigned(from) % 32));
}
template <typename T>
T __shfl_up_sync(unsigned, T v, unsigned d) {
  simt::exchange_begin(simt_bits(v));
  return simt_lane() >= d ? simt_value<T>(simt::exchange_read(simt_lane() - d)) : v;
}
template <typename T>
T __shfl_down_sync(unsigned, T v, unsigned d) {
  simt::exchange_begin(simt_bits(v));
  return simt_lane() + d < 32 ? simt_value<T>(simt::exchange_read(simt_lane() + d)) : v;
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int d) {
  simt::exchange_begin(simt_bits(v));
  return simt_value<T>(simt::exchange_read(simt_lane() ^ unsigned(d)));
}
template <typename F>
uint64_t simt_fold(uint64_t v, uint64_t start, F f) {
  simt::exchange_begin(v);
  for (unsigned l = 0; l < 32; ++l) start = f(start, simt::exchange_read(l), l);
  return start;
}
inline unsigned __ballot_sync(unsigned, int p) {
  return unsigned(simt_fold(p != 0, 0, [](uint64_t a, uint64_t v, unsigned l) { return a | v << l; }));
}
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == ~0u; }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
template <typename T>
unsigned __match_any_sync(unsigned, T v) {
  uint64_t mine = simt_bits(v);
  return unsigned(simt_fold(mine, 0, [=](uint64_t a, uint64_t o, unsigned l) { return a | uint64_t(o == mine) << l; }));
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  return unsigned(simt_fold(v, 0, [](uint64_t a, uint64_t o, unsigned) { return a | o; }));
}
template <typename T>
T __reduce_add_sync(unsigned, T v) {
  return T(simt_fold(uint64_t(unsigned(v)), 0, [](uint64_t a, uint64_t o, unsigned) { return a + o; }));
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  return unsigned(simt_fold(v, ~0ull, [](uint64_t a, uint64_t o, unsigned) { return o < a ? o : a; }));
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return unsigned(simt_fold(v, 0, [](uint64_t a, uint64_t o, unsigned) { return o > a ? o : a; }));
}
inline void __syncwarp(unsigned = ~0u) { simt::exchange_begin(0); }
inline void __syncthreads() { simt::sync_block(); }
inline int __syncthreads_and(int p) { return simt::sync_block_and(p); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
inline float __uint_as_float(unsigned v) { return simt_value<float>(v); }
inline unsigned __float_as_uint(float v) { return unsigned(simt_bits(v)); }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }

template <typename T>
T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <typename T>
T atomicMax(T* p, T v) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old < v and not __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <typename T>
T atomicCAS(T* p, T expected, T v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

struct float2 { float x, y; };
template <typename A, typename B>
auto min(A a, B b) { using T = decltype(a + b); return T(a) < T(b) ? T(a) : T(b); }
template <typename A, typename B>
auto max(A a, B b) { using T = decltype(a + b); return T(a) > T(b) ? T(a) : T(b); }
using std::fmaf;
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
