// Dispatch by lines (line.cuh): what a token is on lines, who sends and who reads them.
//
// When a line may be overwritten is told by combine's words, as of slots.
#pragma once
#include "ep/dispatch.cuh"
#include "ep/line.cuh"

namespace ep {

// A record as lines: chunks of the payload with their scales, kChunkLines from one to the next; then ids, weights and source.
struct Chunks {
  int count, scales, lines, head;   // chunks; words of scales of each, lines of each, lines behind them
};
__device__ __forceinline__ Chunks chunks(const Args& a, const Offsets& f) {
  const int scales = a.payload == i64(Payload::kFp8) ? kChunk / int(kScaleGroup) : a.payload == i64(Payload::kFp8Ue8m0);
  return {(f.row + kChunk - 1) / kChunk, scales, (kChunk / 4 + scales + 2) / 3, (2 * int(a.top_k) + 1 + 2) / 3};
}
__device__ __forceinline__ u64 line_slot(const Args& a, int rank, i64 source, i64 slot) {
  return a.heap[rank] + a.lines + (source * a.max_tokens + slot) * a.line_slot;
}

// Where a pick's payload and scales go.
struct Target {
  u64 row, scales;   // 0: nowhere
};
struct LineShared {
  Chunks c;
  Trouble trouble;

  u64 proposal[kMaxRanks];            // by source, like total
  int total[kMaxRanks];
  Target to[2][2][32];                // by record's parity, group and pick
};

// What a lane reads of a chunk: 16 channels that it casts, or 16 bytes of the payload and a word of scales.
struct Piece {
  Vec in[2];
};
__device__ __forceinline__ Piece ask(const Args& a, const Offsets& f, int token, int chunk, int lane) {
  Piece p{};
  const int at = chunk * kChunk + 16 * lane;
  const Vec* from = reinterpret_cast<const Vec*>(input_row(a, f, token) + (a.cast ? 2 : 1) * at);
  if (at < f.row) p.in[0] = from[0];
  if (at < f.row and a.cast) p.in[1] = from[1];
  return p;
}

// The chunk's words in shared memory.
__device__ __forceinline__ void write_words(const Args& a, const Offsets& f, const Chunks& c, const Piece& p, int token, int chunk,
                                            u32* words, int lane) {
  Vec out = p.in[0];
  u32 scale = 0;
  const int word = chunk * c.scales + lane;
  if (a.cast) {
    const bool ue8m0 = a.payload == i64(Payload::kFp8Ue8m0);
    float amax = magnitude(p.in), inverse;
#pragma unroll
#pragma unroll 1
    for (int d = 1; d < 8; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, d));
    scale = scale_of(amax, ue8m0, inverse);
    out = to_fp8(p.in, inverse);
    scale = ue8m0 ? four_exponents(chunk * kChunk + 16 * lane < f.row ? scale : 0) : __shfl_sync(kFullWarp, scale, lane * 8 % 32);
  } else if (lane < c.scales and word < f.words) {
    scale = reinterpret_cast<const u32*>(a.scales_in)[i64(token) * f.words + word];
  }
  __syncwarp();   // all have read what was there
  reinterpret_cast<Vec*>(words)[lane] = out;
  if (lane < c.scales) words[kChunk / 4 + lane] = scale;
  __syncwarp();
}

// Ids, weights and source: word w of them.
__device__ __forceinline__ u32 head_word(const Args& a, i64 token, int w) {
  const int top_k = int(a.top_k);
  return w > 2 * top_k ? 0 : pick_word(a, token, w == 2 * top_k ? 3 * top_k : w);
}

__device__ __forceinline__ void send_lines(const Args& a, LineShared& ls, const Offsets& f, const Chunks& c, u64 epoch, u32* words, Range mine,
                                           u32 to, Piece piece, int warp, int lane) {
  const int workers = int(a.senders), parts = c.count + 1;
  const u32 tag = line_tag(epoch);
  const u64 own = lane < a.ranks ? line_slot(a, lane, a.rank, 0) : 0;
  int slot = mine.first, unit = warp;
  if (unit < (mine.last - mine.first) * parts and unit % parts != c.count)
    write_words(a, f, c, piece, mine.first + unit / parts, unit % parts, words, lane);
#pragma unroll 1
  for (int first = mine.first; first < mine.last; first += 32) {
    if (first != mine.first) to = block_of_tokens(a, first, mine.last, lane);
    const int stop = (min(first + 32, mine.last) - mine.first) * parts;
#pragma unroll 1
    for (; unit < stop; unit += workers) {
      int i = quotient(unit, parts), part = unit - i * parts;
      i -= first - mine.first;
      const int token = first + i;
      Targets t{own + (slot + __popc(to & below(i))) * a.line_slot + part * (kChunkLines * kLineBytes),
                __ballot_sync(kFullWarp, to >> i & 1)};
      if (part == c.count) {
        Vec line{{0, 0, 0, tag}};
#pragma unroll
        for (int q = 0; q < 3; ++q) line.v[q] = head_word(a, token, 3 * lane + q);
        to_each(t, [&](u64 at) {
          if (lane < c.head) store_line(at + lane * kLineBytes, line);
        });
        i64 id = lane < a.top_k ? raw_pick(a, i64(token) * a.top_k + lane) : -1;
        if (id != -1 and not is_expert(a, id)) note(ls.trouble, Fault::kBadId, int(a.rank), token, id);
      } else {
        if (unit != warp) write_words(a, f, c, ask(a, f, token, part, lane), token, part, words, lane);
        for (int i = lane; i - lane < c.lines; i += 32) {
          Vec line{{0, 0, 0, tag}};
#pragma unroll
          for (int q = 0; q < 3; ++q)
            if (i < c.lines) line.v[q] = words[3 * i + q];
          to_each(t, [&](u64 at) {
            if (i < c.lines) store_line(at + i * kLineBytes, line);
          });
        }
      }
    }
    slot += __popc(to);
  }
}

// Tells every rank how many records this block sends, and what the rank calls. One warp, lane r for rank r.
__device__ __forceinline__ void tell_lines(const Args& a, Shared& sh, Range mine, u32 to, int lane) {
  int count = __popc(to);
#pragma unroll 1
  for (int first = mine.first + 32; first < mine.last; first += 32) count += __popc(block_of_tokens(a, first, mine.last, lane));
  if (lane < a.ranks) tell_count<false>(a, lane, blockIdx.x, signal_word(sh.epoch, count));
  if (blockIdx.x == 0) announce<false, true>(a, sh, lane);
  if (lane < a.ranks) add_written(a, Op::kDispatch, lane, count, sh.f.bytes, false);
}

// Everything that a source says ahead of its records, asked for at once until it is here: one warp, four channels a lane.
// `row` gets the place of each channel's records among the source's. Returns how many there are, negative on failure.
__device__ __forceinline__ int await_source(const Args& a, Shared& sh, LineShared& ls, int source, int (&row)[kLaneChannels], int lane) {
  const bool leaves = blockIdx.x == 0;
  const u64 start = nanoseconds(), *counts = own_word(a, a.stream_count, plan_row(source, 0));
  u64 intent, chunk, word[kLaneChannels];
#pragma unroll 1
  for (int turn = 1;; ++turn) {
    intent = load_relaxed_sys(own_word(a, a.intent, source));
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) word[j] = load_relaxed_sys(counts + lane * kLaneChannels + j);
    // The last of the loads acquires what this rank's first block did before it stored the word: it cleared the counts.
    chunk = load_acquire_sys(counts + kChannels);
    bool here = reached(intent, sh.epoch, 0) and reached(chunk, sh.epoch, 0), ok = true;
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j)
      here = here and (lane * kLaneChannels + j >= intent_channels(intent) or reached(word[j], sh.epoch, 0));
    if (reached(intent, sh.epoch, 0) and (intent & kSignatureMask) != u64(a.signature)) ok = false;
    if (const u32 wrong = __ballot_sync(kFullWarp, not ok)) {   // lanes may see the word apart
      if (lane == __ffs(wrong) - 1) note(ls.trouble, Fault::kDisagree, source, a.signature, intent & kSignatureMask);
      return -1;
    }
    if (__all_sync(kFullWarp, here)) break;
    if (turn % 64 == 0 and not patient_warp(a, ls.trouble, source, start, signal_word(sh.epoch, 0),
                                            reached(intent, sh.epoch, 0) ? chunk : intent, lane))
      return -1;
  }
  if (leaves and lane == 0) add_stat(a, stat_waits(a.ranks) + source, nanoseconds() - start);
  int sum = 0;
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) {
    row[j] = sum;
    if (lane * kLaneChannels + j < intent_channels(intent)) sum += int(signal_count(word[j]));
  }
  int up_to = sum;
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    int left = __shfl_up_sync(kFullWarp, up_to, d);
    if (lane >= d) up_to += left;
  }
#pragma unroll
  for (int j = 0; j < kLaneChannels; ++j) row[j] += up_to - sum;
  int total = __shfl_sync(kFullWarp, up_to, 31);
  if (lane == 0) {
    ls.proposal[source] = signal_count(intent) >> kProposalBits;
    ls.total[source] = total;
    sh.channels[source] = intent_channels(intent);
    sh.chunk[source] = int(signal_count(chunk));
    if (leaves) reinterpret_cast<int*>(a.plan)[plan_chunk(a.ranks, source)] = int(signal_count(chunk));
  }
  return total;
}

// Where the record's payload goes, by its head in shared memory: to rows, or to its slot, if rows are given later.
__device__ __forceinline__ Target place_head(const Args& a, const Offsets& f, const u32* words, i64 record, int source, int slot, int lane) {
  const int top_k = int(a.top_k);
  if (a.ordered) {
    const u64 to = segment(a, int(a.rank), source) + i64(slot) * f.bytes;
#pragma unroll 1
    for (int w = lane; w < 2 * top_k; w += 32) reinterpret_cast<u32*>(to + f.ids)[w] = words[w];
    if (lane == 0) *reinterpret_cast<u32*>(to + f.source) = words[2 * top_k];
    return lane == 0 ? Target{to, to + f.scales} : Target{};
  }
  const int id = lane < top_k ? int(words[lane]) : -1;
  const float weight = lane < top_k ? __uint_as_float(words[top_k + lane]) : 0.f;
  const u32 ranks = __reduce_or_sync(kFullWarp, id >= 0 ? 1u << owner(a, id) : 0);
  const Place to = take_rows(a, f, record, id, weight, int(words[2 * top_k]) % int(a.max_tokens), ranks, lane);
  return to.local >= 0 ? Target{row_at(a, f, to), scales_at(a, f, to)} : Target{};
}

// Warps of a group share a record: the last takes its rows, and all write chunks to them.
__device__ __forceinline__ bool receive_lines(const Args& a, Shared& sh, LineShared& ls, const Chunks& c, const int* table,
                                              u32* words, int warp, int lane) {
  const Offsets& f = sh.f;
  const int ranks = int(a.ranks), members = int(a.receive_parts), groups = int(a.receive_groups);
  const int group = warp / members, member = warp - group * members;
  if (group >= groups) return true;
  const int total = lane < ranks ? ls.total[lane] : 0;
  int base = total;   // lane s: behind source s's last row
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    int left = __shfl_up_sync(kFullWarp, base, d);
    if (lane >= d) base += left;
  }
  const int most = int(__reduce_max_sync(kFullWarp, u32(lane < ranks ? sh.channels[lane] : 0)));
  const i64 step = a.masked and not a.ordered ? a.scale_stride : 1;
  bool ok = true;
  u32 parity = 0;
#pragma unroll 1
  for (int pair = blockIdx.x + gridDim.x * group;; pair += gridDim.x * groups) {
    const int channel = pair / ranks, source = pair - channel * ranks;
    if (channel >= most) break;
    const int row = table[plan_row(source, channel)], count = table[plan_row(source, channel) + 1] - row;
    const int slot = sh.chunk[source] * channel, record = __shfl_sync(kFullWarp, base - total, source) + row;
#pragma unroll 1
    for (int k = 0; k < count; ++k, parity ^= 1) {
      const u64 from = line_slot(a, int(a.rank), source, slot + k);
      Target(&to)[32] = ls.to[parity][group];
      Vec line[2];
      if (member == members - 1) {
        look_at_lines(from + c.count * (kChunkLines * kLineBytes), c.head, line, lane);
        ok = ok and await_lines(a, ls.trouble, from + c.count * (kChunkLines * kLineBytes), c.head, sh.epoch, source, k, line, lane);
        if (ok) {
          unpack_lines(line, c.head, words, lane);
          to[lane] = place_head(a, f, words, record + k, source, slot + k, lane);
        }
      }
      int chunk = member;
      auto await = [&] {
        look_at_lines(from + chunk * (kChunkLines * kLineBytes), c.lines, line, lane);
        return await_lines(a, ls.trouble, from + chunk * (kChunkLines * kLineBytes), c.lines, sh.epoch, source, k, line, lane);
      };
      if (chunk < c.count) ok = ok and await();
      // Behind it places are known. Those of the record after the next are written behind the next barrier, when all have read these.
      if (not barrier_and(kReceiveBarrier + 1 + group, 32 * members, ok)) return false;
      const u32 set = __ballot_sync(kFullWarp, to[lane].row != 0);
#pragma unroll 1
      while (chunk < c.count) {
        unpack_lines(line, c.lines, words, lane);
        const Vec v = reinterpret_cast<const Vec*>(words)[lane];
        const int at = chunk * kChunk + 16 * lane, word = chunk * c.scales + lane;
        const bool scales = lane < c.scales and word < f.words;
        const u32 scale = scales ? words[kChunk / 4 + lane] : 0;
#pragma unroll 1
        for (u32 left = set; left != 0; left &= left - 1) {
          const Target& p = to[__ffs(left) - 1];
          if (at < f.row) store_vec(reinterpret_cast<void*>(p.row + at), v);
          if (scales) reinterpret_cast<u32*>(p.scales)[word * step] = scale;
        }
        chunk += members;
        if (chunk < c.count and not await()) {
          ok = false;   // the others learn of it at the next barrier
          break;
        }
      }
    }
  }
  return ok;
}

// A line that nobody writes for 2^31 rounds would pass for one of this round, so every round clears what it leaves of one slot: the
// same for many rounds, for those of other modes clear none.
__device__ __forceinline__ void clear_slot(const Args& a, const Shared& sh, const Chunks& c, const int* table, int lane) {
  const int index = int((sh.epoch >> kClearBits) % u64(a.ranks * a.max_tokens)), source = index / int(a.max_tokens);
  const int slot = index - source * int(a.max_tokens), chunk = max(1, sh.chunk[source]), channel = slot / chunk;
  const int* row = table + plan_row(source, channel < kChannels ? channel : 0);
  const bool used = channel < sh.channels[source] and slot - channel * chunk < row[1] - row[0];
  const u64 at = line_slot(a, int(a.rank), source, slot);
#pragma unroll 1
  for (int i = lane; i < a.line_slot / kLineBytes; i += 32) {
    const int part = i / int(kChunkLines), first = min(part, c.count) * int(kChunkLines);
    if (not used or i - first >= (part < c.count ? c.lines : c.head)) store_line(at + i * kLineBytes, Vec{});
  }
}

// Warps [0, workers) send, then await what sources say, then receive; the last one announces.
__device__ __forceinline__ void run_lines(const Args& a) {
  __shared__ Shared sh;
  __shared__ LineShared ls;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, workers = blockDim.x / 32 - 1;
  const bool sends = a.senders != 0 and blockIdx.x < a.channels, receives = a.receivers != 0;
  const Range mine = channel_tokens(a, blockIdx.x);
  const Record r = record(Payload(a.payload), a.hidden, a.top_k);
  const Offsets f{int(r.scales), int(r.ids), int(r.weights), int(r.source), int(r.bytes),
                  int(payload_bytes(Payload(a.payload), a.hidden)), int(scale_bytes(Payload(a.payload), a.hidden) / 4)};
  const Chunks c = chunks(a, f);
  // All that the block waits for at first is asked for at once.
  u64 epoch = threadIdx.x == 0 ? load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch) : 0;
  Piece piece{};
  u32 to = 0;
  if (sends) {
    int token = mine.first + quotient(warp, c.count + 1), part = warp - (token - mine.first) * (c.count + 1);
    if (warp < workers and token < mine.last and part < c.count) piece = ask(a, f, token, part, lane);
    to = block_of_tokens(a, mine.first, mine.last, lane);
  }
  if (warp == workers) {
    if (lane == 0) ls.trouble.any = 0;
    __syncwarp();
    bool going = patient_warp(a, ls.trouble, 0, nanoseconds(), 0, 0, lane);
    if (lane == 0) {
      sh.stopped = not going;
      sh.broken = false;
    }
    if (sends and blockIdx.x == 0) clear_counts(a, lane);
  }
  if (threadIdx.x == 0) {
    sh.epoch = epoch;
    sh.f = f;
    ls.c = c;
  }
  __syncthreads();
  if (not sh.stopped) {
    int* table = reinterpret_cast<int*>(stage_memory);   // rows by source and channel among the source's, as in Plan
    u32* words = reinterpret_cast<u32*>(stage_memory + a.receive_at + warp * kLineStage);
    if (sends and warp == workers) tell_lines(a, sh, mine, to, lane);
    if (sends and warp < workers) send_lines(a, ls, sh.f, ls.c, sh.epoch, words, mine, to, piece, anew(warp), anew(lane));
    if (receives and warp < workers) {
      bool ok = true;
#pragma unroll 1
      for (int source = warp; source < a.ranks; source += workers) {
        int row[kLaneChannels], total = ok ? await_source(a, sh, ls, source, row, anew(lane)) : -1;
        ok = total >= 0;
        if (not ok) continue;
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j) table[plan_row(source, lane * kLaneChannels + j)] = row[j];
        if (lane == 0) table[plan_row(source, kChannels)] = total;
      }
      // Behind it all know what all sources said, and that counts are cleared: one of them has acquired that.
      ok = barrier_and(kReceiveBarrier, 32 * workers, ok);
      ok = ok and receive_lines(a, sh, ls, ls.c, table, words, anew(warp), anew(lane));
      if (not ok) sh.broken = true;
      if (ok and (a.fill or blockIdx.x == 0)) {
        int rows = 0;
#pragma unroll 1
        for (int s = 0; s < a.ranks; ++s) {
          if (blockIdx.x == 0)
#pragma unroll 1
            for (int i = threadIdx.x; i <= kChannels; i += 32 * workers)
              reinterpret_cast<int*>(a.plan)[plan_row(s, i)] = rows + table[plan_row(s, i)];
          rows += ls.total[s];
        }
        if (a.fill) fill_ids(a, rows, warp, lane);
        if (blockIdx.x == 0 and warp == 0) {
          bool same = __all_sync(kFullWarp, lane >= a.ranks or ls.proposal[lane] == ls.proposal[0]);
          if (lane == 0) store_relaxed_sys(reinterpret_cast<u64*>(a.agreed), same ? ls.proposal[0] : 0);
          if (lane == 0) tell_host(a, rows);
        }
      }
      if (ok and blockIdx.x == gridDim.x - 1 and warp == workers - 1) clear_slot(a, sh, ls.c, table, lane);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) tell_trouble(a, ls.trouble, Op::kDispatch, sh.epoch);
  if ((sh.stopped or sh.broken) and receives) {   // nothing that was not received may look like data
    i64 rows = (a.masked ? a.local_experts : 1) * a.ranks * a.max_tokens;
    poison_rows(a.rows, rows * sh.f.row);
  }
}

}  // namespace ep
