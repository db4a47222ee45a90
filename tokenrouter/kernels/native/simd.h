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

template <class V>
TR_INLINE f32x16 load16(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
TR_INLINE f32x16 load16(const bf16* p) {
    u16x16 h;
    std::memcpy(&h, p, sizeof h);
#if TR_X86
    if constexpr (V::is_avx512) {
        u32x16 wide;
        __asm__("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(h));
        return (f32x16)(wide << 16);
    }
#endif
    return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

template <class V>
TR_INLINE i32x16 widen(i8x16 bytes) {
#if TR_X86
    if constexpr (V::is_avx512) {
        i32x16 wide;
        __asm__("vpmovsxbd %1, %0" : "=v"(wide) : "v"(bytes));
        return wide;
    }
#endif
    return __builtin_convertvector(bytes, i32x16);
}

// Round to nearest even; NaN stays NaN.
TR_INLINE u32x16 round_bits(u32x16 u) {
    const u32x16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const u32x16 is_nan = (u32x16)((u & 0x7fffffffu) > 0x7f800000u);
    return (is_nan & 0x7fc0u) | (~is_nan & rounded);
}

template <class V>
TR_INLINE u16x16 narrow(f32x16 v) {
#if TR_X86
    if constexpr (V::is_avx512) {
        u16x16 h;
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(v));
        return h;
    }
#endif
    return __builtin_convertvector(round_bits((u32x16)v), u16x16);
}

template <class V>
TR_INLINE void store16(float* p, f32x16 v) {
    std::memcpy(p, &v, sizeof v);
}

template <class V>
TR_INLINE void store16(bf16* p, f32x16 v) {
    const u16x16 h = narrow<V>(v);
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
template <class V, typename T>
TR_INLINE f32x16 load_some(const T* p, int64_t n) {
    T part[16] = {};
    std::memcpy(part, p, size_t(n) * sizeof(T));
    return load16<V>(part);
}

template <class V, typename T>
TR_INLINE void store_some(T* p, f32x16 v, int64_t n) {
    T part[16];
    store16<V>(part, v);
    std::memcpy(p, part, size_t(n) * sizeof(T));
}

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

TR_INLINE float sum16(f32x16 v) {
    const f32x8 w = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const f32x4 x = __builtin_shufflevector(w, w, 0, 1, 2, 3) + __builtin_shufflevector(w, w, 4, 5, 6, 7);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

// Keeps a product from being fused with the sum after it: its rounding is the same on every instruction set.
template <class V>
TR_INLINE f32x16 unfused(f32x16 v) {
#if TR_X86
    if constexpr (V::is_avx512) {
        __asm__("" : "+v"(v));
        return v;
    }
#endif
    __asm__("" : "+m"(v));
    return v;
}

// Rounds half to even; |v| < 2^22.
template <class V>
TR_INLINE i32x16 round_to_int(f32x16 v) {
#if TR_X86
    if constexpr (V::is_avx512) {
        i32x16 n;
        __asm__("vcvtps2dq %1, %0" : "=v"(n) : "v"(v));
        return n;
    }
#endif
    return (i32x16)(unfused<V>(v) + 12582912.0f) - 0x4b400000;
}

// a where x < y, else b: by vectors of the processor's size, as larger ones are compared number by number.
template <class V>
TR_INLINE f32x16 select_less(f32x16 x, f32x16 y, f32x16 a, f32x16 b) {
#if TR_X86
    if constexpr (V::is_avx512) {
        __asm__("vcmpltps %2, %1, %%k1\n\tvblendmps %3, %4, %0%{%%k1%}"
                : "=v"(a)
                : "v"(x), "v"(y), "v"(a), "v"(b)
                : "k1");
        return a;
    }
#endif
    typedef float Part __attribute__((vector_size(V::vector_lanes * sizeof(float))));
    constexpr int64_t count = kLanes / V::vector_lanes;
    Part xs[count], ys[count], as[count], bs[count];
    std::memcpy(xs, &x, sizeof x);
    std::memcpy(ys, &y, sizeof y);
    std::memcpy(as, &a, sizeof a);
    std::memcpy(bs, &b, sizeof b);
    for (int64_t i = 0; i < count; ++i) as[i] = xs[i] < ys[i] ? as[i] : bs[i];
    std::memcpy(&a, as, sizeof a);
    return a;
}

// The larger of each pair; b where they do not compare.
template <class V>
TR_INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if TR_X86
    if constexpr (V::is_avx512) {
        __asm__("vmaxps %1, %2, %0" : "=v"(a) : "v"(b), "v"(a));
        return a;
    }
#endif
    return select_less<V>(b, a, a, b);
}

TR_INLINE float larger(float a, float b) { return a > b ? a : b; }

TR_INLINE float max_of(f32x16 v) {
    const f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    const f32x8 b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    const f32x8 w = a > b ? a : b;
    const f32x4 c = __builtin_shufflevector(w, w, 0, 1, 2, 3), d = __builtin_shufflevector(w, w, 4, 5, 6, 7);
    const f32x4 x = c > d ? c : d;
    return larger(larger(x[0], x[2]), larger(x[1], x[3]));
}

// exp(x) to 2 units in the last place for x <= 88; below -87.3 it is 0 (so is exp of -inf). NaN stays NaN.
template <class V>
TR_INLINE f32x16 exp16(f32x16 x) {
    const f32x16 clamped = max16<V>(splat(-87.3f), x);
    const f32x16 magic = splat(12582912.0f);  // adding it rounds, and leaves the integer in the low bits
    const f32x16 shifted = clamped * 1.44269504088896341f + magic;
    const f32x16 n = shifted - magic;
    const f32x16 r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const f32x16 result = (f32x16)((i32x16)p + ((i32x16)shifted << 23));
    return select_less<V>(x, splat(-87.3f), f32x16{}, result);
}

// 2^x to 3e-6, for results that bf16 holds: x <= 127; below -126 it is 2^-126.
template <class V>
TR_INLINE f32x16 exp2_for_bf16(f32x16 x) {
    const f32x16 magic = splat(12582912.0f);
    const f32x16 clamped = max16<V>(splat(-126.0f), x);
    const f32x16 shifted = clamped + magic;
    const f32x16 r = clamped - (shifted - magic);
    f32x16 p = splat(0.0095701f);
    p = p * r + 0.05591786f;
    p = p * r + 0.24024745f;
    p = p * r + 0.69312181f;
    p = p * r + 0.99999926f;
    return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

constexpr float kLog2e = 1.44269504088896341f;

template <class V>
TR_INLINE f32x16 silu(f32x16 x) {
    const f32x16 least = splat(-88.0f), clamped = max16<V>(least, x);
    return select_less<V>(x, least, f32x16{}, clamped / (1.0f + exp16<V>(-clamped)));
}

// 1 / x to 2^-26 where the processor has an estimate (a division takes four times as long), for normal results.
template <class V>
TR_INLINE f32x16 reciprocal(f32x16 x) {
#if TR_X86
    if constexpr (V::is_avx512) {
        f32x16 r;
        __asm__("vrcp14ps %1, %0" : "=v"(r) : "v"(x));
        return r * (2.0f - x * r);
    }
#endif
    return 1.0f / x;
}

// silu to what bf16 holds.
template <class V>
TR_INLINE f32x16 silu_for_bf16(f32x16 x) {
    const f32x16 least = splat(-87.0f), clamped = max16<V>(least, x);
    return select_less<V>(x, least, f32x16{}, clamped * reciprocal<V>(1.0f + exp2_for_bf16<V>(clamped * -kLog2e)));
}

}  // namespace tr
