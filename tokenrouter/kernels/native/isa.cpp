#include "native/isa.h"

#include <algorithm>
#include <atomic>

#if TR_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tr {
namespace {

#if TR_X86
struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}

uint64_t enabled_state() {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

bool bit(unsigned word, int index) { return (word >> index) & 1; }

// Linux gives a process the tile registers only when asked (arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool tiles_granted() {
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

Isa detect() {
    const Registers basic = cpuid(1, 0);
    if (!bit(basic.c, 27) || !bit(basic.c, 12)) return Isa::plain;  // OSXSAVE, FMA
    const uint64_t state = enabled_state();
    const Registers extended = cpuid(7, 0), more = cpuid(7, 1);
    if ((state & 0x6) != 0x6 || !bit(extended.b, 5)) return Isa::plain;  // AVX2
    const bool avx512 = (state & 0xe6) == 0xe6 && bit(extended.b, 16) && bit(extended.b, 17) &&
                        bit(extended.b, 30) && bit(extended.b, 31) && bit(extended.c, 11) &&
                        bit(more.a, 5);  // F, DQ, BW, VL, VNNI, BF16
    if (!avx512) return Isa::avx2;
    const bool amx = (state & 0x60000) == 0x60000 && bit(extended.d, 22) && bit(extended.d, 24) &&
                     bit(extended.d, 25);  // BF16, TILE, INT8
    return amx && tiles_granted() ? Isa::amx : Isa::avx512;
}
#else
Isa detect() { return Isa::plain; }
#endif

std::atomic<Isa>& current() {
    static std::atomic<Isa> level{best_isa()};
    return level;
}

}  // namespace

Isa best_isa() {
    static const Isa level = detect();
    return level;
}

Isa isa() { return current().load(std::memory_order_relaxed); }

Isa limit_isa(Isa level) {
    current().store(std::min(level, best_isa()));
    return isa();
}

}  // namespace tr
