// The per_expert form of low_latency: a token goes once to every distinct expert that it picks, into segment
// [local expert][source]. A warp serves one segment at a time and signals it by itself. Rows come back unweighted, to
// [first pick of the expert][token] at the owner, who weights and sums them.
#include "ep/plan.cuh"
#include "ep/record.cuh"

namespace ep {

// Behind the plan: [local expert][R + 1], the first of each source's rows among the expert's; behind the last, all.
__device__ __forceinline__ int* expert_plan(const Args& a, int expert) {
  return reinterpret_cast<int*>(a.plan) + plan_words(a.ranks) + expert * (a.ranks + 1);
}
__device__ __forceinline__ u64 expert_slots(const Args& a, int rank, int expert, int source) {
  return a.heap[rank] + a.slots + (expert * a.ranks + source) * a.slot_segment;
}

// Which of 32 tokens pick the expert.
__device__ __forceinline__ u32 tokens_of(const Args& a, int first, int expert, int lane) {
  bool hit = false;
  for (int k = 0; first + lane < a.tokens and k < a.top_k; ++k) hit |= raw_pick(a, (first + lane) * a.top_k + k) == expert;
  return __ballot_sync(kFullWarp, hit);
}

__device__ __forceinline__ void send_expert(const Args& a, Shared& sh, Stage& stage, int expert, int lane) {
  const Offsets& f = sh.f;
  const int rank = owner(a, expert), local = expert - rank * int(a.local_experts);
  const u64 segment = expert_slots(a, rank, local, int(a.rank));
  int count = 0;
  for (int first = 0; first < a.tokens; first += 32)
    for (u32 left = tokens_of(a, first, expert, lane); left != 0; left &= left - 1, ++count) {
      int token = first + __ffs(left) - 1;
      Targets t{segment + i64(count) * f.bytes, 1};
      u64 row = input_row(a, f, token);
      if (a.cast) {
        send_cast(a, t, f, reinterpret_cast<const unsigned char*>(row), reinterpret_cast<u32*>(stage.at), {0, 2 * f.row}, lane);
      } else {
        stage.load(row, f.row, lane);
        stage.await();
        if (lane == 0) bulk_store(t.address, stage.at, f.row);
        bulk_commit();
        bulk_await_stored();
      }
      send_picks(a, t, f, sh.epoch, token, pick_word(a, token, lane), lane);
    }
  __syncwarp();
  fence_release();
  if (lane != 0) return;
  store_relaxed_sys(heap_word(a, rank, a.expert_arrival, local * a.ranks + a.rank), signal_word(sh.epoch, count));
  i64 at = stat_mode(a.ranks, a.mode) + rank;
  add_stat(a, at, count);
  add_stat(a, at + a.ranks, u64(count) * f.bytes);
}

__device__ __forceinline__ void place_expert(const Args& a, Shared& sh, Stage& stage, int expert, int source, int lane) {
  const Offsets& f = sh.f;
  const int *plan = expert_plan(a, expert), first = plan[source], count = plan[source + 1] - first;
  const int capacity = int(a.ranks * a.max_tokens);
  for (int k = 0; k < count; ++k) {
    stage.load(expert_slots(a, int(a.rank), expert, source) + i64(k) * f.bytes, f.bytes, lane);
    stage.await();
    i64 row = i64(expert) * capacity + first + k;
    int id = lane < a.top_k ? stage.get<int>(f.ids + 4 * lane) : -1;
    u32 picks = __ballot_sync(kFullWarp, id == a.rank * a.local_experts + expert);
    if (lane == 0) {
      bulk_store(a.rows + row * f.row, stage.at, f.row);
      reinterpret_cast<int*>(a.target)[row] =
          (__ffs(picks) - 1) * int(a.max_tokens) + stage.get<int>(f.source) % int(a.max_tokens);
    }
    for (int g = lane; g < f.words; g += 32)
      reinterpret_cast<u32*>(a.scales)[(i64(expert) * f.words + g) * a.scale_stride + first + k] =
          stage.get<u32>(f.scales + 4 * g);
    bulk_commit();
    bulk_await_read();
  }
}

__device__ __forceinline__ void return_expert(const Args& a, Stage& stage, int expert, int source, int lane) {
  const int *plan = expert_plan(a, expert), first = plan[source], count = plan[source + 1] - first;
  const i64 bytes = combine_record_bytes(Payload(a.payload), a.hidden), row_bytes = 2 * a.hidden;
  for (int k = 0; k < count; ++k) {
    i64 row = expert * a.ranks * a.max_tokens + first + k, target = reinterpret_cast<const int*>(a.target)[row];
    u64 to = a.heap[source] + a.area + target / a.max_tokens * a.area_segment + target % a.max_tokens * bytes;
    stage.load(a.y + row * row_bytes, u32(row_bytes), lane);
    stage.await();
    if (lane == 0) bulk_store(to, stage.at, u32(row_bytes));
    bulk_commit();
    bulk_await_stored();
  }
  if (lane != 0 or count == 0) return;
  i64 at = stat_mode(a.ranks, a.mode) + 2 * a.ranks + source;
  add_stat(a, at, count);
  add_stat(a, at + a.ranks, u64(count) * bytes);
}

// Rows are there, and slots here have been read: every rank is told.
__device__ __forceinline__ void signal_returned(const Args& a, Shared& sh) {
  signal_as_one(a, int(a.ranks), [&](int r) {
    store_relaxed_sys(heap_word(a, r, a.returned, a.rank), signal_word(sh.epoch, 0));
  });
  if (blockIdx.x != 0 or threadIdx.x != 0) return;
  add_stat(a, stat_mode(a.ranks, a.mode) + kStatRows * a.ranks + 1, 1);
  for (i64 e = 0; e < a.local_experts; ++e)
    add_stat(a, stat_experts(a.ranks) + e, reinterpret_cast<const int*>(a.counts)[e]);
}

__device__ __forceinline__ void sum_token(const Args& a, Stage& stage, i64 token, int part, int lane) {
  bool has = lane < a.top_k;
  i64 id = has ? raw_pick(a, token * a.top_k + lane) : -1;
  float weight = has ? reinterpret_cast<const float*>(a.weights)[token * a.top_k + lane] : 0.f, sum = 0.f;
  if (not is_expert(a, id)) id = -1;
  u32 same = __match_any_sync(kFullWarp, id);
  for (int k = 0; k < a.top_k; ++k) {
    float w = __shfl_sync(kFullWarp, weight, k);
    if (same >> k & 1) sum += w;
  }
  u32 set = __ballot_sync(kFullWarp, id >= 0 and __ffs(same) - 1 == lane);
  u64 row = a.heap[a.rank] + a.area + lane * a.area_segment + token * combine_record_bytes(Payload(a.payload), a.hidden);
  Range run = share(int(2 * a.hidden), part, int(a.receive_parts));
  sum_rows(stage, a.out + token * 2 * a.hidden, run, set, row, sum, lane);
}

}  // namespace ep

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_expert_send(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kDispatch);
  allow_next();
  if (sh.stopped) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  if (blockIdx.x == 0 and warp == 0) announce(a, sh, lane);
  Warps w = all_warps();
  for (int e = w.first; e < a.local_experts * a.ranks; e += w.step) send_expert(a, sh, stage, e, lane);
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_expert_await(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kDispatch);
  if (threadIdx.x < 32 and not sh.stopped) {
    bool ok = await_intents(a, sh, threadIdx.x);
    if (threadIdx.x == 0) sh.stopped = not ok;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.local_experts and not sh.stopped; e += blockDim.x) {
    int sum = 0;
    for (int source = 0; source <= a.ranks; ++source) {
      expert_plan(a, e)[source] = sum;
      if (source == a.ranks) break;
      u64 word = wait_word(a, Op::kDispatch, source, a.expert_arrival, e * a.ranks + source, sh.epoch, 0);
      if (word == 0) break;
      sum += int(signal_count(word));
    }
    reinterpret_cast<int*>(a.counts)[e] = sum;
  }
  __syncthreads();
  allow_next();
  await_previous();
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_expert_place(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  await_previous();
  start(a, sh, Op::kDispatch);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Stage stage{stage_memory + warp * a.receive_stage, &sh.bars[warp]};
  Warps w = all_warps();
  for (int pair = w.first; pair < a.local_experts * a.ranks and not sh.stopped; pair += w.step)
    place_expert(a, sh, stage, pair / int(a.ranks), pair % int(a.ranks), lane);
  if (sh.stopped) poison_rows(a.rows, a.local_experts * a.ranks * a.max_tokens * sh.f.row);
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_expert_return(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kCombine);
  allow_next();
  if (sh.stopped) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  Warps w = all_warps();
  for (int pair = w.first; pair < a.local_experts * a.ranks; pair += w.step)
    return_expert(a, stage, pair / int(a.ranks), pair % int(a.ranks), lane);
  signal_returned(a, sh);
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_expert_sum(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kCombine);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool ok = not sh.stopped;
  if (ok and threadIdx.x < a.ranks) ok = wait_word(a, Op::kCombine, lane, a.returned, lane, sh.epoch, 0) != 0;
  ok = __syncthreads_and(ok);
  Stage stage{stage_memory + warp * a.receive_stage, &sh.bars[warp]};
  Warps w = all_warps();
  for (i64 unit = w.first; ok and unit < a.tokens * a.receive_parts; unit += w.step)
    sum_token(a, stage, unit / a.receive_parts, int(unit % a.receive_parts), lane);
  if (not ok) poison_sums(a);
  await_previous();
}
