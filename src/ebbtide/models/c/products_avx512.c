// Products with weights of 4 or 8 bits in bfloat16 without AMX. Integers are multiplied as they are, and a
// group's sums are scaled afterwards:
//
//     weights  | block 0: group 0, group 1, .. | block 1: ..     a group: 32 inputs of 16 outputs
//     integers | inputs 0, 1 of output 0, of output 1, .. of output 15 | inputs 2, 3 .. | .. | 30, 31 ..
//
// A token's sums are added up in the same order with any number of tokens.

#include "native.h"

#if defined HAS_BF16 && !defined HAS_AMX

#define TOKENS 256  // that one pass over the weights is for
#define TILE 6      // tokens whose sums, of a group and of all groups, are in registers
#define GROUPS 8    // that are unpacked at a time
#define AHEAD 8     // groups whose weights are fetched before they are needed

// What is done with unpacked weights: they are for one tile alone, or kept for others, or were kept.
enum { ALONE, KEEP, KEPT };

typedef struct {
    const bf16 *x;           // [groups, tokens, GROUP]
    const float *sums;       // [groups, tokens], of x; where there are zeros
    const uint8_t *weights;  // [outputs / 16, groups, 64 * bits]
    const uint16_t *scales;  // [outputs / 16, groups, 16], float16; zeros: the same, or none
    const uint16_t *zeros;
    i64 groups, tokens;
} Product;

inlined __m512 widen_half(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

inlined __m512 widen_integers(const uint8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

// Of one of a group's pairs of inputs. Of 2 bytes, the lowest 4 bits are of the first of 4 pairs.
inlined __m512bh unpack(const uint8_t *packed, const int pair, const int bits) {
    const uint8_t *own = packed + 32 * pair;
    if (bits == 8) return _mm512_cvtne2ps_pbh(widen_integers(own + 16), widen_integers(own));
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i index = _mm512_loadu_si512(packed + pair / 4 * 64);  // a fifth bit changes nothing
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(index, pair % 4 * 4),
                                              (__m512i)_mm512_cvtne2ps_pbh(numbers, numbers));
}

// sums [count, 2, 16] += the products of tokens [token, token + count) with groups [first, last) of two
// blocks. kept [last - first, 16, 2, 32]: unpacked weights.
inlined void add_tile(float *sums, const Product *of, const i64 *blocks, i64 token, i64 first, i64 last,
                      bf16 *kept, const int bits, const int mode, const int count) {
    __m512 all[TILE][2];
    for (int i = 0; i < 2 * count; i++) all[i / 2][i % 2] = _mm512_loadu_ps(sums + 16 * i);
    for (i64 group = first; group < last; group++) {
        const bf16 *x = of->x + (group * of->tokens + token) * GROUP;
        i64 places[2] = {blocks[0] * of->groups + group, blocks[1] * of->groups + group};
        __m512 own[TILE][2];
        for (int i = 0; i < 2 * count; i++) own[i / 2][i % 2] = _mm512_setzero_ps();
        for (int each = 0; each < 2 && mode != KEPT; each++)
            for (int i = 0; i < bits; i++)
                _mm_prefetch(of->weights + ((places[each] + AHEAD) * bits + i) * 64, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++)
            for (int each = 0; each < 2; each++) {
                bf16 *place = kept + ((group - first) * 32 + 2 * pair + each) * 32;
                __m512bh weights = mode == KEPT ? (__m512bh)_mm512_load_si512(place)
                                                : unpack(of->weights + places[each] * 64 * bits, pair, bits);
                if (mode == KEEP) _mm512_store_si512(place, (__m512i)weights);
                for (int i = 0; i < count; i++)
                    own[i][each] =
                        _mm512_dpbf16_ps(own[i][each], weights, two_values(x + i * GROUP + 2 * pair));
            }
        for (int each = 0; each < 2; each++) {
            __m512 scales = widen_half(of->scales + 16 * places[each]);
            for (int i = 0; i < count; i++)
                all[i][each] = _mm512_fmadd_ps(scales, own[i][each], all[i][each]);
            if (!of->zeros) continue;
            __m512 zeros = widen_half(of->zeros + 16 * places[each]);
            const float *sum = of->sums + group * of->tokens + token;
            for (int i = 0; i < count; i++)
                all[i][each] = _mm512_fmadd_ps(zeros, _mm512_set1_ps(sum[i]), all[i][each]);
        }
    }
    for (int i = 0; i < 2 * count; i++) _mm512_storeu_ps(sums + 16 * i, all[i / 2][i % 2]);
}

inlined void add_some(float *sums, const Product *of, const i64 *blocks, i64 token, i64 first, i64 last,
                      bf16 *kept, const int bits, const int mode, i64 count) {
    switch (count) {
        case 1: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, 1); break;
        case 2: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, 2); break;
        case 3: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, 3); break;
        case 4: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, 4); break;
        case 5: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, 5); break;
        default: add_tile(sums, of, blocks, token, first, last, kept, bits, mode, TILE);
    }
}

// sums [count, 2, 16]: the products of tokens [begin, begin + count) with two blocks of 16 outputs.
inlined void multiply(float *sums, const Product *of, const i64 *blocks, i64 begin, i64 count,
                      const int bits) {
    bf16 kept[GROUPS * 1024] aligned;
    i64 all_tiles = (count + TILE - 1) / TILE, size = all_tiles == 1 ? of->groups : GROUPS;
    memset(sums, 0, count * 32 * sizeof *sums);
    for (i64 first = 0; first < of->groups; first += size) {
        i64 last = min_of(first + size, of->groups);
        for (i64 token = 0, tiles = all_tiles; tiles; tiles--) {
            i64 some = (count - token + tiles - 1) / tiles;
            float *own = sums + 32 * token;
            if (all_tiles == 1)
                add_some(own, of, blocks, begin + token, first, last, NULL, bits, ALONE, some);
            else if (token == 0)
                add_some(own, of, blocks, begin, first, last, kept, bits, KEEP, some);
            else
                add_some(own, of, blocks, begin + token, first, last, kept, bits, KEPT, some);
            token += some;
        }
    }
}

static void multiply_4(float *sums, const Product *of, const i64 *blocks, i64 begin, i64 count) {
    multiply(sums, of, blocks, begin, count, 4);
}

static void multiply_8(float *sums, const Product *of, const i64 *blocks, i64 begin, i64 count) {
    multiply(sums, of, blocks, begin, count, 8);
}

// out = x @ weights.T + added. x: [tokens, groups * GROUP]; out, added (or none): [tokens, outputs]. scratch:
// for 34 values of each group of each token, of them rounded up to 16. bits: 4 or 8, of a weight. gated: 0;
// or 1 (SiLU), 2 (GELU): the weights are gate, then up, and out is activation(gate) * up.
void multiply_packed(bf16 *out, const bf16 *x, const bf16 *added, bf16 *scratch, const uint8_t *weights,
                     const uint16_t *scales, const uint16_t *zeros, i64 tokens, i64 groups, i64 outputs,
                     int bits, int gated) {
    i64 blocks = outputs / 16, pairs = gated ? blocks : (blocks + 1) / 2;
    float *x_sums = (float *)(scratch + tokens * groups * GROUP);
    Product of = {tokens > 1 ? scratch : x, x_sums, weights, scales, zeros, groups, tokens};
#pragma omp parallel
    {
        if (tokens > 1 || zeros) {
#pragma omp for schedule(static)
            for (i64 at = 0; at < tokens * groups; at++) {
                i64 token = at / groups, place = at % groups * tokens + token;
                __m512i own = _mm512_loadu_si512(x + at * GROUP);
                if (tokens > 1) _mm512_storeu_si512(scratch + place * GROUP, own);
                if (!zeros) continue;
                __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
                x_sums[place] =
                    _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)own, ones));
            }
        }
        for (i64 first = 0; first < tokens; first += TOKENS) {
            i64 count = min_of(TOKENS, tokens - first);
            float sums[32 * TOKENS] aligned;
#pragma omp for schedule(static) nowait
            for (i64 pair = 0; pair < pairs; pair++) {
                i64 own[2] = {2 * pair, min_of(2 * pair + 1, blocks - 1)};
                if (gated) own[0] = pair, own[1] = blocks + pair;
                (bits == 4 ? multiply_4 : multiply_8)(sums, &of, own, first, count);
                for (i64 i = 0; i < count; i++) {
                    __m512 low = _mm512_load_ps(sums + 32 * i), high = _mm512_load_ps(sums + 32 * i + 16);
                    i64 place = (first + i) * outputs;
                    if (gated) {
                        narrow(out + place + 16 * pair, _mm512_mul_ps(activate(low, gated == 2), high));
                        continue;
                    }
                    if (added) low = _mm512_add_ps(low, widen(added + place + 16 * own[0]));
                    if (added) high = _mm512_add_ps(high, widen(added + place + 16 * own[1]));
                    narrow(out + place + 16 * own[0], low);
                    narrow(out + place + 16 * own[1], high);
                }
            }
        }
    }
}

#endif
