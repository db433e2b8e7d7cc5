// What the host hands to a kernel: one struct by value, 64-bit fields only, so that
// ep_backend/fabric/nvshmem/launch.py can mirror it as a list of names (a test compares the two).
#pragma once
#include "ep/layout.h"

namespace ep {

constexpr int kMaxRanks = 32;   // one warp lane a rank
constexpr int kThreads = 1024;   // at most
constexpr int kWarps = kThreads / 32;

// An intent word's count: what ranks must agree on (payload 2 bits, layout 1, mode 2, handle 1), then the sender's channels - 1 in 7,
// and a proposal in the highest 8.
constexpr int kSignatureBits = 6, kRepeats = 1 << 5;   // kRepeats: counts are those of an earlier dispatch
constexpr u64 kSignatureMask = (u64(1) << kSignatureBits) - 1;
constexpr int kProposalBits = 16;
constexpr u64 kRefused = kCountMask;   // instead of all that, and no call's: this rank does not take part in the epoch
EP_HD int intent_channels(u64 intent) { return int(intent >> kSignatureBits & (kChannels - 1)) + 1; }

struct Args {
  u64 heap[kMaxRanks];   // each rank's symmetric heap as this GPU maps it

  // The buffer.
  i64 rank, ranks, local_experts, top_k, hidden;
  u64 control;           // Control
  u64 report;            // mapped host memory: Report
  u64 stats;             // u64[]: Stats
  i64 timeout_ns;

  // Its lane and mode; byte offsets from a heap's start.
  i64 lane, mode, max_tokens;
  u64 state;             // LaneState of this lane
  i64 intent, stream_count, stream_tail, stream_returned, expert_arrival, returned;
  i64 rail_tail, rail_total, relay_returned;
  i64 rail_arrived, rail_rows;                 // by puts: words,
  i64 staging, staged_rows;                    // and what puts read: this rank's records, and its sums as a relay
  u64 puts;                                    // by puts: put_base, put_expected
  i64 slots, slot_segment;   // dispatch payload, and bytes of one source's segment (normal: of a ring)
  i64 lines, line_row;       // low_latency: combined rows as lines, and bytes of one
  i64 area, area_segment;    // combine payload, and bytes of one copy's segment (normal: of a ring)
  i64 gpus;                  // of a node
  i64 rail_slots, rail_segment;      // hybrid: slots of the rail hop, and bytes of one source node's
  i64 relay_area, relay_segment, relay_node;   // hybrid: partial sums at the relay, bytes of one copy's and one source node's
  i64 rail_count, ring_tail, ring_head, rail_ring_tail, rail_ring_head;        // normal
  i64 back_tail, back_head, rail_back_tail, rail_back_head;
  i64 ring_share;            // normal: slots of a ring that a channel has
  i64 payload, signature;
  u64 agreed;            // mapped u64: the proposal of all ranks in the last dispatch, else 0

  // The call.
  i64 masked, cast, ids64;
  i64 ordered;           // masked: ep_order has given rows to picks, in order of source and token; else first come, first served
  i64 tokens, most_tokens;   // of this rank, and the most that any may send
  u64 x, scales_in, ids, weights;
  u64 rows, scales, out_ids, out_weights, counts;
  i64 scale_stride;      // masked: elements between the columns of scales
  i64 fill;              // compact: 1 if ids behind the last row are read
  u64 host_rows;         // mapped u64, gets the number of rows + 1; 0: nobody asks
  u64 plan;              // i32: Plan
  u64 target;            // i32 [R x max_tokens]: by received record, its row in the owner's combine payload
  u64 position;          // i32 [R x max_tokens][K]: by received record and pick, the masked row or -1
  u64 pick_weight;       // f32 likewise
  u64 relay;             // hybrid: i32 [N][max_tokens][3] by source node and rail slot, see relay_entry;
                         // normal: u32 [N][max_tokens] by forwarded record: the GPUs of this node that got it, one bit each
  u64 kept;              // normal, ordered: [capacity] records in order of source and token, not yet given rows
  i64 capacity;          // rows of the outputs (masked: of an expert)
  i64 channels, chunk;   // this rank's dispatch: its blocks, and tokens of each
  i64 stays;             // combine: this rank's own compact rows are read from y when they are summed
  u64 y, out;

  // The launch. Warps [0, senders) send and the next one publishes; warps [receive_from, + receivers) receive.
  i64 senders, receive_from, receivers;   // 0 senders or receivers: not this phase
  i64 send_stage, receive_stage;          // bytes of shared memory of a sending and a receiving warp
  i64 receive_at;                         // where the receivers' begins
  i64 send_parts, receive_parts;          // warps that share a row
  i64 receive_groups;                     // combine: channels that a block sums at a time
  i64 staged;                             // dispatch: rows come through shared memory, not straight from their tensor
  i64 part;                               // normal's dispatch: Part
  i64 advance;                            // combine: the lane's epoch ends with this launch
};

struct LaneState {
  u64 epoch;     // of the round under way or to come; 1 at first
  u64 readers;   // blocks of the advancing kernel that have read it
  u64 done;      // blocks of a kernel that signals as a whole and have ended
};

// What a dispatch leaves for later kernels, i32 each: by source and channel, [R][kChannels + 1], the row of its first
// record (a channel that is not there is empty), by source, [R], the slots between its channels, and normal's round that counted.
EP_HD i64 plan_row(i64 source, i64 channel) { return source * (kChannels + 1) + channel; }
EP_HD i64 plan_chunk(i64 ranks, i64 source) { return ranks * (kChannels + 1) + source; }
EP_HD i64 plan_round(i64 ranks) { return plan_chunk(ranks, ranks); }
EP_HD i64 plan_words(i64 ranks) { return plan_round(ranks) + 1; }

// The tokens of a channel that a launch of normal's dispatch sends: all; or as many as each ring has slots for, which wait for
// nobody; or those behind them.
enum class Part : int { kAll, kFirst, kRest };

// One a buffer.
struct Control {
  u64 proposal;      // carried in intent words; the host sets it
  u64 failed;        // nonzero once a wait has ended without its word; kernels then exit at once
  u64 mode, epoch;   // of the last dispatch; the mode plus 1
};

// First error of this rank, in host memory so that it can be read while kernels run.
enum class Report : int { kKind, kOp, kMode, kLane, kEpoch, kPeer, kExpected, kSeen, kWords };
enum class Fault : u64 { kNone, kTimeout, kDisagree, kAbort, kBadId, kSkipped, kTooMany, kOtherRound };
enum class Op : int { kDispatch, kCombine };

// Counters, u64 each. A mode has four rows of R (records and bytes of both operations, by destination) and scalars:
// dispatches, combines, tokens, most tokens of one call; records and bytes forwarded for other ranks, of both operations.
constexpr int kStatRows = 4, kStatScalars = 8, kStatForwarded = 4;
EP_HD i64 stat_mode(i64 ranks, i64 mode) { return mode * (kStatRows * ranks + kStatScalars); }
EP_HD i64 stat_waits(i64 ranks) { return stat_mode(ranks, 4); }          // [R] nanoseconds
EP_HD i64 stat_experts(i64 ranks) { return stat_waits(ranks) + ranks; }  // [e] rows

}  // namespace ep
