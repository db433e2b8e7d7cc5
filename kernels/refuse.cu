// A rank refuses a dispatch before it sends anything: its round does not take place here, and peers that called it must not take
// this rank's next call for its part of it.
#include "ep/transport.cuh"

// One warp, lane r for rank r. Peers look for the intent of every source in every dispatch, so that they need no look for this.
// Nothing was written before that they could read, so that a relaxed store is enough.
extern "C" __global__ void __launch_bounds__(32, 1) ep_refuse(const __grid_constant__ ep::Args a) {
  using namespace ep;
  LaneState* state = reinterpret_cast<LaneState*>(a.state);
  const u64 epoch = load_relaxed_sys(&state->epoch);
  const int rank = threadIdx.x;
  if (rank < a.ranks) tell(a, a.heap[rank] == 0, rank, a.intent, a.rank, signal_word(epoch, kRefused));
  __syncwarp();
  if (rank == 0) store_relaxed_sys(&state->epoch, epoch + 1);
}
