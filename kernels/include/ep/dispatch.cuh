// Dispatch by slots: a block's warps send a channel's records, receive others', or both.
#pragma once
#include "ep/place.cuh"
#include "ep/plan.cuh"
#include "ep/record.cuh"

namespace ep {

constexpr int kPublishTokens = 8;        // tokens between two signals of a channel

// Tells every rank how much this block writes, then how far it has come. One warp, lane r for rank r. `to`: where the first 32
// tokens go.
template <bool kRails>
__device__ __forceinline__ void publish(const Args& a, Shared& sh, Range mine, u32 to, int lane) {
  const int workers = int(a.senders), parts = int(a.send_parts), tokens = mine.last - mine.first;
  const bool peer = is_peer<kRails>(a, lane);
  if (kRails) to = block_of_tokens<true>(a, mine.first, mine.last, lane);
  int count = __popc(to), published = 0, base = 0;
  for (int first = mine.first + 32; first < mine.last; first += 32)
    count += __popc(block_of_tokens<kRails>(a, first, mine.last, lane));
  if (peer) tell_count<kRails>(a, lane, blockIdx.x, signal_word(sh.epoch, count));
  pass(2);
  if (kRailPut and peer and relays<kRails>(a, lane))
    atomicAdd(puts(a, put_expected(a.ranks / a.gpus, node_of(a, lane))), u64(count));
  for (int block = 0;;) {   // tokens of the channel before the 32 that `to` describes
    int complete = min(tokens, quotient(min(tokens * parts, int(sh.progress.complete(workers, lane))), parts));
    if (complete < tokens and complete - published < kPublishTokens) continue;
    for (; complete - block >= 32; block += 32) {
      base += __popc(to);
      to = block_of_tokens<kRails>(a, mine.first + block + 32, mine.last, lane);
    }
    int sent = base + __popc(to & below(complete - block));
    fence_release();
    if (peer) tell_tail<kRails>(a, lane, blockIdx.x, signal_word(sh.epoch, sent));
    published = complete;
    if (complete == tokens) break;
  }
  pass(3);
  if (peer and count != 0) {
    i64 at = stat_mode(a.ranks, a.mode) + lane;
    add_stat(a, at, count);
    add_stat(a, at + a.ranks, u64(count) * sh.f.bytes);
  }
}

// Start loading this warp's share of a unit, a part of a token.
__device__ __forceinline__ void fetch(const Args& a, const Offsets& f, Stage& stage, Range mine, int unit, int lane) {
  int parts = int(a.send_parts), token = mine.first + quotient(unit, parts);
  if (token >= mine.last or not a.staged) return;
  Range run = input_run(a, f, unit - (token - mine.first) * parts);
  stage.load(input_row(a, f, token) + run.first, run.last - run.first, lane);
}

// From this rank's staging to each relay of the set, whose lane knows the slot there.
__device__ __forceinline__ void put_record(const Args& a, const Offsets& f, u32 set, u64 slot, int token, int lane) {
  __syncwarp();
  if (set != 0) fence_release();
  for (; set != 0; set &= set - 1) {
    int rank = __ffs(set) - 1;
    i64 to = i64(__shfl_sync(kFullWarp, slot, rank));
    put(a, rank, to, a.staging + i64(token) * f.bytes, f.bytes, a.rail_arrived, put_base(own_node(a), blockIdx.x));
  }
}

// kAhead: the words beside the payload are asked for ahead of it, which takes registers.
template <bool kAhead, bool kRails>
__device__ __forceinline__ void send(const Args& a, Shared& sh, Stage& stage, Range mine, u32 to, int warp, int lane) {
  const Offsets& f = sh.f;
  int workers = int(a.senders), parts = int(a.send_parts);
  if (warp == workers) return publish<kRails>(a, sh, mine, to, lane);

  int slot = mine.first, near_slot = mine.first;   // and, for hybrid's second hop, among the tokens that have ranks in this node
  u64 own = is_peer<kRails>(a, lane) ? first_slot<kRails>(a, lane) : 0;
  int unit = warp, done = 0;
  for (int first = mine.first; first < mine.last; first += 32) {
    if (kRails or first != mine.first) to = block_of_tokens<kRails>(a, first, mine.last, lane);
    u32 near = kRails ? __reduce_or_sync(kFullWarp, relays<true>(a, lane) ? 0 : to) : 0;
    int stop = (min(first + 32, mine.last) - mine.first) * parts;
    for (; unit < stop; unit += workers) {
      int i = quotient(unit, parts), part = unit - i * parts;
      i -= first - mine.first;
      int relay_slot = kRails ? near_slot + __popc(near & below(i)) : 0;
      Targets t{own + i64(slot + __popc(to & below(i))) * f.bytes, __ballot_sync(kFullWarp, to >> i & 1)};
      const u64 slot_there = t.address;
      const u32 far = kRails and kRailPut ? t.set & ~node_ranks(a, own_node(a)) : 0;
      if (far >> lane & 1) t.address = a.heap[a.rank] + a.staging + i64(first + i) * f.bytes;   // one copy serves all
      t.set ^= far & (far - 1);
      u32 early = kAhead and part == 0 ? pick_word(a, first + i, lane, relay_slot) : 0;
      Range run = input_run(a, f, part);
      if (a.staged) stage.await();
      pass(4);
      if (a.cast) {
        u64 row = input_row(a, f, first + i) + run.first;
        const int bytes = run.last - run.first;
        send_cast(a, t, f, a.staged ? stage.at : reinterpret_cast<const unsigned char*>(row),
                  reinterpret_cast<u32*>(stage.at + (a.staged ? bytes : 0)), run, lane);
      } else {
        if (t.set >> lane & 1) bulk_store(t.address + run.first, stage.at, run.last - run.first);
        bulk_commit();
        bulk_await_stored();
      }
      pass(5);
      if (not kAhead and part == 0) early = pick_word(a, first + i, lane, relay_slot);
      if (part == 0) send_picks(a, t, f, sh.epoch, first + i, early, lane, relay_slot);
      if (kRails and kRailPut) put_record(a, f, far, slot_there, first + i, lane);
      fetch(a, f, stage, mine, unit + workers, lane);
      sh.progress.finish(warp, ++done, lane);
    }
    slot += __popc(to);
    near_slot += __popc(near);
  }
  sh.progress.finish(warp, Progress::kAll, lane);
}

template <bool kRails>
__device__ __forceinline__ void take(const Args& a, Shared& sh, Stage& stage, int source, int slot, int record, int lane) {
  stage.load(segment(a, int(a.rank), source) + i64(slot) * sh.f.bytes, sh.f.bytes, lane);
  stage.await();
  pass(9);
  place<kRails>(a, sh, stage, record, lane);
  pass(13);
  bulk_commit();
  bulk_await_read();
}

// The records of one source's channel, taken in turns by the warps that serve the source.
__device__ __forceinline__ bool receive_channel(const Args& a, Shared& sh, Stage& stage, int source, int channel, int member,
                                                int members, int lane) {
  const i64 tails = source * kChannels + channel;
  const u64* words = own_word(a, a.stream_count, plan_row(source, lane));
  u32 counts[kLaneChannels];   // of the channels up to this one, which the planning warp has seen
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    const int at = lane + 32 * j;
    counts[j] = at > channel ? 0 : u32(load_relaxed_sys(words + 32 * j));
  }
  const u64 tail = load_acquire_sys(own_word(a, a.stream_tail, tails));   // asked for meanwhile
  int own = 0, before = 0;
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) (lane + 32 * j == channel ? own : before) += int(signal_count(counts[j]));
  const int row = sh.base[source] + __reduce_add_sync(kFullWarp, before), count = __reduce_add_sync(kFullWarp, own);
  const int slot = sh.chunk[source] * channel;
  int arrived = __shfl_sync(kFullWarp, signal_epoch(tail) == sh.epoch ? int(signal_count(tail)) : 0, 0);
  for (int k = member; k < count; k += members) {
    if (k >= arrived) {
      u64 tail = wait_word(a, Op::kDispatch, source, a.stream_tail, tails, sh.epoch, k + 1);
      if (not __all_sync(kFullWarp, tail != 0)) return false;
      arrived = int(__shfl_sync(kFullWarp, u32(signal_count(tail)), 0));
    }
    pass(8);
    take<false>(a, sh, stage, source, slot + k, row + k, lane);
    pass(10);
  }
  return true;
}

// The same when everything is here, by the plan that ep_await left.
template <bool kRails>
__device__ __forceinline__ void take_channel(const Args& a, Shared& sh, Stage& stage, int source, int channel, int member,
                                             int members, int lane) {
  i64 at = lane < 2 ? plan_row(source, channel) + lane : plan_chunk(a.ranks, source);
  int word = reinterpret_cast<const int*>(a.plan)[at];
  int row = __shfl_sync(kFullWarp, word, 0), count = __shfl_sync(kFullWarp, word, 1) - row;
  int slot = __shfl_sync(kFullWarp, word, 2) * channel;
  for (int k = member; k < count; k += members) take<kRails>(a, sh, stage, source, slot + k, row + k, lane);
}

// Nobody knows the number of rows, so the ids behind the last one must say that there is nothing.
__device__ __forceinline__ void fill_ids(const Args& a, int rows, int warp, int lane) {
  const int warps = int(a.receivers);
  i64 first = i64(rows) * a.top_k, last = a.ranks * a.max_tokens * a.top_k;
  for (i64 i = first + (i64(blockIdx.x) * warps + warp) * 32 + lane; i < last; i += i64(gridDim.x) * warps * 32) {
    reinterpret_cast<int*>(a.out_ids)[i] = -1;
    reinterpret_cast<float*>(a.out_weights)[i] = 0.f;
  }
}

template <bool kPlanned, bool kRails>
__device__ __forceinline__ bool receive(const Args& a, Shared& sh, Stage& stage, int warp, int lane) {
  const int warps = int(a.receivers), groups = min(int(a.ranks), warps);
  const int group = warp % groups, member = warp / groups, members = (warps - group + groups - 1) / groups;
  for (int source = group; source < a.ranks; source += groups) {
    const int channels = kPlanned ? int(kChannels) : sh.channels[source];
    for (int channel = blockIdx.x; channel < channels; channel += gridDim.x) {
      if (kPlanned) {
        take_channel<kRails>(a, sh, stage, source, channel, member, members, lane);
      } else if (not receive_channel(a, sh, stage, source, channel, member, members, lane)) {
        return false;
      }
    }
  }
  if (a.fill)
    fill_ids(a, kPlanned ? reinterpret_cast<const int*>(a.plan)[plan_row(a.ranks - 1, kChannels)] : sh.base[a.ranks], warp, lane);
  return true;
}

// Which phases a kernel has is known when it is compiled: short kernels spend much of their time fetching instructions.
enum class Phase { kSend, kPlace, kAny };

template <Phase kPhase, bool kRails>
__device__ __forceinline__ void run(const Args& a) {
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, planner = blockDim.x / 32 - 1;
  const bool sends = kPhase == Phase::kSend or (kPhase == Phase::kAny and a.senders != 0 and blockIdx.x < a.channels);
  const bool receives = kPhase == Phase::kPlace or (kPhase == Phase::kAny and a.receivers != 0);
  pass(0);
  const Range mine = channel_tokens(a, blockIdx.x);
  u32 to = 0;   // where the first tokens go, asked for before anything else; rails have no registers for it
  if (not kRails and sends and warp <= a.senders) to = block_of_tokens<false>(a, mine.first, mine.last, lane);
  if (threadIdx.x < 32) sh.progress.done[lane] = 0;
  if (kPhase != Phase::kSend) clear_tally(a, sh);
  if (kPhase == Phase::kPlace) await_previous();   // ep_await
  if (warp == planner) {
    bool stopped = given_up(a, Op::kDispatch, 0, lane);
    if (lane == 0) {
      sh.stopped = stopped;
      sh.broken = false;
    }
    if (lane < blockDim.x / 32) mbarrier_init(&sh.bars[lane]);
  }
  if (threadIdx.x == 0) {
    sh.epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
    Record f = record(Payload(a.payload), a.hidden, a.top_k);
    sh.f = {int(f.scales), int(f.ids), int(f.weights), int(f.source), int(f.bytes),
            int(payload_bytes(Payload(a.payload), a.hidden)), int(scale_bytes(Payload(a.payload), a.hidden) / 4)};
  }
  __syncthreads();
  if (not receives) allow_next();
  pass(1);
  if (not sh.stopped) {
    Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
    if (sends) {
      if (warp < a.senders) fetch(a, sh.f, stage, mine, warp, lane);
      if (blockIdx.x == 0 and warp == planner) announce<kRails>(a, sh, lane);
      if (warp <= a.senders) send<kPhase == Phase::kSend, kRails>(a, sh, stage, mine, to, warp, lane);
    }
    if (receives) {
      const int receiver = warp - int(a.receive_from);
      const bool takes = receiver >= 0 and receiver < a.receivers, plans = kPhase == Phase::kAny and warp == planner;
      bool ok = not plans or make_plan(a, sh, lane);
      if (plans) pass(6);
      if (kPhase == Phase::kAny and (takes or plans))
        ok = barrier_and(kReceiveBarrier, 32 * (int(a.receivers) + (planner - a.receive_from >= a.receivers)), ok);
      stage.at = stage_memory + a.receive_at + receiver * a.receive_stage;
      pass(7);
      if (takes) ok = ok and receive<kPhase == Phase::kPlace, kRails>(a, sh, stage, receiver, lane);
      if (not ok) sh.broken = true;
    }
    __syncthreads();
    if (kPhase != Phase::kSend) add_tally(a, sh);
  }
  pass(15);
  if ((sh.stopped or sh.broken) and receives) {   // nothing that was not received may look like data
    i64 rows = (a.masked ? a.local_experts : 1) * a.ranks * a.max_tokens;
    poison_rows(a.rows, rows * sh.f.row);
  }
}

}  // namespace ep
