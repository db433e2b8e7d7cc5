// A record becomes rows.
#pragma once
#include "ep/block.cuh"
#include "ep/routing.cuh"
#include "ep/trace.cuh"

namespace ep {

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

}  // namespace ep
