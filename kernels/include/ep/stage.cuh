// A warp's piece of shared memory that bulk copies go through.
#pragma once
#include "ep/ptx.cuh"

namespace ep {

extern __shared__ __align__(128) unsigned char stage_memory[];

struct Stage {
  unsigned char* at;
  u64* bar;
  u32 parity = 0;

  // Whole warp. The fence orders this warp's own reads and writes of the stage, and what it acquired, before the copy.
  __device__ __forceinline__ void load(u64 from, u32 bytes, int lane) {
    __syncwarp();
    if (lane == 0) {
      fence_async();
      bulk_load(at, from, bytes, bar);
    }
  }
  __device__ __forceinline__ void await() {
    bulk_await(bar, parity);
    parity ^= 1;
  }
  template <typename T>
  __device__ __forceinline__ T get(int offset) const { return *reinterpret_cast<const T*>(at + offset); }
};

}  // namespace ep
