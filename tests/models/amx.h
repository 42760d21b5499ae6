// AMX in software, for the compiler's -include: kernels for AMX can be tested on any machine with AVX-512
// BF16. What a processor would refuse ends the process.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1

typedef struct {
    int line, rows;  // bytes, lines
    float values[16][16];
} SoftTile;

static __thread SoftTile soft_tiles[8];
static __thread int soft_tiles_are_set_up;

static inline void soft_demand(int holds) {
    if (!holds) abort();
}

static inline SoftTile *soft_tile(int number) {
    soft_demand(soft_tiles_are_set_up && number < 8);
    return soft_tiles + number;
}

static inline void soft_loadconfig(const void *config) {
    const uint8_t *bytes = (const uint8_t *)config;
    soft_demand(bytes[0] == 1);
    for (int i = 0; i < 8; i++) {
        uint16_t line;
        memcpy(&line, bytes + 16 + 2 * i, 2);
        soft_demand(line <= 64 && bytes[48 + i] <= 16);
        soft_tiles[i] = (SoftTile){.line = line, .rows = bytes[48 + i]};
    }
    soft_tiles_are_set_up = 1;
}

static inline void soft_zero(int number) {
    SoftTile *tile = soft_tile(number);
    memset(tile->values, 0, sizeof tile->values);
}

static inline void soft_load(int number, const void *from, long stride) {
    SoftTile *tile = soft_tile(number);
    soft_zero(number);
    for (int i = 0; i < tile->rows; i++)
        memcpy(tile->values[i], (const char *)from + i * stride, tile->line);
}

static inline void soft_store(int number, void *to, long stride) {
    SoftTile *tile = soft_tile(number);
    for (int i = 0; i < tile->rows; i++) memcpy((char *)to + i * stride, tile->values[i], tile->line);
}

static inline __m512 soft_halves(__m512i pairs, int upper) {
    return (__m512)(upper ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(pairs, 16));
}

static inline void soft_multiply(int out, int left, int right) {
    SoftTile *sums = soft_tile(out), *a = soft_tile(left), *b = soft_tile(right);
    soft_demand(out != left && out != right && left != right);
    soft_demand(sums->rows == a->rows && a->line == 4 * b->rows && sums->line == b->line);
    for (int row = 0; row < a->rows; row++) {
        __m512 sum = _mm512_loadu_ps(sums->values[row]);
        for (int pair = 0; pair < b->rows; pair++)
            for (int upper = 0; upper < 2; upper++) {
                __m512 own = soft_halves(_mm512_castps_si512(_mm512_set1_ps(a->values[row][pair])), upper);
                __m512i others = _mm512_loadu_si512(b->values[pair]);
                sum = _mm512_fmadd_ps(own, soft_halves(others, upper), sum);
            }
        __mmask16 valid = (1u << sums->line / 4) - 1;
        _mm512_mask_storeu_ps(sums->values[row], valid, sum);
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig soft_loadconfig
#define _tile_zero soft_zero
#define _tile_loadd soft_load
#define _tile_stored soft_store
#define _tile_dpbf16ps soft_multiply
#define _tile_release() (soft_tiles_are_set_up = 0)
#define syscall(...) 0
