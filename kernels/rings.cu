// normal: counts first, then records through bounded rings, over a relay between nodes; partial sums come back the same way in
// the same order, so that neither side needs an index. Memory does not depend on the tokens.
//
// A channel is a share of consecutive tokens and a share of every ring's slots; a block serves one, or several one after the
// other. A source is the relay of its own node. Streams of different sources share nothing, and every warp that reads or
// passes on takes whichever of its streams can go on, so that no source blocks another and no ring of waits can close.
#include "ep/ring.cuh"

namespace ep {

// Behind the plan, by node and ring channel: records that this rank relays for its rail peer there.
__device__ __forceinline__ int* rail_plan(const Args& a, int node, int channel) {
  return reinterpret_cast<int*>(a.plan) + plan_words(a.ranks) + node * kRingChannels + channel;
}
__device__ __forceinline__ u32* went(const Args& a, int node, int channel) {
  int chunk = reinterpret_cast<const int*>(a.plan)[plan_chunk(a.ranks, rail_peer(a, node))];
  return reinterpret_cast<u32*>(a.relay) + node * a.max_tokens + i64(chunk) * channel;
}
// Of the plan, which is there once counts are.
__device__ __forceinline__ int all_rows(const Args& a) {
  return reinterpret_cast<const int*>(a.plan)[plan_row(a.ranks - 1, kChannels)];
}
// Tells every rank, and every relay, what this rank's channel will bring. Lane r for rank r, and for node r.
__device__ __forceinline__ void count_channel(const Args& a, u64 epoch, int channel, int lane) {
  const Range mine = channel_tokens(a, channel);
  const int own = own_node(a), top_k = int(a.top_k);
  int records = 0, relayed = 0;
  for (int first = mine.first; first < mine.last; first += 32) {
    for (int k = 0; k < top_k and first + lane < mine.last; ++k) {
      i64 id = raw_pick(a, i64(first + lane) * top_k + k);
      if (id != -1 and not is_expert(a, id)) report(a, Fault::kBadId, Op::kDispatch, epoch, int(a.rank), first + lane, id);
    }
    __syncwarp();
    u32 block = block_of_tokens(a, first, mine.last, lane);
    records += __popc(block);
    for (int n = 0; n < nodes(a); ++n) {
      u32 any = __reduce_or_sync(kFullWarp, lane < a.ranks and node_of(a, lane) == n ? block : 0);
      if (lane == n) relayed += __popc(any);
    }
  }
  if (lane < a.ranks)
    store_relaxed_sys(heap_word(a, lane, a.stream_count, plan_row(a.rank, channel)), signal_word(epoch, records));
  if (lane < nodes(a) and lane != own)
    store_relaxed_sys(heap_word(a, rail_peer(a, lane), a.rail_count, own * kRingChannels + channel), signal_word(epoch, relayed));
}

// A token of this rank becomes a record in a slot.
__device__ __forceinline__ void send_record(const Args& a, const Offsets& f, Stage& stage, u64 epoch, u64 slot, i64 token,
                                            int lane) {
  Targets t{slot, 1};   // the same in all lanes
  const u64 row = input_row(a, f, token);
  if (a.cast) {
    send_cast<1>(a, t, f, reinterpret_cast<const unsigned char*>(row), reinterpret_cast<u32*>(stage.at), {0, 2 * f.row}, lane);
  } else {
    stage.load(row, f.row, lane);
    stage.await();
    if (lane == 0) bulk_store(slot, stage.at, f.row);
    bulk_commit();
    bulk_await_stored();
  }
  send_picks(a, t, f, epoch, token, pick_word(a, token, lane), lane);
}

// This rank's tokens of a channel, to the GPUs of its node and to its relays.
struct Sending {
  const Args& a;
  const Offsets& f;
  Stage& stage;
  const u64& epoch;
  const Range tokens;
  const int channel, lane;
  Route to;
  End ring = kNoRing;
  int first;      // of 32 tokens
  u32 left = 0;   // those of them still to be sent

  __device__ __forceinline__ Sending(const Args& a, const Shared& sh, Stage& stage, int channel, int member, int lane)
      : a(a), f(sh.f), stage(stage), epoch(sh.epoch), tokens(channel_tokens(a, channel)), channel(channel),
        lane(lane), first(tokens.first - 32) {
    if (lane % int(a.senders) == member) to = route(a, lane);
    if (to.peer < 0) {
      first = tokens.last;
      return;
    }
    const int own = own_node(a), rank = int(a.rank);
    ring = lane < a.gpus
               ? writes(a, to.peer, rank, {a.ring_tail, rank}, {a.ring_head, to.peer}, channel)
               : writes(a, to.peer, int(a.ranks) + own, {a.rail_ring_tail, own}, {a.rail_ring_head, to.node}, channel);
  }
  __device__ __forceinline__ bool ended() const { return left == 0 and first + 32 >= tokens.last; }
  __device__ __forceinline__ bool able() const { return not ended() and (left == 0 or ring.open()); }
  __device__ __forceinline__ int unsaid() const { return ring.unsaid(); }
  __device__ __forceinline__ void look() { ring.look(a, epoch); }
  __device__ __forceinline__ void say() { ring.say(a, epoch); }
  __device__ __forceinline__ Blocked blocked() const { return ep::blocked(ring.seen(a), to.peer, epoch); }
  __device__ __forceinline__ void step(int j) {
    int from = __shfl_sync(kFullWarp, first, j);
    u32 bits = __shfl_sync(kFullWarp, left, j), ranks = __shfl_sync(kFullWarp, to.ranks, j);
    if (bits == 0) {
      from += 32;
      bits = __ballot_sync(kFullWarp, from + lane < tokens.last and (token_ranks(a, from + lane) & ranks) != 0);
      if (lane == j) first = from, left = bits;
      return;
    }
    const u64 slot = __shfl_sync(kFullWarp, record_slot(a, ring, channel, f.bytes), j);
    send_record(a, f, stage, epoch, slot, from + __ffs(bits) - 1, lane);
    if (lane == j) left &= left - 1, ++ring.done;
  }
  __device__ __forceinline__ void count() const { add_written(a, Op::kDispatch, to.peer, ring.done, f.bytes, false); }
};

// Records of this rank's rail peers, passed on to the GPUs of this node. Lane n reads node n's; lane n * G + g writes them
// for GPU g.
struct Forwarding {
  const Args& a;
  const Offsets& f;
  Stage& stage;
  const u64& epoch;
  const int channel, lane;
  End in = kNoRing, out = kNoRing;
  int all = 0;
  u32 to = 0;     // lanes that write the next record, once they are known
  u32 full = 0;   // lanes without room

  __device__ __forceinline__ Forwarding(const Args& a, const Shared& sh, Stage& stage, int channel, int member, int lane)
      : a(a), f(sh.f), stage(stage), epoch(sh.epoch), channel(channel), lane(lane) {
    const int own = own_node(a), node = node_of(a, lane), workers = int(a.receive_from - a.senders);
    if (lane < nodes(a) and lane != own and lane % workers == member) {
      all = *rail_plan(a, lane, channel);
      in = reads(a, rail_peer(a, lane), int(a.ranks) + lane, {a.rail_ring_tail, lane}, {a.rail_ring_head, own}, channel);
    }
    if (node < nodes(a) and node != own and node % workers == member) {
      const int source = rail_peer(a, node);
      out = writes(a, gpu(lane), source, {a.ring_tail, source}, {a.ring_head, lane}, channel);
    }
  }
  __device__ __forceinline__ int gpu(int at) const { return own_node(a) * int(a.gpus) + at % int(a.gpus); }
  __device__ __forceinline__ bool ended() const { return in.done == all; }
  __device__ __forceinline__ bool able() {
    full = __ballot_sync(kFullWarp, not out.open());
    return not ended() and in.open() and (to & full) == 0;
  }
  __device__ __forceinline__ int unsaid() const { return max(in.unsaid(), out.unsaid()); }
  __device__ __forceinline__ void look() {
    in.look(a, epoch);
    out.look(a, epoch);
  }
  __device__ __forceinline__ void say() {
    in.say(a, epoch);
    out.say(a, epoch);
  }
  __device__ __forceinline__ Blocked blocked() const {
    if (not in.open()) return ep::blocked(in.seen(a), rail_peer(a, lane), epoch);
    const int at = __ffs(to & full) - 1;
    return ep::blocked(own_word(a, a.ring_head, at * kRingChannels + channel), gpu(at), epoch);
  }
  __device__ __forceinline__ void step(int node) {
    u32 set = __shfl_sync(kFullWarp, to, node);
    const u64 from = __shfl_sync(kFullWarp, record_slot(a, in, channel, f.bytes), node);
    if (set == 0) {   // where does it go
      int id = lane < a.top_k ? reinterpret_cast<const volatile int*>(from + f.ids)[lane] : -1;
      u32 ranks = __reduce_or_sync(kFullWarp, id >= 0 ? 1u << owner(a, id) : 0) & node_ranks(a, own_node(a));
      u32 gpus = ranks >> own_node(a) * int(a.gpus);
      if (lane != node) return;
      to = gpus << node * int(a.gpus);
      went(a, node, channel)[in.done] = gpus;
      return;
    }
    stage.load(from, f.bytes, lane);
    stage.await();
    if (set >> lane & 1) bulk_store(record_slot(a, out, channel, f.bytes), stage.at, f.bytes), ++out.done;
    bulk_commit();
    bulk_await_stored();
    if (lane == node) to = 0, ++in.done;
  }
  __device__ __forceinline__ void count() const { add_written(a, Op::kDispatch, gpu(lane), out.done, f.bytes, true); }
};

// Records of every source, lane s for source s, become rows.
struct Receiving {
  const Args& a;
  const Offsets& f;
  Stage& stage;
  const u64& epoch;
  const int channel, lane;
  End ring = kNoRing;
  int row = 0, all = 0;

  __device__ __forceinline__ Receiving(const Args& a, const Shared& sh, Stage& stage, int channel, int member, int lane)
      : a(a), f(sh.f), stage(stage), epoch(sh.epoch), channel(channel), lane(lane) {
    if (lane >= a.ranks or lane % int(a.receivers) != member) return;
    const int* plan = reinterpret_cast<const int*>(a.plan) + plan_row(lane, channel);
    row = plan[0];
    all = plan[1] - row;
    const int head = node_of(a, lane) * int(a.gpus) + int(a.rank) % int(a.gpus);
    ring = reads(a, relay_here(a, lane), lane, {a.ring_tail, lane}, {a.ring_head, head}, channel);
  }
  __device__ __forceinline__ bool ended() const { return ring.done == all; }
  __device__ __forceinline__ bool able() const { return not ended() and ring.open(); }
  __device__ __forceinline__ int unsaid() const { return ring.unsaid(); }
  __device__ __forceinline__ void look() { ring.look(a, epoch); }
  __device__ __forceinline__ void say() { ring.say(a, epoch); }
  __device__ __forceinline__ Blocked blocked() const { return ep::blocked(ring.seen(a), relay_here(a, lane), epoch); }
  __device__ __forceinline__ void step(int source) {
    stage.load(__shfl_sync(kFullWarp, record_slot(a, ring, channel, f.bytes), source), f.bytes, lane);
    stage.await();
    const int record = __shfl_sync(kFullWarp, row + ring.done, source);
    if (a.ordered) {
      if (lane == 0) bulk_store(a.kept + i64(record) * f.bytes, stage.at, f.bytes);
    } else {
      place<false>(a, f, stage, record, lane);
    }
    bulk_commit();
    bulk_await_read();
    if (lane == source) ++ring.done;
  }
  __device__ __forceinline__ void count() const {}
};

// This rank's answers to every source, lane s for source s, to the source's relay in this node.
struct Returning {
  const Args& a;
  Stage& stage;
  const u64& epoch;
  const int channel, lane;
  End ring = kNoRing;
  int row = 0, all = 0;

  __device__ __forceinline__ Returning(const Args& a, const Shared& sh, Stage& stage, int channel, int member, int lane)
      : a(a), stage(stage), epoch(sh.epoch), channel(channel), lane(lane) {
    if (lane >= a.ranks or lane % int(a.senders) != member) return;
    const int* plan = reinterpret_cast<const int*>(a.plan) + plan_row(lane, channel);
    row = plan[0];
    all = plan[1] - row;
    const int relay = relay_here(a, lane), at = node_of(a, lane) * int(a.gpus) + int(a.rank) % int(a.gpus);
    ring = writes(a, relay, at, {a.back_tail, at}, {a.back_head, lane}, channel);
  }
  __device__ __forceinline__ bool ended() const { return ring.done == all; }
  __device__ __forceinline__ bool able() const { return not ended() and ring.open(); }
  __device__ __forceinline__ int unsaid() const { return ring.unsaid(); }
  __device__ __forceinline__ void look() { ring.look(a, epoch); }
  __device__ __forceinline__ void say() { ring.say(a, epoch); }
  __device__ __forceinline__ Blocked blocked() const { return ep::blocked(ring.seen(a), relay_here(a, lane), epoch); }
  __device__ __forceinline__ void step(int source) {
    const u64 slot = __shfl_sync(kFullWarp, sum_slot(a, ring, channel), source);
    const int record = __shfl_sync(kFullWarp, row + ring.done, source);
    for (int part = 0; part < a.send_parts; ++part) send_back(a, stage, slot, record, part, lane);
    if (lane == source) ++ring.done;
  }
  __device__ __forceinline__ void count() const {
    add_written(a, Op::kCombine, relay_here(a, lane), ring.done, sum_bytes(a), false);
  }
};

// Sums of this node's GPUs for this rank's rail peers. Lane n writes node n's; lane n * G + g reads those of GPU g.
struct Merging {
  const Args& a;
  Stage& stage;
  const u64& epoch;
  const int channel, lane;
  End in = kNoRing, out = kNoRing;
  int all = 0;
  u32 from = 0;    // lanes that read for the next sum
  u32 empty = 0;   // lanes with nothing to read

  __device__ __forceinline__ Merging(const Args& a, const Shared& sh, Stage& stage, int channel, int member, int lane)
      : a(a), stage(stage), epoch(sh.epoch), channel(channel),
        lane(lane) {
    const int own = own_node(a), node = node_of(a, lane), workers = int(a.receive_from - a.senders);
    if (lane < nodes(a) and lane != own and lane % workers == member) {
      const int source = rail_peer(a, lane);
      all = *rail_plan(a, lane, channel);
      out = writes(a, source, int(a.ranks) + own, {a.rail_back_tail, own}, {a.rail_back_head, lane}, channel);
      next();
    }
    if (node < nodes(a) and node != own and node % workers == member)
      in = reads(a, gpu(lane), lane, {a.back_tail, lane}, {a.back_head, rail_peer(a, node)}, channel);
  }
  __device__ __forceinline__ int gpu(int at) const { return own_node(a) * int(a.gpus) + at % int(a.gpus); }
  __device__ __forceinline__ void next() { from = ended() ? 0 : went(a, lane, channel)[out.done] << lane * int(a.gpus); }
  __device__ __forceinline__ bool ended() const { return out.done == all; }
  __device__ __forceinline__ bool able() {
    empty = __ballot_sync(kFullWarp, not in.open());
    return not ended() and out.open() and (from & empty) == 0;
  }
  __device__ __forceinline__ int unsaid() const { return max(in.unsaid(), out.unsaid()); }
  __device__ __forceinline__ void look() {
    in.look(a, epoch);
    out.look(a, epoch);
  }
  __device__ __forceinline__ void say() {
    in.say(a, epoch);
    out.say(a, epoch);
  }
  __device__ __forceinline__ Blocked blocked() const {
    if (not out.open()) return ep::blocked(out.seen(a), rail_peer(a, lane), epoch);
    const int at = __ffs(from & empty) - 1;
    return ep::blocked(own_word(a, a.back_tail, at * kRingChannels + channel), gpu(at), epoch);
  }
  __device__ __forceinline__ void step(int node) {
    const u32 set = __shfl_sync(kFullWarp, from, node);
    const u64 to = __shfl_sync(kFullWarp, sum_slot(a, out, channel), node), row = sum_slot(a, in, channel);
    for (int part = 0; part < a.receive_parts; ++part)
      sum_rows(stage, to, share(int(2 * a.hidden), part, int(a.receive_parts)), set, row, 1.f, lane);
    if (set >> lane & 1) ++in.done;
    if (lane == node) ++out.done, next();
  }
  __device__ __forceinline__ void count() const { add_written(a, Op::kCombine, rail_peer(a, lane), out.done, sum_bytes(a), true); }
};

template <typename Streams>
__device__ __forceinline__ bool serve_channel(const Args& a, Op op, const Shared& sh, Stage& stage, int channel, int member,
                                              int lane) {
  Streams s(a, sh, stage, channel, member, lane);
  if (not serve(a, op, sh.epoch, s, lane)) return false;
  s.count();
  return true;
}

// Where the sums of this rank's tokens come in, by stream.
__device__ __forceinline__ End sums_of(const Args& a, const Route& r, int channel, int lane) {
  if (r.peer < 0) return kNoRing;
  if (lane < a.gpus) return reads(a, r.peer, r.peer, {a.back_tail, r.peer}, {a.back_head, int(a.rank)}, channel);
  return reads(a, r.peer, int(a.ranks) + r.node, {a.rail_back_tail, r.node}, {a.rail_back_head, own_node(a)}, channel);
}

// The sums of a channel's tokens, in order; each of the warps has its parts of every row. Rows of this node's GPUs and those
// of other nodes meet in fp32. Waiting for one stream holds up no other: nobody writes a stream behind another one.
__device__ __forceinline__ bool sum_channel(const Args& a, Shared& sh, Stage& stage, int channel, int member, u32& done, int lane) {
  const Route r = route(a, lane);
  const Range mine = channel_tokens(a, channel);
  const int parts = int(a.receive_parts);
  End ring = sums_of(a, r, channel, lane);
  for (int first = mine.first; first < mine.last; first += 32) {
    const u32 to = block_of_streams(a, r.ranks, first, mine.last, lane);
    for (int i = 0; i < min(32, mine.last - first); ++i) {
      const bool expected = to >> i & 1;
      bool ok = true;
      if (expected and not ring.open()) {
        u64 start = ring.limit == 0 and blockIdx.x == 0 and member == 0 ? nanoseconds() : 0;
        u64 word = load_acquire_sys(ring.seen(a));
        if (not reached(word, sh.epoch, ring.done + 1))
          word = wait_slow(a, Op::kCombine, r.peer, ring.seen(a), sh.epoch, ring.done + 1);
        if (start != 0) add_stat(a, stat_waits(a.ranks) + r.peer, nanoseconds() - start);
        ok = word != 0;
        ring.limit = int(signal_count(word));
      }
      if (not __all_sync(kFullWarp, ok)) return false;
      __syncwarp();
      const u32 set = __ballot_sync(kFullWarp, expected);
      for (int part = member; part < parts; part += int(a.receivers))
        sum_rows(stage, a.out + i64(first + i) * 2 * a.hidden, share(int(2 * a.hidden), part, parts), set,
                 sum_slot(a, ring, channel), 1.f, lane);
      ring.done += expected;
      sh.progress.finish(member, ++done, lane);
    }
  }
  return true;
}

// Gives slots back that all parts of their rows have left. `before`: tokens of the block's earlier channels.
__device__ __forceinline__ void give_credit(const Args& a, Shared& sh, int channel, u32 before, int lane) {
  const Route r = route(a, lane);
  const Range mine = channel_tokens(a, channel);
  const int tokens = mine.last - mine.first, least = max(1, min(2 * kUnsaid, int(a.ring_share) / 2));
  End ring = sums_of(a, r, channel, lane);
  u32 to = block_of_streams(a, r.ranks, mine.first, mine.last, lane);
  for (int block = 0, base = 0, given = 0; given < tokens;) {
    u32 reach = __reduce_min_sync(kFullWarp, lane < a.receivers ? load_acquire_cta(&sh.progress.done[lane]) : ~0u);
    if (reach >= Progress::kAll) return;   // they have given up
    int complete = min(tokens, int(max(reach, before) - before));
    if (complete < tokens and complete - given < least) continue;
    for (; complete - block >= 32; block += 32) {
      base += __popc(to);
      to = block_of_streams(a, r.ranks, mine.first + block + 32, mine.last, lane);
    }
    ring.done = base + __popc(to & below(complete - block));
    __syncwarp();
    fence_release();
    if (r.peer >= 0) ring.say(a, sh.epoch);
    given = complete;
  }
}

// The last block to end tells every rank that nothing of this round is left to be read here, and waits for all to say so.
// By one warp, behind the block's others.
__device__ __forceinline__ bool end_round(const Args& a, const Shared& sh, int lane) {
  LaneState* state = reinterpret_cast<LaneState*>(a.state);
  fence_release();
  u32 last = lane == 0 and atomicAdd(&state->done, u64(1)) == gridDim.x - 1;
  if (not __shfl_sync(kFullWarp, last, 0)) return true;
  if (lane == 0) {
    fence_sys();   // what blocks did before they counted themselves, lane 0 alone has acquired
    state->done = 0;
    add_stat(a, stat_mode(a.ranks, a.mode) + kStatRows * a.ranks + 1, 1);
  }
  for (i64 e = lane; e < a.local_experts; e += 32)
    add_stat(a, stat_experts(a.ranks) + e, reinterpret_cast<const int*>(a.counts)[e]);
  __syncwarp();
  fence_release();
  bool ok = true;
  if (lane < a.ranks) {
    store_relaxed_sys(heap_word(a, lane, a.returned, a.rank), signal_word(sh.epoch, 0));
    ok = wait_word(a, Op::kCombine, lane, a.returned, lane, sh.epoch, 0) != 0;
  }
  return __all_sync(kFullWarp, ok);
}

}  // namespace ep

// Announces the call, exchanges counts, and leaves the plan and the host's count: the first block has a warp a source and
// waits. A repeated dispatch has its plan already and only meets the others.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_count(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int source = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool repeats = a.signature & kRepeats;
  start(a, sh, Op::kDispatch);
  if (sh.stopped) return;
  __syncthreads();
  if (source == 0) {
    if (blockIdx.x == 0) announce(a, sh, lane);
    for (int channel = blockIdx.x; not repeats and channel < a.channels; channel += gridDim.x)
      count_channel(a, sh.epoch, channel, lane);
  }
  if (blockIdx.x != 0) return;
  if (source == 0) {
    bool ok = await_intents(a, sh, lane);
    if (lane == 0) sh.stopped = not ok;
  }
  __syncthreads();
  if (sh.stopped) return;
  if (repeats) {
    if (threadIdx.x == 0) tell_host(a, all_rows(a));
    return;
  }
  int row[kLaneChannels], total = await_counts(a, sh, source, row, lane);
  if (lane == 0) sh.base[source] = total;
  bool ok = __syncthreads_and(total >= 0);
  int base = 0, all = 0;
  for (int s = 0; s < a.ranks; ++s) {
    if (s < source) base += sh.base[s];
    all += sh.base[s];
  }
  if (ok) leave_plan(a, source, base, total, row, lane);
  for (int i = threadIdx.x; ok and i < nodes(a) * a.channels; i += blockDim.x) {
    const int node = i / int(a.channels), channel = i % int(a.channels);
    if (node == own_node(a)) continue;
    u64 word = wait_word(a, Op::kDispatch, rail_peer(a, node), a.rail_count, node * kRingChannels + channel, sh.epoch, 0);
    *rail_plan(a, node, channel) = int(signal_count(word));
    ok = word != 0;
  }
  if (ok and threadIdx.x == 0) tell_host(a, all);
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_dispatch(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, relays_from = int(a.senders), receive_from = int(a.receive_from);
  start(a, sh, Op::kDispatch);
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  bool ok = not sh.stopped;
  for (int channel = blockIdx.x; ok and channel < a.channels; channel += gridDim.x) {
    if (warp < relays_from) {
      ok = serve_channel<Sending>(a, Op::kDispatch, sh, stage, channel, warp, lane);
    } else if (warp < receive_from) {
      ok = serve_channel<Forwarding>(a, Op::kDispatch, sh, stage, channel, warp - relays_from, lane);
    } else {
      ok = serve_channel<Receiving>(a, Op::kDispatch, sh, stage, channel, warp - receive_from, lane);
    }
  }
  if (not __syncthreads_and(ok)) {   // nothing that was not received may look like data
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
    place<false>(a, sh.f, stage, record, lane);
    bulk_commit();
    bulk_await_read();
  }
  if (sh.stopped) poison_rows(a.rows, a.local_experts * a.capacity * sh.f.row);
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_ring_combine(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, relays_from = int(a.senders), receive_from = int(a.receive_from);
  if (threadIdx.x < 32) sh.progress.done[lane] = 0;
  start(a, sh, Op::kCombine);
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  bool ok = not sh.stopped;
  u32 done = 0;   // tokens of this block
  for (int channel = blockIdx.x; ok and channel < a.channels; channel += gridDim.x) {
    if (warp < relays_from) {
      ok = serve_channel<Returning>(a, Op::kCombine, sh, stage, channel, warp, lane);
    } else if (warp < receive_from) {
      ok = serve_channel<Merging>(a, Op::kCombine, sh, stage, channel, warp - relays_from, lane);
    } else if (warp < receive_from + a.receivers) {
      ok = sum_channel(a, sh, stage, channel, warp - receive_from, done, lane);
      if (not ok) sh.progress.finish(warp - receive_from, Progress::kAll, lane);
    } else {
      give_credit(a, sh, channel, done, lane);
      Range mine = channel_tokens(a, channel);
      done += mine.last - mine.first;
    }
  }
  ok = __syncthreads_and(ok);
  if (warp == 0 and ok) ok = end_round(a, sh, lane);
  if (not __syncthreads_and(ok)) poison_sums(a);
}
