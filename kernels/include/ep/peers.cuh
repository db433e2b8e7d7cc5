// Where a rank's records go at first, and what it tells the ranks there.
#pragma once
#include "ep/routing.cuh"
#include "ep/transport.cuh"

namespace ep {

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

}  // namespace ep
