/* The small CPU operations between matrix products, each one fused.

   Knows: arrays of floats. Does not know: tensors, modules.
   Every function gives the bits of the tensor operations that it stands for: the same IEEE additions,
   multiplications, divisions and roundings in the same order. exp, log, sqrt of scores and sums over long rows
   stay with the tensor library, whose last bits are its own. Compile without fused multiply-add and without fast-math. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define API __attribute__((visibility("default")))
#define GROUP 32
#define LANES 16

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* Nearest bf16, ties to even; NaN stays NaN. */
static inline float round_bf16(float x) {
    uint32_t u = bits_of(x);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    return float_of((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : r);
}

static inline float load_value(const void *p, long i, int bf16) {
    if (bf16) return float_of((uint32_t)((const uint16_t *)p)[i] << 16);
    return ((const float *)p)[i];
}

static inline void store_value(void *p, long i, float x, int bf16) {
    if (bf16) ((uint16_t *)p)[i] = (uint16_t)(bits_of(x) >> 16); /* x is rounded already */
    else ((float *)p)[i] = x;
}

/* Scale of an FP8 group (attention spec 9.1): the power of two at or above max(amax, 1e-4) / 448. */
static inline float fp8_scale(const float *x) {
    uint32_t top = bits_of(1e-4f);
    for (int i = 0; i < GROUP; i++) {
        uint32_t u = bits_of(x[i]) & 0x7fffffffu;
        top = u > top ? u : top;
    }
    uint32_t u = bits_of(float_of(top) / 448.0f);
    u = u > 0x7f800000u ? 0x7f800000u : u;
    return float_of((u + 0x007fffffu) & 0x7f800000u);
}

/* Quantize and dequantize one group: adding 1.5 * 2^23 quanta and taking them away rounds to even. */
static inline void fake_fp8_group(const float *x, float *y) {
    float least = fp8_scale(x) * (1.5f * 16384.0f);
    for (int i = 0; i < GROUP; i++) {
        float magic = float_of(bits_of(x[i]) & 0x7f800000u) * (1.5f * 1048576.0f);
        magic = magic > least ? magic : least;
        y[i] = (x[i] + magic) - magic;
    }
}

API void fake_quant_fp8(const float *x, void *y, long groups, int bf16) {
    float out[GROUP];
    for (long g = 0; g < groups; g++) {
        if (!bf16) {
            fake_fp8_group(x + g * GROUP, (float *)y + g * GROUP);
            continue;
        }
        fake_fp8_group(x + g * GROUP, out);
        for (int i = 0; i < GROUP; i++) store_value(y, g * GROUP + i, out[i], 1);
    }
}

/* Quantize and dequantize FP4 groups of 32 with power-of-two scales (attention spec 9.4). */
API void fake_quant_index(const float *x, float *y, long groups) {
    const float sixth = (float)(1.0 / 6.0);
    for (long g = 0; g < groups; g++, x += GROUP, y += GROUP) {
        uint32_t top = bits_of(6.0f * 0x1p-126f);
        for (int i = 0; i < GROUP; i++) {
            uint32_t u = bits_of(x[i]) & 0x7fffffffu;
            top = u > top ? u : top;
        }
        float least = float_of((bits_of(float_of(top) * sixth) + 0x007fffffu) & 0x7f800000u);
        for (int i = 0; i < GROUP; i++) {
            float magic = float_of(bits_of(x[i]) & 0x7f800000u);
            magic = (magic > least ? magic : least) * (1.5f * 4194304.0f);
            y[i] = (x[i] + magic) - magic;
        }
    }
}

API void round_values(const float *x, float *y, long n) {
    for (long i = 0; i < n; i++) y[i] = round_bf16(x[i]);
}

/* y = b(x * rsqrt(ss / n + eps) * w). ss: sums of squares. stride: between rows of x. */
API void norm_rows(const float *x, const float *ss, const float *w, float *y, long rows, long n, long stride,
                   float eps, int rounded) {
    for (long t = 0; t < rows; t++) {
        float r = 1.0f / sqrtf(ss[t] / (float)n + eps);
        const float *in = x + t * stride;
        float *own = y + t * n;
        for (long i = 0; i < n; i++) {
            float v = (in[i] * r) * w[i];
            own[i] = rounded ? round_bf16(v) : v;
        }
    }
}

/* Arguments of the exponentials of a hyper-connection (model spec 3.2): q = product * rstd * scale + base;
   out = -q for the gates, q - row maximum for the m x m logits. ss: sums of squares of n values. m <= 4. */
API void mix_logits(const float *product, const float *ss, const float *scale, const float *base, float *out,
                    long rows, long m, long n, float eps) {
    long width = (2 + m) * m;
    for (long t = 0; t < rows; t++) {
        float r = 1.0f / sqrtf(ss[t] / (float)n + eps);
        const float *in = product + t * width;
        float *own = out + t * width;
        for (long i = 0; i < width; i++) own[i] = ((in[i] * r) * scale[i]) + base[i];
        for (long i = 0; i < 2 * m; i++) own[i] = -own[i];
        for (long row = 2 * m; row < width; row += m) {
            float top = own[row];
            for (long j = 1; j < m; j++) top = own[row + j] > top ? own[row + j] : top;
            for (long j = 0; j < m; j++) own[row + j] = own[row + j] - top;
        }
    }
}

/* pre, post and comb of a hyper-connection from the exponentials of mix_logits. comb_t[t][n][c] holds
   comb[t][c][n]. Rows lie side by side in lanes; sums are ((start + c0) + c1) + ... as everywhere. */
API void mix_coefficients(const float *e, float *pre, float *post, float *comb_t, long rows, long m, float eps,
                          int iterations) {
    long width = (2 + m) * m;
    float c[16][LANES], s[LANES];
    for (long t0 = 0; t0 < rows; t0 += LANES) {
        long live = rows - t0 < LANES ? rows - t0 : LANES;
        for (long l = 0; l < live; l++) {
            const float *in = e + (t0 + l) * width;
            for (long j = 0; j < m; j++) {
                pre[(t0 + l) * m + j] = 1.0f / (in[j] + 1.0f) + eps;
                post[(t0 + l) * m + j] = (1.0f / (in[m + j] + 1.0f)) * 2.0f;
            }
        }
        for (long k = 0; k < m * m; k++)
            for (long l = 0; l < LANES; l++) c[k][l] = l < live ? e[(t0 + l) * width + 2 * m + k] : 1.0f;
        for (int step = 0; step < 2 * iterations; step++) {
            int over_columns = step % 2 == 0; /* rows are normalized first, columns last */
            long outer = over_columns ? m : 1, inner = over_columns ? 1 : m;
            float start = step ? eps : 0.0f;
            for (long a = 0; a < m; a++) {
                for (int l = 0; l < LANES; l++) s[l] = c[a * outer][l] + start;
                for (long b = 1; b < m; b++)
                    for (int l = 0; l < LANES; l++) s[l] = s[l] + c[a * outer + b * inner][l];
                for (long b = 0; b < m; b++)
                    for (int l = 0; l < LANES; l++)
                        c[a * outer + b * inner][l] = c[a * outer + b * inner][l] / s[l];
            }
            if (step == 0)
                for (long k = 0; k < m * m; k++)
                    for (int l = 0; l < LANES; l++) c[k][l] = c[k][l] + eps;
        }
        for (long l = 0; l < live; l++)
            for (long a = 0; a < m; a++)
                for (long b = 0; b < m; b++) comb_t[((t0 + l) * m + b) * m + a] = c[a * m + b][l];
    }
}

/* y[t] = b(((a0 x0 + a1 x1) + a2 x2) + ...) over the m copies of x [T, m, n]. */
API void collapse_rows(const float *a, const float *x, float *y, long rows, long m, long n, int rounded) {
    for (long t = 0; t < rows; t++) {
        const float *in = x + t * m * n, *w = a + t * m;
        float *own = y + t * n;
        for (long i = 0; i < n; i++) {
            float v = w[0] * in[i];
            for (long c = 1; c < m; c++) v = v + w[c] * in[c * n + i];
            own[i] = rounded ? round_bf16(v) : v;
        }
    }
}

/* Rotate the last `width` of `dim` values of each head in place: cos (c0, c0, ...), sin (-s0, s0, ...). */
API void rotate_tail(float *x, const float *cos_t, const float *sin_t, long rows, long heads, long dim, long width,
                     long row_stride, int rounded) {
    for (long t = 0; t < rows; t++) {
        const float *c = cos_t + t * width, *s = sin_t + t * width;
        for (long h = 0; h < heads; h++) {
            float *v = x + t * row_stride + h * dim + dim - width;
            for (long i = 0; i < width; i += 2) {
                float a = (v[i] * c[i]) + (v[i + 1] * s[i]);
                float b = (v[i + 1] * c[i + 1]) + (v[i] * s[i + 1]);
                v[i] = rounded ? round_bf16(a) : a;
                v[i + 1] = rounded ? round_bf16(b) : b;
            }
        }
    }
}

/* A product's result: bf16 as it is, float32 rounded if asked. */
static inline float load_product(const void *p, long i, int bf16, int rounded) {
    float x = load_value(p, i, bf16);
    return rounded && !bf16 ? round_bf16(x) : x;
}

/* First half of a SwiGLU on rows index[p] of gate_up [., 2M]: out = min(-min(gate, limit), 80). */
API void swiglu_logits(const void *gate_up, const int64_t *index, float *out, long pairs, long width, float limit,
                       int rounded, int bf16) {
    for (long p = 0; p < pairs; p++)
        for (long i = 0; i < width; i++) {
            float g = load_product(gate_up, index[p] * 2 * width + i, bf16, rounded);
            if (limit > 0.0f) g = g > limit ? limit : g;
            g = -g;
            out[p * width + i] = g > 80.0f ? 80.0f : g;
        }
}

/* Second half: Q8(gate / (e + 1) * up * weight) to row index[p] of out [., M]; rounded 0 leaves it plain. */
API void swiglu_values(const void *gate_up, const int64_t *index, const float *e, const float *weight, void *out,
                       long pairs, long width, float limit, int rounded, int bf16) {
    float v[GROUP], q[GROUP];
    for (long p = 0; p < pairs; p++) {
        long in = index[p] * 2 * width, to = index[p] * width;
        for (long start = 0; start < width; start += GROUP) {
            for (int i = 0; i < GROUP; i++) {
                float g = load_product(gate_up, in + start + i, bf16, rounded);
                float u = load_product(gate_up, in + width + start + i, bf16, rounded);
                if (limit > 0.0f) {
                    g = g > limit ? limit : g;
                    u = u < -limit ? -limit : u > limit ? limit : u;
                }
                v[i] = ((g / (e[p * width + start + i] + 1.0f)) * u) * weight[p];
            }
            if (rounded) fake_fp8_group(v, q);
            for (int i = 0; i < GROUP; i++) store_value(out, to + start + i, rounded ? q[i] : v[i], bf16);
        }
    }
}

/* y[t] = b((o[t][0] + o[t][1]) + ...) over the slots of a row. */
API void combine_rows(const float *o, float *y, long rows, long slots, long width, int rounded) {
    for (long t = 0; t < rows; t++)
        for (long i = 0; i < width; i++) {
            const float *own = o + t * slots * width + i;
            float v = own[0];
            for (long k = 1; k < slots; k++) v = v + own[k * width];
            y[t * width + i] = rounded ? round_bf16(v) : v;
        }
}

/* Router: the k best of score + bias (the smaller id of equals), weights from the unbiased scores. The square
   root of the score is not here: the tensor library's is not the correctly rounded one. */
API void route_rows(const float *scores, const float *bias, int64_t *experts, float *weights, long rows, long count,
                    long k, float scaling) {
    for (long t = 0; t < rows; t++) {
        const float *x = scores + t * count;
        int64_t *id = experts + t * k;
        float *w = weights + t * k;
        for (long slot = 0; slot < k; slot++) {
            long best = -1;
            float top = 0.0f;
            for (long e = 0; e < count; e++) {
                int taken = 0;
                for (long s = 0; s < slot; s++) taken |= id[s] == e;
                if (taken) continue;
                float value = x[e] + bias[e];
                if (best < 0 || value > top) { best = e; top = value; }
            }
            id[slot] = best;
            w[slot] = x[best];
        }
        if (k > 1) {
            float total = w[0] + 1e-20f;
            for (long slot = 1; slot < k; slot++) total = total + w[slot];
            for (long slot = 0; slot < k; slot++) w[slot] = w[slot] / total;
        }
        for (long slot = 0; slot < k; slot++) w[slot] = w[slot] * scaling;
    }
}

/* e4m3fn code of |x| <= 448 or NaN, ties to even. */
static inline uint8_t encode_e4m3(float x) {
    uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    float a = float_of(u);
    if (a < 0.015625f) return (uint8_t)(sign | (bits_of(a + 16384.0f) & 0xfu)); /* quanta of 2^-9 */
    u += 0x0007ffffu + ((u >> 20) & 1u);
    return (uint8_t)(sign | ((u >> 20) - (120u << 3)));
}

/* e2m1 code, ties to the even code, saturating; NaN of either sign is 6, zeros keep their sign. */
static inline uint8_t encode_e2m1(float x) {
    uint32_t u = bits_of(x), sign = u >> 28 & 8u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return 7;
    float a = float_of(u > 0x40c00000u ? 0x40c00000u : u); /* at most 6 */
    float magic = float_of(bits_of(a) & 0x7f800000u);
    magic = (magic > 1.0f ? magic : 1.0f) * (1.5f * 4194304.0f);
    a = (a + magic) - magic;
    float code = a + a, two = a + 2.0f, half = a * 0.5f + 4.0f;
    code = code < two ? code : two;
    return (uint8_t)(sign | (uint32_t)(code < half ? code : half));
}

/* FP4 records: e2m1 pairs to codes, one scale a group. ue8m0 (kv 0): power of two at or above max(amax, 6 2^-126)
   times fp32(1/6). e4m3 (kv 1): max(amax, 6 2^-9) times fp32(1/6), values times the reciprocal; divide: both are
   true divisions. e4m3: the values of scale codes. */
API void store_fp4(const float *x, uint8_t *codes, uint8_t *scales, const int64_t *code_rows,
                   const int64_t *scale_rows, long count, long dim, long code_pitch, long scale_pitch, long group,
                   int kv, int divide, const float *e4m3) {
    const float sixth = (float)(1.0 / 6.0);
    for (long t = 0; t < count; t++) {
        uint8_t *out = codes + code_rows[t] * code_pitch, *sc = scales + scale_rows[t] * scale_pitch;
        for (long g = 0; g < dim / group; g++) {
            const float *in = x + t * dim + g * group;
            uint32_t top = kv ? bits_of(6.0f * 0x1p-9f) : bits_of(6.0f * 0x1p-126f);
            for (long i = 0; i < group; i++) {
                uint32_t u = bits_of(in[i]) & 0x7fffffffu;
                top = u > top ? u : top;
            }
            float factor, amax = float_of(top);
            if (kv) {
                float s = divide ? amax / 6.0f : amax * sixth;
                uint8_t code = encode_e4m3(s > 448.0f ? 448.0f : s);
                sc[g] = code;
                factor = divide ? e4m3[code] : 1.0f / e4m3[code];
            } else {
                uint32_t u = ((bits_of(amax * sixth) - 1u) >> 23) + 1u;
                u = u > 255u ? 255u : u;
                sc[g] = (uint8_t)u;
                factor = float_of((254u - u) << 23);
            }
            for (long i = 0; i < group; i += 2) {
                float a = kv && divide ? in[i] / factor : in[i] * factor;
                float b = kv && divide ? in[i + 1] / factor : in[i + 1] * factor;
                out[(g * group + i) / 2] = (uint8_t)(encode_e2m1(a) | encode_e2m1(b) << 4);
            }
        }
    }
}

/* Window records of `record` bytes: e4m3 codes of `dim` values, then one ue8m0 byte for each 32. */
API void store_fp8(const float *x, uint8_t *base, const int64_t *rows, long count, long dim, long record,
                   long stride) {
    for (long t = 0; t < count; t++) {
        uint8_t *out = base + rows[t] * record;
        for (long g = 0; g < dim / GROUP; g++) {
            const float *in = x + t * stride + g * GROUP;
            float scale = fp8_scale(in);
            for (int i = 0; i < GROUP; i++) out[g * GROUP + i] = encode_e4m3(in[i] / scale);
            out[dim + g] = (uint8_t)(bits_of(scale) >> 23);
        }
    }
}

/* e4m3 codes and ue8m0 scales of the same rows; a negative row gives zeros. */
API void load_fp8(const uint8_t *codes, const uint8_t *scales, const int64_t *rows, float *y, long count, long dim,
                  long code_pitch, long scale_pitch) {
    for (long t = 0; t < count; t++) {
        if (rows[t] < 0) {
            memset(y + t * dim, 0, (size_t)dim * sizeof(float));
            continue;
        }
        const uint8_t *in = codes + rows[t] * code_pitch, *sc = scales + rows[t] * scale_pitch;
        for (long g = 0; g < dim / GROUP; g++) {
            uint32_t b = sc[g];
            float scale = float_of(b == 255u ? 0x7fc00000u : b ? b << 23 : 0x00400000u);
            float *own = y + t * dim + g * GROUP;
            for (int i = 0; i < GROUP; i++) {
                uint32_t code = in[g * GROUP + i];
                float v = float_of(((code & 0x80u) << 24) | ((code & 0x7fu) << 20));
                own[i] = (v * 0x1p120f) * scale;
            }
        }
    }
}

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* Values of n packed e2m1 codes (a multiple of 8) times a scale. */
static inline void decode_fp4_group(const uint8_t *in, float *y, long n, float scale) {
#ifdef __AVX2__
    /* Eight codes lie in one word: each lane shifts its own down; the shuffle looks at the low three bits. */
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28), sign = _mm256_set1_epi32(8);
    const __m256 table = _mm256_loadu_ps(E2M1), factor = _mm256_set1_ps(scale);
    for (long i = 0; i < n; i += 8) {
        int32_t word;
        memcpy(&word, in + i / 2, 4);
        __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
        __m256i minus = _mm256_slli_epi32(_mm256_and_si256(code, sign), 28);
        __m256 v = _mm256_or_ps(_mm256_permutevar8x32_ps(table, code), _mm256_castsi256_ps(minus));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(v, factor));
    }
#else
    for (long i = 0; i < n / 2; i++) {
        y[2 * i] = E2M1[in[i] & 15u] * scale;
        y[2 * i + 1] = E2M1[in[i] >> 4] * scale;
    }
#endif
}

/* Packed e2m1 codes with one ue8m0 byte (group 32) or one e4m3 scale (group 16, from a table of 256). */
API void load_fp4(const uint8_t *codes, const uint8_t *scales, const int64_t *code_rows, const int64_t *scale_rows,
                  float *y, long count, long dim, long code_pitch, long scale_pitch, long group,
                  const float *e4m3) {
    for (long t = 0; t < count; t++) {
        const uint8_t *in = codes + code_rows[t] * code_pitch;
        const uint8_t *sc = scales + scale_rows[t] * scale_pitch;
        for (long g = 0; g < dim / group; g++) {
            uint32_t b = sc[g];
            float scale = e4m3 ? e4m3[b] : float_of(b == 255u ? 0x7fc00000u : b ? b << 23 : 0x00400000u);
            float *own = y + t * dim + g * group;
            decode_fp4_group(in + g * group / 2, own, group, scale);
        }
    }
}

/* scores[t][j] = sum over heads, ascending, of w[t][h] * relu(dots[t][h][j]). pitch: between heads of dots. */
API void head_sums(const float *dots, const float *w, float *scores, long rows, long heads, long count, long pitch) {
    for (long t = 0; t < rows; t++) {
        float *own = scores + t * count;
        for (long h = 0; h < heads; h++) {
            const float *d = dots + (t * heads + h) * pitch;
            float weight = w[t * heads + h];
            for (long j = 0; j < count; j++) {
                float v = (d[j] > 0.0f ? d[j] : 0.0f) * weight;
                own[j] = h ? own[j] + v : v;
            }
        }
    }
}

/* Order of a score as an integer; equal zeros of either sign. Larger is better, the lower column of equals. */
static inline uint64_t rank_key(float score, long column) {
    uint32_t u = bits_of(score + 0.0f);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return ((uint64_t)u << 32) | (uint32_t)~(uint32_t)column;
}

static uint64_t kth_largest(uint64_t *a, long n, long k) {
    long lo = 0, hi = n - 1, want = k - 1;
    while (lo < hi) {
        uint64_t pivot = a[lo + (hi - lo) / 2];
        long i = lo, j = hi;
        while (i <= j) {
            while (a[i] > pivot) i++;
            while (a[j] < pivot) j--;
            if (i <= j) { uint64_t x = a[i]; a[i] = a[j]; a[j] = x; i++; j--; }
        }
        if (want <= j) hi = j;
        else if (want >= i) lo = i;
        else break;
    }
    return a[want];
}

static void select_row(const float *scores, long count, long k, int64_t *out, uint64_t *keys) {
    long n = 0;
    if (count <= k) {
        for (; n < count; n++) out[n] = n;
    } else {
        for (long j = 0; j < count; j++) keys[j] = rank_key(scores[j], j);
        uint64_t least = kth_largest(keys, count, k);
        for (long j = 0; j < count && n < k; j++)
            if (rank_key(scores[j], j) >= least) out[n++] = j;
    }
    for (; n < k; n++) out[n] = -1;
}

/* The k best of the first klen[t] scores of each row, ascending, -1 padded. keys: room for `count` numbers. */
API void select_rows(const float *scores, const int64_t *klen, int64_t *out, uint64_t *keys, long rows, long count,
                     long k) {
    for (long t = 0; t < rows; t++) select_row(scores + t * count, klen[t], k, out + t * k, keys);
}

/* Candidate blocks (attention spec 6): block maxima of visible scores, the newest block always kept. */
API void candidate_rows(const float *scores, const int64_t *klen, int64_t *out, float *best, uint64_t *keys, long rows,
                        long count, long k, long size) {
    const float largest = 3.3895313892515355e38f;
    for (long t = 0; t < rows; t++) {
        const float *own = scores + t * count;
        long blocks = (klen[t] + size - 1) / size;
        for (long b = 0; b < blocks; b++) {
            long end = (b + 1) * size < klen[t] ? (b + 1) * size : klen[t];
            float top = own[b * size];
            for (long j = b * size + 1; j < end; j++) top = own[j] > top ? own[j] : top;
            best[b] = b == blocks - 1 ? INFINITY : top > largest ? largest : top;
        }
        select_row(best, blocks, k, out + t * k, keys);
    }
}

/* Pool slots of entry ids of the rows' own sequences, and 0 / -inf where an entry is / is not. */
API void entry_slots(const int64_t *entries, const int64_t *tables, int64_t *slots, float *bias, long rows, long count,
                     long width, long size) {
    for (long t = 0; t < rows; t++)
        for (long i = 0; i < count; i++) {
            long at = t * count + i;
            int64_t e = entries[at];
            slots[at] = e < 0 ? -1 : tables[t * width + e / size] * size + e % size;
            if (bias) bias[at] = e < 0 ? -INFINITY : 0.0f;
        }
}
