// Attention that reads KV blocks where they are, with AMX or with AVX-512 alone. A query's result is the same
// whatever is beside it, be it part of a prompt or a decode row:
//
//     positions of a sequence | part 0: KEYS of them | part 1 | ..
//
// Over each part that it sees a query has sums of its own, which are then merged from the first part on.
// Tiles: Dao 2023 (FlashAttention-2); parts: Dao et al. 2023 (Flash-Decoding).

#include "native.h"

#ifdef HAS_BF16

#define QUERIES 32   // of a tile
#define KEYS 256     // of a part, whose scores are in the first-level cache
#define AHEAD 128    // positions between what is fetched and what is read
#define NONE -1e30f  // the largest of no scores
#define ROWS 12      // whose sums are in registers

int part_size(void) { return KEYS; }

// One KV head's keys and values of 32 positions, as AMX wants its right-hand side: pairs along the summed
// axis. rows: where the keys of each are, or NULL for zeros; the values are `values` after their keys.
inlined void pack_some(bf16 *packed_keys, bf16 *packed_values, const bf16 *const *rows, i64 dim, i64 values,
                       const int whole) {
    const __m512i low = _mm512_setr_epi32(  // of two rows, the first 16 values in turns
        0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008, 0x290009,
        0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x100010));
    const __m512i nothing = _mm512_setzero_si512();
    for (i64 part = 0; part < dim; part += 32) {
        for (i64 half = 0; half < 2; half++) {
            __m512i square[16];
            for (i64 i = 0; i < 16; i++) {
                const bf16 *row = rows[16 * half + i];
                square[i] = whole || row ? _mm512_loadu_si512(row + part) : nothing;
            }
            transpose(square);
            for (i64 pair = 0; pair < 16; pair++)
                _mm512_storeu_si512(packed_keys + (half * dim + part) * 16 + pair * 32, square[pair]);
        }
        for (i64 pair = 0; pair < 16; pair++) {
            const bf16 *a = rows[2 * pair], *b = rows[2 * pair + 1];
            __m512i first = whole || a ? _mm512_loadu_si512(a + values + part) : nothing;
            __m512i second = whole || b ? _mm512_loadu_si512(b + values + part) : nothing;
            bf16 *out = packed_values + part * 32 + pair * 32;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(first, low, second));
            _mm512_storeu_si512(out + 512, _mm512_permutex2var_epi16(first, high, second));
        }
    }
}

// The same for positions from `first` on; those before `low`, which no query sees, and those from `keys` on
// are zeros.
static void pack(bf16 *packed_keys, bf16 *packed_values, const Layer *of, const i64 *table, i64 first,
                 i64 low, i64 keys, i64 kv_head) {
    const bf16 *rows[32];
    i64 dim = of->dim, values = of->kv_heads * dim;
    locate(rows, of, table, first, min_of(32, keys - first));
    for (i64 i = 0; i < 32; i++)
        rows[i] = first + i < keys && first + i >= low ? rows[i] + kv_head * dim : NULL;
    if (first >= low && first + 32 <= keys) pack_some(packed_keys, packed_values, rows, dim, values, 1);
    else pack_some(packed_keys, packed_values, rows, dim, values, 0);
}

// Weights of one query over `count` keys, of which it sees [low, high). largest[0] and [1]: the largest
// score, and the sum of weights.
inlined void weigh_some(bf16 *weights, const float *scores, i64 count, i64 low, i64 high, float scale,
                        float *largest, const int sees_all) {
    __mmask16 seen[KEYS / 16];
    for (i64 i = 0; i < count / 16; i++) {
        i64 from = max_of(0, min_of(16, low - 16 * i)), to = max_of(0, min_of(16, high - 16 * i));
        seen[i] = sees_all ? 0xffff : (1u << to) - (1u << min_of(from, to));
    }
    __m512 most = _mm512_set1_ps(NONE), sum = _mm512_setzero_ps(), scales = _mm512_set1_ps(scale);
    for (i64 i = 0; i < count / 16; i++) {
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + 16 * i), scales);
        most = _mm512_mask_max_ps(most, seen[i], most, score);
    }
    largest[0] = _mm512_reduce_max_ps(most);
    __m512 top = _mm512_set1_ps(largest[0]);
    for (i64 i = 0; i < count / 16; i++) {
        __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + 16 * i), scales, top));
        weight = _mm512_maskz_mov_ps(seen[i], weight);
        sum = _mm512_add_ps(sum, weight);
        narrow(weights + 16 * i, weight);
    }
    largest[1] = _mm512_reduce_add_ps(sum);
}

static void weigh(bf16 *weights, const float *scores, i64 count, i64 low, i64 high, float scale,
                  float *largest) {
    if (low <= 0 && high >= KEYS) weigh_some(weights, scores, KEYS, 0, KEYS, scale, largest, 1);
    else weigh_some(weights, scores, count, low, high, scale, largest, 0);
}

#ifdef HAS_AMX

// What the tiles of `rows` queries are: 0 to 3 are sums, 4 and 5 queries or weights, 6 and 7 keys or values.
inlined void set_up_tiles(i64 rows) {
    uint8_t low = min_of(16, rows), high = max_of(1, rows - 16);
    TileConfig config = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {low, low, high, high, low, high, 16, 16}};
    _tile_loadconfig(&config);
}

inlined void leave_tiles(void) { _tile_release(); }

// out [rows, 32] = a [rows, count] @ b [count, 32]: `rows` as they were set up; out and a have rows of their
// own width; b lies as packed: in tiles of 32 by 16, `step` values from one to the one below, `beside` to the
// one on its right.
inlined void multiply(float *out, i64 out_width, const bf16 *a, i64 a_width, const bf16 *b, i64 step,
                      i64 beside, i64 count, i64 rows) {
    const int tall = rows > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 at = 0; at < count; at += 32, b += step) {
        _tile_loadd(4, a + at, 2 * a_width);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + beside, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!tall) continue;
        _tile_loadd(5, a + 16 * a_width + at, 2 * a_width);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 4 * out_width);
    _tile_stored(1, out + 16, 4 * out_width);
    if (tall) _tile_stored(2, out + 16 * out_width, 4 * out_width);
    if (tall) _tile_stored(3, out + 16 * out_width + 16, 4 * out_width);
}

#else

inlined void set_up_tiles(i64 rows) {}
inlined void leave_tiles(void) {}

inlined void multiply_some(float *out, i64 out_width, const bf16 *a, i64 a_width, const bf16 *b, i64 step,
                           i64 beside, i64 count, const int rows) {
    __m512 left[ROWS], right[ROWS];
    for (int row = 0; row < rows; row++) left[row] = right[row] = _mm512_setzero_ps();
    for (i64 at = 0; at < count; at += 32, b += step)
        for (int pair = 0; pair < 16; pair++) {
            __m512bh first = (__m512bh)_mm512_loadu_si512(b + 32 * pair);
            __m512bh second = (__m512bh)_mm512_loadu_si512(b + beside + 32 * pair);
            for (int row = 0; row < rows; row++) {
                __m512bh own = two_values(a + row * a_width + at + 2 * pair);
                left[row] = _mm512_dpbf16_ps(left[row], first, own);
                right[row] = _mm512_dpbf16_ps(right[row], second, own);
            }
        }
    for (int row = 0; row < rows; row++) {
        _mm512_storeu_ps(out + row * out_width, left[row]);
        _mm512_storeu_ps(out + row * out_width + 16, right[row]);
    }
}

inlined void multiply(float *out, i64 out_width, const bf16 *a, i64 a_width, const bf16 *b, i64 step,
                      i64 beside, i64 count, i64 rows) {
#define CASE(n) \
    case n: multiply_some(out, out_width, a, a_width, b, step, beside, count, n); break
    for (i64 some; rows > 0; rows -= some, out += some * out_width, a += some * a_width) {
        some = rows >= 12 ? 12 : rows >= 4 ? rows / 4 * 4 : rows;
        switch (some) {
            CASE(12);
            CASE(8);
            CASE(4);
            CASE(3);
            CASE(2);
            CASE(1);
        }
    }
#undef CASE
}

#endif

// `rows` queries, up to QUERIES, over a part's first `count` keys, a multiple of 32. Query i, at q + i * dim,
// sees [high - window, high) with high = first_high + i * step. sums: [rows, dim + 2], of each its dim sums,
// its largest score, its sum of weights.
static void attend_part(float *sums, const bf16 *q, const bf16 *keys, const bf16 *values, i64 rows, i64 count,
                        i64 first_high, i64 step, i64 window, i64 dim, float scale) {
    bf16 weights[QUERIES * KEYS] aligned;
    float scores[QUERIES * KEYS] aligned;
    const i64 width = dim + 2;
    for (i64 at = 0; at < count; at += 32)
        multiply(scores + at, KEYS, q, dim, keys + at * dim, 512, 16 * dim, dim, rows);
    for (i64 i = 0; i < rows; i++) {
        i64 high = first_high + i * step;
        weigh(weights + i * KEYS, scores + i * KEYS, count, high - window, high, scale,
              sums + i * width + dim);
    }
    for (i64 lane = 0; lane < dim; lane += 32)
        multiply(sums + lane, width, weights, KEYS, values + lane * 32, 32 * dim, 512, count, rows);
}

inlined void start(float *sums, i64 dim) {
    memset(sums, 0, (dim + 2) * sizeof *sums);
    sums[dim] = NONE;
}

// sums += part
static void merge(float *sums, const float *part, i64 dim) {
    float before = sums[dim], now = fmaxf(before, part[dim]);
    float old = exp2f(before - now), new = exp2f(part[dim] - now);
    for (i64 i = 0; i < dim; i += 16) {
        __m512 own = _mm512_mul_ps(_mm512_loadu_ps(part + i), _mm512_set1_ps(new));
        _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(old), own));
    }
    sums[dim] = now;
    sums[dim + 1] = fmaf(sums[dim + 1], old, part[dim + 1] * new);
}

static void finish(bf16 *out, const float *sums, i64 dim) {
    __m512 share = _mm512_set1_ps(1 / sums[dim + 1]);
    for (i64 i = 0; i < dim; i += 16) narrow(out + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), share));
}

// Fetches one KV head's keys and values of up to 32 positions, [first, end).
inlined void fetch(const Layer *of, const i64 *table, i64 first, i64 end, i64 kv_head) {
    const bf16 *rows[32];
    i64 count = max_of(0, min_of(32, end - first)), values = of->kv_heads * of->dim;
    locate(rows, of, table, first, count);
    for (i64 i = 0; i < count; i++)
        for (i64 lane = kv_head * of->dim; lane < (kv_head + 1) * of->dim; lane += 32) {
            _mm_prefetch(rows[i] + lane, _MM_HINT_T0);
            _mm_prefetch(rows[i] + values + lane, _MM_HINT_T0);
        }
}

// One decode row's heads that share a KV head, over one part: positions [first, last) of [.., end), of which
// it sees those from `low` on.
static void attend_row(float *sums, const Layer *of, const bf16 *query, const i64 *table, i64 first, i64 low,
                       i64 last, i64 end, i64 kv_head) {
    bf16 keys[KEYS * of->dim] aligned, values[KEYS * of->dim] aligned;
    i64 dim = of->dim, group = of->heads / of->kv_heads, begin = max_of(first, low / 32 * 32);
    for (i64 at = begin; at < last; at += 32) {
        fetch(of, table, at + AHEAD, end, kv_head);
        pack(keys + (at - begin) * dim, values + (at - begin) * dim, of, table, at, low, last, kv_head);
    }
    for (i64 head = kv_head * group; head < (kv_head + 1) * group; head += QUERIES) {
        i64 rows = min_of(QUERIES, (kv_head + 1) * group - head);
        if (group > QUERIES) set_up_tiles(rows);
        attend_part(sums + head * (dim + 2), query + head * dim, keys, values, rows,
                    (last - begin + 31) / 32 * 32, last - begin, 0, last - low, dim, of->scale);
    }
}

// `count` rows of one query each. rows: [count + 1, 4], where a row's blocks begin in `tables`, the first
// position that it sees and the one after the last, its first part; a last row ends the parts. Positions are
// counted from that of the first block, which a part begins with.
// parts: scratch, [parts, heads, dim + 2].
void attend_decode(bf16 *out, const bf16 *qkv, const bf16 *kv, float *parts, const i64 *shape,
                   const i64 *tables, const i64 *rows, i64 count, i64 slot) {
    Layer of = layer_of(kv, shape, slot);
    i64 stride = (of.heads + 2 * of.kv_heads) * of.dim, width = of.heads * (of.dim + 2);
    i64 num_parts = rows[4 * count + 3];
#pragma omp parallel
    {
        set_up_tiles(of.heads / of.kv_heads);
#pragma omp for schedule(static)
        for (i64 at = 0; at < num_parts * of.kv_heads; at++) {
            i64 part = at / of.kv_heads, row = 0, end = count;
            while (end - row > 1) {
                i64 middle = (row + end) / 2;
                if (rows[4 * middle + 3] <= part) row = middle; else end = middle;
            }
            const i64 *own = rows + 4 * row;
            i64 first = (own[1] / KEYS + part - own[3]) * KEYS;
            attend_row(parts + part * width, &of, qkv + row * stride, tables + own[0], first, own[1],
                       min_of(own[2], first + KEYS), own[2], at % of.kv_heads);
        }
#pragma omp for schedule(static)
        for (i64 at = 0; at < count * of.heads; at++) {
            const i64 *own = rows + 4 * (at / of.heads);
            float sums[of.dim + 2];
            start(sums, of.dim);
            for (i64 part = own[3]; part < own[7]; part++)
                merge(sums, parts + part * width + at % of.heads * (of.dim + 2), of.dim);
            finish(out + at * of.dim, sums, of.dim);
        }
        leave_tiles();
    }
}

// Queries [first, first + QUERIES) of one head over all that they see.
static void attend_tile(bf16 *out, const bf16 *query, const bf16 *packed_keys, const bf16 *packed_values,
                        i64 first, i64 queries, i64 keys, i64 window, i64 dim, i64 stride, i64 out_stride,
                        float scale) {
    i64 rows = min_of(QUERIES, queries - first), past = keys - queries + first, width = dim + 2;
    bf16 q[QUERIES * dim] aligned;
    float sums[QUERIES * width], part[QUERIES * width];
    memset(q, 0, sizeof q);
    for (i64 i = 0; i < rows; i++) {
        memcpy(q + i * dim, query + (first + i) * stride, 2 * dim);
        start(sums + i * width, dim);
    }
    for (i64 key = max_of(0, past - window + 1) / 32 * 32, end; key < past + rows; key = end) {
        end = (key / KEYS + 1) * KEYS;
        i64 count = min_of(end - key, (past + rows - key + 31) / 32 * 32);
        attend_part(part, q, packed_keys + key * dim, packed_values + key * dim, rows, count,
                    past + 1 - key, 1, window, dim, scale);
        for (i64 i = 0; i < rows; i++) merge(sums + i * width, part + i * width, dim);
    }
    for (i64 i = 0; i < rows; i++) finish(out + (first + i) * out_stride, sums + i * width, dim);
}

// The last `queries` of `keys` positions over those up to `window` before them. table: the blocks of these
// positions. packed: scratch, [2, kv_heads, keys rounded up to 32, dim].
void attend_prefill(bf16 *out, const bf16 *qkv, const bf16 *kv, bf16 *packed, const i64 *shape,
                    const i64 *table, i64 queries, i64 keys, i64 window, i64 slot) {
    Layer of = layer_of(kv, shape, slot);
    i64 stride = (of.heads + 2 * of.kv_heads) * of.dim, squares = (keys + 31) / 32;
    i64 size = squares * 32 * of.dim, tiles = (queries + QUERIES - 1) / QUERIES;
    i64 low = max_of(0, keys - queries - window + 1);
    bf16 *values = packed + of.kv_heads * size;
#pragma omp parallel
    {
        set_up_tiles(QUERIES);
#pragma omp for
        for (i64 at = low / 32 * of.kv_heads; at < squares * of.kv_heads; at++) {
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
        leave_tiles();
    }
}

#endif
