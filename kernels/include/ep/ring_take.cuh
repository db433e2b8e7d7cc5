// normal: the warps that take the records which this rank receives, or answer them.
#pragma once
#include "ep/block.cuh"
#include "ep/ring.cuh"

namespace ep {

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

}  // namespace ep
