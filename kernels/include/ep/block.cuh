// What the warps of a block share in dispatch kernels, and how kernels whose warps are all alike begin and end.
#pragma once
#include "ep/progress.cuh"
#include "ep/signal.cuh"

namespace ep {

constexpr int kTally = 256;              // experts of a rank whose rows a block counts by itself

struct Offsets {   // a Record whose fields fit 32 bits, its payload's bytes and how many words of scales
  int scales, ids, weights, source, bytes, row, words;
};

struct Shared {
  u64 epoch;
  Offsets f;
  int base[kMaxRanks + 1];   // by source: its first row; behind the last, all rows
  int channels[kMaxRanks], chunk[kMaxRanks];   // by source
  bool stopped;              // the buffer had failed when the block began: all threads agree, and none waits for the others
  bool broken;               // it failed since, some threads know
  Progress progress;
  u64 bars[kWarps];
  int tally[kTally];         // rows of each expert that this block has placed
};

// Kernels whose warps are all alike.
struct Warps {
  int first, step;
};
__device__ __forceinline__ Warps all_warps() {
  int warps = blockDim.x / 32;
  return {int(blockIdx.x * warps + threadIdx.x / 32), int(gridDim.x * warps)};
}

__device__ __forceinline__ void start(const Args& a, Shared& sh, Op op) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == blockDim.x / 32 - 1) {
    bool stopped = given_up(a, op, 0, lane);
    if (lane == 0) sh.stopped = stopped;
    if (lane < blockDim.x / 32) mbarrier_init(&sh.bars[lane]);
  }
  if (threadIdx.x == 0) {
    sh.epoch = read_epoch(a);
    Record f = record(Payload(a.payload), a.hidden, a.top_k);
    sh.f = {int(f.scales), int(f.ids), int(f.weights), int(f.source), int(f.bytes),
            int(payload_bytes(Payload(a.payload), a.hidden)), int(scale_bytes(Payload(a.payload), a.hidden) / 4)};
  }
  __syncthreads();
}

// The last block to end says so: signal(i) for each i.
template <typename Signal>
__device__ __forceinline__ void signal_as_one(const Args& a, int words, Signal signal) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  LaneState* state = reinterpret_cast<LaneState*>(a.state);
  fence_release();
  if (atomicAdd(&state->done, u64(1)) != gridDim.x - 1) return;
  state->done = 0;
  fence_release();
  for (int i = 0; i < words; ++i) signal(i);
}

}  // namespace ep
