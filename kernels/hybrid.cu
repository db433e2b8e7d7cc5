// hybrid: a token crosses to another node once, to the rank on its source's rail there, which passes it on to the GPUs of its
// node that own its experts. A source is the relay of its own node. Answers return the same way: GPUs to the relay, which
// sums them in fp32 and sends one row a token back over the rail; the owner sums its own GPUs' rows and other nodes' rows.
//
// Both hops of dispatch reuse the streams of dispatch.cuh: a channel of the source is a channel at the relay and at the GPUs,
// its records take consecutive slots from that of its first token on, and whoever writes the records writes the words.
// Relays run beside the caller's stream, so that lanes may be driven in any order, except where one launch does all the summing.
#include "ep/dispatch.cuh"

namespace ep {

struct Relay {   // by node: what its rank on this rail sends here
  int channels[kMaxRanks], chunk[kMaxRanks];
  int most;   // channels of a node
};

__device__ __forceinline__ u64 rail_slot(const Args& a, const Offsets& f, int node, i64 slot) {
  return a.heap[a.rank] + a.rail_slots + node * a.rail_segment + slot * f.bytes;
}
__device__ __forceinline__ u64 relay_row(const Args& a, int rank, int node, int copy, i64 slot) {
  return a.heap[rank] + a.relay_area + node * a.relay_node + copy * a.relay_segment +
         slot * combine_record_bytes(Payload(a.payload), a.hidden);
}

// What every remote source calls, passed on to the GPUs of this node by the first block. One warp, lane n for node n.
__device__ __forceinline__ bool await_sources(const Args& a, Shared& sh, Relay& relay, int lane) {
  const int source = lane < nodes(a) ? rail_peer(a, lane) : 0;
  int channels = 0;
  bool ok = true;
  if (lane < nodes(a) and lane != own_node(a)) {
    u64 intent = wait_word(a, Op::kDispatch, source, a.intent, source, sh.epoch, 0);
    ok = intent != 0;
    if (ok and (intent & kSignatureMask) != u64(a.signature)) {
      report(a, Fault::kDisagree, Op::kDispatch, sh.epoch, source, a.signature, intent & kSignatureMask);
      ok = false;
    }
    u64 chunk = ok ? wait_word(a, Op::kDispatch, source, a.rail_total, plan_row(lane, kChannels), sh.epoch, 0) : 0;
    ok = chunk != 0;
    relay.channels[lane] = channels = intent_channels(intent);
    relay.chunk[lane] = int(signal_count(chunk));
    for (int g = 0; ok and blockIdx.x == 0 and g < a.gpus; ++g) {
      int gpu = own_node(a) * int(a.gpus) + g;
      if (gpu != a.rank) store_relaxed_sys(heap_word(a, gpu, a.intent, source), intent);
      store_relaxed_sys(heap_word(a, gpu, a.stream_count, plan_row(source, kChannels)), chunk);
    }
  }
  const u32 most = __reduce_max_sync(kFullWarp, u32(channels));
  if (lane == 0) relay.most = int(most);
  return __all_sync(kFullWarp, ok);
}

// What the relay must know of a record when its answers come: by then the rail slot may hold another mode's records. Its ranks,
// its token, and its number among the channel's records that stay here.
__device__ __forceinline__ int* relay_entry(const Args& a, int node, i64 slot) {
  return reinterpret_cast<int*>(a.relay) + 3 * (node * a.max_tokens + slot);
}

// The ranks that own a record's experts, by its ids where they lie; loads are in flight together, as in token_ranks.
__device__ __forceinline__ u32 record_ranks(const Args& a, u64 ids) {
  constexpr int kLoads = 8;
  const int top_k = int(a.top_k);
  u32 ranks = 0;
  for (int first = 0; first < top_k; first += kLoads) {
    int id[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) id[k] = first + k < top_k ? reinterpret_cast<const int*>(ids)[first + k] : -1;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) ranks |= id[k] >= 0 ? 1u << owner(a, id[k]) : 0;
  }
  return ranks;
}

// Warps of a block that share a channel. With several members they meet at barrier 1 + id.
struct Team {
  int id, member, members;
};
constexpr int kTeams = 15;   // a block has 16 barriers, the first of which is everybody's

// So many teams that each block's channels go on at once, or else a warp is one.
__device__ __forceinline__ int teams(int channels) {
  const int warps = blockDim.x / 32, each = (channels + int(gridDim.x) - 1) / int(gridDim.x);
  return each > kTeams ? warps : min(each, warps);
}

// One channel of one remote source; the team's warps take its records in turns. A record's slot follows from those before it,
// whose ids every warp reads, 32 records at a time: lane r counts for rank r of this node.
__device__ __forceinline__ bool forward(const Args& a, Shared& sh, const Relay& relay, Stage& stage, int node, int channel,
                                        const Team& team, int lane) {
  const Offsets& f = sh.f;
  const int source = rail_peer(a, node), first = relay.chunk[node] * channel, near = own_node(a) * int(a.gpus);
  const i64 stream = node * kChannels + channel;
  u64* before = puts(a, put_base(node, channel));
  const u64 from = rail_slot(a, f, node, first);
  const bool mine = lane < a.ranks and node_of(a, lane) == own_node(a);
  const u64 slots = mine ? segment(a, lane, source) + i64(first) * f.bytes : 0;
  u64 total = wait_word(a, Op::kDispatch, source, a.rail_total, plan_row(node, channel), sh.epoch, 0);
  bool ok = __all_sync(kFullWarp, total != 0);
  const int count = int(signal_count(__shfl_sync(kFullWarp, total, 0)));
  if (kRailPut and ok)
    ok = __all_sync(kFullWarp, wait_puts(a, Op::kDispatch, source, a.rail_arrived, stream, sh.epoch, *before, count));
  int k = team.member, sent = 0;
  for (int begin = 0; begin < count; begin += 32) {
    const int end = min(begin + 32, count);
    if (not kRailPut) ok = ok and wait_word(a, Op::kDispatch, source, a.rail_tail, stream, sh.epoch, end) != 0;
    if (not __all_sync(kFullWarp, ok)) break;
    if (k < end) stage.load(from + i64(k) * f.bytes, f.bytes, lane);   // on its way while ids are read
    const u32 ranks = lane < end - begin ? record_ranks(a, from + i64(begin + lane) * f.bytes + f.ids) : 0;
    u32 to = 0;
    for (int r = near; r < near + int(a.gpus); ++r) {
      u32 records = __ballot_sync(kFullWarp, ranks >> r & 1);
      if (lane == r) to = records;
    }
    for (; k < end; k += team.members) {
      const int i = k - begin;
      const u32 all = __shfl_sync(kFullWarp, ranks, i);
      const int number = sent + __popc(to & below(i));
      const int own = __shfl_sync(kFullWarp, number, int(a.rank));
      stage.await();
      if (lane == 0) {
        int* entry = relay_entry(a, node, first + k);
        entry[0] = int(all);
        entry[1] = stage.get<int>(f.source) % int(a.max_tokens);
        entry[2] = own;
        *reinterpret_cast<int*>(stage.at + f.weights + 4 * a.top_k) = first + k;
        fence_async_shared();
      }
      __syncwarp();
      if (to >> i & 1) bulk_store(slots + i64(number) * f.bytes, stage.at, f.bytes);
      bulk_commit();
      bulk_await_read();
      if (k + team.members < end) stage.load(from + i64(k + team.members) * f.bytes, f.bytes, lane);
    }
    sent += __popc(to);
  }
  // Each lane's records are where they went before its warp meets the others, and their meeting is before the fence: the first
  // warp's lanes may tell the ranks of all.
  bulk_await_stored();
  __syncwarp();
  if (team.members > 1) ok = barrier_and(1 + team.id, 32 * team.members, ok);
  if (not __all_sync(kFullWarp, ok)) return false;
  if (team.member != 0) return true;
  fence_release();
  if (mine) {
    store_relaxed_sys(heap_word(a, lane, a.stream_tail, source * kChannels + channel), signal_word(sh.epoch, sent));
    store_relaxed_sys(heap_word(a, lane, a.stream_count, plan_row(source, channel)), signal_word(sh.epoch, sent));
  }
  if (kRailPut and lane == 0) *before += count;
  add_written(a, Op::kDispatch, lane, sent, f.bytes, true);
  return true;
}

// Consecutive units fall to different multiprocessors, so that few of them have the bandwidth of many.
__device__ __forceinline__ Warps spread_warps() {
  return {int(threadIdx.x / 32 * gridDim.x + blockIdx.x), int(gridDim.x * (blockDim.x / 32))};
}

// Whether answers to a source stay in this rank's y, where its relay, or the owner, reads them.
__device__ __forceinline__ bool stays(const Args& a, int source) { return a.stays and relay_here(a, source) == a.rank; }

// The first row here of one channel of a source.
__device__ __forceinline__ int first_row(const Args& a, int source, int channel) {
  return reinterpret_cast<const int*>(a.plan)[plan_row(source, channel)];
}

// Partial sums for one source node, at its relay here: one row a slot, to the row of the token's copy at the owner.
__device__ __forceinline__ void sum_slot(const Args& a, Stage& stage, int node, int channel, i64 slot, int part, int lane) {
  const int *entry = relay_entry(a, node, slot), parts = int(a.send_parts);
  const u32 ranks = u32(entry[0]), here = ranks & node_ranks(a, own_node(a));
  int before = 0;
  for (int n = 0; n < own_node(a); ++n) before += (ranks & node_ranks(a, n)) != 0;
  const i64 row_bytes = combine_record_bytes(Payload(a.payload), a.hidden);
  const i64 there = a.area + before * a.area_segment + entry[1] * row_bytes;
  u64 row = relay_row(a, int(a.rank), node, __popc(here & below(lane)), slot);
  if (a.stays and lane == a.rank) row = a.y + i64(first_row(a, rail_peer(a, node), channel) + entry[2]) * 2 * a.hidden;
  if (not kRailPut) {
    sum_rows(stage, a.heap[rail_peer(a, node)] + there, share(int(2 * a.hidden), part, parts), here, row, 1.f, lane);
    return;
  }
  const i64 staged = a.staged_rows + (node * a.max_tokens + slot) * row_bytes;
  for (int p = 0; p < parts; ++p) sum_rows(stage, a.heap[a.rank] + staged, share(int(2 * a.hidden), p, parts), here, row, 1.f, lane);
  __syncwarp();
  fence_release();
  put(a, rail_peer(a, node), there, staged, u32(2 * a.hidden), a.rail_rows, own_node(a));
}

// Tokens of one channel: rows of this node's GPUs, by slot, and of other nodes' relays, by token.
__device__ __forceinline__ void sum_channel(const Args& a, Stage& stage, int channel, int member, int workers, int lane) {
  const int parts = int(a.receive_parts);
  const Range mine = channel_tokens(a, channel);
  const bool remote = relays<true>(a, lane), own = a.stays and lane == a.rank;
  const i64 row_bytes = combine_record_bytes(Payload(a.payload), a.hidden);
  int near_slot = mine.first, unit = member, own_row = own ? first_row(a, lane, channel) : 0;
  for (int first = mine.first; first < mine.last; first += 32) {
    u32 to = block_of_tokens<true>(a, first, mine.last, lane), near = __reduce_or_sync(kFullWarp, remote ? 0 : to);
    int stop = (min(first + 32, mine.last) - mine.first) * parts;
    for (; unit < stop; unit += workers) {
      int i = quotient(unit, parts), part = unit - i * parts;
      i -= first - mine.first;
      u32 set = __ballot_sync(kFullWarp, to >> i & 1), local = set & node_ranks(a, own_node(a));
      // Copies are numbered by node; this node's takes a number too, though its rows never meet there.
      int copy = remote ? __popc(set & ~local & below(lane)) + (local != 0 and own_node(a) < node_of(a, lane)) : 0;
      u64 row = remote ? a.heap[a.rank] + a.area + copy * a.area_segment + (first + i) * row_bytes
                       : relay_row(a, int(a.rank), own_node(a), __popc(local & below(lane)), near_slot + __popc(near & below(i)));
      if (own) row = a.y + i64(own_row + __popc(to & below(i))) * 2 * a.hidden;
      sum_rows(stage, a.out + i64(first + i) * 2 * a.hidden, share(int(2 * a.hidden), part, parts), set, row, 1.f, lane);
    }
    near_slot += __popc(near);
    own_row += __popc(to);
  }
}

// Sums for every remote source, once all GPUs of this node have answered it. This rank's own word comes after its ep_rail_return
// has done with the counter of blocks that both signal by.
__device__ __forceinline__ bool relay_sums(const Args& a, Shared& sh, Stage& stage, int lane) {
  const int rank = threadIdx.x, shared = kRailPut ? 1 : int(a.send_parts);   // a put takes a whole row
  bool ok = true;
  if (rank < a.ranks and node_of(a, rank) != own_node(a))
    ok = wait_word(a, Op::kCombine, relay_here(a, rank), a.relay_returned, rank, sh.epoch, 0) != 0;
  if (not __syncthreads_and(ok)) return false;
  const Warps w = spread_warps();
  for (int node = 0; node < nodes(a); ++node) {
    if (node == own_node(a)) continue;
    const int channels = intent_channels(load_relaxed_sys(own_word(a, a.intent, rail_peer(a, node))));
    const int chunk = int(signal_count(load_relaxed_sys(own_word(a, a.rail_total, plan_row(node, kChannels)))));
    int rows = 0;
    for (int unit = w.first; unit < channels * chunk * shared; unit += w.step) {
      int slot = unit / shared, part = unit % shared, channel = slot / chunk;
      u64 total = load_relaxed_sys(own_word(a, a.rail_total, plan_row(node, channel)));
      if (slot - channel * chunk >= int(signal_count(total))) continue;
      sum_slot(a, stage, node, channel, slot, part, lane);
      rows += part == 0;
    }
    if (lane == 0)
      add_written(a, Op::kCombine, rail_peer(a, node), rows, combine_record_bytes(Payload(a.payload), a.hidden), true);
  }
  signal_as_one(a, nodes(a), [&](int node) {
    tell(a, node != own_node(a), rail_peer(a, node), a.returned, a.rank, signal_word(sh.epoch, 0));
  });
  return true;
}

// One thread a rank: until what the owner adds of it is here.
__device__ __forceinline__ bool await_answer(const Args& a, const Shared& sh, int rank) {
  if (rank >= a.ranks or not is_peer<true>(a, rank)) return true;
  const bool relayed = relays<true>(a, rank);
  bool ok = wait_word(a, Op::kCombine, rank, relayed ? a.returned : a.relay_returned, rank, sh.epoch, 0) != 0;
  if (kRailPut and ok and relayed) {
    const u64 rows = *puts(a, put_expected(nodes(a), node_of(a, rank)));
    ok = wait_puts(a, Op::kCombine, rank, a.rail_rows, node_of(a, rank), sh.epoch, 0, rows);
  }
  return ok;
}

}  // namespace ep

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_rail_send(const __grid_constant__ ep::Args a) {
  ep::run<ep::Phase::kSend, true>(a);
}
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_rail_place(const __grid_constant__ ep::Args a) {
  ep::run<ep::Phase::kPlace, true>(a);
}

// Channels of all sources are dealt out to the blocks, and a block's to its teams.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_forward(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  __shared__ Relay relay;
  start(a, sh, Op::kDispatch);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, others = nodes(a) - 1;
  if (warp == 0 and not sh.stopped) {
    bool ok = await_sources(a, sh, relay, lane);
    if (lane == 0) sh.stopped = not ok;
  }
  __syncthreads();
  if (sh.stopped) return;
  Stage stage{stage_memory + warp * a.receive_stage, &sh.bars[warp]};
  const int items = relay.most * others, all = teams(items), id = warp % all;
  const Team team{id, warp / all, (int(blockDim.x / 32) - id + all - 1) / all};
  for (int item = blockIdx.x + gridDim.x * id; item < items; item += gridDim.x * all) {
    int channel = item / others, node = item % others;
    node += node >= own_node(a);
    if (channel < relay.channels[node] and not forward(a, sh, relay, stage, node, channel, team, lane)) return;
  }
}

extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_rail_return(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kCombine);
  allow_next();   // this block has read the epoch, so the next kernel may end it
  if (sh.stopped) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = int(a.send_parts);
  const int* plan = reinterpret_cast<const int*>(a.plan);
  const int records = plan[plan_row(a.ranks - 1, kChannels)];
  const int first = lane < a.ranks ? plan[plan_row(lane, 0)] : records;
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  Warps w = spread_warps();
  for (i64 unit = w.first; unit < i64(records) * parts; unit += w.step) {
    int record = int(unit / parts), source = __popc(__ballot_sync(kFullWarp, first <= record)) - 1;
    if (stays(a, source)) continue;
    int target = reinterpret_cast<const int*>(a.target)[record];
    u64 to = relay_row(a, relay_here(a, source), node_of(a, source),
                       target / int(a.max_tokens), target % int(a.max_tokens));
    send_back(a, stage, to, record, int(unit % parts), lane);
  }
  const i64 mode = stat_mode(a.ranks, a.mode);
  if (blockIdx.x == 0 and warp == 0) {
    int next = lane < a.ranks ? plan[plan_row(lane, kChannels)] : records, count = next - first;
    i64 bytes = stays(a, lane) ? 0 : combine_record_bytes(Payload(a.payload), a.hidden);
    if (lane < a.ranks) add_written(a, Op::kCombine, relay_here(a, lane), count, bytes, false);
    if (lane == 0) add_stat(a, mode + kStatRows * a.ranks + 1, 1);
    for (i64 e = lane; e < a.local_experts; e += 32)
      add_stat(a, stat_experts(a.ranks) + e, reinterpret_cast<const int*>(a.counts)[e]);
  }
  signal_as_one(a, int(a.ranks), [&](int source) {
    store_relaxed_sys(heap_word(a, relay_here(a, source), a.relay_returned, node_of(a, source) * a.gpus + a.rank % a.gpus),
                      signal_word(sh.epoch, 0));
  });
}

// This rank sums as a relay (senders), as an owner (receivers), or as one behind the other. The words that an owner awaits also
// say that every slot of this epoch has been read: a relay answers only after all GPUs of its node.
extern "C" __global__ void __launch_bounds__(ep::kThreads, 1) ep_rail_sum(const __grid_constant__ ep::Args a) {
  using namespace ep;
  __shared__ Shared sh;
  start(a, sh, Op::kCombine);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  Stage stage{stage_memory + warp * a.send_stage, &sh.bars[warp]};
  bool ok = not sh.stopped and (a.senders == 0 or relay_sums(a, sh, stage, lane));
  // The owner's launch behind a relay's has more blocks than can wait together, so that everything must be here when it begins.
  if (ok and (a.receivers != 0 or blockIdx.x == 0)) ok = await_answer(a, sh, threadIdx.x);
  if (a.receivers == 0) return;
  ok = __syncthreads_and(ok);
  stage.at = stage_memory + warp * a.receive_stage;
  const int groups = int(a.receive_groups), workers = warps / groups, group = warp / workers;
  for (int channel = blockIdx.x + gridDim.x * group; ok and group < groups and channel < a.channels; channel += gridDim.x * groups)
    sum_channel(a, stage, channel, warp % workers, workers, lane);
  if (not ok) poison_sums(a);
  await_previous();   // ep_rail_return, if it is just before: whoever follows this kernel follows that one too
}
