// The puts that kernels use, as far as one machine can play them: a thread delivers them late and in any order.
#pragma once
#include "simt.h"

enum { NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD };

namespace simt {
void put_signal(void* to, const void* from, size_t bytes, uint64_t* word, uint64_t value, int op, int pe);
}

inline void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes, uint64_t* word, uint64_t value, int op, int pe) {
  __syncwarp();
  if (simt_lane() == 0) simt::put_signal(to, from, bytes, word, value, op, pe);
  __syncwarp();
}
inline void nvshmemx_signal_op(uint64_t* word, uint64_t value, int op, int pe) {
  simt::put_signal(nullptr, nullptr, 0, word, value, op, pe);
}
