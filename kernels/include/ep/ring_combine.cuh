// normal: the warps that answer, add answers up at a relay, and sum them at the tokens' owner.
#pragma once
#include "ep/ring_relay.cuh"
#include "ep/ring_take.cuh"

namespace ep {

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

}  // namespace ep
