// When the warps of a block pass points of a kernel. `build.py OUT -DEP_TRACE` compiles images that keep it, for
// kernels/scripts/trace.py, which names the points; all others have nothing of it.
#pragma once
#include "ep/ptx.cuh"

#ifdef EP_TRACE
constexpr int kTraceBlocks = 132, kTraceWarps = 32, kTracePoints = 16;
extern "C" __device__ unsigned long long ep_trace[kTraceBlocks * kTraceWarps * kTracePoints] = {};
#endif

namespace ep {

#ifdef EP_TRACE
// By one whole warp; the last time counts.
__device__ __forceinline__ void pass(int point) {
  if (threadIdx.x % 32 == 0) ep_trace[(blockIdx.x * kTraceWarps + threadIdx.x / 32) * kTracePoints + point] = nanoseconds();
}
#else
__device__ __forceinline__ void pass(int) {}
#endif

}  // namespace ep
