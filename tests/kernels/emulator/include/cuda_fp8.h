// The one FP8 conversion that kernels use: to e4m3, nearest even, saturating.
#pragma once
#include "simt.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline uint8_t simt_e4m3(float v) {
  unsigned sign = __float_as_uint(v) >> 31 << 7;
  float a = std::fabs(v);
  if (a != a) return uint8_t(sign | 0x7f);
  if (a >= 464.f) return uint8_t(sign | 0x7e);   // half way between 448 and what would be next
  if (a == 0) return uint8_t(sign);
  int exponent;
  std::frexp(a, &exponent);                      // a = m * 2^exponent, m in [1/2, 1)
  int least = exponent - 1 < -6 ? -6 : exponent - 1;
  float units = std::nearbyint(std::ldexp(a, 3 - least));   // of the last bit
  unsigned code = unsigned(units) + (unsigned(least + 6) << 3);
  return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return uint16_t(simt_e4m3(v.x) | simt_e4m3(v.y) << 8);
}
