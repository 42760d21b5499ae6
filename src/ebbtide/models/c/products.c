// Products with weights of 4 or 8 bits, unpacked to bfloat16 into AMX's tiles, once for all tokens, or with
// those that are bfloat16 already:
//
//     weights  | block 0: group 0, group 1, .. | block 1: ..     a group: 32 inputs of 16 outputs
//     its tile | output 0: inputs 0, 1, .. 31 | output 1: .. | .. | output 15
//     x's tile | inputs 0, 1 of token 0, of token 1, .. | inputs 2, 3 .. | .. | 30, 31 ..
//     sums     | output 0: token 0, 1, .. | output 1: .. | .. | output 15
//
// A sum stays in one tile from its first group to the last, or goes through memory as it is. So it is the
// same with any number of tokens.

#include "native.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

// 1, or -1 where the system does not let this process use AMX: ARCH_REQ_XCOMP_PERM for its tiles.
int has_amx(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 1 : -1; }

#define TOKENS 256  // that one pass over the weights is for
#define GROUPS 18   // that are unpacked at a time
#define LAG 2       // groups between what is stored and the tile that loads it
#define RING 4      // groups that are kept, where they are used but once: a power of two above LAG
#define AHEAD 8     // groups whose weights are fetched before they are needed

typedef struct {
    const bf16 *x;  // [tokens / 16, groups, 16 pairs, line / 4 tokens, 2]
    const uint8_t *weights;  // [outputs / 16, groups, 64 * bits]
    const uint16_t *scales;  // [outputs / 16, groups, 16], float16; zeros: the same, or none
    const uint16_t *zeros;
    i64 groups, tiles, line;  // line: bytes of a line of x's tiles, and of those of sums
} Product;

inlined __m512 widen_half(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

inlined __m512 widen_integers(const uint8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

// A group's weights as a tile: scale * q + zero, with q from 512 bytes; or scale * (q - 8) + zero, with q
// from 256 bytes: of 2 bytes, the lowest 4 bits are of the first of 4 outputs.
inlined void unpack(bf16 *tile, const Product *of, i64 group, const int bits) {
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const uint8_t *packed = of->weights + group * 64 * bits;
    float both[32] aligned, *scales = both, *zeros = both + 16;
    _mm512_store_ps(scales, widen_half(of->scales + 16 * group));
    _mm512_store_ps(zeros, of->zeros ? widen_half(of->zeros + 16 * group) : _mm512_setzero_ps());
    __asm__("" : "+r"(scales), "+r"(zeros) : : "memory");  // read them from there: faster than from registers
    _mm_prefetch(of->scales + (group + AHEAD) * 16, _MM_HINT_T0);
    for (int i = 0; i < bits; i++) _mm_prefetch(packed + (AHEAD * bits + i) * 64, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        __m512 scale = _mm512_set1_ps(scales[row]), zero = _mm512_set1_ps(zeros[row]);
        __m512i weights;
        if (bits == 4) {  // all values that there can be; an index is odd, and so takes their upper halves
            __m512i values = (__m512i)_mm512_fmadd_ps(numbers, scale, zero);
            values = _mm512_add_epi32(values, _mm512_set1_epi32(0x8000));
            __m512i index = _mm512_loadu_si512(packed + row / 4 * 64);
            index = row % 4 ? _mm512_srli_epi16(index, row % 4 * 4 - 1) : _mm512_slli_epi16(index, 1);
            weights = _mm512_permutexvar_epi16(_mm512_or_si512(index, _mm512_set1_epi16(1)), values);
        } else {
            __m512 low = widen_integers(packed + row * 32), high = widen_integers(packed + row * 32 + 16);
            low = _mm512_fmadd_ps(low, scale, zero);
            high = _mm512_fmadd_ps(high, scale, zero);
            weights = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        _mm512_store_si512(tile + row * 32, weights);
    }
}

// sums [2, tiles, 16, line / 4]: the products with two blocks of 16 outputs.
inlined void multiply(float *sums, const Product *of, const i64 *blocks, const int bits) {
    bf16 unpacked[2][GROUPS * 512] aligned;
    const i64 line = of->line, size = line * 4, x_size = line * 8;
    const i64 kept = of->tiles > 2 ? -1 : RING - 1;
    for (i64 first = 0; first < of->groups; first += GROUPS) {
        i64 count = min_of(GROUPS, of->groups - first);
        for (i64 tile = 0; tile < of->tiles; tile += 2) {
            float *a = sums + tile * size, *b = a + of->tiles * size;
            const bf16 *x = of->x + (tile * of->groups + first) * x_size;
            int two = of->tiles - tile > 1;
            _tile_zero(4);
            _tile_zero(5);
            _tile_zero(6);
            _tile_zero(7);
            if (first) {
                _tile_loadd(4, a, line);
                _tile_loadd(5, b, line);
                if (two) _tile_loadd(6, a + size, line);
                if (two) _tile_loadd(7, b + size, line);
            }
            for (i64 i = tile == 0 ? -LAG : 0; i < count; i++) {
                i64 next = i + LAG, place = 512 * (i & kept);
                for (int each = 0; each < 2 && tile == 0 && next < count; each++)
                    unpack(unpacked[each] + 512 * (next & kept), of, blocks[each] * of->groups + first + next,
                           bits);
                if (i < 0) continue;
                _tile_loadd(0, unpacked[0] + place, 64);
                _tile_loadd(1, unpacked[1] + place, 64);
                _tile_loadd(2, x + i * x_size, line);
                _tile_dpbf16ps(4, 0, 2);
                _tile_dpbf16ps(5, 1, 2);
                if (!two) continue;
                _tile_loadd(3, x + (of->groups + i) * x_size, line);
                _tile_dpbf16ps(6, 0, 3);
                _tile_dpbf16ps(7, 1, 3);
            }
            _tile_stored(4, a, line);
            _tile_stored(5, b, line);
            if (two) _tile_stored(6, a + size, line);
            if (two) _tile_stored(7, b + size, line);
        }
    }
}

static void multiply_4(float *sums, const Product *of, const i64 *blocks) { multiply(sums, of, blocks, 4); }
static void multiply_8(float *sums, const Product *of, const i64 *blocks) { multiply(sums, of, blocks, 8); }

// 16 lines of `tokens` values each, the other way round: 16 values of each token.
inlined void turn(__m512i lines[16], const void *values, i64 line, i64 tokens) {
    __mmask16 valid = (1u << tokens) - 1;
    for (int i = 0; i < 16; i++)
        lines[i] = _mm512_maskz_loadu_epi32(valid, (const char *)values + line * i);
    transpose(lines);
}

// One group of up to 16 tokens as a tile.
static void lay_out(bf16 *tile, const bf16 *x, i64 width, i64 tokens, i64 line) {
    __m512i lines[16];
    for (i64 i = 0; i < 16; i++)
        lines[i] = i < tokens ? _mm512_loadu_si512(x + i * width) : _mm512_setzero_si512();
    transpose(lines);
    for (i64 i = 0; i < 16; i++)
        _mm512_mask_storeu_epi32((char *)tile + line * i, (1u << line / 4) - 1, lines[i]);
}

// out = x @ weights.T + added. x: [tokens, groups * GROUP]; out, added (or none): [tokens, outputs]. tiles:
// scratch, as large as x with its tokens rounded up to 16, and more. bits: 4 or 8, of a weight. gated: 0; or
// 1 (SiLU), 2 (GELU): the weights are gate, then up, and out is activation(gate) * up.
void multiply_packed(bf16 *out, const bf16 *x, const bf16 *added, bf16 *tiles, const uint8_t *weights,
                     const uint16_t *scales, const uint16_t *zeros, i64 tokens, i64 groups, i64 outputs,
                     int bits, int gated) {
    void (*multiply_blocks)(float *, const Product *, const i64 *) = bits == 4 ? multiply_4 : multiply_8;
    i64 blocks = outputs / 16, pairs = gated ? blocks : (blocks + 1) / 2, width = groups * GROUP;
    i64 line = 4 * min_of(16, tokens), size = 4 * line;
    uint16_t bytes = line;
    TileConfig config = {1, 0, {0}, {64, 64, bytes, bytes, bytes, bytes, bytes, bytes},
                         {16, 16, 16, 16, 16, 16, 16, 16}};
#pragma omp parallel
    {
        _tile_loadconfig(&config);
        if (tokens > 1) {  // one token lies as its tiles do
#pragma omp for schedule(static)
            for (i64 i = 0; i < (tokens + 15) / 16 * groups; i++) {
                i64 first = i / groups * 16;
                lay_out(tiles + i * line * 8, x + first * width + i % groups * GROUP, width, tokens - first,
                        line);
            }
        }
        for (i64 first = 0; first < tokens; first += TOKENS) {
            i64 own_tokens = min_of(TOKENS, tokens - first);
            Product of = {tokens > 1 ? tiles + first * width : x, weights, scales, zeros, groups,
                          (own_tokens + 15) / 16, line};
            float sums[2 * 16 * TOKENS] aligned;
#pragma omp for schedule(static) nowait
            for (i64 pair = 0; pair < pairs; pair++) {
                i64 own[2] = {2 * pair, min_of(2 * pair + 1, blocks - 1)};
                if (gated) own[0] = pair, own[1] = blocks + pair;
                multiply_blocks(sums, &of, own);
                for (i64 i = 0; gated && i < of.tiles * size; i += 16) {
                    __m512 gate = activate(_mm512_load_ps(sums + i), gated == 2);
                    __m512 up = _mm512_load_ps(sums + of.tiles * size + i);
                    _mm512_store_ps(sums + i, _mm512_mul_ps(gate, up));
                }
                for (i64 at = 0; at < (gated ? 1 : 2) * of.tiles; at++) {
                    i64 token = at % of.tiles * 16;
                    i64 place = (first + token) * outputs + 16 * own[at / of.tiles];
                    __m512i lines[16] = {_mm512_load_si512(sums + at * size)};
                    if (tokens > 1) turn(lines, sums + at * size, line, min_of(16, tokens));
                    for (i64 i = 0; i < min_of(16, own_tokens - token); i++, place += outputs) {
                        __m512 sum = (__m512)lines[i];
                        if (added) sum = _mm512_add_ps(sum, widen(added + place));
                        narrow(out + place, sum);
                    }
                }
            }
        }
        _tile_release();
    }
}

#else

int has_amx(void) { return 0; }

#endif
