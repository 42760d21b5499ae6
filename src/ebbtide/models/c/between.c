// What lies between the products: norms, rotations, and the writing of keys and values.

#include "native.h"

#ifdef HAS_BF16

int has_bf16(void) { return 1; }

// out = x / sqrt(mean(x^2) + eps) * weight. x, out: [tokens, heads, width], a token after `stride` values;
// weight: [heads, width].
void rms_norm(bf16 *out, const bf16 *x, const float *weight, i64 tokens, i64 heads, i64 width, i64 stride,
              float eps) {
#pragma omp parallel for if (tokens * heads * width > SMALL)
    for (i64 row = 0; row < tokens * heads; row++) {
        i64 at = row / heads * stride + row % heads * width;
        const float *factors = weight + row % heads * width;
        __m512 squares = _mm512_setzero_ps();
        for (i64 i = 0; i < width; i += 16) {
            __m512 value = widen(x + at + i);
            squares = _mm512_fmadd_ps(value, value, squares);
        }
        __m512 scale = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / width + eps));
        for (i64 i = 0; i < width; i += 16) {
            __m512 value = _mm512_mul_ps(widen(x + at + i), scale);
            narrow(out + at + i, _mm512_mul_ps(value, _mm512_loadu_ps(factors + i)));
        }
    }
}

// Rotates queries and keys in place, then writes keys and values to the KV. cos, sin: [tokens, dim / 2], or
// none. write: each token's place in the first slot, in positions.
void rotate_and_write(bf16 *qkv, bf16 *kv, const i64 *shape, const i64 *write, const float *cos,
                      const float *sin, i64 tokens, i64 slot) {
    Layer of = layer_of(kv, shape, slot);
    i64 heads = of.heads, kv_heads = of.kv_heads, dim = of.dim, half = dim / 2;
    i64 stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for if (tokens * stride > SMALL)
    for (i64 token = 0; token < tokens; token++) {
        bf16 *row = qkv + token * stride;
        const float *c = cos + token * half, *s = sin + token * half;
        for (i64 head = 0; cos && head < heads + kv_heads; head++) {
            bf16 *low = row + head * dim, *high = low + half;
            for (i64 i = 0; i < half; i += 16) {
                __m512 a = widen(low + i), b = widen(high + i);
                __m512 ci = _mm512_loadu_ps(c + i), si = _mm512_loadu_ps(s + i);
                narrow(low + i, _mm512_fmsub_ps(a, ci, _mm512_mul_ps(b, si)));
                narrow(high + i, _mm512_fmadd_ps(b, ci, _mm512_mul_ps(a, si)));
            }
        }
        bf16 *place = kv + (write[token] + slot * of.block_size) * 2 * kv_heads * dim;
        memcpy(place, row + heads * dim, 4 * kv_heads * dim);
    }
}

#else

int has_bf16(void) { return 0; }

#endif
