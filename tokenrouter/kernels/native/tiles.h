// The tile unit's configuration.
#pragma once

#include "native/isa.h"

#if TR_X86
#include <immintrin.h>

namespace tr {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

TR_AMX inline void load(const TileConfig& config) {
    __asm__ volatile("" : : "r"(&config) : "memory");  // gcc 12 takes only the first 8 bytes for an input
    _tile_loadconfig(&config);
}

}  // namespace tr
#endif  // TR_X86
