// How a rank reaches one that is on another node: by stores, if that one's heap is mapped here, or by NVSHMEM's puts.
//
// A put carries its own signal, which adds one to a cumulative word once its bytes are there. Nothing else about the order
// of puts is relied on: whoever waits knows the total from a word that travels apart, and all has arrived when the two are
// equal. Offsets are the same in every heap. What a put writes has no proxy fence behind it, so whoever has waited for it executes
// one before bulk copies read it.
#pragma once
#include "ep/signal.cuh"

#ifdef EP_RAIL_PUT
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

namespace ep {

#ifdef EP_RAIL_PUT
constexpr bool kRailPut = true;
#else
constexpr bool kRailPut = false;
#endif

// Device memory of a lane, u64 each: by source node and channel, the records that rounds before this one brought; and by
// remote node, the combine rows that this and earlier rounds have asked for.
EP_HD i64 put_base(i64 node, i64 channel) { return node * kChannels + channel; }
EP_HD i64 put_expected(i64 nodes, i64 node) { return nodes * kChannels + node; }

__device__ __forceinline__ u64* puts(const Args& a, i64 index) { return reinterpret_cast<u64*>(a.puts) + index; }

#ifdef EP_RAIL_PUT
// Whole warp: `bytes` of this rank's heap, at `from`, to `to` at that rank; then its word grows by one.
__device__ __forceinline__ void put(const Args& a, int rank, i64 to, i64 from, u32 bytes, i64 array, i64 index) {
  char* own = reinterpret_cast<char*>(a.heap[a.rank]);
  nvshmemx_putmem_signal_nbi_warp(own + to, own + from, bytes, reinterpret_cast<uint64_t*>(own + array + 8 * index), 1,
                                  NVSHMEM_SIGNAL_ADD, rank);
}
// One thread: that rank's word becomes `value`.
__device__ __forceinline__ void put_word(const Args& a, int rank, i64 array, i64 index, u64 value) {
  char* own = reinterpret_cast<char*>(a.heap[a.rank]);
  nvshmemx_signal_op(reinterpret_cast<uint64_t*>(own + array + 8 * index), value, NVSHMEM_SIGNAL_SET, rank);
}
#else
__device__ __forceinline__ void put(const Args&, int, i64, i64, u32, i64, i64) {}
__device__ __forceinline__ void put_word(const Args&, int, i64, i64, u64) {}
#endif

// A word of a rank on this node, or (`far`) of one that only puts may reach.
__device__ __forceinline__ void tell(const Args& a, bool far, int rank, i64 array, i64 index, u64 value) {
  if (kRailPut and far) return put_word(a, rank, array, index, value);
  store_relaxed_sys(heap_word(a, rank, array, index), value);
}

// Until a cumulative word has grown by `count` over `base`.
__device__ __forceinline__ bool wait_puts(const Args& a, Op op, int peer, i64 array, i64 index, u64 epoch, u64 base, u64 count) {
  const u64* word = own_word(a, array, index);
  u64 start = nanoseconds();
  for (int turn = 1;; ++turn) {
    u64 seen = load_acquire_sys(word) - base;
    if (seen == count) {
      fence_async();
      return true;
    }
    if (turn % 64 == 0 and not patient(a, op, peer, epoch, start, signal_word(epoch, count & kCountMask),
                                       signal_word(epoch, seen & kCountMask)))
      return false;
  }
}

}  // namespace ep
