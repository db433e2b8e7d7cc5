// Streams through bounded rings, for normal: one writer and one reader a ring and channel, a tail word at the reader, a head
// word at the writer. Several warps of a block take turns at one end, or one serves several streams, one a lane: it never blocks
// on one while another can go on. Another one then tells the other end.
#pragma once
#include "ep/progress.cuh"
#include "ep/routing.cuh"

namespace ep {

constexpr int kRingThreads = 896;   // at most, so that a thread has 72 registers
constexpr int kUnsaid = 8;   // records of a stream that its reader need not know of yet, nor its writer that they are taken

// One end of a ring's channel. What this end has done, and how far it may go: as far as the other end's word says, and a
// writer by the slots of the channel further. Packed, for a warp may hold two a lane; words count from rail_count.
struct End {
  int peer : 8;       // the other end's rank; -1: there is no ring
  u32 ring : 8;       // at its reader
  u32 slack : 16;     // slots if this end writes
  u32 other : 16;     // the other end's word, here
  u32 word : 16;      // this end's word, there
  int done, said, limit;

  __device__ __forceinline__ bool open() const { return done < limit; }
  __device__ __forceinline__ int unsaid() const { return done - said; }
  __device__ __forceinline__ const u64* seen(const Args& a) const { return own_word(a, a.rail_count, other); }
  __device__ __forceinline__ void look(const Args& a, u64 epoch) {
    if (peer < 0) return;
    u64 now = load_acquire_sys(seen(a));
    if (signal_epoch(now) == epoch) limit = int(slack) + int(signal_count(now));
  }
  __device__ __forceinline__ void say(const Args& a, u64 epoch) {   // behind a fence
    if (said == done) return;
    store_relaxed_sys(heap_word(a, peer, a.rail_count, word), signal_word(epoch, done));
    said = done;
  }
  // Until this end may do its next record; false once the buffer has failed. By lanes apart.
  __device__ __forceinline__ bool await(const Args& a, Op op, u64 epoch) {
    const u64 count = u64(done + 1 - int(slack));
    u64 word = load_acquire_sys(seen(a));
    if (not reached(word, epoch, count)) word = wait_slow(a, op, peer, seen(a), epoch, count);
    limit = int(slack) + int(signal_count(word));
    return word != 0;
  }
  // Of the next record. `area`: a.slots or a.area, with rings of `segment` bytes.
  __device__ __forceinline__ u64 slot(const Args& a, i64 area, i64 segment, int channel, int bytes) const {
    return a.heap[slack != 0 ? peer : int(a.rank)] + area + ring * segment +
           i64(channel * u32(a.ring_share) + u32(done) % u32(a.ring_share)) * bytes;
  }
};

__device__ __forceinline__ u32 ring_word(const Args& a, i64 array, int ring, int channel) {
  return u32((array - a.rail_count) / 8) + u32(ring * kRingChannels + channel);
}
constexpr End kNoRing{-1, 0, 0, 0, 0, 0, 0, 0};
constexpr End kNoWaiting{-1, 0, 0, 0, 0, 0, 0, 1 << 30};   // nor one, but all is there

struct Word {   // an array, and the index of a ring in it
  i64 array;
  int ring;
};
__device__ __forceinline__ End writes(const Args& a, int reader, int ring, Word tail, Word head, int channel) {
  return {reader,
          u32(ring),
          u32(a.ring_share),
          ring_word(a, head.array, head.ring, channel),
          ring_word(a, tail.array, tail.ring, channel),
          0,
          0,
          int(a.ring_share)};
}
__device__ __forceinline__ End reads(const Args& a, int writer, int ring, Word tail, Word head, int channel) {
  return {writer,
          u32(ring),
          0,
          ring_word(a, tail.array, tail.ring, channel),
          ring_word(a, head.array, head.ring, channel),
          0,
          0,
          0};
}
__device__ __forceinline__ u64 record_slot(const Args& a, const End& e, int channel, int bytes) {
  return e.slot(a, a.slots, a.slot_segment, channel, bytes);
}
__device__ __forceinline__ int sum_bytes(const Args& a) { return int(combine_record_bytes(Payload(a.payload), a.hidden)); }
__device__ __forceinline__ u64 sum_slot(const Args& a, const End& e, int channel) {
  return e.slot(a, a.area, a.area_segment, channel, sum_bytes(a));
}

// A source's records in a channel: the first one's row, and how many.
struct Rows {
  int first, all;
};
__device__ __forceinline__ Rows rows_of(const Args& a, int source, int channel) {
  const int* plan = reinterpret_cast<const int*>(a.plan) + plan_row(source, channel);
  return {plan[0], plan[1] - plan[0]};
}

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

// How a block's warps share streams, one a lane: where there are warps enough, several take turns at each, else one has several.
struct Turn {
  int shares, member;   // warps that take turns, and which of them this one is
  bool mine;            // this lane's stream
};
__device__ __forceinline__ int shares_of(int warps, int streams) {
  return streams == 0 or streams >= warps ? 1 : warps / streams;
}
__device__ __forceinline__ Turn turns(int warps, int streams, int warp, int lane) {
  if (streams == 0) return {1, 0, false};
  if (streams >= warps) return {1, 0, lane < streams and lane % warps == warp};
  const int shares = shares_of(warps, streams);
  return {shares, warp / streams, lane == warp % streams and warp < shares * streams};
}
// The first of a channel's units that is this member's turn: of all units of a block, u is that of member u % members.
__device__ __forceinline__ int first_turn(int member, int members, int before) {
  const int ahead = before % members;
  return member - ahead + (member < ahead ? members : 0);
}

// How many units of each stream each of the warps that take turns at it has done, in order.
struct Taken {
  u32 done[32];

  __device__ __forceinline__ void finish(const Turn& t, int stream, int unit) {
    store_release_cta(&done[stream * t.shares + t.member], u32(unit) / t.shares + 1);
  }
  __device__ __forceinline__ void give_up(const Turn& t, int stream) {
    store_release_cta(&done[stream * t.shares + t.member], Progress::kAll);
  }
  __device__ __forceinline__ u32 complete(int stream, int shares) const {   // units from the first on
    u32 reach = ~0u;
    for (int m = 0; m < shares; ++m) {
      const u32 units = load_acquire_cta(&done[stream * shares + m]);
      if (units >= Progress::kAll) return Progress::kAll;   // one that gave up ends it, however far others are
      reach = min(reach, units * shares + m);
    }
    return reach;
  }
};

// The same of warps that take turns at one sequence of units; `mine`: what this lane's warp has done, 0 of warps that are none.
__device__ __forceinline__ u32 together(u32 mine, int shares, int member, bool takes_part) {
  __syncwarp();   // what one lane acquired, all lanes pass on
  if (__any_sync(kFullWarp, mine >= Progress::kAll)) return Progress::kAll;
  return __reduce_min_sync(kFullWarp, takes_part ? mine * shares + member : ~0u);
}

// What one end does not say yet is less than half of a channel's slots, so that the two ends of a ring never wait for each
// other's word, and a ring of one slot works too.
__device__ __forceinline__ int least_said(const Args& a) { return max(1, min(kUnsaid, int(a.ring_share) / 2)); }

// Tells the other ends how far a channel's streams have come, one a lane, behind the warps that take turns at them. `all`: records
// of the stream, `before`: those of the block's earlier channels. False once one of those warps has given up.
__device__ __forceinline__ bool follow_records(const Args& a, u64 epoch, const Taken& taken, End ring, int all, int shares,
                                               int before, int lane) {
  const int least = least_said(a);
  for (;;) {
    const u32 reach = all != 0 ? taken.complete(lane, shares) : u32(before);
    if (__any_sync(kFullWarp, reach >= Progress::kAll)) return false;
    ring.done = min(all, int(reach) - before);
    if (__any_sync(kFullWarp, ring.unsaid() >= (ring.done == all ? 1 : least))) {
      __syncwarp();   // what lanes acquired of the warps, the fence makes the other ends see
      fence_release();
      if (ring.peer >= 0) ring.say(a, epoch);
    }
    if (__all_sync(kFullWarp, ring.done == all)) return true;
  }
}

// The streams of this rank's own tokens, one a lane: to each GPU of its node, then to its relay in each other node.
struct Route {
  int peer = -1, node = -1;
  u32 ranks = 0;   // whose tokens it carries
};
__device__ __forceinline__ Route route(const Args& a, int lane) {
  const int own = own_node(a), gpus = int(a.gpus);
  if (lane < gpus) return {own * gpus + lane, own, 1u << (own * gpus + lane)};
  int node = lane - gpus;
  node += node >= own;
  if (node >= nodes(a)) return {};
  return {rail_peer(a, node), node, node_ranks(a, node)};
}
// 32 tokens from `first` on, transposed: lane j gets a bit for each that stream j carries.
__device__ __forceinline__ u32 block_of_streams(const Args& a, u32 ranks, int first, int last, int lane) {
  u32 mask = first + lane < last ? token_ranks<4>(a, first + lane) : 0, mine = 0;
  const int streams = int(a.gpus) + nodes(a) - 1;
  for (int j = 0; j < streams; ++j) {
    u32 tokens = __ballot_sync(kFullWarp, (mask & __shfl_sync(kFullWarp, ranks, j)) != 0);
    if (lane == j) mine = tokens;
  }
  return mine;
}

// The same where all streams move with the channel's tokens; reach() says how many of the block's are done. Leaves what was said,
// beside what `ring` had said before.
template <typename Reach>
__device__ __forceinline__ bool follow_tokens(const Args& a, u64 epoch, End& ring, const Route& r, Range mine, int before, int lane,
                                              Reach reach) {
  const int tokens = mine.last - mine.first, least = least_said(a);
  u32 to = block_of_streams(a, r.ranks, mine.first, mine.last, lane);
  for (int block = 0, base = ring.done, given = 0; given < tokens;) {
    const u32 done = reach();
    if (done >= Progress::kAll) return false;
    const int complete = min(tokens, int(done) - before);
    if (complete < tokens and complete - given < least) continue;
    for (; complete - block >= 32; block += 32) {
      base += __popc(to);
      to = block_of_streams(a, r.ranks, mine.first + block + 32, mine.last, lane);
    }
    ring.done = base + __popc(to & below(complete - block));
    __syncwarp();
    fence_release();
    if (ring.peer >= 0) ring.say(a, epoch);
    given = complete;
  }
  return true;
}

// Who a lane's stream waits for: one more than its word says.
struct Blocked {
  int peer;
  u64 expected, seen;
};
__device__ __forceinline__ Blocked blocked(const u64* word, int peer, u64 epoch) {
  u64 seen = load_acquire_sys(word);
  return {peer, signal_word(epoch, signal_epoch(seen) == epoch ? signal_count(seen) + 1 : 1), seen};
}

// Serves the streams of a warp until all have ended. By lane: `ended` and `able` (to go on now; met by the whole warp); by the
// whole warp `step(j)` for lane j's stream, and `look`, which reads words.
template <typename Streams>
__device__ __forceinline__ bool serve(const Args& a, Op op, u64 epoch, Streams& s, int lane) {
  int next = 0, idle = 0;
  u64 since = 0;
  for (;;) {
    u32 able = __ballot_sync(kFullWarp, s.able());
    if (able != 0) {
      u32 later = able & ~below(next);
      int j = __ffs(later != 0 ? later : able) - 1;
      next = j + 1 & 31;
      idle = 0;
      s.step(j);
      continue;
    }
    if (__all_sync(kFullWarp, s.ended())) return true;
    s.look();
    __syncwarp();   // what one lane acquired, all lanes read
    if (++idle % 64 != 0) continue;
    if (idle == 64) since = nanoseconds();
    if (given_up(a, op, epoch, lane)) return false;
    if (not __any_sync(kFullWarp, nanoseconds() - since > u64(a.timeout_ns))) continue;   // lanes read clocks apart
    u32 waiting = __ballot_sync(kFullWarp, not s.ended());
    if (lane == __ffs(waiting) - 1) {
      Blocked b = s.blocked();
      report(a, Fault::kTimeout, op, epoch, b.peer, b.expected, b.seen);
    }
    __syncwarp();
    return false;
  }
}

}  // namespace ep
