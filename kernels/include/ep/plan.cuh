// Before records: what each rank calls and how much it brings, said and awaited, and the plan of rows that follows from it.
#pragma once
#include "ep/block.cuh"
#include "ep/peers.cuh"

namespace ep {

// Receiving warps of this GPU add to counts; the word that they all await first says that it is cleared.
__device__ __forceinline__ void clear_counts(const Args& a, int lane) {
  for (i64 e = lane; e < a.local_experts; e += 32) reinterpret_cast<int*>(a.counts)[e] = 0;
  __syncwarp();
  __threadfence();
}

// By the last warp of the first block: what this rank calls, and that its counts are cleared.
template <bool kRails = false>
__device__ __forceinline__ void announce(const Args& a, Shared& sh, int lane) {
  Control* control = reinterpret_cast<Control*>(a.control);
  u64 said = u64(a.signature) | u64(a.channels - 1) << kSignatureBits | load_relaxed_sys(&control->proposal) << kProposalBits;
  clear_counts(a, lane);
  if (is_peer<kRails>(a, lane)) {
    tell(a, relays<kRails>(a, lane), lane, a.intent, a.rank, signal_word(sh.epoch, said));
    tell_count<kRails>(a, lane, int(kChannels), signal_word(sh.epoch, a.chunk));
  }
  if (lane != 0) return;
  i64 at = stat_mode(a.ranks, a.mode) + kStatRows * a.ranks;
  add_stat(a, at, 1);
  add_stat(a, at + 2, a.tokens);
  atomicMax(stats(a) + at + 3, u64(a.tokens));
  control->mode = a.mode + 1;
  control->epoch = sh.epoch;
}

constexpr int kLaneChannels = int(kChannels) / 32;

// The words that travel ahead of the records say who sends how much. First what each source calls; lane s for source s.
__device__ __forceinline__ bool await_intents(const Args& a, Shared& sh, int lane) {
  const bool peer = lane < a.ranks, leaves = blockIdx.x == 0;
  bool ok = true;
  u64 proposal = ~u64(0);
  if (peer) {
    u64 start = leaves ? nanoseconds() : 0;
    u64 intent = wait_word(a, Op::kDispatch, lane, a.intent, lane, sh.epoch, 0);
    if (leaves) add_stat(a, stat_waits(a.ranks) + lane, nanoseconds() - start);
    ok = intent != 0;
    if (ok and (intent & kSignatureMask) != u64(a.signature)) {
      report(a, Fault::kDisagree, Op::kDispatch, sh.epoch, lane, a.signature, intent & kSignatureMask);
      ok = false;
    }
    u64 chunk = ok ? wait_word(a, Op::kDispatch, lane, a.stream_count, plan_row(lane, kChannels), sh.epoch, 0) : 0;
    ok = chunk != 0;
    proposal = signal_count(intent) >> kProposalBits;
    sh.channels[lane] = intent_channels(intent);
    sh.chunk[lane] = int(signal_count(chunk));
    if (leaves) reinterpret_cast<int*>(a.plan)[plan_chunk(a.ranks, lane)] = sh.chunk[lane];
  }
  u64 first = __shfl_sync(kFullWarp, proposal, 0);
  bool same = __all_sync(kFullWarp, not peer or proposal == first);
  if (leaves and lane == 0) store_relaxed_sys(reinterpret_cast<u64*>(a.agreed), same ? first : 0);
  ok = __all_sync(kFullWarp, ok);
  __syncwarp();
  return ok;
}

// Then one source's channels, four a lane: `row` gets the place of each among the source's. Returns the source's records,
// negative on failure.
__device__ __forceinline__ int await_counts(const Args& a, Shared& sh, int source, int (&row)[kLaneChannels], int lane) {
  u64 word[kLaneChannels];
  int sum = 0;
  bool ok = true;
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j)
    word[j] = load_relaxed_sys(own_word(a, a.stream_count, plan_row(source, lane * kLaneChannels + j)));
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    int channel = lane * kLaneChannels + j;
    row[j] = sum;
    if (channel >= sh.channels[source]) continue;
    if (not reached(word[j], sh.epoch, 0))
      word[j] = wait_word(a, Op::kDispatch, source, a.stream_count, plan_row(source, channel), sh.epoch, 0);
    ok = ok and word[j] != 0;
    sum += int(signal_count(word[j]));
  }
  int up_to = sum;
  for (int d = 1; d < 32; d *= 2) {
    int left = __shfl_up_sync(kFullWarp, up_to, d);
    if (lane >= d) up_to += left;
  }
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) row[j] += up_to - sum;
  int total = __shfl_sync(kFullWarp, up_to, 31);
  return __all_sync(kFullWarp, ok) ? total : -1;
}

// Records beyond what the caller has given y rows for still find memory here, but combine must not read their answers.
__device__ __noinline__ void refuse_records(const Args& a, int source, int records) {
  u64 epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
  report(a, Fault::kTooMany, Op::kDispatch, epoch, source, a.most_tokens, records);
}
__device__ __forceinline__ void leave_plan(const Args& a, int source, int base, int total, const int (&row)[kLaneChannels], int lane) {
  int* plan = reinterpret_cast<int*>(a.plan) + plan_row(source, 0);
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) plan[lane * kLaneChannels + j] = base + row[j];
  if (lane != 0) return;
  plan[kChannels] = base + total;
  if (total > a.most_tokens) refuse_records(a, source, total);
}
__device__ __forceinline__ void tell_host(const Args& a, int rows) {
  if (a.host_rows != 0) store_relaxed_sys(reinterpret_cast<u64*>(a.host_rows), u64(rows) + 1);
}

// By one warp of every block while others send; the first block's leaves the plan.
__device__ __forceinline__ bool make_plan(const Args& a, Shared& sh, int lane) {
  bool ok = await_intents(a, sh, lane);
  int base = 0, row[kLaneChannels];
  for (int source = 0; ok and source < a.ranks; ++source) {
    int total = await_counts(a, sh, source, row, lane);
    ok = total >= 0;
    if (lane == 0) sh.base[source] = base;
    if (ok and blockIdx.x == 0) leave_plan(a, source, base, total, row, lane);
    base += total;
  }
  if (lane == 0) sh.base[a.ranks] = base;
  if (ok and blockIdx.x == 0 and lane == 0) tell_host(a, base);
  __syncwarp();
  return ok;
}

}  // namespace ep
