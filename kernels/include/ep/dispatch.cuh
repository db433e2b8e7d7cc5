// What dispatch kernels are made of: a token becomes a record at each destination, a record becomes rows.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "ep/progress.cuh"
#include "ep/routing.cuh"
#include "ep/rows.cuh"
#include "ep/stage.cuh"
#include "ep/trace.cuh"
#include "ep/transport.cuh"

namespace ep {

constexpr int kPublishTokens = 8;        // tokens between two signals of a channel
constexpr int kTally = 256;              // experts of a rank whose rows a block counts by itself

struct Offsets {   // a Record whose fields fit 32 bits, its payload's bytes and how many words of scales
  int scales, ids, weights, source, bytes, row, words;
};

struct Shared {
  u64 epoch;
  Offsets f;
  int base[kMaxRanks + 1];   // by source: its first row; behind the last, all rows
  int channels[kMaxRanks], chunk[kMaxRanks];   // by source
  bool stopped;              // the buffer had failed when the block began: all threads agree, and none waits for the others
  bool broken;               // it failed since, some threads know
  Progress progress;
  u64 bars[kWarps];
  int tally[kTally];         // rows of each expert that this block has placed
};

// A record's address at each destination: lane r holds that of rank r; `set` says which count.
struct Targets {
  u64 address;
  u32 set;
};

template <typename Store>
__device__ __forceinline__ void to_each(const Targets& t, Store store) {
  for (u32 left = t.set; left != 0; left &= left - 1) store(__shfl_sync(kFullWarp, t.address, __ffs(left) - 1));
}

__device__ __forceinline__ u64 segment(const Args& a, int rank, int source) {
  return a.heap[rank] + a.slots + source * a.slot_segment;
}

// hybrid: a rank of another node is this rank's relay there, with slots and words by source node.
template <bool kRails>
__device__ __forceinline__ bool relays(const Args& a, int rank) {
  return kRails and node_of(a, rank) != own_node(a);
}
template <bool kRails>
__device__ __forceinline__ bool is_peer(const Args& a, int rank) {
  return rank < a.ranks and (not relays<kRails>(a, rank) or rank == rail_peer(a, node_of(a, rank)));
}
template <bool kRails>
__device__ __forceinline__ u64 first_slot(const Args& a, int rank) {
  if (not relays<kRails>(a, rank)) return segment(a, rank, int(a.rank));
  return (kRailPut ? 0 : a.heap[rank]) + a.rail_slots + own_node(a) * a.rail_segment;   // puts take offsets
}
// What this rank tells a peer: how many records a channel brings (channel kChannels: the tokens of a channel), and how far it
// has come, which puts say themselves.
template <bool kRails>
__device__ __forceinline__ void tell_count(const Args& a, int rank, int channel, u64 word) {
  const bool far = relays<kRails>(a, rank);
  tell(a, far, rank, far ? a.rail_total : a.stream_count, plan_row(far ? own_node(a) : a.rank, channel), word);
}
template <bool kRails>
__device__ __forceinline__ void tell_tail(const Args& a, int rank, int channel, u64 word) {
  const bool far = relays<kRails>(a, rank);
  if (kRailPut and far) return;
  store_relaxed_sys(heap_word(a, rank, far ? a.rail_tail : a.stream_tail,
                              (far ? own_node(a) : a.rank) * kChannels + channel), word);
}

// What a warp reads of a token: a run of the row, in bytes.
__device__ __forceinline__ Range input_run(const Args& a, const Offsets& f, int part) {
  int parts = int(a.send_parts);
  if (a.cast) {   // in steps of 512 channels
    int steps = (f.row + 511) / 512;
    return {quotient(steps * part, parts) * 1024, min(quotient(steps * (part + 1), parts) * 1024, 2 * f.row)};
  }
  return share(f.row, part, parts);
}
__device__ __forceinline__ u64 input_row(const Args& a, const Offsets& f, i64 token) {
  return a.x + token * (a.cast ? 2 : 1) * f.row;
}

__device__ __forceinline__ u32 largest(u32 a, u32 b) {   // of two bf16 each, by magnitude
  __nv_bfloat162 m = __hmax2(__habs2(reinterpret_cast<__nv_bfloat162&>(a)), __habs2(reinterpret_cast<__nv_bfloat162&>(b)));
  return reinterpret_cast<u32&>(m);
}

// A lane has 16 channels, so that 8 lanes share a scale: scale = max(|x|, 1e-4) / 448, rounded up to a power of two for UE8M0.
__device__ __forceinline__ float magnitude(const Vec (&in)[2]) {
  u32 m = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) m = largest(m, largest(in[0].v[j], in[1].v[j]));
  float2 pair = unpack(m);
  return fmaxf(fmaxf(pair.x, pair.y), 1e-4f);
}
// The scale's word, of UE8M0 the exponent.
__device__ __forceinline__ u32 scale_of(float amax, bool ue8m0, float& inverse) {
  if (not ue8m0) {
    inverse = __fdividef(448.f, amax);
    return __float_as_uint(amax * (1.f / 448.f));
  }
  u32 bits = __float_as_uint(__fdiv_rn(amax, 448.f));
  u32 exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);   // a normal number: amax has a floor
  inverse = __uint_as_float((254 - exponent) << 23);
  return exponent;
}
__device__ __forceinline__ u32 four_exponents(u32 own) {   // of a step of 512 channels
  return __shfl_sync(kFullWarp, own, 0) | __shfl_sync(kFullWarp, own, 8) << 8 | __shfl_sync(kFullWarp, own, 16) << 16 |
         __shfl_sync(kFullWarp, own, 24) << 24;
}
__device__ __forceinline__ Vec to_fp8(const Vec (&in)[2], float inverse) {
  Vec out;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float2 lo = unpack(in[j / 2].v[j % 2 * 2]), hi = unpack(in[j / 2].v[j % 2 * 2 + 1]);
    u32 l = __nv_cvt_float2_to_fp8x2({lo.x * inverse, lo.y * inverse}, __NV_SATFINITE, __NV_E4M3);
    u32 h = __nv_cvt_float2_to_fp8x2({hi.x * inverse, hi.y * inverse}, __NV_SATFINITE, __NV_E4M3);
    out.v[j] = l | h << 16;
  }
  return out;
}

// A row in steps of 512 channels. The scales gather in shared memory and leave together. Two steps hide each other's latency.
__device__ __forceinline__ void send_cast(const Args& a, const Targets& t, const Offsets& f, const unsigned char* input,
                                          u32* words, Range run, int lane) {
  constexpr int kSteps = 2;
  bool ue8m0 = a.payload == i64(Payload::kFp8Ue8m0);
  int bytes = run.last - run.first;
  for (int first = lane * 32; first - lane * 32 < bytes; first += 1024 * kSteps) {
    Vec in[kSteps][2], out[kSteps];
    float amax[kSteps], inverse[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      in[i][0] = in[i][1] = Vec{};
      if (first + 1024 * i < bytes) {
        in[i][0] = *reinterpret_cast<const Vec*>(input + first + 1024 * i);
        in[i][1] = *reinterpret_cast<const Vec*>(input + first + 1024 * i + 16);
      }
      amax[i] = magnitude(in[i]);
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) amax[i] = fmaxf(amax[i], __shfl_xor_sync(kFullWarp, amax[i], d));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int at = first + 1024 * i;
      u32 scale = scale_of(amax[i], ue8m0, inverse[i]);
      if (ue8m0) {
        scale = four_exponents(at < bytes ? scale : 0);
        if (lane == 0 and at < bytes) words[at / 1024] = scale;
      } else if (lane % 8 == 0 and at < bytes) {
        words[at / 256] = scale;
      }
      out[i] = to_fp8(in[i], inverse[i]);
    }
    to_each(t, [&](u64 record) {
      u64 to = record + (run.first + first) / 2;
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        if (first + 1024 * i < bytes) store_vec(reinterpret_cast<void*>(to + 512 * i), out[i]);
    });
  }
  __syncwarp();
  int span = ue8m0 ? 1024 : 256, skip = run.first / span, count = (bytes + span - 1) / span;
  to_each(t, [&](u64 record) {
    for (int g = lane; g < count; g += 32) reinterpret_cast<u32*>(record + f.scales)[skip + g] = words[g];
  });
}

// Whatever is not payload, in one run of words: ids, weights, rows (the first is the relay's slot) and source. Word w of a token.
__device__ __forceinline__ u32 pick_word(const Args& a, i64 token, int w, int slot = 0) {
  const int top_k = int(a.top_k);
  if (w < top_k) {
    i64 id = raw_pick(a, token * top_k + w);
    return is_expert(a, id) ? u32(id) : ~0u;
  }
  if (w < 2 * top_k) return reinterpret_cast<const u32*>(a.weights)[token * top_k + w - top_k];
  return w == 3 * top_k ? u32(a.rank * a.max_tokens + token) : w == 2 * top_k ? u32(slot) : 0;
}

// `early` is the lane's first word, asked for long before.
__device__ __forceinline__ void send_picks(const Args& a, const Targets& t, const Offsets& f, u64 epoch, i64 token, u32 early,
                                           int lane, int slot = 0) {
  const int words = 3 * int(a.top_k) + 1;
  for (int first = 0; first < words; first += 32) {
    int w = first + lane;
    u32 word = first == 0 ? early : pick_word(a, token, w, slot);
    to_each(t, [&](u64 record) {
      if (w < words) reinterpret_cast<u32*>(record + f.ids)[w] = word;
    });
  }
  if (lane < a.top_k and early == ~0u) {   // none, or out of range
    i64 id = raw_pick(a, token * a.top_k + lane);
    if (id != -1) report(a, Fault::kBadId, Op::kDispatch, epoch, int(a.rank), token, id);
  }
  __syncwarp();
  for (int first = 0; first < (a.cast ? 0 : f.words); first += 32) {
    int g = first + lane;
    u32 v = g < f.words ? reinterpret_cast<const u32*>(a.scales_in)[token * f.words + g] : 0;
    to_each(t, [&](u64 record) {
      if (g < f.words) reinterpret_cast<u32*>(record + f.scales)[g] = v;
    });
  }
}

// Receiving warps of this GPU add to counts; the word that they all await first says that it is cleared.
__device__ __forceinline__ void clear_counts(const Args& a, int lane) {
  for (i64 e = lane; e < a.local_experts; e += 32) reinterpret_cast<int*>(a.counts)[e] = 0;
  __syncwarp();
  __threadfence();
}

// By the last warp of the first block: what this rank calls, and that its counts are cleared.
template <bool kRails = false>
__device__ __forceinline__ void announce(const Args& a, Shared& sh, int lane) {
  Control* control = reinterpret_cast<Control*>(a.control);
  u64 said = u64(a.signature) | u64(a.channels - 1) << kSignatureBits | load_relaxed_sys(&control->proposal) << kProposalBits;
  clear_counts(a, lane);
  if (is_peer<kRails>(a, lane)) {
    tell(a, relays<kRails>(a, lane), lane, a.intent, a.rank, signal_word(sh.epoch, said));
    tell_count<kRails>(a, lane, int(kChannels), signal_word(sh.epoch, a.chunk));
  }
  if (lane != 0) return;
  i64 at = stat_mode(a.ranks, a.mode) + kStatRows * a.ranks;
  add_stat(a, at, 1);
  add_stat(a, at + 2, a.tokens);
  atomicMax(stats(a) + at + 3, u64(a.tokens));
  control->mode = a.mode + 1;
  control->epoch = sh.epoch;
}

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

constexpr int kLaneChannels = int(kChannels) / 32;

// The words that travel ahead of the records say who sends how much. First what each source calls; lane s for source s.
__device__ __forceinline__ bool await_intents(const Args& a, Shared& sh, int lane) {
  const bool peer = lane < a.ranks, leaves = blockIdx.x == 0;
  bool ok = true;
  u64 proposal = ~u64(0);
  if (peer) {
    u64 start = leaves ? nanoseconds() : 0;
    u64 intent = wait_word(a, Op::kDispatch, lane, a.intent, lane, sh.epoch, 0);
    if (leaves) add_stat(a, stat_waits(a.ranks) + lane, nanoseconds() - start);
    ok = intent != 0;
    if (ok and (intent & kSignatureMask) != u64(a.signature)) {
      report(a, Fault::kDisagree, Op::kDispatch, sh.epoch, lane, a.signature, intent & kSignatureMask);
      ok = false;
    }
    u64 chunk = ok ? wait_word(a, Op::kDispatch, lane, a.stream_count, plan_row(lane, kChannels), sh.epoch, 0) : 0;
    ok = chunk != 0;
    proposal = signal_count(intent) >> kProposalBits;
    sh.channels[lane] = intent_channels(intent);
    sh.chunk[lane] = int(signal_count(chunk));
    if (leaves) reinterpret_cast<int*>(a.plan)[plan_chunk(a.ranks, lane)] = sh.chunk[lane];
  }
  u64 first = __shfl_sync(kFullWarp, proposal, 0);
  bool same = __all_sync(kFullWarp, not peer or proposal == first);
  if (leaves and lane == 0) store_relaxed_sys(reinterpret_cast<u64*>(a.agreed), same ? first : 0);
  ok = __all_sync(kFullWarp, ok);
  __syncwarp();
  return ok;
}

// Then one source's channels, four a lane: `row` gets the place of each among the source's. Returns the source's records,
// negative on failure.
__device__ __forceinline__ int await_counts(const Args& a, Shared& sh, int source, int (&row)[kLaneChannels], int lane) {
  u64 word[kLaneChannels];
  int sum = 0;
  bool ok = true;
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j)
    word[j] = load_relaxed_sys(own_word(a, a.stream_count, plan_row(source, lane * kLaneChannels + j)));
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    int channel = lane * kLaneChannels + j;
    row[j] = sum;
    if (channel >= sh.channels[source]) continue;
    if (not reached(word[j], sh.epoch, 0))
      word[j] = wait_word(a, Op::kDispatch, source, a.stream_count, plan_row(source, channel), sh.epoch, 0);
    ok = ok and word[j] != 0;
    sum += int(signal_count(word[j]));
  }
  int up_to = sum;
  for (int d = 1; d < 32; d *= 2) {
    int left = __shfl_up_sync(kFullWarp, up_to, d);
    if (lane >= d) up_to += left;
  }
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) row[j] += up_to - sum;
  int total = __shfl_sync(kFullWarp, up_to, 31);
  return __all_sync(kFullWarp, ok) ? total : -1;
}

// Records beyond what the caller has given y rows for still find memory here, but combine must not read their answers.
__device__ __noinline__ void refuse_records(const Args& a, int source, int records) {
  u64 epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
  report(a, Fault::kTooMany, Op::kDispatch, epoch, source, a.most_tokens, records);
}
__device__ __forceinline__ void leave_plan(const Args& a, int source, int base, int total, const int (&row)[kLaneChannels], int lane) {
  int* plan = reinterpret_cast<int*>(a.plan) + plan_row(source, 0);
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) plan[lane * kLaneChannels + j] = base + row[j];
  if (lane != 0) return;
  plan[kChannels] = base + total;
  if (total > a.most_tokens) refuse_records(a, source, total);
}
__device__ __forceinline__ void tell_host(const Args& a, int rows) {
  if (a.host_rows != 0) store_relaxed_sys(reinterpret_cast<u64*>(a.host_rows), u64(rows) + 1);
}

// By one warp of every block while others send; the first block's leaves the plan.
__device__ __forceinline__ bool make_plan(const Args& a, Shared& sh, int lane) {
  bool ok = await_intents(a, sh, lane);
  int base = 0, row[kLaneChannels];
  for (int source = 0; ok and source < a.ranks; ++source) {
    int total = await_counts(a, sh, source, row, lane);
    ok = total >= 0;
    if (lane == 0) sh.base[source] = base;
    if (ok and blockIdx.x == 0) leave_plan(a, source, base, total, row, lane);
    base += total;
  }
  if (lane == 0) sh.base[a.ranks] = base;
  if (ok and blockIdx.x == 0 and lane == 0) tell_host(a, base);
  __syncwarp();
  return ok;
}

// Where one pick's payload and scales go: masked, the expert here and the row among its; compact, 0 and the row.
struct Place {
  int local, at;   // local negative: nowhere
};
__device__ __forceinline__ u64 row_at(const Args& a, const Offsets& f, Place p) {
  return a.rows + (p.local * (a.ranks * a.max_tokens) + p.at) * f.row;
}
__device__ __forceinline__ u64 scales_at(const Args& a, const Offsets& f, Place p) {
  return a.scales + 4 * (a.masked ? i64(p.local) * f.words * a.scale_stride + p.at : i64(p.at) * f.words);
}

// Rows of compact outputs are counted by block: all records of a rank adding to the same few words would wait for each other.
__device__ __forceinline__ bool tallies(const Args& a) { return not a.masked and a.local_experts <= kTally; }
// Whole block, in front of a barrier; and behind one, once it has placed its last record.
__device__ __forceinline__ void clear_tally(const Args& a, Shared& sh) {
  if (tallies(a))
    for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) sh.tally[e] = 0;
}
__device__ __forceinline__ void add_tally(const Args& a, const Shared& sh) {
  if (tallies(a))
    for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x)
      if (sh.tally[e] != 0) atomicAdd(reinterpret_cast<int*>(a.counts) + e, sh.tally[e]);
}

// A record becomes rows; what combine needs of it goes to the call's own memory. Lane k has pick k's id and weight, and gets
// its place; of compact rows lane 0. `target` is the record's row among those of this rank at the owner.
__device__ __forceinline__ Place take_rows(const Args& a, Shared& sh, i64 record, int id, float weight, int target,
                                           u32 ranks, int lane) {
  const bool has = lane < a.top_k, mine = id >= 0 and owner(a, id) == a.rank;
  const int local = mine ? id - int(a.rank * a.local_experts) : -1;
  if (lane == 0) reinterpret_cast<int*>(a.target)[record] = __popc(ranks & below(int(a.rank))) * int(a.max_tokens) + target;
  int* counts = reinterpret_cast<int*>(a.counts);
  i64 pick = record * a.top_k + lane;
  if (not a.masked) {
    if (has) {
      reinterpret_cast<int*>(a.out_ids)[pick] = local;
      reinterpret_cast<float*>(a.out_weights)[pick] = mine ? weight : 0.f;
    }
    if (mine) atomicAdd(tallies(a) ? sh.tally + local : counts + local, 1);
    return {lane == 0 ? 0 : -1, int(record)};
  }
  // A pick that repeats an earlier one takes no row; its weight joins the first one's.
  u32 same = __match_any_sync(kFullWarp, local);
  int capacity = int(a.ranks * a.max_tokens), at = 0;
  bool first = mine and __ffs(same) - 1 == lane;
  if (first) at = a.ordered ? reinterpret_cast<const int*>(a.position)[pick] - local * capacity : atomicAdd(counts + local, 1);
  float sum = 0.f;
  for (int k = 0; k < a.top_k; ++k) {
    float w = __shfl_sync(kFullWarp, weight, k);
    if (same >> k & 1) sum += w;
  }
  if (has) {
    reinterpret_cast<int*>(a.position)[pick] = first ? local * capacity + at : -1;
    reinterpret_cast<float*>(a.pick_weight)[pick] = sum;
  }
  return {first ? local : -1, at};
}

// The record in the stage.
template <bool kRails>
__device__ __forceinline__ void place(const Args& a, Shared& sh, const Stage& stage, i64 record, int lane) {
  const Offsets& f = sh.f;
  bool has = lane < a.top_k;
  int id = has ? stage.get<int>(f.ids + 4 * lane) : -1;
  float weight = has ? stage.get<float>(f.weights + 4 * lane) : 0.f;
  u32 ranks = __reduce_or_sync(kFullWarp, id >= 0 ? 1u << owner(a, id) : 0);
  if (kRails) ranks &= node_ranks(a, own_node(a));   // answers go to the relay, which has a row a slot
  int target = kRails ? stage.get<int>(f.weights + 4 * int(a.top_k)) : stage.get<int>(f.source) % int(a.max_tokens);
  Place to = take_rows(a, sh, record, id, weight, target, ranks, lane);
  pass(11);
  if (to.local >= 0) bulk_store(row_at(a, f, to), stage.at, f.row);
  pass(12);
  const u64 scales = to.local >= 0 ? scales_at(a, f, to) : 0;
  const u32 step = a.masked ? 4 * u32(a.scale_stride) : 4;
#pragma unroll 1
  for (int first = 0; first < f.words; first += 64) {
    const int g = first + lane;
    const u32 low = g < f.words ? stage.get<u32>(f.scales + 4 * g) : 0;
    const u32 high = g + 32 < f.words ? stage.get<u32>(f.scales + 4 * (g + 32)) : 0;
#pragma unroll 1
    for (u32 left = __ballot_sync(kFullWarp, scales != 0); left != 0; left &= left - 1) {
      const u64 at = __shfl_sync(kFullWarp, scales, __ffs(left) - 1) + g * step;
      if (g < f.words) *reinterpret_cast<u32*>(at) = low;
      if (g + 32 < f.words) *reinterpret_cast<u32*>(at + 32 * step) = high;
    }
  }
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

// Kernels whose warps are all alike.
struct Warps {
  int first, step;
};
__device__ __forceinline__ Warps all_warps() {
  int warps = blockDim.x / 32;
  return {int(blockIdx.x * warps + threadIdx.x / 32), int(gridDim.x * warps)};
}

__device__ __forceinline__ void start(const Args& a, Shared& sh, Op op) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == blockDim.x / 32 - 1) {
    bool stopped = given_up(a, op, 0, lane);
    if (lane == 0) sh.stopped = stopped;
    if (lane < blockDim.x / 32) mbarrier_init(&sh.bars[lane]);
  }
  if (threadIdx.x == 0) {
    sh.epoch = read_epoch(a);
    Record f = record(Payload(a.payload), a.hidden, a.top_k);
    sh.f = {int(f.scales), int(f.ids), int(f.weights), int(f.source), int(f.bytes),
            int(payload_bytes(Payload(a.payload), a.hidden)), int(scale_bytes(Payload(a.payload), a.hidden) / 4)};
  }
  __syncthreads();
}

// The last block to end says so: signal(i) for each i.
template <typename Signal>
__device__ __forceinline__ void signal_as_one(const Args& a, int words, Signal signal) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  LaneState* state = reinterpret_cast<LaneState*>(a.state);
  fence_release();
  if (atomicAdd(&state->done, u64(1)) != gridDim.x - 1) return;
  state->done = 0;
  fence_release();
  for (int i = 0; i < words; ++i) signal(i);
}

}  // namespace ep
