// Dispatch: every token goes once to each rank that owns one of its experts; every rank places what arrives.
//
// A block is one channel: its tokens are consecutive, their records take consecutive slots of this rank's segment at
// each destination, and the block signals by itself how far it has come. Nothing waits for another block. Sending and
// receiving warps share a block, or run one after the other, or in two launches with the caller's work in between.
#include <cuda_fp8.h>

#include "ep/progress.cuh"
#include "ep/rows.cuh"

namespace ep {

constexpr int kPublishTokens = 8;   // tokens between two signals of a channel

struct Offsets {   // a Record whose fields fit 32 bits, its payload's bytes and how many words of scales
  int scales, ids, weights, source, bytes, row, words;
};

struct Shared {
  u64 epoch;
  Offsets f;
  int begin[kMaxRanks], end[kMaxRanks];   // by destination: slots of this channel
  int base[kMaxRanks + 1];                // by source: its first row; behind the last, all rows
  int channels[kMaxRanks];                // by source
  int rows[kWarps][2][kMaxTopK];          // by team, and turn about: the masked rows of its record
  bool stopped;                           // the buffer has failed
  Progress progress;
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

// Rows go as they are: one part of the row.
__device__ __forceinline__ void send_row(const Targets& t, u64 row, int bytes, Part p) {
  for_vectors<kUnroll>(
      bytes / 16, p, [&](int at) { return load_input(reinterpret_cast<const Vec*>(row) + at); },
      [&](const int (&at)[kUnroll], const bool (&there)[kUnroll], const Vec (&v)[kUnroll]) {
        to_each(t, [&](u64 record) {
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            if (there[i]) store_vec(reinterpret_cast<Vec*>(record) + at[i], v[i]);
        });
      });
}

// 512 channels a step, 16 a lane, so that 8 lanes share a scale: scale = max(|x|, 1e-4) / 448, rounded up to a power of
// two for UE8M0.
__device__ __forceinline__ void send_cast_row(const Args& a, const Targets& t, u64 row, const Offsets& f, Part p) {
  const int lane = p.lane, part = p.part, parts = p.parts;
  bool ue8m0 = a.payload == i64(Payload::kFp8Ue8m0);
  int hidden = int(a.hidden), steps = (hidden + 511) / 512, groups = hidden / int(kScaleGroup);
  for (int first = part; first < steps; first += 2 * parts) {
    Vec in[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int channel = (first + i * parts) * 512 + lane * 16;
      const Vec* from = reinterpret_cast<const Vec*>(row + 2 * channel);
      bool there = channel < hidden;
      in[i][0] = there ? load_input(from) : Vec{};
      in[i][1] = there ? load_input(from + 1) : Vec{};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int step = first + i * parts, channel = step * 512 + lane * 16;
      if (step >= steps) break;
      float amax = 1e-4f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float2 x = unpack(in[i][j / 4].v[j % 4]);
        amax = fmaxf(amax, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      for (int d = 1; d < 8; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, d));
      float scale = __fdiv_rn(amax, 448.f);
      u32 exponent = 0;
      if (ue8m0) {
        u32 bits = __float_as_uint(scale);
        exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);   // scale > 0 is normal: amax has a floor
        scale = __uint_as_float(exponent << 23);
      }
      float inverse = __fdiv_rn(1.f, scale);
      Vec out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 lo = unpack(in[i][j / 2].v[j % 2 * 2]), hi = unpack(in[i][j / 2].v[j % 2 * 2 + 1]);
        u32 l = __nv_cvt_float2_to_fp8x2({lo.x * inverse, lo.y * inverse}, __NV_SATFINITE, __NV_E4M3);
        u32 h = __nv_cvt_float2_to_fp8x2({hi.x * inverse, hi.y * inverse}, __NV_SATFINITE, __NV_E4M3);
        out.v[j] = l | h << 16;
      }
      Vec s;   // the step's four scales, or four exponents in one word
#pragma unroll
      for (int g = 0; g < 4; ++g) s.v[g] = __shfl_sync(kFullWarp, ue8m0 ? exponent : __float_as_uint(scale), g * 8);
      int here = groups - step * 4 < 4 ? groups - step * 4 : 4;
      u32 packed = s.v[0] | (here > 1 ? s.v[1] << 8 : 0) | (here > 2 ? s.v[2] << 16 : 0) | (here > 3 ? s.v[3] << 24 : 0);
      to_each(t, [&](u64 record) {
        if (channel < hidden) store_vec(reinterpret_cast<void*>(record + channel), out);
        u32* scales = reinterpret_cast<u32*>(record + f.scales);
        if (ue8m0) {
          if (lane == 0) scales[step] = packed;
        } else if (here == 4) {
          if (lane == 0) store_vec(scales + 4 * step, s);
        } else if (lane < here) {
          scales[4 * step + lane] = lane == 0 ? s.v[0] : lane == 1 ? s.v[1] : s.v[2];
        }
      });
    }
  }
}

// One part of a token, to every rank of the set; the first part carries what is not payload.
__device__ __forceinline__ void send_token(const Args& a, const Targets& t, const Offsets& f, i64 token, Part p) {
  const int lane = p.lane;
  if (a.cast) {
    send_cast_row(a, t, a.x + token * 2 * a.hidden, f, p);
  } else {
    send_row(t, a.x + token * f.row, f.row, p);
  }
  if (p.part != 0) return;
  int width = a.cast ? 0 : f.words;
  for (int first = 0; first < width; first += 32) {
    int g = first + lane;
    u32 v = g < width ? reinterpret_cast<const u32*>(a.scales_in)[token * width + g] : 0;
    to_each(t, [&](u64 record) {
      if (g < width) reinterpret_cast<u32*>(record + f.scales)[g] = v;
    });
  }
  bool has = lane < a.top_k;
  int id = has ? pick(a, token, lane) : -1;
  float weight = has ? reinterpret_cast<const float*>(a.weights)[token * a.top_k + lane] : 0.f;
  to_each(t, [&](u64 record) {
    if (has) {
      reinterpret_cast<int*>(record + f.ids)[lane] = id;
      reinterpret_cast<float*>(record + f.weights)[lane] = weight;
    }
    if (lane == 0) *reinterpret_cast<int*>(record + f.source) = int(a.rank * a.max_tokens + token);
  });
}

__device__ __forceinline__ u64 segment(const Args& a, int rank, int source) {
  return a.heap[rank] + a.slots + source * a.slot_segment;
}

// How many records of earlier channels, and of this one, go to each rank. By all sending warps.
__device__ __forceinline__ void count_records(const Args& a, Shared& sh, Range mine, int warp, int lane) {
  int before = 0, all = 0;
  for (int first = warp * 32; first < mine.last; first += int(a.send_warps) * 32) {
    u32 to = block_of_tokens(a, first, mine.last, lane);
    int split = mine.first - first;   // tokens of this block that belong to earlier channels
    before += __popc(split >= 32 ? to : split > 0 ? to & below(split) : 0);
    all += __popc(to);
  }
  if (lane < a.ranks and all != 0) {
    atomicAdd(&sh.begin[lane], before);
    atomicAdd(&sh.end[lane], all);
  }
  barrier(kSendBarrier, int(a.send_warps) * 32);
}

// Tells every rank what this block writes, then how far it has come. One warp, lane r for rank r.
__device__ __forceinline__ void publish(const Args& a, Shared& sh, Range mine, int workers, int lane) {
  int channel = blockIdx.x, channels = gridDim.x;
  bool peer = lane < a.ranks;
  int begin = peer ? sh.begin[lane] : 0, count = peer ? sh.end[lane] - begin : 0;
  i64 row = a.rank * (kChannels + 1);
  if (peer) store_relaxed_sys(heap_word(a, lane, a.stream_begin, row + channel), signal_word(sh.epoch, begin));
  if (channel == channels - 1) {
    // Receiving warps add to counts; the word that they all await first says that it is cleared.
    for (i64 e = lane; e < a.local_experts; e += 32) reinterpret_cast<int*>(a.counts)[e] = 0;
    __syncwarp();
    fence_sys();
    if (peer) store_relaxed_sys(heap_word(a, lane, a.stream_begin, row + channels), signal_word(sh.epoch, begin + count));
  }
  int tokens = mine.last - mine.first, published = 0, base = 0, parts = int(a.send_parts);
  u32 to = block_of_tokens(a, mine.first, mine.last, lane);
  for (int block = 0;;) {   // tokens of the channel before the 32 that `to` describes
    int complete = min(tokens, int(sh.progress.complete(workers, lane)) / parts);
    if (complete < tokens and complete - published < kPublishTokens) continue;
    for (; complete - block >= 32; block += 32) {
      base += __popc(to);
      to = block_of_tokens(a, mine.first + block + 32, mine.last, lane);
    }
    int sent = base + __popc(to & below(complete - block));
    fence_sys();
    if (peer) store_relaxed_sys(heap_word(a, lane, a.stream_tail, a.rank * kChannels + channel), signal_word(sh.epoch, sent));
    published = complete;
    if (complete == tokens) break;
  }
  if (peer and count != 0) {
    i64 at = stat_mode(a.ranks, a.mode) + lane;
    add_stat(a, at, count);
    add_stat(a, at + a.ranks, u64(count) * sh.f.bytes);
  }
}

__device__ __forceinline__ void announce(const Args& a, Shared& sh, int lane) {
  u64 said = u64(a.signature) | u64(gridDim.x - 1) << kSignatureBits |
             load_relaxed_sys(reinterpret_cast<const u64*>(a.proposal)) << kProposalBits;
  if (lane < a.ranks) store_relaxed_sys(heap_word(a, lane, a.intent, a.rank), signal_word(sh.epoch, said));
  if (lane != 0) return;
  i64 at = stat_mode(a.ranks, a.mode) + kStatRows * a.ranks;
  add_stat(a, at, 1);
  add_stat(a, at + 2, a.tokens);
  atomicMax(stats(a) + at + 3, u64(a.tokens));
  Control* control = reinterpret_cast<Control*>(a.control);
  control->mode = a.mode + 1;
  control->epoch = sh.epoch;
}

__device__ __forceinline__ void check_ids(const Args& a, Shared& sh, i64 token, int lane) {
  if (lane >= a.top_k) return;
  i64 at = token * a.top_k + lane;
  i64 id = a.ids64 ? reinterpret_cast<const i64*>(a.ids)[at] : reinterpret_cast<const int*>(a.ids)[at];
  if (id < -1 or id >= a.local_experts * a.ranks) report(a, Fault::kBadId, Op::kDispatch, sh.epoch, int(a.rank), token, id);
}

__device__ __forceinline__ void send(const Args& a, Shared& sh, int warp, int lane) {
  Range mine = channel_tokens(a.tokens, blockIdx.x, gridDim.x);
  int workers = int(a.send_warps) - 1, parts = int(a.send_parts);
  if (blockIdx.x == 0 and warp == workers) announce(a, sh, lane);
  count_records(a, sh, mine, warp, lane);
  if (warp == workers) return publish(a, sh, mine, workers, lane);

  int slot = lane < a.ranks ? sh.begin[lane] : 0;
  u64 own = lane < a.ranks ? segment(a, lane, int(a.rank)) : 0;
  int unit = warp, done = 0;
  for (int first = mine.first; first < mine.last; first += 32) {
    u32 to = block_of_tokens(a, first, mine.last, lane);
    int stop = (min(first + 32, mine.last) - mine.first) * parts;
    for (; unit < stop; unit += workers) {
      int i = unit / parts - (first - mine.first), part = unit % parts;
      Targets t{own + i64(slot + __popc(to & below(i))) * sh.f.bytes, __ballot_sync(kFullWarp, to >> i & 1)};
      if (part == 0) check_ids(a, sh, first + i, lane);
      if (t.set != 0) send_token(a, t, sh.f, first + i, {part, parts, lane});
      sh.progress.finish(warp, ++done, lane);
    }
    slot += __popc(to);
  }
  sh.progress.finish(warp, Progress::kAll, lane);
}

// Who sends how much: from the words that travel ahead of the records. One warp, lane s for source s.
__device__ __forceinline__ bool receive_plan(const Args& a, Shared& sh, int lane) {
  bool ok = true;
  int total = 0;
  u64 proposal = ~u64(0);
  if (lane < a.ranks) {
    u64 start = blockIdx.x == 0 ? nanoseconds() : 0;
    u64 intent = wait_word(a, Op::kDispatch, lane, a.intent, lane, sh.epoch, 0);
    if (blockIdx.x == 0) add_stat(a, stat_waits(a.ranks) + lane, nanoseconds() - start);
    ok = intent != 0;
    if (ok and (intent & kSignatureMask) != u64(a.signature)) {
      report(a, Fault::kDisagree, Op::kDispatch, sh.epoch, lane, a.signature, intent & kSignatureMask);
      ok = false;
    }
    if (ok) {
      proposal = signal_count(intent) >> kProposalBits;
      int channels = int(intent >> kSignatureBits & (kChannels - 1)) + 1;
      sh.channels[lane] = channels;
      u64 all = wait_word(a, Op::kDispatch, lane, a.stream_begin, lane * (kChannels + 1) + channels, sh.epoch, 0);
      ok = all != 0;
      total = int(signal_count(all));
    }
  }
  int up_to = total;
  for (int d = 1; d < 32; d *= 2) {
    int left = __shfl_up_sync(kFullWarp, up_to, d);
    if (lane >= d) up_to += left;
  }
  if (lane < a.ranks) sh.base[lane + 1] = up_to;
  if (lane == 0) sh.base[0] = 0;
  ok = __all_sync(kFullWarp, ok);
  u64 first = __shfl_sync(kFullWarp, proposal, 0);
  bool same = __all_sync(kFullWarp, lane >= a.ranks or proposal == first);
  if (not ok or blockIdx.x != 0) return ok;
  if (lane < a.ranks) reinterpret_cast<int*>(a.plan)[lane + 1] = up_to;
  if (lane == 0) {
    reinterpret_cast<int*>(a.plan)[0] = 0;
    store_relaxed_sys(reinterpret_cast<u64*>(a.agreed), same ? first : 0);
  }
  if (a.host_rows != 0 and lane == a.ranks - 1) store_relaxed_sys(reinterpret_cast<u64*>(a.host_rows), u64(up_to) + 1);
  return true;
}

// What is not payload: ids and weights of this rank's experts, counts, and what combine will need. One warp;
// masked: `rows` gets each pick's row, -1 for other ranks' experts and for repeated ones.
__device__ __forceinline__ void place_picks(const Args& a, const Offsets& f, u64 from, i64 record, int* rows, int lane) {
  bool has = lane < a.top_k;
  int id = has ? reinterpret_cast<const volatile int*>(from + f.ids)[lane] : -1;
  float weight = has ? reinterpret_cast<const volatile float*>(from + f.weights)[lane] : 0.f;
  int source = *reinterpret_cast<const volatile int*>(from + f.source);
  int each = int(a.local_experts), rank = id >= 0 ? id / each : -1;
  u32 ranks = __reduce_or_sync(kFullWarp, rank >= 0 ? 1u << rank : 0);
  bool mine = rank == a.rank;
  int local = mine ? id - int(a.rank) * each : -1;
  if (lane == 0)
    reinterpret_cast<int*>(a.target)[record] =
        __popc(ranks & below(int(a.rank))) * int(a.max_tokens) + source % int(a.max_tokens);
  int* counts = reinterpret_cast<int*>(a.counts);
  if (not a.masked) {
    if (has) {
      reinterpret_cast<int*>(a.out_ids)[record * a.top_k + lane] = local;
      reinterpret_cast<float*>(a.out_weights)[record * a.top_k + lane] = mine ? weight : 0.f;
    }
    if (mine) atomicAdd(counts + local, 1);
    return;
  }
  // A pick that repeats an earlier one takes no row; its weight joins the first one's.
  u32 same = __match_any_sync(kFullWarp, local);
  bool first = mine and __ffs(same) - 1 == lane;
  float sum = 0.f;
  for (int k = 0; k < a.top_k; ++k) {
    float w = __shfl_sync(kFullWarp, weight, k);
    if (same >> k & 1) sum += w;
  }
  int row = first ? local * int(a.ranks * a.max_tokens) + atomicAdd(counts + local, 1) : -1;
  if (not has) return;
  rows[lane] = row;
  reinterpret_cast<int*>(a.position)[record * a.top_k + lane] = row;
  reinterpret_cast<float*>(a.pick_weight)[record * a.top_k + lane] = sum;
}

__device__ __forceinline__ void place_compact(const Args& a, const Offsets& f, u64 from, i64 row, Part p) {
  if (p.part == 0) place_picks(a, f, from, row, nullptr, p.lane);
  copy_row(a.rows + row * f.row, from, f.row, p, load_vec);
  if (p.part != 0) return;
  for (int g = p.lane; g < f.words; g += 32)
    reinterpret_cast<u32*>(a.scales)[row * f.words + g] = reinterpret_cast<const volatile u32*>(from + f.scales)[g];
}

// One row for each distinct local expert. The first loads are under way while the team's first warp takes the rows.
// False if a warp of the team has given up.
__device__ __forceinline__ bool place_masked(const Args& a, const Offsets& f, u64 from, i64 record, int* rows, Part p,
                                             bool ok) {
  bool known = false;
  auto know = [&] {
    if (known) return;
    known = true;
    if (ok and p.part == 0) place_picks(a, f, from, record, rows, p.lane);
    ok = team_agrees(ok, p);
  };
  for_vectors<kUnroll>(
      ok ? f.row / 16 : 0, p, [&](int at) { return load_vec(reinterpret_cast<const Vec*>(from) + at); },
      [&](const int (&at)[kUnroll], const bool (&there)[kUnroll], const Vec (&v)[kUnroll]) {
        know();
        for (int k = 0; ok and k < a.top_k; ++k) {
          int row = rows[k];
          if (row < 0) continue;
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            if (there[i]) store_vec(reinterpret_cast<Vec*>(a.rows + i64(row) * f.row) + at[i], v[i]);
        }
      });
  know();
  if (not ok) return false;
  int capacity = int(a.ranks * a.max_tokens);
  for (int g = p.part * 32 + p.lane; g < f.words; g += 32 * p.parts) {
    u32 v = reinterpret_cast<const volatile u32*>(from + f.scales)[g];
    for (int k = 0; k < a.top_k; ++k) {
      int row = rows[k];
      if (row < 0) continue;
      i64 column = i64(row / capacity) * f.words + g;
      reinterpret_cast<u32*>(a.scales)[column * a.scale_stride + row % capacity] = v;
    }
  }
  return true;
}

// The records of one source's channel, taken in turns by the teams that serve the source.
__device__ __forceinline__ bool receive_channel(const Args& a, Shared& sh, int source, int channel, int member,
                                                int members, int team, int& turn, Part p) {
  i64 word = source * (kChannels + 1) + channel;
  u64 lo = wait_word(a, Op::kDispatch, source, a.stream_begin, word, sh.epoch, 0);
  u64 hi = wait_word(a, Op::kDispatch, source, a.stream_begin, word + 1, sh.epoch, 0);
  if (not team_agrees(__all_sync(kFullWarp, lo != 0 and hi != 0), p)) return false;
  int begin = int(signal_count(lo)), end = int(signal_count(hi)), arrived = 0;
  for (int slot = begin + member; slot < end; slot += members, turn ^= 1) {
    bool ok = true;
    if (slot - begin >= arrived) {
      u64 tail = wait_word(a, Op::kDispatch, source, a.stream_tail, source * kChannels + channel, sh.epoch, slot - begin + 1);
      ok = __all_sync(kFullWarp, tail != 0);
      arrived = int(__shfl_sync(kFullWarp, u32(signal_count(tail)), 0));
      __syncwarp();
    }
    u64 from = segment(a, int(a.rank), source) + i64(slot) * sh.f.bytes;
    i64 record = sh.base[source] + slot;
    if (a.masked) {
      if (not place_masked(a, sh.f, from, record, sh.rows[team][turn], p, ok)) return false;
    } else {
      if (not ok) return false;
      place_compact(a, sh.f, from, record, p);
    }
  }
  return true;
}

__device__ __forceinline__ bool receive(const Args& a, Shared& sh, int warp, int lane) {
  int warps = kWarps - int(a.receive_from), parts = int(a.receive_parts);
  bool planned = warp != 0 or receive_plan(a, sh, lane);
  if (not barrier_and(kReceiveBarrier, warps * 32, planned)) return false;
  int team = warp / parts, teams = warps / parts, groups = min(int(a.ranks), teams), turn = 0;
  Part p{warp % parts, parts, lane, team};
  if (team >= teams) return true;
  for (int source = team % groups; source < a.ranks; source += groups) {
    int members = (teams - team % groups + groups - 1) / groups;
    for (int channel = blockIdx.x; channel < sh.channels[source]; channel += gridDim.x)
      if (not receive_channel(a, sh, source, channel, team / groups, members, team, turn, p)) return false;
  }
  if (a.fill) {   // nobody knows the number of rows, so the ids behind the last one must say that there is nothing
    i64 first = sh.base[a.ranks] * a.top_k, last = a.ranks * a.max_tokens * a.top_k;
    for (i64 i = first + (i64(blockIdx.x) * warps + warp) * 32 + lane; i < last; i += i64(gridDim.x) * warps * 32) {
      reinterpret_cast<int*>(a.out_ids)[i] = -1;
      reinterpret_cast<float*>(a.out_weights)[i] = 0.f;
    }
  }
  return true;
}

}  // namespace ep

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_dispatch(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < kMaxRanks) sh.begin[lane] = sh.end[lane] = sh.progress.done[lane] = 0;
  if (warp == 1) {
    bool stopped = given_up(a, Op::kDispatch, 0, lane);
    if (lane == 0) sh.stopped = stopped;
  }
  if (threadIdx.x == 0) {
    sh.epoch = load_relaxed_sys(&reinterpret_cast<LaneState*>(a.state)->epoch);
    Record f = record(Payload(a.payload), a.hidden, a.top_k);
    sh.f = {int(f.scales), int(f.ids), int(f.weights), int(f.source), int(f.bytes),
            int(payload_bytes(Payload(a.payload), a.hidden)), int(scale_bytes(Payload(a.payload), a.hidden) / 4)};
  }
  __syncthreads();
  if (not sh.stopped) {
    if (warp < a.send_warps) send(a, sh, warp, lane);
    if (warp >= a.receive_from and not receive(a, sh, warp - int(a.receive_from), lane)) sh.stopped = true;
    __syncthreads();
  }
  if (sh.stopped) {   // nothing that was not received may look like data
    i64 bytes = (a.masked ? a.local_experts : 1) * a.ranks * a.max_tokens * payload_bytes(Payload(a.payload), a.hidden);
    fill_nan(a.rows, bytes);
  }
}
