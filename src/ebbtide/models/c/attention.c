// Attention of decode rows that reads KV blocks where they are, without AMX.

#include "native.h"

#if defined HAS_BF16 && !defined HAS_AMX

int part_size(void) { return SPLIT; }

#define LANES 64  // of a head that are summed at a time

// The products of one query with the keys of 16 positions.
inlined __m512 score_16(const bf16 *query, const bf16 *const *keys, i64 offset, const i64 dim) {
    __m512 sum[16];
    for (int at = 0; at < 16; at++) {
        sum[at] = _mm512_setzero_ps();
        for (i64 i = 0; i < dim; i += 32)
            sum[at] = _mm512_dpbf16_ps(sum[at], (__m512bh)_mm512_loadu_si512(query + i),
                                       (__m512bh)_mm512_loadu_si512(keys[at] + offset + i));
    }
    for (int at = 0; at < 16; at += 2)  // now add each one's 16 lanes up: transposing is cheaper than 16 sums
        sum[at / 2] = _mm512_add_ps(_mm512_unpacklo_ps(sum[at], sum[at + 1]),
                                    _mm512_unpackhi_ps(sum[at], sum[at + 1]));
    for (int at = 0; at < 8; at += 2) {
        __m512d a = _mm512_castps_pd(sum[at]), b = _mm512_castps_pd(sum[at + 1]);
        sum[at / 2] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int left = 4; left > 1; left /= 2)
        for (int at = 0; at < left; at += 2)
            sum[at / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(sum[at], sum[at + 1], 0x88),
                                        _mm512_shuffle_f32x4(sum[at], sum[at + 1], 0xdd));
    return sum[0];
}

// sums[head][0:LANES] += weights[head][i] * values[i][0:LANES] for `count` heads.
inlined void add_weighted(float *sums, i64 sums_stride, const float *weights, const bf16 *const *values,
                          i64 offset, i64 positions, const int count) {
    __m512 sum[4][4];
    for (int head = 0; head < count; head++)
        for (int i = 0; i < 4; i++) sum[head][i] = _mm512_setzero_ps();
    for (i64 at = 0; at < positions; at++) {
        __m512 value[4];
        for (int i = 0; i < 4; i++) value[i] = widen(values[at] + offset + 16 * i);
        for (int head = 0; head < count; head++) {
            __m512 weight = _mm512_set1_ps(weights[head * SPLIT + at]);
            for (int i = 0; i < 4; i++) sum[head][i] = _mm512_fmadd_ps(weight, value[i], sum[head][i]);
        }
    }
    for (int head = 0; head < count; head++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(sums + head * sums_stride + 16 * i, sum[head][i]);
}

// A decode row's positions are attended to in parts, so that all threads have work (Dao et al. 2023,
// Flash-Decoding), and a part is the same whatever else is in the step:
//
//     low     SPLIT             2 * SPLIT         3 * SPLIT    high
//     |- part 0 -|---- part 1 ------|---- part 2 ------|- part 3 -|
//
// One row over the positions of its part from `first` on, of [.., last), while those that follow are fetched.
// part: per head, dim sums, the largest score, the sum of weights.
static void attend_part(float *part, const Layer *of, const bf16 *query, const i64 *table, i64 first,
                        i64 last) {
    i64 count = min_of(SPLIT - first % SPLIT, last - first), group = of->heads / of->kv_heads, dim = of->dim;
    i64 width = 2 * of->kv_heads * dim;
    i64 following = min_of(SPLIT, last - first - count);
    const bf16 *keys[SPLIT], *next[SPLIT];
    float weights[of->heads * SPLIT];
    locate(keys, of, table, first, count);
    locate(next, of, table, first + count, following);
    for (i64 at = count; at % 16; at++) keys[at] = keys[count - 1];  // whose weight will be 0
    for (i64 head = 0; head < of->heads; head++) {
        const bf16 *own = query + head * dim;
        float *scores = weights + head * SPLIT;
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (i64 at = head * following / of->heads; at < (head + 1) * following / of->heads; at++)
            for (i64 i = 0; i < width; i += 32) _mm_prefetch(next[at] + i, _MM_HINT_T1);
        for (i64 at = 0; at < count; at += 16) {
            i64 offset = head / group * dim;
            __m512 score = dim == 64 ? score_16(own, keys + at, offset, 64)  // with the loop unrolled
                                     : score_16(own, keys + at, offset, dim);
            score = _mm512_mul_ps(score, _mm512_set1_ps(of->scale));
            most = _mm512_max_ps(most, score);
            _mm512_storeu_ps(scores + at, score);
        }
        __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        for (i64 at = 0; at < count; at += 16) {
            __mmask16 valid = (1u << min_of(16, count - at)) - 1;
            __m512 weight = power_of_two(_mm512_sub_ps(_mm512_loadu_ps(scores + at), largest));
            weight = _mm512_maskz_mov_ps(valid, weight);
            total = _mm512_add_ps(total, weight);
            _mm512_storeu_ps(scores + at, weight);
        }
        float *sums = part + head * (dim + 2);
        sums[dim] = _mm512_cvtss_f32(largest);
        sums[dim + 1] = _mm512_reduce_add_ps(total);
    }
    for (i64 kv_head = 0; kv_head < of->kv_heads; kv_head++)
        for (i64 head = kv_head * group; head < (kv_head + 1) * group; head += 4)
            for (i64 lane = 0; lane < dim; lane += LANES) {
                float *sums = part + head * (dim + 2) + lane, *own = weights + head * SPLIT;
                i64 offset = (of->kv_heads + kv_head) * dim + lane;
                switch (min_of(4, (kv_head + 1) * group - head)) {
                    case 1: add_weighted(sums, dim + 2, own, keys, offset, count, 1); break;
                    case 2: add_weighted(sums, dim + 2, own, keys, offset, count, 2); break;
                    case 3: add_weighted(sums, dim + 2, own, keys, offset, count, 3); break;
                    default: add_weighted(sums, dim + 2, own, keys, offset, count, 4);
                }
            }
}

// The parts of one row's head, each of which is `stride` after the one before.
static void merge(bf16 *out, const float *parts, i64 count, i64 stride, i64 dim) {
    float largest = -INFINITY, total = 0, sums[dim];
    for (i64 part = 0; part < count; part++) largest = fmaxf(largest, parts[part * stride + dim]);
    memset(sums, 0, sizeof sums);
    for (i64 part = 0; part < count; part++) {
        const float *own = parts + part * stride;
        float weight = exp2f(own[dim] - largest);
        total += weight * own[dim + 1];
        for (i64 i = 0; i < dim; i++) sums[i] += weight * own[i];
    }
    __m512 share = _mm512_set1_ps(1 / total);
    for (i64 i = 0; i < dim; i += 16) narrow(out + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), share));
}

// `count` rows of one query each. rows: [count + 1, 4], where a row's blocks begin in `tables`, the first
// position that it sees and the one after the last, its first part; a last row ends the parts.
// parts: scratch, [parts, heads, dim + 2].
void attend_decode(bf16 *out, const bf16 *qkv, const bf16 *kv, float *parts, const i64 *shape,
                   const i64 *tables, const i64 *rows, i64 count, i64 slot) {
    Layer of = layer_of(kv, shape, slot);
    i64 stride = (of.heads + 2 * of.kv_heads) * of.dim, width = of.heads * (of.dim + 2);
    i64 num_parts = rows[4 * count + 3];
#pragma omp parallel if (num_parts > 1)
    {
#pragma omp for schedule(static)
        for (i64 part = 0; part < num_parts; part++) {
            i64 row = 0, end = count;
            while (end - row > 1) {
                i64 middle = (row + end) / 2;
                if (rows[4 * middle + 3] <= part) row = middle; else end = middle;
            }
            const i64 *own = rows + 4 * row;
            i64 first = max_of(own[1], (own[1] / SPLIT + part - own[3]) * SPLIT);
            attend_part(parts + part * width, &of, qkv + row * stride, tables + own[0], first, own[2]);
        }
#pragma omp for
        for (i64 at = 0; at < count * of.heads; at++) {
            const i64 *own = rows + 4 * (at / of.heads);
            const float *first = parts + own[3] * width + at % of.heads * (of.dim + 2);
            merge(out + at * of.dim, first, own[7] - own[3], width, of.dim);
        }
    }
}

#endif
