// Where everything lies in one rank's symmetric heap. The only C++ place with offsets, for host and device;
// ep_backend/layout.py is its Python counterpart and tests/core/test_layout.py holds the two equal.
//
// heap := abort words | lane 0 | lane 1.   lane := signal words | lines | dispatch payload | combine payload | put staging.
// Modes share payload memory dispatch with dispatch and combine with combine, inside one lane; signal words alias nothing.
// All sizes and offsets are bytes in 64 bits unless a name says otherwise.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define EP_HD __host__ __device__ __forceinline__
#else
#define EP_HD inline
#endif

namespace ep {

using i64 = int64_t;
using u64 = unsigned long long;   // the type that device atomics take

constexpr i64 kScaleGroup = 128;      // channels that share one FP8 scale
constexpr i64 kMaxTopK = 32;          // one warp lane a pick
constexpr i64 kRecordAlign = 32;      // a record starts on a sector, and bulk copies need 16
constexpr i64 kRegionAlign = 1024;
constexpr i64 kRailChannels = 4;      // independent tails of hybrid's rail hop
constexpr i64 kRingChannels = 24;     // most channels that share a ring of normal, one a thread block (CUDA)
constexpr i64 kChannels = 128;        // most streams, one a thread block, that a source's records travel in (CUDA)
constexpr i64 kLineTokens = 512;      // max_tokens of low_latency up to which its combine travels as lines (CUDA)
constexpr i64 kCountBits = 24;        // low bits of a signal word; the upper 40 hold the epoch
constexpr u64 kCountMask = (u64(1) << kCountBits) - 1;

EP_HD i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }
EP_HD i64 max_i64(i64 a, i64 b) { return a > b ? a : b; }
EP_HD i64 align_up(i64 n, i64 a) { return (n + a - 1) / a * a; }
EP_HD i64 ceil_div(i64 n, i64 d) { return (n + d - 1) / d; }

// One store writes epoch and count together; a receiver waits for its own epoch, so no word is ever reset.
EP_HD u64 signal_word(u64 epoch, u64 count) { return epoch << kCountBits | count; }
EP_HD u64 signal_epoch(u64 word) { return word >> kCountBits; }
EP_HD u64 signal_count(u64 word) { return word & kCountMask; }

enum class Payload : int { kBf16 = 0, kFp8 = 1, kFp8Ue8m0 = 2, kFp32 = 3 };

// One dispatched token on the wire: payload | scales | ids | weights | rows | source. `rows` is scratch of the receiver.
struct Record {
  i64 scales;    // fp32 [H/128], or UE8M0 exponents packed four to an int32 [ceil(H/512)]
  i64 ids;       // int32 [K]: global expert ids, -1 for none
  i64 weights;   // fp32 [K]
  i64 rows;      // int32 [K]
  i64 source;    // int32: source rank * max_tokens of the mode + token
  i64 bytes;
};

EP_HD i64 payload_bytes(Payload p, i64 hidden) {
  return p == Payload::kFp32 ? 4 * hidden : p == Payload::kBf16 ? 2 * hidden : hidden;
}
EP_HD i64 scale_bytes(Payload p, i64 hidden) {
  if (p == Payload::kFp8) return hidden / kScaleGroup * 4;
  if (p == Payload::kFp8Ue8m0) return ceil_div(hidden / kScaleGroup, 4) * 4;
  return 0;
}
EP_HD Record record(Payload p, i64 hidden, i64 top_k) {
  Record r{};
  r.scales = align_up(payload_bytes(p, hidden), 16);
  r.ids = align_up(r.scales + scale_bytes(p, hidden), kRecordAlign);
  r.weights = r.ids + 4 * top_k;
  r.rows = r.weights + 4 * top_k;
  r.source = r.rows + 4 * top_k;
  r.bytes = align_up(r.source + 4, kRecordAlign);
  return r;
}
// One combined row on the wire. FP8 dispatch returns bf16.
EP_HD i64 combine_record_bytes(Payload p, i64 hidden) {
  return align_up(p == Payload::kFp32 ? 4 * hidden : 2 * hidden, kRecordAlign);
}

// What a buffer is made for. Equal on all ranks; the constructor compares.
struct Shape {
  i64 ranks, gpus_per_node, experts, top_k, hidden;
  i64 normal, direct, low_latency, hybrid;   // max_tokens a rank of each mode; 0: the mode is not there
  i64 per_expert;                            // 1: low_latency's per_expert form can be used
  i64 staging;                               // 1: some peer is reached by puts, which need a registered source
  i64 ring_slots;                            // records a ring of normal holds
  i64 record_bytes, combine_bytes;           // the widest of the payloads it serves

  EP_HD i64 nodes() const { return ranks / gpus_per_node; }
  EP_HD i64 local_experts() const { return experts / ranks; }
  EP_HD i64 rank_copies() const { return min_i64(ranks, top_k); }           // most ranks one token can go to
  EP_HD i64 node_copies() const { return min_i64(nodes(), top_k); }
  EP_HD i64 gpu_copies() const { return min_i64(gpus_per_node, top_k); }
  EP_HD i64 line_row() const {                                              // bytes of a row as lines; 0: none travel so
    return low_latency > kLineTokens or per_expert ? 0 : combine_bytes;
  }
  EP_HD i64 line_bytes() const { return low_latency * rank_copies() * line_row(); }
  EP_HD i64 rail_limit() const { return ceil_div(hybrid, kRailChannels); }  // tokens of one channel
};

// Signal words of one lane; each array is u64, indexed as stated. PROTOCOL.md says who writes each, when, and what it frees.
struct Words {
  i64 intent;           // [R]      by source rank: epoch and the call's mode, layout and payload
  i64 arrival;          // [R]      by source rank: its records of this epoch are here (direct, low_latency, hybrid's last hop)
  i64 expert_arrival;   // [e][R]   the same for each local expert (low_latency, per_expert form)
  i64 returned;         // [R]      by rank: its combine rows are here, and my dispatch slots there are free
  i64 stream_count;     // [R][128+1] by source rank and channel: records it will bring; last, the tokens of one channel
  i64 stream_tail;      // [R][128] by source rank and channel: records written so far (direct, low_latency on CUDA)
  i64 stream_returned;  // [R][128] by rank and my channel: combine rows written so far
  i64 rail_tail;        // [N][128] by source node and channel: records written so far (hybrid)
  i64 rail_total;       // [N][128+1] by source node and channel: records there will be; last, as in stream_count (hybrid)
  i64 rail_arrived;     // [N][128] by source node and channel: records put, over all epochs (hybrid by puts)
  i64 rail_rows;        // [N]      by remote node: combine rows put, over all epochs (hybrid by puts)
  i64 relay_returned;   // [N][G]   by source node and GPU of my node: its partial sums are here (hybrid)
  i64 count;            // [R]      by source rank: records its stream will bring (normal)
  i64 rail_count;       // [N][Q]   by source node and ring channel: records its rail stream will bring (normal)
  // normal's rings, each word by ring channel too (Q); the host fabric has one.
  i64 ring_tail;        // [R][Q]   by source rank: records written to its ring
  i64 ring_head;        // [N][G][Q] by source node and destination GPU: records the destination has consumed
  i64 rail_ring_tail;   // [N][Q]   by source node
  i64 rail_ring_head;   // [N][Q]   by remote node
  i64 back_tail;        // [N][G][Q] by source node and GPU: partial sums written to my relay ring
  i64 back_head;        // [R][Q]   by source rank: partial sums its relay has consumed
  i64 rail_back_tail;   // [N][Q]   by remote node
  i64 rail_back_head;   // [N][Q]   by source node
  i64 bytes;
};

EP_HD i64 take(i64& at, i64 words) {
  i64 here = at;
  at = align_up(at + 8 * words, 128);   // no two arrays in one cache line: their writers differ
  return here;
}
EP_HD Words words(const Shape& s) {
  Words w{};
  i64 at = 0, R = s.ranks, N = s.nodes();
  w.intent = take(at, R);
  w.arrival = take(at, R);
  w.expert_arrival = take(at, s.per_expert ? s.experts : 0);
  w.returned = take(at, R);
  w.stream_count = take(at, R * (kChannels + 1));
  w.stream_tail = take(at, R * kChannels);
  w.stream_returned = take(at, R * kChannels);
  w.rail_tail = take(at, N * kChannels);
  w.rail_total = take(at, N * (kChannels + 1));
  w.rail_arrived = take(at, s.staging ? N * kChannels : 0);
  w.rail_rows = take(at, s.staging ? N : 0);
  w.relay_returned = take(at, R);
  w.count = take(at, R);
  w.rail_count = take(at, N * kRingChannels);
  w.ring_tail = take(at, R * kRingChannels);
  w.ring_head = take(at, R * kRingChannels);
  w.rail_ring_tail = take(at, N * kRingChannels);
  w.rail_ring_head = take(at, N * kRingChannels);
  w.back_tail = take(at, R * kRingChannels);
  w.back_head = take(at, R * kRingChannels);
  w.rail_back_tail = take(at, N * kRingChannels);
  w.rail_back_head = take(at, N * kRingChannels);
  w.bytes = align_up(at, kRegionAlign);
  return w;
}

// Payload bytes one mode needs in a lane.
struct ModeBytes { i64 dispatch, combine; };

EP_HD ModeBytes slot_mode_bytes(const Shape& s, i64 max_tokens, bool per_expert) {   // direct, low_latency
  i64 slots = per_expert ? s.experts : s.ranks;                                     // experts = e x R
  i64 copies = per_expert ? s.top_k : s.rank_copies();
  return {slots * max_tokens * s.record_bytes, copies * max_tokens * s.combine_bytes};
}
EP_HD ModeBytes hybrid_bytes(const Shape& s) {
  i64 rail = s.nodes() * kRailChannels * s.rail_limit();
  return {(rail + s.ranks * s.hybrid) * s.record_bytes,
          (rail * s.gpu_copies() + s.node_copies() * s.hybrid) * s.combine_bytes};
}
EP_HD ModeBytes normal_bytes(const Shape& s) {
  if (s.normal == 0) return {0, 0};
  i64 rings = s.ranks + (s.nodes() > 1 ? s.nodes() : 0);
  return {rings * s.ring_slots * s.record_bytes, rings * s.ring_slots * s.combine_bytes};
}

struct Lane { i64 words, lines, dispatch, combine, staging, bytes; };   // offsets from the lane's start

EP_HD Lane lane(const Shape& s) {
  ModeBytes d = slot_mode_bytes(s, s.direct, false), h = hybrid_bytes(s), n = normal_bytes(s);
  ModeBytes l = slot_mode_bytes(s, s.low_latency, false);
  if (s.per_expert) {
    ModeBytes x = slot_mode_bytes(s, s.low_latency, true);
    l = {max_i64(l.dispatch, x.dispatch), max_i64(l.combine, x.combine)};
  }
  i64 dispatch = max_i64(max_i64(d.dispatch, l.dispatch), max_i64(h.dispatch, n.dispatch));
  i64 combine = max_i64(max_i64(d.combine, l.combine), max_i64(h.combine, n.combine));
  Lane a{};
  a.words = 0;
  a.lines = words(s).bytes;
  a.dispatch = align_up(a.lines + s.line_bytes(), kRegionAlign);
  a.combine = align_up(a.dispatch + dispatch, kRegionAlign);
  a.staging = align_up(a.combine + combine, kRegionAlign);
  // A put reads from registered memory: its record, and a relay's sums for the other nodes.
  i64 staging = s.staging ? s.hybrid * (s.record_bytes + s.nodes() * s.combine_bytes) : 0;
  a.bytes = align_up(a.staging + staging, kRegionAlign);
  return a;
}

EP_HD i64 abort_bytes(const Shape& s) { return align_up(8 * s.ranks, kRegionAlign); }   // [R] by rank that gave up
EP_HD i64 lane_offset(const Shape& s, i64 lane_idx) { return abort_bytes(s) + lane_idx * lane(s).bytes; }
EP_HD i64 heap_bytes(const Shape& s, i64 lanes) { return lane_offset(s, lanes); }

// Slot indices inside a lane's payload areas; multiply by the call's record size. A segment always has room for the
// widest record, so its base does not depend on the payload of the call.
EP_HD i64 source_segment(const Shape& s, i64 source, i64 max_tokens) { return source * max_tokens * s.record_bytes; }
EP_HD i64 expert_segment(const Shape& s, i64 local_expert, i64 source, i64 max_tokens) {
  return (local_expert * s.ranks + source) * max_tokens * s.record_bytes;
}
EP_HD i64 rail_segment(const Shape& s, i64 source_node, i64 channel) {   // behind hybrid's [R][Tmax] slots
  return (s.ranks * s.hybrid + (source_node * kRailChannels + channel) * s.rail_limit()) * s.record_bytes;
}
EP_HD i64 ring_segment(const Shape& s, i64 ring) { return ring * s.ring_slots * s.record_bytes; }
EP_HD i64 combine_segment(const Shape& s, i64 copy, i64 max_tokens) { return copy * max_tokens * s.combine_bytes; }
EP_HD i64 relay_segment(const Shape& s, i64 source_node, i64 copy) {     // behind hybrid's [min(N,K)][Tmax] rows
  i64 rail = kRailChannels * s.rail_limit();
  return (s.node_copies() * s.hybrid + (source_node * s.gpu_copies() + copy) * rail) * s.combine_bytes;
}
EP_HD i64 back_segment(const Shape& s, i64 ring) { return ring * s.ring_slots * s.combine_bytes; }

}  // namespace ep
