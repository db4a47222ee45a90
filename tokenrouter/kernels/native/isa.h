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

// What portable code may use beyond plain vectors: a tag that TR_EACH_ISA gives to the bodies that it compiles.
namespace tr {
struct Portable {
    static constexpr bool is_avx512 = false;
    static constexpr int64_t vector_lanes = 4;  // floats
};
struct Avx2 {
    static constexpr bool is_avx512 = false;
    static constexpr int64_t vector_lanes = 8;
};
struct Avx512 {
    static constexpr bool is_avx512 = true;
    static constexpr int64_t vector_lanes = 16;
};
}  // namespace tr

#define TR_UNWRAP(...) __VA_ARGS__

// TR_EACH_ISA(name, body, types, parameters, arguments) defines `static void name parameters`, which calls
// `body<Tag, types...> arguments` compiled for the instruction set in use. `body` and all that it calls must be TR_INLINE.
// `types` is (, T, ...) or (); parameters and arguments stand in parentheses.
#if TR_X86
#define TR_EACH_ISA(name, body, types, parameters, arguments)                                      \
    TR_AVX512 static void name##_avx512 parameters { body<tr::Avx512 TR_UNWRAP types> arguments; } \
    TR_AVX2 static void name##_avx2 parameters { body<tr::Avx2 TR_UNWRAP types> arguments; }       \
    static void name##_plain parameters { body<tr::Portable TR_UNWRAP types> arguments; }          \
    static void name parameters {                                                                  \
        switch (tr::isa()) {                                                                       \
            case tr::Isa::amx:                                                                     \
            case tr::Isa::avx512: return name##_avx512 arguments;                                  \
            case tr::Isa::avx2: return name##_avx2 arguments;                                      \
            default: return name##_plain arguments;                                                \
        }                                                                                          \
    }
#else
#define TR_EACH_ISA(name, body, types, parameters, arguments)                                      \
    static void name parameters { body<tr::Portable TR_UNWRAP types> arguments; }
#endif
