// A warp's piece of shared memory that bulk copies go through.
#pragma once
#include "ep/ptx.cuh"

namespace ep {

extern __shared__ __align__(128) unsigned char stage_memory[];

struct Stage {
  unsigned char* at;
  u64* bar;
  u32 parity = 0;

  // Whole warp, which has done with what was there.
  __device__ __forceinline__ void load(u64 from, u32 bytes, int lane) {
    __syncwarp();
    if (lane == 0) {
      fence_async_shared();
      bulk_expect(bar, bytes);
      bulk_load(at, from, bytes, bar);
    }
  }
  __device__ __forceinline__ void await() {
    bulk_await(bar, parity);
    parity ^= 1;
  }
  // One run from each lane of the set, one behind the other.
  __device__ __forceinline__ void gather(u32 set, u64 from, u32 bytes, int lane) {
    __syncwarp();
    if (lane == 0) bulk_expect(bar, __popc(set) * bytes);
    __syncwarp();
    if (set >> lane & 1) {
      fence_async_shared();
      bulk_load(at + __popc(set & ((1u << lane) - 1)) * bytes, from, bytes, bar);
    }
  }
  template <typename T>
  __device__ __forceinline__ T get(int offset) const { return *reinterpret_cast<const T*>(at + offset); }
};

}  // namespace ep
