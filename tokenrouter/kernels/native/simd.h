// Portable vectors of 16 floats, bfloat16 conversion, exp. Everything here is inlined into a body that TR_EACH_ISA
// compiles for each instruction set, so it is written without intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

#include "native/isa.h"

namespace tr {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

constexpr int64_t kLanes = 16;

TR_INLINE f32x16 splat(float x) { return f32x16{} + x; }

TR_INLINE f32x16 load16(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

TR_INLINE f32x16 load16(const bf16* p) {
    u16x16 h;
    std::memcpy(&h, p, sizeof h);
    return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

TR_INLINE void store16(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// Round to nearest even; NaN stays NaN.
TR_INLINE u32x16 round_bits(u32x16 u) {
    const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const u32x16 is_nan = (u32x16)((u & 0x7fffffffu) > 0x7f800000u);
    return (is_nan & 0x7fc0u) | (~is_nan & rounded);
}

TR_INLINE void store16(bf16* p, f32x16 v) {
    const u16x16 h = __builtin_convertvector(round_bits((u32x16)v), u16x16);
    std::memcpy(p, &h, sizeof h);
}

TR_INLINE float to_float(float x) { return x; }

TR_INLINE float to_float(bf16 x) {
    const uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

TR_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}

TR_INLINE void from_float(float x, float* p) { *p = x; }

TR_INLINE void from_float(float x, bf16* p) {
    const uint32_t u = bits_of(x);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    p->bits = is_nan ? 0x7fc0 : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The first n (0 .. 15) of 16 values; the others are zero. Never reads past p + n.
template <typename T>
TR_INLINE f32x16 load_some(const T* p, int64_t n) {
    T part[16] = {};
    std::memcpy(part, p, size_t(n) * sizeof(T));
    return load16(part);
}

template <typename T>
TR_INLINE void store_some(T* p, f32x16 v, int64_t n) {
    T part[16];
    store16(part, v);
    std::memcpy(p, part, size_t(n) * sizeof(T));
}

TR_INLINE float sum16(f32x16 v) {
    float part[16], total = 0;
    std::memcpy(part, &v, sizeof v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) part[i] += part[i + step];
    total = part[0];
    return total;
}

TR_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

TR_INLINE float max_of(f32x16 v) {
    float part[16];
    std::memcpy(part, &v, sizeof v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; ++i) part[i] = part[i] > part[i + step] ? part[i] : part[i + step];
    return part[0];
}

// exp(x) to 2 units in the last place for x <= 88; below -87.3 it is 0 (so is exp of -inf). NaN stays NaN.
TR_INLINE f32x16 exp16(f32x16 x) {
    const f32x16 low = splat(-87.3f);
    const i32x16 underflow = x < low;
    const f32x16 clamped = underflow ? low : (x > 88.0f ? splat(88.0f) : x);
    const f32x16 magic = splat(12582912.0f);  // adding it rounds to an integer
    const f32x16 n = (clamped * 1.44269504088896341f + magic) - magic;
    const f32x16 r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
    const f32x16 result = p * (f32x16)exponent;
    return underflow ? f32x16{} : result;
}

}  // namespace tr
