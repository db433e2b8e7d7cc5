// normal: the warps that send this rank's tokens, pass records on, and receive.
#pragma once
#include "ep/place.cuh"
#include "ep/record.cuh"
#include "ep/ring_relay.cuh"
#include "ep/ring_take.cuh"

namespace ep {

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

}  // namespace ep
