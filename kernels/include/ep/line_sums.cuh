// low_latency's combine by lines (line.cuh): each rank returns its partial sum of a token in chunks, their owner adds them.
//
// A rank says `returned` when its combine begins: its dispatch, an earlier kernel, has then read every slot of the round, so
// that the owner, who waits for the word of all ranks, may write the next round's. A line is written again by who has got the
// token's next record: its owner signalled that behind a fence, in a later kernel than the one that reads and blanks the line here.
#pragma once
#include "ep/line.cuh"
#include "ep/routing.cuh"
#include "ep/trace.cuh"

namespace ep {

constexpr int kAtOnce = 4;   // rows of a sum that are loaded together

struct SumShared {
  u64 epoch;
  bool stopped, broken;
  Trouble trouble;
};

__device__ __forceinline__ u64 line_row(const Args& a, int rank, i64 row) { return a.heap[rank] + a.lines + row * a.line_row; }
__device__ __forceinline__ int sum_parts(const Args& a) { return (2 * int(a.hidden) + kChunk - 1) / kChunk; }

// What is known of a received record: lane k has pick k's masked row, or -1, and its weight; lane 0 the one compact row.
struct Answer {
  int row, target;
  float weight;
};
__device__ __forceinline__ Answer ask_answer(const Args& a, int record, int lane) {
  Answer r{-1, 0, 0.f};
  if (record >= a.ranks * a.max_tokens) return r;
  if (not a.masked) {
    r = {lane == 0 ? record : -1, 0, 1.f};
  } else if (lane < a.top_k) {
    r.row = reinterpret_cast<const int*>(a.position)[record * a.top_k + lane];
    r.weight = reinterpret_cast<const float*>(a.pick_weight)[record * a.top_k + lane];
  }
  r.target = reinterpret_cast<const int*>(a.target)[record];
  return r;
}

// Units are (record, chunk), dealt out to all blocks first. Lane s of `base` has source s's first record.
__device__ __forceinline__ void send_sums(const Args& a, Answer answer, int base, int total, int warp, int lane) {
  const int parts = sum_parts(a), step = gridDim.x * int(a.senders), begin = blockIdx.x + gridDim.x * warp;
  const int bytes = 2 * int(a.hidden);
#pragma unroll 1
  for (int unit = begin; unit < total * parts; unit += step) {
    const int record = unit / parts, part = unit - record * parts, at = part * kChunk + 16 * lane;
    if (unit != begin) answer = ask_answer(a, record, lane);
    const int source = __popc(__ballot_sync(kFullWarp, lane < a.ranks and base <= record)) - 1;
    float acc[8] = {};
#pragma unroll 1
    for (u32 left = __ballot_sync(kFullWarp, answer.row >= 0); left != 0;) {
      Vec in[kAtOnce];
      float weight[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        in[j] = Vec{};
        weight[j] = 0.f;
        if (left == 0) continue;
        const int k = __ffs(left) - 1, row = __shfl_sync(kFullWarp, answer.row, k);
        weight[j] = __shfl_sync(kFullWarp, answer.weight, k);
        if (at < bytes) in[j] = *reinterpret_cast<const Vec*>(a.y + i64(row) * bytes + at);
        left &= left - 1;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          float2 x = unpack(in[j].v[q]);
          acc[2 * q] = fmaf(weight[j], x.x, acc[2 * q]);
          acc[2 * q + 1] = fmaf(weight[j], x.y, acc[2 * q + 1]);
        }
    }
    Vec sum;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum.v[q] = pack(acc[2 * q], acc[2 * q + 1]);
    if (at < bytes) send_line(line_row(a, source, answer.target) + at, sum);
  }
}

// The ranks that a token went to.
__device__ __forceinline__ u32 went_to(const Args& a, int token, int lane) {
  i64 id = token < a.tokens and lane < a.top_k ? raw_pick(a, i64(token) * a.top_k + lane) : -1;
  return __reduce_or_sync(kFullWarp, is_expert(a, id) ? 1u << owner(a, int(id)) : 0);
}

// Units are (token, chunk). A token's copies are in order of rank.
__device__ __forceinline__ bool add_sums(const Args& a, SumShared& sh, u32 set, int warp, int lane) {
  const int parts = sum_parts(a), step = gridDim.x * int(a.receivers), begin = blockIdx.x + gridDim.x * warp;
  const int bytes = 2 * int(a.hidden);
#pragma unroll 1
  for (int unit = begin; unit < a.tokens * parts; unit += step) {
    const int token = unit / parts, part = unit - token * parts, at = part * kChunk + 16 * lane;
    if (unit != begin) set = went_to(a, token, lane);
    const bool there = at < bytes;
    u64 from = line_row(a, int(a.rank), token) + at;
    float acc[8] = {};
    Vec line{}, next{};
    if (set != 0 and there) line = load_line(from);
#pragma unroll 1
    for (; set != 0; from += a.max_tokens * a.line_row) {
      const int rank = __ffs(set) - 1;
      set &= set - 1;
      if (set != 0 and there) next = load_line(from + a.max_tokens * a.line_row);
      if (not take_line(a, sh.trouble, from, there, sh.epoch, rank, line, lane)) return false;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float2 x = unpack(line.v[q]);
        acc[2 * q] += x.x;
        acc[2 * q + 1] += x.y;
      }
      line = next;
    }
    Vec sum;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum.v[q] = pack(acc[2 * q], acc[2 * q + 1]);
    if (there) store_vec(reinterpret_cast<void*>(a.out + i64(token) * bytes + at), sum);
  }
  return true;
}

// Lane r for rank r: it has read this round's lines, and so on.
__device__ __forceinline__ bool await_returned(const Args& a, SumShared& sh, int lane) {
  const u64 start = nanoseconds();
  bool here = lane >= a.ranks;
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    if (not here) {
      here = reached(load_acquire_sys(own_word(a, a.returned, lane)), sh.epoch, 0);
      if (here) add_stat(a, stat_waits(a.ranks) + lane, nanoseconds() - start);
    }
    const u32 missing = __ballot_sync(kFullWarp, not here);
    if (missing == 0) return true;
    if (turn % 64 != 0) continue;
    if (not patient_warp(a, sh.trouble, __ffs(missing) - 1, start, signal_word(sh.epoch, 0), 0, lane)) return false;
  }
}

// Warps [0, workers) send, then add; the last one has the words.
__device__ __forceinline__ void run_sums(const Args& a) {
  __shared__ SumShared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, workers = blockDim.x / 32 - 1;
  const bool sends = a.senders != 0, receives = a.receivers != 0;
  pass(0);
  // All that the block waits for at first is asked for at once.
  const int begin = (blockIdx.x + gridDim.x * warp) / sum_parts(a);
  const bool speaks = warp == workers and sends and blockIdx.x == 0;
  const u64 epoch = threadIdx.x == 0 or speaks ? load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch) : 0;
  const int* plan = reinterpret_cast<const int*>(a.plan);
  const int base = sends and lane < a.ranks ? plan[plan_row(lane, 0)] : 0;
  const int end = sends and lane < a.ranks ? plan[plan_row(lane, kChannels)] : 0;
  const Answer answer = sends ? ask_answer(a, begin, lane) : Answer{-1, 0, 0.f};
  u32 set = receives ? went_to(a, begin, lane) : 0;
  if (warp == workers) {
    if (lane == 0) sh.trouble.any = 0;
    __syncwarp();
    bool going = patient_warp(a, sh.trouble, 0, nanoseconds(), 0, 0, lane);
    if (lane == 0) {
      sh.stopped = not going;
      sh.broken = false;
    }
    // No fence: what earlier kernels have read they have read, and nobody looks here for what they wrote.
    if (going and speaks and lane < a.ranks) store_relaxed_sys(heap_word(a, lane, a.returned, a.rank), signal_word(epoch, 0));
  }
  if (threadIdx.x == 0) sh.epoch = epoch;
  __syncthreads();
  pass(1);
  if (not sh.stopped) {
    if (warp < workers) {
      if (sends) send_sums(a, answer, base, __reduce_max_sync(kFullWarp, u32(end)), warp, anew(lane));
      pass(2);
      if (receives and not add_sums(a, sh, set, warp, anew(lane))) sh.broken = true;
      pass(3);
    } else {
      if (speaks) {
        if (lane < a.ranks)
          add_written(a, Op::kCombine, lane, end - base, combine_record_bytes(Payload(a.payload), a.hidden), false);
        if (lane == 0) add_stat(a, stat_mode(a.ranks, a.mode) + kStatRows * a.ranks + 1, 1);
        for (i64 e = lane; e < a.local_experts; e += 32)
          add_stat(a, stat_experts(a.ranks) + e, reinterpret_cast<const int*>(a.counts)[e]);
      }
      if (lane == 0) count_reader(a, sh.epoch);
      if (receives and blockIdx.x == 0 and not await_returned(a, sh, lane)) sh.broken = true;
      pass(4);
    }
    __syncthreads();
  }
  pass(15);
  if (threadIdx.x == 0) tell_trouble(a, sh.trouble, Op::kCombine, sh.epoch);
  if ((sh.stopped or sh.broken) and receives) poison_sums(a);
}

}  // namespace ep
