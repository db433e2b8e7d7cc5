// normal: counts first, then records through bounded rings, over a relay between nodes; partial sums come back the same way in
// the same order, so that neither side needs an index. Memory does not depend on the tokens.
//
// A channel is a share of consecutive tokens and a share of every ring's slots; a block serves one, or several one after the
// other. A source is the relay of its own node. Warps that move rows tell two others of the block how far they have come, which
// tell the other ends: fences wait for all that a warp has stored, so none is between two rows.
// Streams of different sources share nothing, and every warp that reads or passes on takes whichever of its streams can go on,
// so that no source blocks another. Where warps take turns at a stream, the one with the earliest record that is not done waits
// for nothing that is behind it: all before are done, and told to whoever must make room. So no ring of waits can close.
#include "ep/ring.cuh"

namespace ep {

// Behind the plan, by node and ring channel: records that this rank relays for its rail peer there.
__device__ __forceinline__ int* rail_plan(const Args& a, int node, int channel) {
  return reinterpret_cast<int*>(a.plan) + plan_words(a.ranks) + node * kRingChannels + channel;
}
// And which GPUs of this node each of them goes to, one bit each.
__device__ __forceinline__ u32* went(const Args& a, int node, int channel) {
  int chunk = reinterpret_cast<const int*>(a.plan)[plan_chunk(a.ranks, rail_peer(a, node))];
  return reinterpret_cast<u32*>(a.relay) + node * a.max_tokens + i64(chunk) * channel;
}
// Of the plan, which is there once counts are.
__device__ __forceinline__ int all_rows(const Args& a) {
  return reinterpret_cast<const int*>(a.plan)[plan_row(a.ranks - 1, kChannels)];
}
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

// Where this rank's tokens of a channel go, lane j for stream j: to the GPUs of its node and to its relays.
__device__ __forceinline__ End tokens_to(const Args& a, const Route& to, int channel, int lane) {
  const int own = own_node(a), rank = int(a.rank);
  if (to.peer < 0) return kNoRing;
  if (lane < a.gpus) return writes(a, to.peer, rank, {a.ring_tail, rank}, {a.ring_head, to.peer}, channel);
  return writes(a, to.peer, int(a.ranks) + own, {a.rail_ring_tail, own}, {a.rail_ring_head, to.node}, channel);
}

// Of a channel's tokens, those that this launch sends.
__device__ __forceinline__ Range sent_tokens(const Args& a, int channel) {
  const Range all = channel_tokens(a, channel);
  const int middle = min(all.last, all.first + int(a.ring_share));
  return {a.part == i64(Part::kRest) ? middle : all.first, a.part == i64(Part::kFirst) ? middle : all.last};
}
// How many records of the stream in this lane, which carries `ranks`, the launch before this one has sent.
__device__ __forceinline__ int sent_before(const Args& a, u32 ranks, int channel, int lane) {
  const int first = channel_tokens(a, channel).first, stop = sent_tokens(a, channel).first;
  int sent = 0;
  for (int token = first; token < stop; token += 32) sent += __popc(block_of_streams(a, ranks, token, stop, lane));
  return sent;
}

// One of the warps that take a channel's tokens in turns: a token is read and cast once for all its streams. `before`: tokens of
// the block's earlier channels.
__device__ __forceinline__ bool send_tokens(const Args& a, Shared& sh, Stage& stage, int channel, int member, int before, int lane) {
  const Offsets& f = sh.f;
  const Range mine = sent_tokens(a, channel);
  const u32 ranks = route(a, lane).ranks;
  const int workers = int(a.senders);
  int limit = int(a.ring_share), base = sent_before(a, ranks, channel, lane), token = mine.first + first_turn(member, workers, before);
  for (int first = mine.first; first < mine.last; first += 32) {
    const u32 bits = block_of_streams(a, ranks, first, mine.last, lane);
    for (const int stop = min(first + 32, mine.last); token < stop; token += workers) {
      const int i = token - first;
      const bool there = bits >> i & 1;
      End ring = tokens_to(a, route(a, lane), channel, lane);   // made anew, for kept it would take registers
      ring.limit = limit;
      ring.done = base + __popc(bits & below(i));
      const bool ok = not there or ring.open() or ring.await(a, Op::kDispatch, sh.epoch);
      limit = ring.limit;
      if (not __all_sync(kFullWarp, ok)) return false;
      __syncwarp();   // what one lane acquired, all lanes write behind
      const Targets t{record_slot(a, ring, channel, f.bytes), __ballot_sync(kFullWarp, there)};
      const u64 row = input_row(a, f, token);
      if (a.cast and lane == 0 and token + workers < mine.last) bulk_prefetch(input_row(a, f, token + workers), 2 * f.row);
      const u32 early = pick_word(a, token, lane);
      if (a.cast) {
        send_cast(a, t, f, reinterpret_cast<const unsigned char*>(row), reinterpret_cast<u32*>(stage.at), {0, 2 * f.row}, lane);
      } else {
        stage.load(row, f.row, lane);
        stage.await();
        if (there) bulk_store(t.address, stage.at, f.row);
        bulk_commit();
        bulk_await_stored();
      }
      send_picks(a, t, f, sh.epoch, token, early, lane);
      sh.progress.finish(member, u32(before + token - mine.first) / workers + 1, lane);
    }
    base += __popc(bits);
  }
  return true;
}

// A relay: records of a rail peer in another node go on to the GPUs of this node, and their sums come back. Lane j has the rail
// of the j-th other node, lane j * G + g what GPU g gets of that node's records, or answers to them.
__device__ __forceinline__ int other_node(const Args& a, int j) { return j + (j >= own_node(a)); }
__device__ __forceinline__ int gpu_here(const Args& a, int lane) { return own_node(a) * int(a.gpus) + lane % int(a.gpus); }
__device__ __forceinline__ int relays(const Args& a) { return max(0, int(a.receive_from - a.senders) - 2); }
__device__ __forceinline__ Turn relay_turn(const Args& a, int warp, int j) {
  return turns(relays(a), nodes(a) - 1, warp - int(a.receive_from) + relays(a), j);
}
template <Op kOp>
__device__ __forceinline__ End rail_end(const Args& a, int j, int channel) {
  const int own = own_node(a), node = other_node(a, j), peer = rail_peer(a, node);
  if (kOp == Op::kDispatch) return reads(a, peer, int(a.ranks) + node, {a.rail_ring_tail, node}, {a.rail_ring_head, own}, channel);
  return writes(a, peer, int(a.ranks) + own, {a.rail_back_tail, own}, {a.rail_back_head, node}, channel);
}
template <Op kOp>
__device__ __forceinline__ End gpu_end(const Args& a, int lane, int channel) {
  const int node = other_node(a, lane / int(a.gpus)), source = rail_peer(a, node), gpu = gpu_here(a, lane);
  const int at = node * int(a.gpus) + lane % int(a.gpus);
  if (kOp == Op::kDispatch) return writes(a, gpu, source, {a.ring_tail, source}, {a.ring_head, at}, channel);
  if (a.stays and gpu == a.rank) return kNoWaiting;
  return reads(a, gpu, at, {a.back_tail, at}, {a.back_head, source}, channel);
}
// `gpus`: where one record a lane of the j-th other node goes; each GPU's end is as many further.
__device__ __forceinline__ void count_gpus(const Args& a, End& end, u32 gpus, int j, int lane) {
  for (int g = 0; g < a.gpus; ++g) {
    const u32 records = __ballot_sync(kFullWarp, gpus >> g & 1);
    if (lane == j * int(a.gpus) + g) end.done += __popc(records);
  }
}

struct Passed {
  Taken taken;     // by other node
  u32 known[32];   // dispatch, likewise: how many have come whose GPUs are written down, of all channels of the block
};

// One of the warps that take a relay's records in turns. `before`: those of the block's earlier channels.
template <Op kOp>
struct Relaying {
  const Args& a;
  Stage& stage;
  Passed& passed;
  const u64& epoch;
  const Turn turn;
  const int channel, lane, before;
  End rail = kNoRing, end = kNoRing;   // the GPU's is at the record that the rail is at, once `learned`
  int all = 0;
  bool learned = false;
  u32 with = 0;     // lanes of the GPUs that have to do with it
  u32 closed = 0;   // lanes whose GPU's end cannot go on

  __device__ __forceinline__ Relaying(const Args& a, const Shared& sh, Stage& stage, Passed& passed, int channel, int before,
                                      int warp, int lane)
      : a(a), stage(stage), passed(passed), epoch(sh.epoch), turn(relay_turn(a, warp, lane)), channel(channel), lane(lane),
        before(before) {
    if (turn.mine) {
      all = *rail_plan(a, other_node(a, lane), channel);
      rail = rail_end<kOp>(a, lane, channel);
      rail.done = first_turn(turn.member, turn.shares, before);
    }
    if (relay_turn(a, warp, lane / int(a.gpus)).mine) end = gpu_end<kOp>(a, lane, channel);
  }
  __device__ __forceinline__ bool ended() const { return rail.done >= all; }
  __device__ __forceinline__ bool able() {
    closed = __ballot_sync(kFullWarp, not end.open());
    return not ended() and rail.open() and (with & closed) == 0;
  }
  __device__ __forceinline__ Blocked blocked() const {
    const int at = __ffs(with & closed) - 1;
    if (at < 0) return ep::blocked(rail.seen(a), rail.peer, epoch);
    return ep::blocked(gpu_end<kOp>(a, at, channel).seen(a), gpu_here(a, at), epoch);
  }
  // What was noted of node j's record, in the lane behind those that others of its warps have taken since this one's last.
  __device__ __forceinline__ u32 ask(int j) const {
    const int next = __shfl_sync(kFullWarp, rail.done, j), first = max(0, next - turn.shares);
    return first + lane <= next ? went(a, other_node(a, j), channel)[first + lane] : 0;
  }
  __device__ __forceinline__ void learn(int j, u32 gpus) {
    const int others = min(__shfl_sync(kFullWarp, rail.done, j), turn.shares);
    const u32 own = __shfl_sync(kFullWarp, gpus, others);
    count_gpus(a, end, lane < others ? gpus : 0, j, lane);
    if (lane == j) with = own << j * int(a.gpus), learned = true;
  }
  // The next one of node j, and whether it can be asked for.
  __device__ __forceinline__ bool advance(int j) {
    if (lane == j) rail.done += turn.shares, with = 0, learned = false;
    return __shfl_sync(kFullWarp, not ended() and rail.open(), j);
  }
  __device__ __forceinline__ int last() const { return before + rail.done - turn.shares; }   // of the block, after advance
};

// Records go on as they came.
struct Forwarding : Relaying<Op::kDispatch> {
  const Offsets& f;
  bool owed = false;   // this lane's last record may still be on its way

  __device__ __forceinline__ Forwarding(const Args& a, const Shared& sh, Stage& stage, Passed& passed, int channel, int before,
                                        int warp, int lane)
      : Relaying(a, sh, stage, passed, channel, before, warp, lane), f(sh.f) {}
  __device__ __forceinline__ void settle() {
    bulk_await_stored();
    __syncwarp();   // each lane has awaited its own, and the release covers them
    if (owed) passed.taken.finish(turn, lane, last());
    owed = false;
  }
  __device__ __forceinline__ void look() {
    settle();   // before it waits for others
    if (turn.mine) rail.limit = int(load_acquire_cta(&passed.known[lane])) - before;
    end.look(a, epoch);
  }
  __device__ __forceinline__ void step(int j) {
    if (not __shfl_sync(kFullWarp, learned, j)) return learn(j, ask(j));
    const u32 set = __shfl_sync(kFullWarp, with, j);
    stage.load(__shfl_sync(kFullWarp, record_slot(a, rail, channel, f.bytes), j), f.bytes, lane);
    settle();   // the last one was stored while this one comes
    const u64 to = record_slot(a, end, channel, f.bytes);
    const bool more = advance(j);
    if (more) learn(j, ask(j));
    stage.await();
    if (set >> lane & 1) bulk_store(to, stage.at, f.bytes);
    bulk_commit();
    bulk_await_read();
    owed = lane == j;
  }
};

// Records that this rank receives, lane s for source s.
__device__ __forceinline__ End records_of(const Args& a, int source, int channel) {
  const int head = node_of(a, source) * int(a.gpus) + int(a.rank) % int(a.gpus);
  return reads(a, relay_here(a, source), source, {a.ring_tail, source}, {a.ring_head, head}, channel);
}
// And its answers, lane j for the j-th source, to the source's relay in this node. Those that this rank relays itself come last,
// its own behind them, and do not travel where sums may read them from y.
__device__ __forceinline__ int answered(const Args& a, int lane) {
  const int gpus = int(a.gpus), count = nodes(a);
  return (own_node(a) + 1 + lane % count) % count * gpus + (int(a.rank) + 1 + lane / count) % gpus;
}
__device__ __forceinline__ int answers(const Args& a) { return int(a.ranks) - (a.stays ? nodes(a) : 0); }
__device__ __forceinline__ End answers_to(const Args& a, int source, int channel) {
  const int relay = relay_here(a, source), at = node_of(a, source) * int(a.gpus) + int(a.rank) % int(a.gpus);
  return writes(a, relay, at, {a.back_tail, at}, {a.back_head, source}, channel);
}

// One of the warps that take either in turns. `before`: those of the block's earlier channels.
template <Op kOp>
struct Taking {
  const Args& a;
  Stage& stage;
  Taken& taken;
  const u64& epoch;
  const Turn turn;
  const int channel, lane, before;
  End ring = kNoRing;
  Rows rows{};

  __device__ __forceinline__ Taking(const Args& a, const Shared& sh, Stage& stage, Taken& taken, Turn turn, int channel, int before,
                                    int lane)
      : a(a), stage(stage), taken(taken), epoch(sh.epoch), turn(turn), channel(channel), lane(lane), before(before) {
    if (not turn.mine) return;
    rows = rows_of(a, source(), channel);
    ring = kOp == Op::kDispatch ? records_of(a, source(), channel) : answers_to(a, source(), channel);
    ring.done = first_turn(turn.member, turn.shares, before);
  }
  __device__ __forceinline__ int source() const { return kOp == Op::kDispatch ? lane : answered(a, lane); }
  __device__ __forceinline__ bool ended() const { return ring.done >= rows.all; }
  __device__ __forceinline__ bool able() const { return not ended() and ring.open(); }
  __device__ __forceinline__ void look() { ring.look(a, epoch); }
  __device__ __forceinline__ Blocked blocked() const { return ep::blocked(ring.seen(a), ring.peer, epoch); }
};

// Records become rows.
struct Receiving : Taking<Op::kDispatch> {
  Shared& sh;

  __device__ __forceinline__ Receiving(const Args& a, Shared& sh, Stage& stage, Taken& taken, Turn turn, int channel,
                                       int before, int lane)
      : Taking(a, sh, stage, taken, turn, channel, before, lane), sh(sh) {}
  __device__ __forceinline__ void step(int source) {
    stage.load(__shfl_sync(kFullWarp, record_slot(a, ring, channel, sh.f.bytes), source), sh.f.bytes, lane);
    stage.await();   // the bulk load has read the slot, which may be written again
    if (lane == source) taken.finish(turn, lane, before + ring.done);
    const int record = __shfl_sync(kFullWarp, rows.first + ring.done, source);
    if (a.ordered) {
      if (lane == 0) bulk_store(a.kept + i64(record) * sh.f.bytes, stage.at, sh.f.bytes);
    } else {
      place<false>(a, sh, stage, record, lane);
    }
    bulk_commit();
    bulk_await_read();
    if (lane == source) ring.done += turn.shares;
  }
};

// What the experts made of them goes back.
struct Returning : Taking<Op::kCombine> {
  using Taking::Taking;

  __device__ __forceinline__ void step(int j) {
    const u64 slot = __shfl_sync(kFullWarp, sum_slot(a, ring, channel), j);
    const int record = __shfl_sync(kFullWarp, rows.first + ring.done, j);
    for (int part = 0; part < a.send_parts; ++part) send_back(a, stage, slot, record, part, lane);
    __syncwarp();   // all lanes' stores are behind it, so the release covers them
    if (lane != j) return;
    taken.finish(turn, lane, before + ring.done);
    ring.done += turn.shares;
  }
};

// Answers of this node's GPUs become one sum, of as long runs as the stage holds one of each.
struct Merging : Relaying<Op::kCombine> {
  int first = -1;   // where this lane reads y: the row of the node's first record

  __device__ __forceinline__ Merging(const Args& a, const Shared& sh, Stage& stage, Passed& passed, int channel, int before,
                                     int warp, int lane)
      : Relaying(a, sh, stage, passed, channel, before, warp, lane) {
    if (end.open()) first = rows_of(a, rail_peer(a, other_node(a, lane / int(a.gpus))), channel).first;   // it waits for nobody
  }
  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void look() {
    rail.look(a, epoch);
    end.look(a, epoch);
  }
  __device__ __forceinline__ void step(int j) {
    if (not __shfl_sync(kFullWarp, learned, j)) return learn(j, ask(j));
    const u32 set = __shfl_sync(kFullWarp, with, j);
    const u64 to = __shfl_sync(kFullWarp, sum_slot(a, rail, channel), j);
    const u64 row = first < 0 ? sum_slot(a, end, channel) : a.y + i64(first + end.done) * 2 * a.hidden;
    const int bytes = int(2 * a.hidden), run = int(a.send_stage) / max(1, __popc(set)) / 16 * 16;
    const bool more = advance(j);
    const u32 ahead = more ? ask(j) : 0;   // comes meanwhile
    for (int at = 0; at < bytes; at += run) sum_rows(stage, to, {at, min(at + run, bytes)}, set, row, 1.f, lane);
    if (more) learn(j, ahead);
    __syncwarp();   // all lanes' stores are behind it, so the release covers them
    if (lane == j) passed.taken.finish(turn, lane, last());
  }
};

// Forwarding and Merging.
template <typename Streams>
__device__ __forceinline__ bool relay_channel(const Args& a, Op op, const Shared& sh, Stage& stage, Passed& passed, int channel,
                                              int& before, int warp, int lane) {
  Streams s(a, sh, stage, passed, channel, before, warp, lane);
  before += s.all;
  const bool ok = serve(a, op, sh.epoch, s, lane);
  s.settle();
  if (not ok and s.turn.mine) passed.taken.give_up(s.turn, lane);
  return ok;
}

// Notes where records go that have come from other nodes, up to 32 of each: a slot may be written again once its record has
// gone on, and not all of the warps that count it have then seen it. `known`: how many of lane j's are noted.
__device__ __forceinline__ void note_gpus(const Args& a, const Shared& sh, Passed& passed, End& rail, int& known, int channel,
                                          int before, int lane) {
  rail.look(a, sh.epoch);
  __syncwarp();   // what one lane acquired, all lanes read
  for (u32 left = __ballot_sync(kFullWarp, known < rail.limit); left != 0; left &= left - 1) {
    const int j = __ffs(left) - 1, first = __shfl_sync(kFullWarp, known, j);
    const int count = min(32, __shfl_sync(kFullWarp, rail.limit, j) - first);
    if (lane < count) {
      End at = rail_end<Op::kDispatch>(a, j, channel);
      at.done = first + lane;
      const int* ids = reinterpret_cast<const int*>(record_slot(a, at, channel, sh.f.bytes) + sh.f.ids);
      u32 ranks = 0;
#pragma unroll 8
      for (int k = 0; k < a.top_k; ++k)
        if (is_expert(a, ids[k])) ranks |= 1u << owner(a, ids[k]);
      went(a, other_node(a, j), channel)[first + lane] = (ranks & node_ranks(a, own_node(a))) >> own_node(a) * int(a.gpus);
    }
    __syncwarp();   // all lanes' notes are behind it, so the release covers them; it passes on what lane j acquired
    if (lane == j) known += count, store_release_cta(&passed.known[j], u32(before + known));
  }
}

// Tells the other ends how far a channel's relays have come, behind the warps that take turns at them; in dispatch it goes ahead
// of them, too. `before`: lane j's records of the block's earlier channels. False once one of those warps has given up.
template <Op kOp>
__device__ __forceinline__ bool follow_relays(const Args& a, const Shared& sh, Passed& passed, int channel, int& before, int lane) {
  const int others = nodes(a) - 1, shares = shares_of(relays(a), others), least = least_said(a);
  const int all = lane < others ? *rail_plan(a, other_node(a, lane), channel) : 0;
  End rail = lane < others ? rail_end<kOp>(a, lane, channel) : kNoRing;
  End end = lane < others * a.gpus ? gpu_end<kOp>(a, lane, channel) : kNoRing;
  int known = 0;
  do {
    if (kOp == Op::kDispatch) note_gpus(a, sh, passed, rail, known, channel, before, lane);
    const u32 reach = all != 0 ? passed.taken.complete(lane, shares) : u32(before);
    if (__any_sync(kFullWarp, reach >= Progress::kAll)) return false;
    __syncwarp();   // what lanes acquired of the warps, all lanes read, and the fence makes the other ends see
    const int done = min(min(all, int(reach) - before), rail.done + 32);
    const u32 due = __ballot_sync(kFullWarp, done - rail.done >= (done == all ? 1 : least));
    if (due == 0) continue;
    for (u32 left = due; left != 0; left &= left - 1) {
      const int j = __ffs(left) - 1, first = __shfl_sync(kFullWarp, rail.done, j), last = __shfl_sync(kFullWarp, done, j);
      count_gpus(a, end, first + lane < last ? went(a, other_node(a, j), channel)[first + lane] : 0, j, lane);
      if (lane == j) rail.done = done;
    }
    fence_release();
    if (rail.peer >= 0) rail.say(a, sh.epoch);
    if (end.peer >= 0) end.say(a, sh.epoch);
  } while (not __all_sync(kFullWarp, rail.done == all));
  if (kOp == Op::kDispatch) {
    add_written(a, kOp, gpu_here(a, lane), end.done, sh.f.bytes, true);
  } else {
    add_written(a, kOp, rail.peer, rail.done, sum_bytes(a), true);
  }
  before += all;
  return true;
}

// Receiving and Returning. `before`: lane's records of the block's earlier channels.
template <typename Streams>
__device__ __forceinline__ bool take_channel(const Args& a, Op op, Shared& sh, Stage& stage, Taken& taken, Turn turn,
                                             int channel, int& before, int lane) {
  Streams s(a, sh, stage, taken, turn, channel, before, lane);
  before += s.rows.all;
  if (serve(a, op, sh.epoch, s, lane)) return true;
  if (turn.mine) taken.give_up(turn, lane);
  return false;
}

// Where the sums of this rank's tokens come in, by stream.
__device__ __forceinline__ End sums_of(const Args& a, const Route& r, int channel, int lane) {
  if (r.peer < 0 or (a.stays and r.peer == a.rank)) return kNoRing;
  if (lane < a.gpus) return reads(a, r.peer, r.peer, {a.back_tail, r.peer}, {a.back_head, int(a.rank)}, channel);
  return reads(a, r.peer, int(a.ranks) + r.node, {a.rail_back_tail, r.node}, {a.rail_back_head, own_node(a)}, channel);
}

// Summing warps: groups of them take a channel's tokens in turns, and each warp of a group its parts of every row.
struct Summing {
  int groups, members, group, member;
};
__device__ __forceinline__ Summing summing(const Args& a, int warp) {
  const int members = min(int(a.receive_parts), int(a.receivers));
  return {int(a.receivers) / members, members, warp / members, warp % members};
}

// Rows of this node's GPUs and those of other nodes meet in fp32. Waiting for one stream holds up no other: nobody writes a
// stream behind another one. `before`: tokens of the block's earlier channels.
__device__ __forceinline__ bool sum_channel(const Args& a, Shared& sh, Stage& stage, int channel, int warp, int before, int lane) {
  const Route r = route(a, lane);
  const Range mine = channel_tokens(a, channel);
  const Summing g = summing(a, warp);
  if (g.group >= g.groups) return true;   // left over
  const int parts = int(a.receive_parts);
  const bool own = a.stays and r.peer == a.rank;   // its rows are still where the experts left them
  const u64 answer = own ? a.y + i64(rows_of(a, int(a.rank), channel).first) * 2 * a.hidden : 0;
  End ring = sums_of(a, r, channel, lane);
  int base = 0, token = mine.first + first_turn(g.group, g.groups, before);
  for (int first = mine.first; first < mine.last; first += 32) {
    const u32 to = block_of_streams(a, r.ranks, first, mine.last, lane);
    for (const int stop = min(first + 32, mine.last); token < stop; token += g.groups) {
      const int i = token - first;
      const bool expected = to >> i & 1;
      ring.done = base + __popc(to & below(i));
      bool ok = true;
      if (expected and not own and not ring.open()) {
        u64 start = ring.limit == 0 and blockIdx.x == 0 and warp == 0 ? nanoseconds() : 0;
        ok = ring.await(a, Op::kCombine, sh.epoch);
        if (start != 0) add_stat(a, stat_waits(a.ranks) + r.peer, nanoseconds() - start);
      }
      if (not __all_sync(kFullWarp, ok)) return false;
      __syncwarp();   // what one lane acquired, all lanes read
      const u32 set = __ballot_sync(kFullWarp, expected);
      const u64 row = own ? answer + i64(ring.done) * 2 * a.hidden : sum_slot(a, ring, channel);
      for (int part = g.member; part < parts; part += g.members)
        sum_rows(stage, a.out + i64(token) * 2 * a.hidden, share(int(2 * a.hidden), part, parts), set, row, 1.f, lane);
      sh.progress.finish(warp, u32(before + token - mine.first) / g.groups + 1, lane);
    }
    base += __popc(to);
  }
  return true;
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
