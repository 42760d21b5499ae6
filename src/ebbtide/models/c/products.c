// Products with weights of 4 or 8 bits, unpacked into AMX's tiles group by group. A block is 16 outputs:
//
//     weights  | block 0: group 0, group 1, .. | block 1: ..     a group: 32 inputs of 16 outputs, as a tile
//     tile     | inputs 0, 1 of output 0, of output 1, .. of output 15 | inputs 2, 3 .. | .. | 30, 31 ..
//
// A tile's product is multiplied with the group's scales, and added up in float32.

#include "native.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

// Whether the system lets this process use AMX: ARCH_REQ_XCOMP_PERM for its tiles.
int has_amx(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// Rows of x that one pass over the weights is for, groups of 32 weights that are unpacked at a time.
#define ROWS 32
#define GROUPS 12
#define LAG 3       // groups between what is stored and the tile that loads it
#define AHEAD 8192  // bytes of weights that are fetched before they are needed

// 16 outputs' weights of one group, as AMX wants them. They are whole numbers, which bfloat16 holds: from 256
// bytes, low nibbles first, from -8 on; or from 512 bytes.
inlined void unpack_4(bf16 *out, const uint8_t *packed) {
    const __m512i numbers = _mm512_set_epi16(
        0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000, 0xc040, 0xc080, 0xc0a0,
        0xc0c0, 0xc0e0, 0xc100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, 0xbf80, 0xc000,
        0xc040, 0xc080, 0xc0a0, 0xc0c0, 0xc0e0, 0xc100);
    for (int i = 0; i < 8; i++) {
        __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(packed + 32 * i)));
        // of an index, only the lowest 5 bits count, and both halves of the table are the same
        __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(bytes, 4);
        _mm512_storeu_si512(out + 32 * i, _mm512_permutexvar_epi16(low, numbers));
        _mm512_storeu_si512(out + 256 + 32 * i, _mm512_permutexvar_epi16(high, numbers));
    }
}

inlined void unpack_8(bf16 *out, const uint8_t *packed) {
    for (int i = 0; i < 512; i += 32) {
        __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(packed + i)));
        __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(packed + i + 16)));
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high),
                                                                 _mm512_cvtepi32_ps(low)));
    }
}

typedef struct {
    const bf16 *x;
    const uint8_t *weights;  // [outputs / 16, groups, 64 * bits]
    const uint16_t *scales;  // [outputs / 16, groups, 16], float16; zeros: the same, or none
    const uint16_t *zeros;
    const float *x_sums;  // [rows, groups], where there are zeros
    i64 rows, groups;
} Product;

// sums [rows, 16]: the products with one block of 16 outputs.
inlined void multiply(float *sums, const Product *of, i64 block, const int bits) {
    bf16 unpacked[GROUPS * 512] aligned;
    float products[GROUPS * ROWS * 16] aligned;
    const i64 height = of->rows > 16 ? 32 : 16;
    memset(sums, 0, of->rows * 16 * sizeof *sums);
    for (i64 first = 0; first < of->groups; first += GROUPS) {
        i64 count = min_of(GROUPS, of->groups - first), at = block * of->groups + first;
        for (i64 i = 0; i < count + LAG; i++) {
            const uint8_t *packed = of->weights + (at + i) * 64 * bits;
            for (int line = 0; line < bits; line++) _mm_prefetch(packed + AHEAD + 64 * line, _MM_HINT_T0);
            if (i < count && bits == 4) unpack_4(unpacked + 512 * i, packed);
            if (i < count && bits == 8) unpack_8(unpacked + 512 * i, packed);
            if (i < LAG) continue;
            i64 now = i - LAG;  // what was stored a while ago can be loaded at once
            const bf16 *x = of->x + (first + now) * GROUP;
            _tile_loadd(2, unpacked + 512 * now, 64);
            _tile_loadd(0, x, of->groups * GROUP * 2);
            _tile_zero(4);
            _tile_dpbf16ps(4, 0, 2);
            _tile_stored(4, products + now * height * 16, 64);
            if (of->rows > 16) {
                _tile_loadd(1, x + 16 * of->groups * GROUP, of->groups * GROUP * 2);
                _tile_zero(5);
                _tile_dpbf16ps(5, 1, 2);
                _tile_stored(5, products + now * height * 16 + 256, 64);
            }
        }
        __m512 scales[GROUPS], zeros[GROUPS];
        for (i64 i = 0; i < count; i++) {
            scales[i] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(of->scales + (at + i) * 16)));
            if (of->zeros)
                zeros[i] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(of->zeros + (at + i) * 16)));
        }
        for (i64 row = 0; row < of->rows; row++) {
            __m512 sum = _mm512_load_ps(sums + row * 16);
            for (i64 i = 0; i < count; i++)
                sum = _mm512_fmadd_ps(scales[i], _mm512_load_ps(products + (i * height + row) * 16), sum);
            const float *x_sums = of->x_sums + row * of->groups + first;
            for (i64 i = 0; of->zeros && i < count; i++)
                sum = _mm512_fmadd_ps(zeros[i], _mm512_set1_ps(x_sums[i]), sum);
            _mm512_store_ps(sums + row * 16, sum);
        }
    }
}

// Sums of x over each group: what is multiplied by a group's zero.
static void sum_groups(float *sums, const bf16 *x, i64 count) {
    for (i64 i = 0; i < count; i++)
        sums[i] = _mm512_reduce_add_ps(_mm512_add_ps(widen(x + i * GROUP), widen(x + i * GROUP + 16)));
}

static void multiply_block_4(float *sums, const Product *of, i64 block) { multiply(sums, of, block, 4); }
static void multiply_block_8(float *sums, const Product *of, i64 block) { multiply(sums, of, block, 8); }

// out = x @ weights.T + added. x: [tokens, groups * GROUP]; out, added (or none): [tokens, outputs]. bits:
// 4 or 8, of a weight. gated: 0; or 1 (SiLU), 2 (GELU): the weights are gate, then up, and out is
// activation(gate) * up.
void multiply_packed(bf16 *out, const bf16 *x, const bf16 *added, const uint8_t *weights,
                     const uint16_t *scales, const uint16_t *zeros, i64 tokens, i64 groups, i64 outputs,
                     int bits, int gated) {
    void (*multiply_block)(float *, const Product *, i64) = bits == 4 ? multiply_block_4 : multiply_block_8;
    i64 blocks = outputs / 16;
    for (i64 first = 0; first < tokens; first += ROWS) {
        i64 rows = min_of(ROWS, tokens - first);
        float x_sums[zeros ? rows * groups : 1];
        const bf16 *own = x + first * groups * GROUP;
        if (zeros) sum_groups(x_sums, own, rows * groups);
        Product of = {own, weights, scales, zeros, x_sums, rows, groups};
        TileConfig config = {1, 0, {0}, {64, 64, 64, 0, 64, 64}, {0}};
        config.rows[2] = 16;
        config.rows[0] = config.rows[4] = min_of(16, rows);
        config.rows[1] = config.rows[5] = max_of(1, rows - 16);
#pragma omp parallel
        {
            _tile_loadconfig(&config);
#pragma omp for schedule(static)
            for (i64 block = 0; block < blocks; block++) {
                float sums[ROWS * 16] aligned, ups[ROWS * 16] aligned;
                multiply_block(sums, &of, block);
                if (gated) multiply_block(ups, &of, blocks + block);
                for (i64 row = 0; row < rows; row++) {
                    i64 at = (first + row) * outputs + 16 * block;
                    __m512 sum = _mm512_load_ps(sums + 16 * row);
                    if (gated) sum = _mm512_mul_ps(activate(sum, gated == 2), _mm512_load_ps(ups + 16 * row));
                    if (added) sum = _mm512_add_ps(sum, widen(added + at));
                    narrow(out + at, sum);
                }
            }
            _tile_release();
        }
    }
}
#else

int has_amx(void) { return 0; }

#endif
