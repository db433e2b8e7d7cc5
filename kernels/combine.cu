// Combine: each rank returns its partial sums to the tokens' owners, who add them up.
//
// Records of a source's channel return in its order and signal by channel, so an owner's block sums its tokens while later
// ones are under way. A rank signals every channel of every peer, also with no rows: the words of an epoch say that this
// rank has read all its dispatch slots of that epoch.
#include "ep/line_sums.cuh"
#include "ep/progress.cuh"
#include "ep/routing.cuh"
#include "ep/rows.cuh"
#include "ep/stage.cuh"

namespace ep {

constexpr int kPublishRows = 8;   // rows between two signals of a channel

struct Shared {
  u64 epoch;
  bool stopped, broken;   // as in block.cuh
  Progress progress;
  u64 bars[kWarps];
};

// One channel index of every source: lane s holds what source s sent in it.
struct Returning {
  int row, count, channels;   // first row, rows, the source's channels
  u32 rounds;                 // most rows of a source
};

__device__ __forceinline__ Returning returning(const Args& a, u64 epoch, int channel, int lane) {
  Returning r{};
  if (lane < a.ranks) {
    const int* plan = reinterpret_cast<const int*>(a.plan) + plan_row(lane, channel);
    u64 intent = load_relaxed_sys(own_word(a, a.intent, lane));
    r.row = plan[0];
    r.count = plan[1] - r.row;
    // A source in a later epoch has all its rows back already; this block then has none of its channels.
    r.channels = signal_epoch(intent) == epoch ? intent_channels(intent) : 0;
  }
  r.rounds = __reduce_max_sync(kFullWarp, u32(r.count));
  return r;
}

// Units are (record, source, part), sources innermost, so that all of them move along together.
struct Units {
  u32 ranks, parts, rounds, workers;
  __device__ __forceinline__ u32 total() const { return ranks * parts * rounds; }
  __device__ __forceinline__ u32 turns() const { return u32(ceil_div(total(), workers)); }   // of a worker, at most
};

__device__ __forceinline__ void return_row(const Args& a, Stage& stage, int source, i64 record, int part, int lane) {
  i64 target = reinterpret_cast<const int*>(a.target)[record];
  u64 to = a.heap[source] + a.area + target / a.max_tokens * a.area_segment +
           target % a.max_tokens * combine_record_bytes(Payload(a.payload), a.hidden);
  send_back(a, stage, to, record, part, lane);
}

__device__ __forceinline__ void publish(const Args& a, Shared& sh, int channel, const Returning& r, const Units& u, u32 turns_before,
                                        int lane) {
  u32 published = 0, all = u.total() / u.parts;
  for (;;) {
    u32 reach = sh.progress.complete(u.workers, lane), before = turns_before * u.workers;
    u32 complete = min(all, reach > before ? (reach - before) / u.parts : 0);   // (record, source) pairs
    if (complete < all and complete - published < kPublishRows * u.ranks) continue;
    int rows = complete > lane ? int((complete - lane + u.ranks - 1) / u.ranks) : 0;
    fence_release();
    if (channel < r.channels)
      store_relaxed_sys(heap_word(a, lane, a.stream_returned, a.rank * kChannels + channel),
                        signal_word(sh.epoch, min(rows, r.count)));
    published = complete;
    if (complete == all) break;
  }
  if (r.count != 0) {
    i64 at = stat_mode(a.ranks, a.mode) + 2 * a.ranks + lane;
    add_stat(a, at, r.count);
    add_stat(a, at + a.ranks, lane == a.rank and a.stays ? 0 : u64(r.count) * combine_record_bytes(Payload(a.payload), a.hidden));
  }
}

__device__ __forceinline__ void send(const Args& a, Shared& sh, Stage& stage, int warp, int lane) {
  u32 workers = u32(a.senders), turns = 0;
  bool publisher = warp == int(workers);
  int channels = kChannels;
  for (int channel = blockIdx.x; channel < channels; channel += gridDim.x) {
    Returning r = returning(a, sh.epoch, channel, lane);
    channels = int(__reduce_max_sync(kFullWarp, u32(r.channels)));
    if (channel >= channels) break;
    Units u{u32(a.ranks), u32(a.send_parts), r.rounds, workers};
    if (publisher) {
      publish(a, sh, channel, r, u, turns, lane);
    } else {
      u32 done = turns;
      for (u32 unit = warp; unit < u.total(); unit += workers) {
        u32 pair = unit / u.parts, source = pair % u.ranks, k = pair / u.ranks;
        int count = __shfl_sync(kFullWarp, r.count, source), row = __shfl_sync(kFullWarp, r.row, source) + k;
        bool stays = source == a.rank and a.stays;
        if (k < count and not stays) return_row(a, stage, source, row, int(unit % u.parts), lane);
        sh.progress.finish(warp, ++done, lane);
      }
      sh.progress.finish(warp, turns + u.turns(), lane);
    }
    turns += u.turns();
  }
  if (not publisher) sh.progress.finish(warp, Progress::kAll, lane);
  if (blockIdx.x == 0 and publisher) {
    if (lane == 0) add_stat(a, stat_mode(a.ranks, a.mode) + kStatRows * a.ranks + 1, 1);
    for (i64 e = lane; e < a.local_experts; e += 32)
      add_stat(a, stat_experts(a.ranks) + e, reinterpret_cast<const int*>(a.counts)[e]);
  }
}

// A receiving warp's work: the first of its channels, and who shares it.
struct Mine {
  int channel, member, workers;
  bool first;
};
__device__ __forceinline__ Mine receivers_part(const Args& a, int warp) {
  int groups = int(a.receive_groups), workers = int(a.receivers) / groups, group = warp / workers;
  if (group >= groups) return {int(kChannels), 0, 1, false};   // left over
  return {int(blockIdx.x + gridDim.x * group), warp % workers, workers, warp == 0};
}

// Sum the tokens of this block's channels. Copy j of a token is that of the j-th rank that got it; this rank's own compact
// rows need not leave `y`, unless the caller may overwrite it before they are summed.
__device__ __forceinline__ bool receive(const Args& a, Shared& sh, Stage& stage, const Mine& m, u32 to, int lane) {
  const int groups = int(a.receive_groups), workers = m.workers, parts = int(a.receive_parts);
  const int channels = int(a.channels);
  const bool peer = lane < a.ranks, own = lane == a.rank and a.stays;
  const i64 row_bytes = combine_record_bytes(Payload(a.payload), a.hidden);
  for (int channel = m.channel; channel < channels; channel += gridDim.x * groups) {
    Range mine = channel_tokens(a, channel);
    int before = 0, seen = -1, unit = m.member;   // lane r: rows of rank r expected before the block, and seen
    i64 own_row = own ? reinterpret_cast<const int*>(a.plan)[plan_row(lane, channel)] : 0;
    auto await = [&](int count) {
      if (seen >= count) return true;
      u64 start = seen < 0 and blockIdx.x == 0 and m.first ? nanoseconds() : 0;
      u64 word = wait_word(a, Op::kCombine, lane, a.stream_returned, lane * kChannels + channel, sh.epoch, count);
      if (start != 0) add_stat(a, stat_waits(a.ranks) + lane, nanoseconds() - start);
      seen = int(signal_count(word));
      return word != 0;
    };
    for (int first = mine.first; first < mine.last; first += 32) {
      if (channel != m.channel or first != mine.first) to = block_of_tokens(a, first, mine.last, lane);
      int stop = (min(first + 32, mine.last) - mine.first) * parts;
      for (; unit < stop; unit += workers) {
        int i = quotient(unit, parts), part = unit - i * parts;
        i -= first - mine.first;
        int ordinal = before + __popc(to & below(i));
        bool expected = to >> i & 1;
        bool ok = not expected or own or await(ordinal + 1);
        if (not __all_sync(kFullWarp, ok)) return false;
        __syncwarp();   // what one lane acquired, all lanes read
        u32 set = __ballot_sync(kFullWarp, expected);
        u64 row = own ? a.y + (own_row + ordinal) * 2 * a.hidden
                      : a.heap[a.rank] + a.area + __popc(set & below(lane)) * a.area_segment + (first + i) * row_bytes;
        Range run = share(int(2 * a.hidden), part, parts);
        sum_rows(stage, a.out + i64(first + i) * 2 * a.hidden, run, set, row, 1.f, lane);
      }
      before += __popc(to);
    }
    // The last word of a rank also frees the slots there, so that it is awaited from all.
    if (not __all_sync(kFullWarp, not peer or await(before))) return false;
  }
  return true;
}

}  // namespace ep

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_sums(const __grid_constant__ ep::Args a) { ep::run_sums(a); }

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_combine(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, receiver = warp - int(a.receive_from);
  if (threadIdx.x < 32) sh.progress.done[lane] = 0;
  Mine mine{};
  u32 to = 0;   // where the first tokens went, asked for before anything else
  if (receiver >= 0 and receiver < a.receivers) {
    mine = receivers_part(a, receiver);
    Range tokens = channel_tokens(a, mine.channel);
    to = block_of_tokens(a, tokens.first, tokens.last, lane);
  }
  if (warp == blockDim.x / 32 - 1) {
    bool stopped = given_up(a, Op::kCombine, 0, lane);
    if (lane == 0) {
      sh.stopped = stopped;
      sh.broken = false;
    }
    if (lane < blockDim.x / 32) mbarrier_init(&sh.bars[lane]);
  }
  if (threadIdx.x == 0) sh.epoch = read_epoch(a);
  __syncthreads();
  // Every block has read the epoch by now, so the receiving kernel may start and end it.
  if (a.receivers == 0) allow_next();
  if (not sh.stopped) {
    Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
    if (a.senders != 0 and warp <= a.senders) send(a, sh, stage, warp, lane);
    stage.at = stage_memory + a.receive_at + receiver * a.receive_stage;
    if (receiver >= 0 and receiver < a.receivers and not receive(a, sh, stage, mine, to, lane)) sh.broken = true;
    __syncthreads();
  }
  if ((sh.stopped or sh.broken) and a.out != 0) poison_sums(a);
  if (a.receivers != 0) await_previous();   // the sending kernel, if it was another: whoever follows this one follows it too
}
