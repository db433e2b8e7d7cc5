// Every function of layout.h behind C calls, for test_layout.py.
#include <cstring>

#include "ep/layout.h"

using namespace ep;

extern "C" {

// round trip of one signal word
void dump_signal(u64 epoch, u64 count, u64* out) {
  out[0] = signal_word(epoch, count);
  out[1] = signal_epoch(out[0]);
  out[2] = signal_count(out[0]);
}

void dump_record(int payload, i64 hidden, i64 top_k, i64* out) {
  Payload p = Payload(payload);
  Record r = record(p, hidden, top_k);
  const i64 values[] = {payload_bytes(p, hidden), scale_bytes(p, hidden), combine_record_bytes(p, hidden),
                        r.scales, r.ids, r.weights, r.rows, r.source, r.bytes};
  for (i64 v : values) *out++ = v;
}

// Fields of Words, then of Lane, in their order; returns how many values.
i64 dump_structs(const Shape* shape, i64* out) {
  Words w = words(*shape);
  Lane l = lane(*shape);
  std::memcpy(out, &w, sizeof w);
  std::memcpy(out + sizeof w / 8, &l, sizeof l);
  return (sizeof w + sizeof l) / 8;
}

// `at`: rank, local expert, node, channel, ring, copy, relay copy, lane; returns how many values.
i64 dump_shape(const Shape* shape, const i64* at, i64* out) {
  const Shape& s = *shape;
  ModeBytes n = normal_bytes(s), d = slot_mode_bytes(s, s.direct, false), h = hybrid_bytes(s),
            r = slot_mode_bytes(s, s.low_latency, false), e = slot_mode_bytes(s, s.low_latency, true);
  const i64 values[] = {
      s.nodes(), s.local_experts(), s.rank_copies(), s.node_copies(), s.gpu_copies(), s.rail_limit(),
      n.dispatch, n.combine, d.dispatch, d.combine, h.dispatch, h.combine, r.dispatch, r.combine, e.dispatch, e.combine,
      abort_bytes(s), lane_offset(s, at[7]), heap_bytes(s, 2),
      source_segment(s, at[0], s.direct), expert_segment(s, at[1], at[0], s.low_latency),
      rail_segment(s, at[2], at[3]), ring_segment(s, at[4]), combine_segment(s, at[5], s.hybrid),
      relay_segment(s, at[2], at[6]), back_segment(s, at[4])};
  std::memcpy(out, values, sizeof values);
  return sizeof values / 8;
}

}  // extern "C"
