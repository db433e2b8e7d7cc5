// normal: counts first, then records through bounded rings, over a relay between nodes; partial sums come back the same way in
// the same order, so that neither side needs an index. Memory does not depend on the tokens.
//
// A channel is a share of consecutive tokens and a share of every ring's slots; a block serves one, or several one after the
// other. A source is the relay of its own node. Warps that move rows tell two others of the block how far they have come, which
// tell the other ends: fences wait for all that a warp has stored, so none is between two rows.
// Streams of different sources share nothing, and every warp that reads or passes on takes whichever of its streams can go on,
// so that no source blocks another. Where warps take turns at a stream, the one with the earliest record that is not done waits
// for nothing that is behind it: all before are done, and told to whoever must make room. So no ring of waits can close.
#include "ep/plan.cuh"
#include "ep/ring_combine.cuh"
#include "ep/ring_dispatch.cuh"
#include "ep/trace.cuh"

namespace ep {

// What this rank's channel will bring to every rank, and to the relay in every other node.
struct Counts {
  int records[kMaxRanks], relayed[kMaxRanks];
};
// Whole block; 32 tokens a warp and step. Lane r for rank r, and for node r.
__device__ __forceinline__ void count_channel(const Args& a, Counts& counts, u64 epoch, int channel, int warp, int lane) {
  const Range mine = channel_tokens(a, channel);
  const int own = own_node(a), top_k = int(a.top_k), warps = blockDim.x / 32;
  if (warp == 0) counts.records[lane] = counts.relayed[lane] = 0;
  __syncthreads();
  for (int first = mine.first + 32 * warp; first < mine.last; first += 32 * warps) {
    for (int k = 0; k < top_k and first + lane < mine.last; ++k) {
      i64 id = raw_pick(a, i64(first + lane) * top_k + k);
      if (id != -1 and not is_expert(a, id)) report(a, Fault::kBadId, Op::kDispatch, epoch, int(a.rank), first + lane, id);
    }
    __syncwarp();
    u32 block = block_of_tokens(a, first, mine.last, lane);
    if (block != 0) atomicAdd(&counts.records[lane], __popc(block));
    for (int n = 0; n < nodes(a); ++n) {
      u32 any = __reduce_or_sync(kFullWarp, lane < a.ranks and node_of(a, lane) == n ? block : 0);
      if (lane == n and any != 0) atomicAdd(&counts.relayed[lane], __popc(any));
    }
  }
  __syncthreads();
  if (warp != 0) return;
  if (lane < a.ranks)
    store_relaxed_sys(heap_word(a, lane, a.stream_count, plan_row(a.rank, channel)), signal_word(epoch, counts.records[lane]));
  if (lane < nodes(a) and lane != own)
    store_relaxed_sys(heap_word(a, rail_peer(a, lane), a.rail_count, own * kRingChannels + channel),
                      signal_word(epoch, counts.relayed[lane]));
}

// A repeated dispatch has its plan already, and tells the others of which round it is. By one warp, lane r for rank r, which then
// knows that all repeat the same.
__device__ __forceinline__ bool repeat_round(const Args& a, Shared& sh, int lane) {
  const u64 round = reinterpret_cast<const u32*>(a.plan)[plan_round(a.ranks)];
  if (lane < a.ranks)
    store_relaxed_sys(heap_word(a, lane, a.stream_count, plan_row(a.rank, 0)), signal_word(sh.epoch, round));
  bool ok = await_intents(a, sh, lane);   // first: the count of a rank that does not repeat is no round
  if (ok and lane < a.ranks) {
    const u64 word = wait_word(a, Op::kDispatch, lane, a.stream_count, plan_row(lane, 0), sh.epoch, 0);
    ok = word != 0 and signal_count(word) == round;
    if (word != 0 and not ok) report(a, Fault::kOtherRound, Op::kDispatch, sh.epoch, lane, round, signal_count(word));
  }
  return __all_sync(kFullWarp, ok);
}

}  // namespace ep

// Announces the call, exchanges counts, and leaves the plan and the host's count: the first block has a warp a source and
// waits. A repeated dispatch only meets the others.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_count(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  __shared__ Counts counts;
  const int source = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool repeats = a.signature & kRepeats;
  pass(10);
  start(a, sh, Op::kDispatch);
  if (sh.stopped) return;
  __syncthreads();
  if (source == 0 and blockIdx.x == 0) announce(a, sh, lane);
  for (int channel = blockIdx.x; not repeats and channel < a.channels; channel += gridDim.x)
    count_channel(a, counts, sh.epoch, channel, source, lane);
  pass(11);
  if (blockIdx.x != 0) return;
  if (source == 0) {
    bool ok = repeats ? repeat_round(a, sh, lane) : await_intents(a, sh, lane);
    if (lane == 0) sh.stopped = not ok;
  }
  __syncthreads();
  if (sh.stopped) return;
  if (repeats) {
    if (threadIdx.x == 0) tell_host(a, all_rows(a));
    return;
  }
  int row[kLaneChannels], total = source < a.ranks ? await_counts(a, sh, source, row, lane) : 0;
  if (lane == 0 and source < a.ranks) sh.base[source] = total;
  pass(12);
  bool ok = __syncthreads_and(total >= 0);
  int base = 0, all = 0;
  for (int s = 0; s < a.ranks; ++s) {
    if (s < source) base += sh.base[s];
    all += sh.base[s];
  }
  if (ok and source < a.ranks) leave_plan(a, source, base, total, row, lane);
  for (int i = threadIdx.x; ok and i < nodes(a) * a.channels; i += blockDim.x) {
    const int node = i / int(a.channels), channel = i % int(a.channels);
    if (node == own_node(a)) continue;
    u64 word = wait_word(a, Op::kDispatch, rail_peer(a, node), a.rail_count, node * kRingChannels + channel, sh.epoch, 0);
    *rail_plan(a, node, channel) = int(signal_count(word));
    ok = word != 0;
  }
  if (not ok or threadIdx.x != 0) return;
  reinterpret_cast<u32*>(a.plan)[plan_round(a.ranks)] = u32((sh.epoch << 1 | a.lane) & kCountMask);
  tell_host(a, all);
}

extern "C" __global__ void __launch_bounds__(ep::kRingThreads, 1) ep_ring_dispatch(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  __shared__ Taken taken;
  __shared__ Passed passed;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int senders = int(a.senders), receive_from = int(a.receive_from), receivers = int(a.receivers);
  if (threadIdx.x < 32) sh.progress.done[lane] = taken.done[lane] = passed.taken.done[lane] = passed.known[lane] = 0;
  clear_tally(a, sh);
  pass(0);
  start(a, sh, Op::kDispatch);
  pass(1);
  Stage stage{stage_memory + (warp < senders ? warp * a.send_stage : a.receive_at + (warp - receive_from) * a.receive_stage),
              &sh.bars[warp]};
  bool ok = not sh.stopped;
  int before = 0;   // of what this warp or lane counts, in the block's earlier channels
  for (int channel = blockIdx.x; ok and channel < a.channels; channel += gridDim.x) {
    const Range mine = sent_tokens(a, channel);
    if (warp < senders) {
      ok = send_tokens(a, sh, stage, channel, warp, before, lane);
      if (not ok) sh.progress.finish(warp, Progress::kAll, lane);
      before += mine.last - mine.first;
    } else if (warp == senders) {
      const Route to = route(a, lane);
      End ring = tokens_to(a, to, channel, lane);
      const int sent = ring.done = ring.said = sent_before(a, to.ranks, channel, lane);
      ok = follow_tokens(a, sh.epoch, ring, to, mine, before, lane, [&] {
        return together(lane < senders ? load_acquire_cta(&sh.progress.done[lane]) : 0, senders, lane, lane < senders);
      });
      add_written(a, Op::kDispatch, to.peer, ring.done - sent, sh.f.bytes, false);
      before += mine.last - mine.first;
    } else if (warp < receive_from) {
      ok = warp == senders + 1 ? follow_relays<Op::kDispatch>(a, sh, passed, channel, before, lane)
                               : relay_channel<Forwarding>(a, Op::kDispatch, sh, stage, passed, channel, before, warp, lane);
    } else if (warp < receive_from + receivers) {
      const Turn turn = turns(receivers, int(a.ranks), warp - receive_from, lane);
      ok = take_channel<Receiving>(a, Op::kDispatch, sh, stage, taken, turn, channel, before, lane);
    } else {
      End ring = lane < a.ranks ? records_of(a, lane, channel) : kNoRing;
      const int all = lane < a.ranks ? rows_of(a, lane, channel).all : 0;
      ok = follow_records(a, sh.epoch, taken, ring, all, shares_of(receivers, int(a.ranks)), before, lane);
      before += all;
    }
  }
  pass(2);
  ok = __syncthreads_and(ok);
  add_tally(a, sh);
  if (not ok) {   // nothing that was not received may look like data
    poison_rows(a.rows, (a.masked ? a.local_experts : 1) * a.capacity * sh.f.row);
  } else if (a.fill) {   // the ids behind the last row say that there is nothing
    i64 first = i64(all_rows(a)) * a.top_k;
    for (i64 i = first + blockIdx.x * blockDim.x + threadIdx.x; i < a.capacity * a.top_k; i += i64(gridDim.x) * blockDim.x) {
      reinterpret_cast<int*>(a.out_ids)[i] = -1;
      reinterpret_cast<float*>(a.out_weights)[i] = 0.f;
    }
  }
}

// For callers who want masked rows in the same order from run to run: gives every first pick of an expert its row, a warp an
// expert; then kept records become rows.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_order(const __grid_constant__ ep::Args a) {
  using namespace ep;
  if (__any_sync(kFullWarp, failed(a))) return;
  const int lane = threadIdx.x % 32, top_k = int(a.top_k), all = all_rows(a);
  const Record f = record(Payload(a.payload), a.hidden, a.top_k);
  Warps w = all_warps();
  for (int expert = w.first; expert < a.local_experts; expert += w.step) {
    const int id = int(a.rank * a.local_experts) + expert;
    int total = 0;
    for (int first = 0; first < all; first += 32) {
      const int* ids = reinterpret_cast<const int*>(a.kept + i64(first + lane) * f.bytes + f.ids);
      int pick = top_k;
      for (int k = 0; k < top_k and first + lane < all and pick == top_k; ++k)
        if (ids[k] == id) pick = k;
      u32 hits = __ballot_sync(kFullWarp, pick < top_k);
      if (pick < top_k)
        reinterpret_cast<int*>(a.position)[i64(first + lane) * top_k + pick] =
            expert * int(a.capacity) + total + __popc(hits & below(lane));
      total += __popc(hits);
    }
    if (lane == 0) reinterpret_cast<int*>(a.counts)[expert] = total;
  }
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_place(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start(a, sh, Op::kDispatch);
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  Warps w = all_warps();
  for (int record = w.first; record < all_rows(a) and not sh.stopped; record += w.step) {
    stage.load(a.kept + i64(record) * sh.f.bytes, sh.f.bytes, lane);
    stage.await();
    place<false>(a, sh, stage, record, lane);
    bulk_commit();
    bulk_await_read();
  }
  if (sh.stopped) poison_rows(a.rows, a.local_experts * a.capacity * sh.f.row);
}

extern "C" __global__ void __launch_bounds__(ep::kRingThreads, 1) ep_ring_combine(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  __shared__ Taken taken;
  __shared__ Passed passed;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int senders = int(a.senders), receive_from = int(a.receive_from), receivers = int(a.receivers);
  if (threadIdx.x < 32) sh.progress.done[lane] = taken.done[lane] = passed.taken.done[lane] = passed.known[lane] = 0;
  pass(0);
  start(a, sh, Op::kCombine);
  pass(1);
  Stage stage{stage_memory + (warp < receive_from ? (warp - (warp > senders ? 2 : 0)) * a.send_stage
                                                  : a.receive_at + (warp - receive_from) * a.receive_stage),
              &sh.bars[warp]};
  bool ok = not sh.stopped;
  int before = 0;   // of what this warp or lane counts, in the block's earlier channels
  for (int channel = blockIdx.x; ok and channel < a.channels; channel += gridDim.x) {
    const Range mine = channel_tokens(a, channel);
    if (warp < senders) {
      const Turn turn = turns(senders, answers(a), warp, lane);
      ok = take_channel<Returning>(a, Op::kCombine, sh, stage, taken, turn, channel, before, lane);
    } else if (warp == senders) {
      const int source = lane < a.ranks ? answered(a, lane) : 0;
      const int all = lane < a.ranks ? rows_of(a, source, channel).all : 0;
      const bool travels = lane < answers(a);
      ok = follow_records(a, sh.epoch, taken, travels ? answers_to(a, source, channel) : kNoRing, travels ? all : 0,
                          shares_of(senders, answers(a)), before, lane);
      if (lane < a.ranks) add_written(a, Op::kCombine, relay_here(a, source), all, travels ? sum_bytes(a) : 0, false);
      before += all;
    } else if (warp < receive_from) {
      ok = warp == senders + 1 ? follow_relays<Op::kCombine>(a, sh, passed, channel, before, lane)
                               : relay_channel<Merging>(a, Op::kCombine, sh, stage, passed, channel, before, warp, lane);
    } else if (warp < receive_from + receivers) {
      ok = sum_channel(a, sh, stage, channel, warp - receive_from, before, lane);
      if (not ok) sh.progress.finish(warp - receive_from, Progress::kAll, lane);
      before += mine.last - mine.first;
    } else {
      const Route r = route(a, lane);
      const Summing g = summing(a, lane);
      End ring = sums_of(a, r, channel, lane);
      ok = follow_tokens(a, sh.epoch, ring, r, mine, before, lane, [&] {
        const bool sums = g.group < g.groups;
        return together(sums ? load_acquire_cta(&sh.progress.done[lane]) : 0, g.groups, g.group, sums);
      });
      before += mine.last - mine.first;
    }
  }
  pass(2);
  ok = __syncthreads_and(ok);
  if (warp == 0 and ok) ok = end_round(a, sh, lane);
  if (not __syncthreads_and(ok)) poison_sums(a);
}
