// The two bf16 operations that kernels use.
#pragma once
#include "simt.h"

struct __nv_bfloat162 { uint16_t x, y; };

inline __nv_bfloat162 __habs2(__nv_bfloat162 v) { return {uint16_t(v.x & 0x7fff), uint16_t(v.y & 0x7fff)}; }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {   // a number beats NaN
  auto most = [](uint16_t p, uint16_t q) {
    float f = __uint_as_float(unsigned(p) << 16), g = __uint_as_float(unsigned(q) << 16);
    return f != f ? q : g != g ? p : f > g ? p : q;
  };
  return {most(a.x, b.x), most(a.y, b.y)};
}
