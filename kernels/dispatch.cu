// Dispatch: every token goes once to each rank that owns one of its experts; every rank places what arrives.
//
// A block is one channel: its tokens are consecutive, their records take consecutive slots from the first token's on in this
// rank's segment at each destination, and the block signals by itself how far it has come. No block waits for another. Sending and
// receiving warps share a block, or run one after the other, or in two launches with the caller's work in between.
// Rows pass through shared memory by bulk copies, which keeps many bytes in flight with few warps.
#include "ep/dispatch.cuh"

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_dispatch(const __grid_constant__ ep::Args a) {
  ep::run<ep::Phase::kAny, false>(a);
}
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_send(const __grid_constant__ ep::Args a) {
  ep::run<ep::Phase::kSend, false>(a);
}
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_place(const __grid_constant__ ep::Args a) {
  ep::run<ep::Phase::kPlace, false>(a);
}

// Returns once everything of the round has arrived: one block that waits for the peers, a warp for each, so that the kernel
// behind it can place records on all multiprocessors and waits for nobody.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_await(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int source = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) sh.epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
  if (source == 0) {
    __syncwarp();
    bool ok = not given_up(a, Op::kDispatch, sh.epoch, lane) and await_intents(a, sh, lane);
    if (lane == 0) sh.stopped = not ok;
  }
  __syncthreads();
  if (not sh.stopped) {
    int row[kLaneChannels], total = await_counts(a, sh, source, row, lane);
    if (lane == 0) sh.base[source] = total;
    bool ok = __syncthreads_and(total >= 0);
    int base = 0, all = 0;
    for (int s = 0; s < a.ranks; ++s) {
      if (s < source) base += sh.base[s];
      all += sh.base[s];
    }
    if (ok) leave_plan(a, source, base, total, row, lane);
    if (ok and threadIdx.x == 0) tell_host(a, all);
#pragma unroll
    for (int j = 0; ok and j < kLaneChannels; ++j) {
      int channel = lane * kLaneChannels + j, next = j + 1 < kLaneChannels ? row[j + 1 < kLaneChannels ? j + 1 : j] : 0;
      if (j + 1 == kLaneChannels) next = __shfl_down_sync(kFullWarp, row[0], 1);
      if (j + 1 == kLaneChannels and lane == 31) next = total;
      if (channel < sh.channels[source])
        ok = wait_word(a, Op::kDispatch, source, a.stream_tail, source * kChannels + channel, sh.epoch, next - row[j]) != 0;
      ok = __all_sync(kFullWarp, ok);
    }
  }
  __syncthreads();
  allow_next();
  await_previous();   // the sending kernel: whoever follows this kernel follows that one too
}

// Everything is here: gives every first pick of an expert its masked row, in order of source and token, a warp an expert.
// For callers who want the same order from run to run.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_order(const __grid_constant__ ep::Args a) {
  using namespace ep;
  await_previous();   // ep_await
  if (__any_sync(kFullWarp, failed(a))) return;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, capacity = int(a.ranks * a.max_tokens), top_k = int(a.top_k);
  const Record f = record(Payload(a.payload), a.hidden, a.top_k);
  const int* plan = reinterpret_cast<const int*>(a.plan);
  for (int expert = blockIdx.x * warps + threadIdx.x / 32; expert < a.local_experts; expert += gridDim.x * warps) {
    const int id = int(a.rank * a.local_experts) + expert;
    auto first_pick = [&](u64 from) {
      for (int k = 0; k < top_k; ++k)
        if (reinterpret_cast<const volatile int*>(from + f.ids)[k] == id) return k;
      return -1;
    };
    int total = 0;
    for (int source = 0; source < a.ranks; ++source)
      for (int base = 0; base < kChannels; base += 32) {
        int channel = base + lane, row = plan[plan_row(source, channel)], count = plan[plan_row(source, channel) + 1] - row, hits = 0;
        u64 from = segment(a, int(a.rank), source) + i64(plan[plan_chunk(a.ranks, source)]) * channel * f.bytes;
        for (int k = 0; k < count; ++k) hits += first_pick(from + k * f.bytes) >= 0;
        int up_to = hits;
        for (int d = 1; d < 32; d *= 2) {
          int left = __shfl_up_sync(kFullWarp, up_to, d);
          if (lane >= d) up_to += left;
        }
        int at = total + up_to - hits;
        for (int k = 0; k < count; ++k) {
          int pick = first_pick(from + k * f.bytes);
          if (pick >= 0) reinterpret_cast<int*>(a.position)[i64(row + k) * top_k + pick] = expert * capacity + at++;
        }
        total += __shfl_sync(kFullWarp, up_to, 31);
      }
    if (lane == 0) reinterpret_cast<int*>(a.counts)[expert] = total;
  }
}
