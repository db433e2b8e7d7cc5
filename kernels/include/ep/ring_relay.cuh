// normal between nodes: the warps of a relay, which pass records on and answers back.
#pragma once
#include "ep/block.cuh"
#include "ep/ring.cuh"

namespace ep {

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

}  // namespace ep
