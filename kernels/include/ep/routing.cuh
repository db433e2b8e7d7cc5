// Who gets which token, and in which slot. Slots are in token order, so everything is the same from run to run.
#pragma once
#include "ep/rows.cuh"
#include "ep/signal.cuh"

namespace ep {

// The tokens of one channel. Sender and owner split alike, so a channel's combine rows are those of its tokens.
__device__ __forceinline__ Range channel_tokens(const Args& a, int channel) {
  return {min(int(a.tokens), int(a.chunk) * channel), min(int(a.tokens), int(a.chunk) * (channel + 1))};
}
// a / b for a below 2^20, where the half keeps clear of rounding.
__device__ __forceinline__ int quotient(int a, int b) { return int((float(a) + 0.5f) * __frcp_rn(float(b))); }

// One pick's expert, -1 for none. Ids outside the model count as none and are reported by who sends them.
__device__ __forceinline__ i64 raw_pick(const Args& a, i64 at) {
  return a.ids64 ? reinterpret_cast<const i64*>(a.ids)[at] : reinterpret_cast<const int*>(a.ids)[at];
}
__device__ __forceinline__ bool is_expert(const Args& a, i64 id) { return u64(id) < u64(a.local_experts * a.ranks); }

__device__ __forceinline__ int owner(const Args& a, int id) { return quotient(id, int(a.local_experts)); }

// The ranks that own a token's experts, one bit a rank. So many loads are in flight, which takes two registers each.
template <int kLoads = 8>
__device__ __forceinline__ u32 token_ranks(const Args& a, i64 token) {
  u32 mask = 0;
  int top_k = int(a.top_k);
  for (int first = 0; first < top_k; first += kLoads) {
    i64 id[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) id[k] = first + k < top_k ? raw_pick(a, token * top_k + first + k) : -1;
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (is_expert(a, id[k])) mask |= 1u << owner(a, int(id[k]));
  }
  return mask;
}

// Ranks of a node are consecutive; rank r's rail is the ranks of other nodes in r's place.
__device__ __forceinline__ int node_of(const Args& a, int rank) { return rank / int(a.gpus); }
__device__ __forceinline__ int own_node(const Args& a) { return node_of(a, int(a.rank)); }
__device__ __forceinline__ int nodes(const Args& a) { return int(a.ranks / a.gpus); }
__device__ __forceinline__ int rail_peer(const Args& a, int node) { return node * int(a.gpus) + int(a.rank) % int(a.gpus); }
__device__ __forceinline__ int relay_here(const Args& a, int source) {
  return own_node(a) * int(a.gpus) + source % int(a.gpus);
}
__device__ __forceinline__ u32 node_ranks(const Args& a, int node) {
  return (a.gpus == 32 ? ~0u : (1u << int(a.gpus)) - 1) << node * int(a.gpus);
}

// Where a token's records go at first. hybrid: to its ranks of this node, and to this rank's rail peer in every other node
// that has some.
template <bool kRails>
__device__ __forceinline__ u32 first_hop(const Args& a, u32 ranks) {
  if (not kRails) return ranks;
  u32 to = ranks & node_ranks(a, own_node(a));
  for (int n = 0; n < nodes(a); ++n)
    if (n != own_node(a) and (ranks & node_ranks(a, n)) != 0) to |= 1u << rail_peer(a, n);
  return to;
}

// 32 tokens from `first` on, transposed: lane r gets a bit for each of them that goes to rank r.
template <bool kRails = false>
__device__ __forceinline__ u32 block_of_tokens(const Args& a, int first, int last, int lane) {
  u32 mask = first + lane < last ? first_hop<kRails>(a, token_ranks(a, first + lane)) : 0, mine = 0;
  for (int r = 0; r < a.ranks; ++r) {
    u32 tokens = __ballot_sync(kFullWarp, mask >> r & 1);
    if (lane == r) mine = tokens;
  }
  return mine;
}
__device__ __forceinline__ u32 below(int bit) { return (1u << bit) - 1; }   // bit < 32

}  // namespace ep
