// In-order progress of a block's sending warps: worker w does units w, w + workers, ... and says how many it has done;
// the publishing warp reads off how many units from the first on are complete.
#pragma once
#include "ep/ptx.cuh"

namespace ep {

struct Progress {
  static constexpr u32 kAll = 1u << 26;   // more units than any warp has; times 32 it still fits

  u32 done[32];

  // All lanes' stores of the unit are behind the __syncwarp, so the release covers them.
  __device__ __forceinline__ void finish(int worker, u32 units, int lane) {
    __syncwarp();
    if (lane == 0) store_release_cta(&done[worker], units);
  }
  __device__ __forceinline__ u32 complete(int workers, int lane) const {
    u32 reach = lane < workers ? load_acquire_cta(&done[lane]) * workers + lane : ~0u;
    __syncwarp();   // what one lane acquired, all lanes pass on: the reduction orders no memory
    return __reduce_min_sync(kFullWarp, reach);
  }
};

}  // namespace ep
