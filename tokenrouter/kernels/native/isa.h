// Instruction sets: found at run time, one function body compiled for each.
#pragma once

#include <cstdint>

#define TR_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define TR_X86 1
#define TR_AVX2 __attribute__((target("avx2,fma")))
#define TR_AVX512                                                                                  \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,"     \
                          "prefer-vector-width=512")))
#define TR_AMX                                                                                     \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,"     \
                          "prefer-vector-width=512,amx-tile,amx-int8,amx-bf16")))
#else
#define TR_X86 0
#define TR_AVX2
#define TR_AVX512
#define TR_AMX
#endif

namespace tr {

// Each level contains the ones before it. avx512 asks for VNNI and bf16 too: a processor without them runs avx2.
enum class Isa : int { plain = 0, avx2 = 1, avx512 = 2, amx = 3 };

// What operators use now: the best of this processor, or less after limit_isa.
Isa isa();

// The best of this processor.
Isa best_isa();

// Uses at most `level` from now on (for tests and measurements); returns what is used.
Isa limit_isa(Isa level);

}  // namespace tr

// Calls body(args...) compiled for the instruction set in use. `body` must be TR_INLINE, and so must all that it calls.
// TR_EACH_ISA(name, body, (parameters), (arguments)) defines `static void name(parameters)`.
#if TR_X86
#define TR_EACH_ISA(name, body, parameters, arguments)                                             \
    TR_AVX512 static void name##_avx512 parameters { body arguments; }                             \
    TR_AVX2 static void name##_avx2 parameters { body arguments; }                                 \
    static void name##_plain parameters { body arguments; }                                        \
    static void name parameters {                                                                  \
        switch (tr::isa()) {                                                                       \
            case tr::Isa::amx:                                                                     \
            case tr::Isa::avx512: return name##_avx512 arguments;                                  \
            case tr::Isa::avx2: return name##_avx2 arguments;                                      \
            default: return name##_plain arguments;                                                \
        }                                                                                          \
    }
#else
#define TR_EACH_ISA(name, body, parameters, arguments)                                             \
    static void name parameters { body arguments; }
#endif
