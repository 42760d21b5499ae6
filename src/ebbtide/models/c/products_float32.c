// Products in float32 with weights of 4 or 8 bits, for AVX2 or AVX-512. Weights are unpacked, with their
// scales and zeros, into the first-level cache, a few groups of 16 outputs at a time:
//
//     weights  | block 0: group 0, group 1, .. | block 1: ..     a group: 32 inputs of 16 outputs
//     unpacked | input 0 of output 0, of output 1, .. of output 15 | input 1 .. | .. | 31 ..

#include "native.h"

#define ROWS 64     // of x, that one pass over the weights is for
#define GROUPS 6    // that are unpacked at a time
#define AHEAD 8192  // bytes of weights that are fetched before they are needed

#ifdef __AVX512F__
#define WIDTH 16
#define TILE 8  // rows whose sums are in registers
#define UNSIGNED(x) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(x)))
#define SIGNED(x) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x)))
#else
#define WIDTH 8
#define TILE 4
#define UNSIGNED(x) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(x)))
#define SIGNED(x) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(x)))
#endif
#define VECTORS (16 / WIDTH)

typedef float vector __attribute__((vector_size(4 * WIDTH), __aligned__(4), __may_alias__));
typedef int integers __attribute__((vector_size(4 * WIDTH)));

typedef struct {
    const float *x;
    const uint8_t *weights;  // [outputs / 16, groups, 64 * bits]
    const float *scales;     // [outputs / 16, groups, 16]; zeros: the same, or none
    const float *zeros;
    i64 rows, groups;
} Product;

// 16 outputs' weights of one group: scale * q + zero, with q from 512 bytes; or scale * (q - 8) + zero, with
// q from 256 bytes, low nibbles first.
inlined void unpack(float *out, const uint8_t *packed, const float *scales, const float *zeros,
                    const int bits) {
    for (int lane = 0; lane < 16; lane += WIDTH) {
        vector scale = *(const vector *)(scales + lane), zero = {0};
        if (zeros) zero = *(const vector *)(zeros + lane);
        if (bits == 4) zero -= 8 * scale;
        for (int i = lane; i < 64 * bits; i += 16) {
            integers q = (integers)(bits == 4 ? UNSIGNED(packed + i) : SIGNED(packed + i));
            integers low = bits == 4 ? q & 15 : q;
            *(vector *)(out + i) = scale * __builtin_convertvector(low, vector) + zero;
            if (bits == 4)
                *(vector *)(out + 256 + i) = scale * __builtin_convertvector(q >> 4, vector) + zero;
        }
    }
}

// sums [count, 16] += x [count, values] @ unpacked [values, 16], which is added up by itself: rounding errors
// grow with the length of a sum.
inlined void add_rows(float *sums, const float *x, i64 stride, const float *unpacked, i64 values,
                      const int count) {
    vector sum[TILE][VECTORS];
    memset(sum, 0, count * 16 * sizeof *sums);
    for (i64 value = 0; value < values; value++)
        for (int row = 0; row < count; row++)
            for (int i = 0; i < VECTORS; i++)
                sum[row][i] += x[row * stride + value] * *(const vector *)(unpacked + 16 * value + WIDTH * i);
    for (int row = 0; row < count; row++)
        for (int i = 0; i < VECTORS; i++) *(vector *)(sums + 16 * row + WIDTH * i) += sum[row][i];
}

// sums [rows, 16]: the products with one block of 16 outputs.
inlined void multiply(float *sums, const Product *of, i64 block, const int bits) {
    float unpacked[GROUPS * 512] aligned;
    i64 stride = of->groups * GROUP;
    memset(sums, 0, of->rows * 16 * sizeof *sums);
    for (i64 first = 0; first < of->groups; first += GROUPS) {
        i64 count = min_of(GROUPS, of->groups - first), row = 0, values = count * GROUP;
        for (i64 i = 0; i < count; i++) {
            i64 at = block * of->groups + first + i;
            const uint8_t *packed = of->weights + at * 64 * bits;
            for (int line = 0; line < bits; line++) _mm_prefetch(packed + AHEAD + 64 * line, _MM_HINT_T0);
            unpack(unpacked + 512 * i, packed, of->scales + 16 * at, of->zeros ? of->zeros + 16 * at : NULL,
                   bits);
        }
        const float *x = of->x + first * GROUP;
        for (; row + TILE <= of->rows; row += TILE)
            add_rows(sums + 16 * row, x + row * stride, stride, unpacked, values, TILE);
        for (; TILE > 4 && row + 4 <= of->rows; row += 4)
            add_rows(sums + 16 * row, x + row * stride, stride, unpacked, values, 4);
        for (; row + 2 <= of->rows; row += 2)
            add_rows(sums + 16 * row, x + row * stride, stride, unpacked, values, 2);
        if (row < of->rows) add_rows(sums + 16 * row, x + row * stride, stride, unpacked, values, 1);
    }
}

// out = x @ weights.T. x: [tokens, groups * GROUP]; out: [tokens, outputs]. bits: 4 or 8, of a weight.
void multiply_packed_float32(float *out, const float *x, const uint8_t *weights, const float *scales,
                             const float *zeros, i64 tokens, i64 groups, i64 outputs, int bits) {
    for (i64 first = 0; first < tokens; first += ROWS) {
        i64 rows = min_of(ROWS, tokens - first);
        Product of = {x + first * groups * GROUP, weights, scales, zeros, rows, groups};
#pragma omp parallel for schedule(static)
        for (i64 block = 0; block < outputs / 16; block++) {
            float sums[ROWS * 16] aligned;
            if (bits == 4) multiply(sums, &of, block, 4);
            else multiply(sums, &of, block, 8);
            for (i64 row = 0; row < of.rows; row++)
                memcpy(out + (first + row) * outputs + 16 * block, sums + 16 * row, 16 * sizeof *out);
        }
    }
}
