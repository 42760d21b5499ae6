// Attention that reads KV blocks where they are: of decode rows, and, with AMX, of prompts.

#include "native.h"

#ifdef HAS_BF16

// Where the keys of all heads of positions [first, first + count) are; the values of each follow its keys.
inlined void locate(const bf16 **keys, const Layer *of, const i64 *table, i64 first, i64 count) {
    i64 width = 2 * of->kv_heads * of->dim, block = first / of->block_size, in_block = first % of->block_size;
    while (count > 0) {
        i64 run = (table[block++] * of->slots + of->slot) * of->block_size;
        for (; count > 0 && in_block < of->block_size; count--) *keys++ = of->kv + (run + in_block++) * width;
        in_block = 0;
    }
}

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
//     low             low + SPLIT         low + 2 * SPLIT   high
//     |---- part 0 ------|---- part 1 ------|---- part 2 ---|
//
// One row over up to SPLIT positions from `first` on, of [.., last), while those that follow are fetched.
// part: per head, dim sums, the largest score, the sum of weights.
static void attend_part(float *part, const Layer *of, const bf16 *query, const i64 *table, i64 first,
                        i64 last) {
    i64 count = min_of(SPLIT, last - first), group = of->heads / of->kv_heads, dim = of->dim;
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
            i64 first = own[1] + (part - own[3]) * SPLIT;
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

#ifdef HAS_AMX

#define QUERIES 32  // of a tile
#define KEYS 256    // whose scores are in the first-level cache

// Keys of 16 positions and values of 32, as AMX wants its right-hand side: pairs along the summed axis.
// Positions before `low`, which no query sees, and those from `keys` on are zeros.
static void pack(bf16 *packed_keys, bf16 *packed_values, const Layer *of, const i64 *table, i64 first,
                 i64 low, i64 keys, i64 kv_head) {
    static const bf16 nothing[32];
    const bf16 *at[32];
    i64 dim = of->dim, values = of->kv_heads * dim;
    i64 count = min_of(32, keys - first);
    locate(at, of, table, first, count);
    for (i64 i = 0; i < 32; i++)
        at[i] = i < count && first + i >= low ? at[i] + kv_head * dim : NULL;
    const __m512i places = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208,
                                             224, 240);
    for (i64 half = 0; half < 2; half++)
        for (i64 part = 0; part < dim; part += 32) {
            uint32_t square[256] aligned;
            for (i64 i = 0; i < 16; i++) {
                const bf16 *key = at[16 * half + i];
                _mm512_store_si512(square + 16 * i, _mm512_loadu_si512(key ? key + part : nothing));
            }
            for (i64 pair = 0; pair < 16; pair++)
                _mm512_storeu_si512(packed_keys + (half * dim + part) * 16 + pair * 32,
                                    _mm512_i32gather_epi32(places, square + pair, 4));
        }
    for (i64 lane = 0; lane < dim; lane += 16)
        for (i64 pair = 0; pair < 16; pair++) {
            const bf16 *a = at[2 * pair], *b = at[2 * pair + 1];
            a = a ? a + values + lane : nothing;
            b = b ? b + values + lane : nothing;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)a));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)b));
            _mm512_storeu_si512(packed_values + lane * 32 + pair * 32,
                                _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

// Weights of one query over `count` keys, of which it sees [low, high). Returns what earlier sums shrink by.
inlined float weigh_some(bf16 *weights, const float *scores, i64 count, i64 low, i64 high, float scale,
                         float *largest, float *total, const int sees_all) {
    __mmask16 seen[KEYS / 16];
    for (i64 i = 0; i < count / 16; i++) {
        i64 from = max_of(0, min_of(16, low - 16 * i)), to = max_of(0, min_of(16, high - 16 * i));
        seen[i] = sees_all ? 0xffff : (1u << to) - (1u << min_of(from, to));
    }
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), scales = _mm512_set1_ps(scale);
    for (i64 i = 0; i < count / 16; i++)
        most = _mm512_mask_max_ps(most, seen[i], most, _mm512_loadu_ps(scores + 16 * i));
    float before = *largest, now = fmaxf(before, _mm512_reduce_max_ps(most) * scale);
    __m512 top = _mm512_set1_ps(now);
    for (i64 i = 0; i < count / 16; i++) {
        __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + 16 * i), scales, top));
        weight = _mm512_maskz_mov_ps(seen[i], weight);
        sum = _mm512_add_ps(sum, weight);
        narrow(weights + 16 * i, weight);
    }
    *largest = now;
    if (before == now) {
        *total += _mm512_reduce_add_ps(sum);
        return 1;
    }
    float shrink = exp2f(before - now);
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

static float weigh(bf16 *weights, const float *scores, i64 count, i64 low, i64 high, float scale,
                   float *largest, float *total) {
    if (low <= 0 && high >= KEYS) return weigh_some(weights, scores, KEYS, 0, KEYS, scale, largest, total, 1);
    return weigh_some(weights, scores, count, low, high, scale, largest, total, 0);
}

// Queries [first, first + QUERIES) of one head over all that they see. Online softmax: Milakov and
// Gimelshein 2018; tiles: Dao 2023 (FlashAttention-2).
static void attend_tile(bf16 *out, const bf16 *query, const bf16 *packed_keys, const bf16 *packed_values,
                        i64 first, i64 queries, i64 keys, i64 window, i64 dim, i64 stride, i64 out_stride,
                        float scale) {
    i64 rows = min_of(QUERIES, queries - first), past = keys - queries + first;
    bf16 q[QUERIES * dim] aligned, weights[QUERIES * KEYS] aligned;
    float sums[QUERIES * dim] aligned, scores[QUERIES * KEYS] aligned;
    float largest[QUERIES], total[QUERIES];
    memset(q, 0, sizeof q);
    memset(weights, 0, sizeof weights);
    memset(sums, 0, sizeof sums);
    for (i64 i = 0; i < rows; i++) {
        memcpy(q + i * dim, query + (first + i) * stride, 2 * dim);
        largest[i] = -1e30f;
        total[i] = 0;
    }
    for (i64 key = max_of(0, past - window + 1) / 32 * 32; key < past + rows; key += KEYS) {
        i64 count = min_of(KEYS, (past + rows - key + 31) / 32 * 32);
        for (i64 at = 0; at < count; at += 32) {
            const bf16 *low = packed_keys + (key + at) * dim, *high = low + 16 * dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (i64 part = 0; part < dim; part += 32) {
                _tile_loadd(4, q + part, 2 * dim);
                _tile_loadd(5, q + 16 * dim + part, 2 * dim);
                _tile_loadd(6, low + part * 16, 64);
                _tile_loadd(7, high + part * 16, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, scores + at, 4 * KEYS);
            _tile_stored(1, scores + at + 16, 4 * KEYS);
            _tile_stored(2, scores + 16 * KEYS + at, 4 * KEYS);
            _tile_stored(3, scores + 16 * KEYS + at + 16, 4 * KEYS);
        }
        for (i64 i = 0; i < rows; i++) {
            i64 high = past + i + 1 - key;
            float shrink = weigh(weights + i * KEYS, scores + i * KEYS, count, high - window, high, scale,
                                 largest + i, total + i);
            if (shrink != 1)
                for (i64 lane = 0; lane < dim; lane++) sums[i * dim + lane] *= shrink;
        }
        for (i64 lane = 0; lane < dim; lane += 32) {
            float *low = sums + lane, *high = sums + 16 * dim + lane;
            _tile_loadd(0, low, 4 * dim);
            _tile_loadd(1, low + 16, 4 * dim);
            _tile_loadd(2, high, 4 * dim);
            _tile_loadd(3, high + 16, 4 * dim);
            for (i64 at = 0; at < count; at += 32) {
                const bf16 *values = packed_values + (key + at) * dim + lane * 32;
                _tile_loadd(4, weights + at, 2 * KEYS);
                _tile_loadd(5, weights + 16 * KEYS + at, 2 * KEYS);
                _tile_loadd(6, values, 64);
                _tile_loadd(7, values + 512, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, low, 4 * dim);
            _tile_stored(1, low + 16, 4 * dim);
            _tile_stored(2, high, 4 * dim);
            _tile_stored(3, high + 16, 4 * dim);
        }
    }
    for (i64 i = 0; i < rows; i++) {
        __m512 share = _mm512_set1_ps(1 / total[i]);
        for (i64 lane = 0; lane < dim; lane += 16)
            narrow(out + (first + i) * out_stride + lane,
                   _mm512_mul_ps(_mm512_load_ps(sums + i * dim + lane), share));
    }
}

// The last `queries` of `keys` positions over those up to `window` before them. table: the blocks of these
// positions. packed: scratch, [2, kv_heads, keys rounded up to 32, dim].
void attend_prefill(bf16 *out, const bf16 *qkv, const bf16 *kv, bf16 *packed, const i64 *shape,
                    const i64 *table, i64 queries, i64 keys, i64 window, i64 slot) {
    Layer of = layer_of(kv, shape, slot);
    i64 stride = (of.heads + 2 * of.kv_heads) * of.dim, squares = (keys + 31) / 32;
    i64 size = squares * 32 * of.dim, tiles = (queries + QUERIES - 1) / QUERIES;
    i64 low = keys - queries - window + 1;
    bf16 *values = packed + of.kv_heads * size;
    static const TileConfig config = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#pragma omp parallel
    {
        _tile_loadconfig(&config);
#pragma omp for
        for (i64 at = 0; at < squares * of.kv_heads; at++) {
            i64 square = at / of.kv_heads, head = at % of.kv_heads;
            i64 place = head * size + square * 32 * of.dim;
            pack(packed + place, values + place, &of, table, square * 32, low, keys, head);
        }
#pragma omp for schedule(dynamic)
        for (i64 at = 0; at < tiles * of.heads; at++) {
            i64 tile = tiles - 1 - at / of.heads, head = at % of.heads;  // those that see most first
            i64 place = head / (of.heads / of.kv_heads) * size;
            attend_tile(out + head * of.dim, qkv + head * of.dim, packed + place, values + place,
                        tile * QUERIES, queries, keys, window, of.dim, stride, of.heads * of.dim, of.scale);
        }
        _tile_release();
    }
}

#endif

#endif
