// What the kernels share. They are for bfloat16 on x86-64 with AVX-512 BF16, with or without AMX, and, of
// packed weights in float32, for AVX2.
//
// compiled.py builds these files, native.py calls what is in them. All tensors are contiguous, but where
// a stride is given. Every kernel uses the threads that the caller's OpenMP has, and gives a token the same
// result whatever is beside it. Widths are multiples of 16, head sizes of 64.

#pragma once
#ifdef __clang__
#error "gcc is needed: clang's OpenMP is not the one that PyTorch has"
#endif
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

#define inlined static inline __attribute__((always_inline))
#define aligned __attribute__((aligned(64)))

#if defined __AVX512F__ && defined __AVX512BF16__
#define HAS_BF16
#ifdef __AMX_BF16__
#define HAS_AMX
#endif
#endif

inlined i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
inlined i64 max_of(i64 a, i64 b) { return a > b ? a : b; }

#ifdef HAS_BF16

typedef uint16_t bf16;

#define SMALL 8192  // values up to which a second thread costs more than it saves

inlined __m512 widen(const bf16 *x) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inlined void narrow(bf16 *out, __m512 x) {
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x));
}

// 2^x, relative error below 3e-6: the Taylor series of its fraction, scaled by its integer.
inlined __m512 power_of_two(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.33335581e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.61812911e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.55041087e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.40226507e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.93147181e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

// x * sigmoid(z): SiLU, with z = x, or GELU's approximation by tanh.
inlined __m512 activate(__m512 x, int is_gelu) {
    __m512 z = x;
    if (is_gelu) {  // tanh(z / 2) = 2 * sigmoid(z) - 1
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
        z = _mm512_mul_ps(_mm512_add_ps(x, cube), _mm512_set1_ps(1.59576912f));
    }
    __m512 power = power_of_two(_mm512_mul_ps(z, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1)));
}

// The model's heads, and where one layer's keys and values are: see KVLayout.
typedef struct {
    const bf16 *kv;
    i64 heads, kv_heads, dim, block_size, slots, slot;
    float scale;  // of scores, as exponents of two
} Layer;

inlined Layer layer_of(const bf16 *kv, const i64 *shape, i64 slot) {
    float scale = 1.44269504f / sqrtf(shape[2]);
    return (Layer){kv, shape[0], shape[1], shape[2], shape[3], shape[4], slot, scale};
}

// Where the keys of all heads of positions [first, first + count) are; the values of each follow its keys.
inlined void locate(const bf16 **keys, const Layer *of, const i64 *table, i64 first, i64 count) {
    i64 width = 2 * of->kv_heads * of->dim, block = first / of->block_size, in_block = first % of->block_size;
    while (count > 0) {
        i64 run = (table[block++] * of->slots + of->slot) * of->block_size;
        for (; count > 0 && in_block < of->block_size; count--) *keys++ = of->kv + (run + in_block++) * width;
        in_block = 0;
    }
}

// 16 lines of 16 values of 32 bits.
inlined void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {  // now a quarter of x[4 * i + j] is of columns j, j + 4, j + 8, j + 12
        __m512i even[2], odd[2];
        for (int i = 0; i < 2; i++) {
            even[i] = _mm512_shuffle_i32x4(x[8 * i + j], x[8 * i + j + 4], 0x88);
            odd[i] = _mm512_shuffle_i32x4(x[8 * i + j], x[8 * i + j + 4], 0xdd);
        }
        x[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        x[j + 4] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        x[j + 8] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        x[j + 12] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
}

// Two neighbours, again and again.
inlined __m512bh two_values(const bf16 *x) {
    int both;
    memcpy(&both, x, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

#endif

#ifdef HAS_AMX

// How AMX's tiles are set up. Whoever uses them sets them up anew: oneDNN, too, looks first at how they are.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

#endif
