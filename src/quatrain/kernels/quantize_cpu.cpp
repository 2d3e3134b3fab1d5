// Compiled CPU twin of quantize.py: the same bits, in loops that a compiler turns into vector code.
//
// Plain C interface, called through ctypes. It must be compiled without fused multiply-add contraction and without
// fast-math: every fp32 operation below rounds exactly once, in the order of the reference.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr float FLT_MAX_ = 3.4028234663852886e38f;
enum Format { NVFP4, MXFP4, MXFP8, FP8 };
enum Rule { TO_6, TO_4, FOUR_OVER_SIX, SEARCH, FLOOR, CEIL, EVEN, RCEIL, FP32, POW2 };
enum Error { MSE, MAE, ABSMAX };

struct Job {
  const void* x;
  int64_t rows, columns, row_stride, padded;  // padded: columns in whole blocks
  int32_t bf16, format, block_rows, block_columns, rule, error, scale_up, stochastic, hadamard, threads;
  float element_max, constant;
  u64 seed, offset;
  const float* signs;
  const float* multipliers;  // of "search"
  int32_t multiplier_count, unused;
  u8* codes;
  void* scales;
  float* amax;
};

// Sixteen lanes: one NVFP4 block. The compiler maps them to whatever vectors the processor has.
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef int32_t vi8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int32_t vi4 __attribute__((vector_size(16)));
typedef u8 vb __attribute__((vector_size(16)));
typedef u16 vh __attribute__((vector_size(32)));
#define INLINE inline __attribute__((always_inline))

template <typename V, typename T> INLINE V load(const T* at) { V v; std::memcpy(&v, at, sizeof v); return v; }
template <typename W, typename V> INLINE W lower(V v) { W w; std::memcpy(&w, &v, sizeof w); return w; }
template <typename W, typename V> INLINE W upper(V v) {
  W w;
  std::memcpy(&w, (const char*)&v + sizeof w, sizeof w);
  return w;
}
INLINE vf as_float(vi v) { vf f; std::memcpy(&f, &v, sizeof f); return f; }
INLINE vi as_int(vf v) { vi i; std::memcpy(&i, &v, sizeof i); return i; }
INLINE vi magnitude_bits(vf v) { return as_int(v) & 0x7FFFFFFF; }
INLINE int32_t largest(vi v) {
  vi8 a = lower<vi8>(v), b = upper<vi8>(v);
  vi8 c = a > b ? a : b;
  vi4 d = lower<vi4>(c), e = upper<vi4>(c);
  vi4 f = d > e ? d : e;
  int32_t g = f[0] > f[2] ? f[0] : f[2], h = f[1] > f[3] ? f[1] : f[3];
  return g > h ? g : h;
}
// Sum of 16 in the order 8+8, 4+4, 2+2, 1+1.
INLINE float tree_sum(vf v) {
  vf8 a = lower<vf8>(v) + upper<vf8>(v);
  vf4 b = lower<vf4>(a) + upper<vf4>(a);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

inline u32 bits_of(float v) { u32 b; std::memcpy(&b, &v, 4); return b; }
inline float float_of(u32 b) { float v; std::memcpy(&v, &b, 4); return v; }
inline float cap(float v) { return v == INFINITY ? FLT_MAX_ : v; }
inline u32 round_bf16(u32 b) {
  u32 rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) & 0xFFFF0000u;
  return (b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : rounded;
}

// ---- scales -------------------------------------------------------------------------------------------------------

// Nearest E4M3 value of v in [0, 448]; ties to even. NaN stays NaN.
inline float e4m3_nearest(float v) {
  u32 b = bits_of(v);
  float normal = float_of((b + 0x7FFFFu + ((b >> 20) & 1u)) & 0xFFF00000u);
  const float magic = 24576.0f;  // 1.5 * 2^23 * 2^-9: adding it leaves multiples of 2^-9
  float subnormal = (v + magic) - magic;
  return v < 0.015625f ? subnormal : normal;
}
inline u32 e4m3_byte(float v) {  // of a non-negative value on the grid
  u32 normal = (bits_of(v) >> 20) - 960u;
  return v < 0.015625f ? (u32)(int32_t)(v * 512.0f) : normal;
}
inline float e4m3_value(u32 byte) {
  return byte < 8 ? (float)(int32_t)byte * 0.001953125f : float_of((byte + 960u) << 20);
}
inline float e4m3_scale(float ideal, int up) {
  if (ideal != ideal) return ideal;
  float clamped = ideal < 448.0f ? ideal : 448.0f;
  float v = e4m3_nearest(clamped);
  return up && v < clamped ? e4m3_value(e4m3_byte(v) + 1u) : v;
}
inline u8 e4m3_scale_byte(float v) { return v != v ? 0x7F : (u8)e4m3_byte(v); }

inline int round_up_exponent(u32 b) {
  u32 exponent = b >> 23, mantissa = b & 0x7FFFFFu;
  return (int)exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1 : 0);
}
inline float e8m0_value(int code) {
  return code == 255 ? NAN : code == 0 ? float_of(0x00400000u) : float_of((u32)code << 23);
}
inline int mx_code(float block_max, int rule, int mantissa_bits, int max_exponent, float element_max) {
  u32 b = bits_of(block_max);
  if (b >= 0x7F800000u) return 255;
  int code;
  if (rule == RCEIL) code = round_up_exponent(bits_of(block_max * (1.0f / element_max)));
  else if (rule == CEIL) code = (int)(b >> 23) - max_exponent + ((b & 0x7FFFFFu) != 0);
  else if (rule == EVEN) code = (int)((b + (1u << (23 - mantissa_bits - 1))) >> 23) - max_exponent;
  else code = (int)(b >> 23) - max_exponent;
  return code < 0 ? 0 : code > 254 ? 254 : code;
}

// ---- elements -----------------------------------------------------------------------------------------------------

// Adding 1.5 * 2^22 * 2 * step leaves a multiple of the step, ties to even, with the count in the lowest bits.
struct E2m1 { vf magic; vi offset; };  // the code is count + offset
INLINE E2m1 e2m1_binade(vf a) {
  vi low = a < 2.0f, middle = a < 4.0f;
  vf half = vf{} + 6291456.0f, one = vf{} + 12582912.0f, two = vf{} + 25165824.0f;
  return {low ? half : middle ? one : two, low ? vi{} : middle ? vi{} + 2 : vi{} + 4};
}
INLINE vf clip6(vf y) {
  vf a = as_float(magnitude_bits(y)), six = vf{} + 6.0f;
  return a < six ? a : six;
}
INLINE vf e2m1_nearest(vf a) {  // a in [0, 6]
  vf magic = e2m1_binade(a).magic;
  return (a + magic) - magic;
}
inline float e2m1_value(u32 code) {
  float m = (float)(int32_t)code, a = m * 0.5f, b = m - 2.0f, c = m + m - 8.0f;
  float v = a > b ? a : b;
  return v > c ? v : c;
}
inline float clip(float a, float top) { return a < top ? a : top; }
inline float stochastic(float a, float step, float inverse, u32 random) {
  float position = a * inverse;
  float lower = (float)(int32_t)position;
  float up = ((float)(int32_t)random + 0.5f) < (position - lower) * 65536.0f ? 1.0f : 0.0f;
  return (lower + up) * step;
}
inline float e4m3_stochastic(float a, u32 random) {
  int exponent = (int)(bits_of(a) >> 23);
  exponent = exponent < 121 ? 121 : exponent;
  return stochastic(a, float_of((u32)(exponent - 3) << 23), float_of((u32)(257 - exponent) << 23), random);
}

// ---- random bits --------------------------------------------------------------------------------------------------

inline u32 mix32(u32 x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}
struct RowState { u32 start, middle; };
inline RowState row_state(u64 seed, u64 offset, u32 row) {
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32), o0 = (u32)offset, o1 = (u32)(offset >> 32);
  u32 first = mix32(k0 + 0x9E3779B9u), second = mix32(k1 + 0x85EBCA6Bu);
  first = mix32(mix32(mix32(first ^ k1) ^ o0) ^ o1);
  second = mix32(mix32(mix32(second ^ k0) ^ o1) ^ o0);
  return {mix32(first ^ row), mix32(second + row * 0x9E3779B9u)};
}
void random_words(RowState s, int64_t pairs, u32* words) {
  for (int64_t j = 0; j < pairs; ++j) {
    u32 x = s.start + (u32)j * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x += s.middle;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    words[j] = x ^ (x >> 15);
  }
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// One butterfly stage inside a vector: lanes j and j + HALF become their sum and difference.
template <int HALF>
INLINE vf stage(vf x) {
  vf swapped;
  vi negate;
  for (int j = 0; j < 16; ++j) {
    swapped[j] = x[j ^ HALF];
    negate[j] = j & HALF ? (int32_t)0x80000000 : 0;
  }
  return swapped + as_float(as_int(x) ^ negate);
}
INLINE vf stages(vf x, int n) {
  x = stage<2>(stage<1>(x));
  return n > 4 ? stage<8>(stage<4>(x)) : x;
}

void hadamard_row(float* row, int64_t length, int n, const float* signs, int bf16) {
  const vf norm = vf{} + (float)(1.0 / std::sqrt((double)n));
  const int vectors = n < 16 ? 1 : n / 16;
  vf sign[8], x[8];
  for (int i = 0; i < vectors; ++i)
    for (int j = 0; j < 16; ++j) sign[i][j] = signs[(i * 16 + j) % n];
  for (int64_t base = 0; base < length; base += 16 * vectors) {
    for (int i = 0; i < vectors; ++i) x[i] = stages(load<vf>(row + base + 16 * i) * sign[i], n);
    for (int half = 1; half < vectors; half *= 2)
      for (int i = 0; i < vectors; i += 2 * half)
        for (int j = i; j < i + half; ++j) {
          vf a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
    for (int i = 0; i < vectors; ++i) {
      float out[16];
      vf v = x[i] * norm;
      std::memcpy(out, &v, sizeof out);
      for (int j = 0; j < 16; ++j) row[base + 16 * i + j] = bf16 ? float_of(round_bf16(bits_of(out[j]))) : out[j];
    }
  }
}

void load_row(const Job& job, int64_t r, float* out) {
  if (r >= job.rows) { std::memset(out, 0, job.padded * 4); return; }
  if (job.bf16) {
    const u16* src = (const u16*)job.x + r * job.row_stride;
    for (int64_t k = 0; k < job.columns; ++k) out[k] = float_of((u32)src[k] << 16);
  } else {
    std::memcpy(out, (const float*)job.x + r * job.row_stride, job.columns * 4);
  }
  for (int64_t k = job.columns; k < job.padded; ++k) out[k] = 0.0f;
  if (job.hadamard) hadamard_row(out, job.padded, job.hadamard, job.signs, job.bf16);
}

u32 row_max(const float* row, int64_t length) {  // on the bits, so that NaN wins over infinity over finite
  u32 top = 0;
  for (int64_t k = 0; k < length; ++k) {
    u32 b = bits_of(row[k]) & 0x7FFFFFFFu;
    top = b > top ? b : top;
  }
  return top;
}

float tensor_max(const Job& job) {
  u32 top = 0;
#pragma omp parallel num_threads(job.threads) reduction(max : top)
  {
    std::vector<float> row(job.padded);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < job.rows; ++r) {
      u32 m;
      if (!job.hadamard && job.bf16) {
        const u16* src = (const u16*)job.x + r * job.row_stride;
        u16 t = 0;
        for (int64_t k = 0; k < job.columns; ++k) {
          u16 b = src[k] & 0x7FFF;
          t = b > t ? b : t;
        }
        m = (u32)t << 16;
      } else {
        load_row(job, r, row.data());
        m = row_max(row.data(), job.padded);
      }
      top = m > top ? m : top;
    }
  }
  return float_of(top);
}

float encode_scale(const Job& job, float amax) {
  float encode = cap(job.constant / amax);
  return amax == 0.0f || encode == 0.0f ? 1.0f : encode;
}

struct Work {  // scratch of one thread
  std::vector<float> values, block_max, ideal, scale, multiplier, error, best_error, try_scale, try_multiplier;
  std::vector<u8> codes;
  std::vector<u32> words;
  Work(const Job& j, int64_t rows, int64_t blocks)
      : values(rows * j.padded), block_max(blocks), ideal(blocks), scale(blocks), multiplier(blocks), error(blocks),
        best_error(blocks), try_scale(blocks), try_multiplier(blocks), codes(j.padded), words(j.padded / 2 + 1) {}
};

template <int WIDTH>
void block_maxima(const Job& job, Work& w, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    vi top = vi{};
    for (int r = 0; r < job.block_rows; ++r)
      for (int j = 0; j < WIDTH; j += 16) {
        vi m = magnitude_bits(load<vf>(&w.values[r * job.padded + b * WIDTH + j]));
        top = m > top ? m : top;
      }
    w.block_max[b] = float_of((u32)largest(top));
  }
}

template <int ERROR>
INLINE float block_error(const Job& job, const float* values, float scale, float multiplier, float amax) {
  float sums[16];
  vi worst = vi{};
  for (int r = 0; r < job.block_rows; ++r) {
    vf v = load<vf>(values + r * job.padded), y = v * multiplier;
    vf rounded = as_float(as_int(e2m1_nearest(clip6(y))) | (as_int(y) & (int32_t)0x80000000));
    vf difference = as_float(magnitude_bits(rounded * scale * amax / job.constant - v));
    if (ERROR == ABSMAX) worst = as_int(difference) > worst ? as_int(difference) : worst;
    else sums[r] = tree_sum(ERROR == MSE ? difference * difference : difference);
  }
  if (ERROR == ABSMAX) return float_of((u32)largest(worst));
  return job.block_rows == 1 ? sums[0] : tree_sum(load<vf>(sums));
}

template <int ERROR>
void errors_of(const Job& job, const Work& w, int64_t blocks, const float* scale, const float* mult, float amax, float* out) {
  for (int64_t b = 0; b < blocks; ++b) out[b] = block_error<ERROR>(job, &w.values[b * 16], scale[b], mult[b], amax);
}

void candidate(const Job& job, const Work& w, int64_t blocks, float factor, float decode, float* scale, float* mult) {
  for (int64_t b = 0; b < blocks; ++b) {
    scale[b] = e4m3_scale(factor == 1.0f ? w.ideal[b] : w.ideal[b] * factor, job.scale_up);
    mult[b] = cap(1.0f / (scale[b] * decode));
  }
}

void choose_nvfp4(const Job& job, Work& w, int64_t blocks, float amax) {
  const float encode = encode_scale(job, amax), decode = 1.0f / encode;
  const float plain = encode * (1.0f / job.element_max);
  for (int64_t b = 0; b < blocks; ++b)
    w.ideal[b] = job.rule == TO_6 ? w.block_max[b] * plain : (w.block_max[b] / job.element_max) * encode;
  if (job.rule == TO_6 || job.rule == TO_4) {
    candidate(job, w, blocks, 1.0f, decode, w.scale.data(), w.multiplier.data());
    return;
  }
  const float pair[2] = {1.0f, 1.5f};
  const float* factors = job.rule == SEARCH ? job.multipliers : pair;
  const int count = job.rule == SEARCH ? job.multiplier_count : 2;
  float *scale = w.try_scale.data(), *mult = w.try_multiplier.data();
  auto errors = job.error == MSE ? errors_of<MSE> : job.error == MAE ? errors_of<MAE> : errors_of<ABSMAX>;
  for (int i = 0; i < count; ++i) {
    candidate(job, w, blocks, factors[i], decode, scale, mult);
    errors(job, w, blocks, scale, mult, amax, w.error.data());
    for (int64_t b = 0; b < blocks; ++b) {
      bool better = i == 0 || w.error[b] < w.best_error[b];
      w.best_error[b] = better ? w.error[b] : w.best_error[b];
      w.scale[b] = better ? scale[b] : w.scale[b];
      w.multiplier[b] = better ? mult[b] : w.multiplier[b];
    }
  }
}

void choose_fp8(const Job& job, Work& w, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    float scale = w.block_max[b] / 448.0f;
    if (job.rule == POW2) {
      int code = round_up_exponent(bits_of(scale));
      scale = std::isfinite(w.block_max[b]) ? e8m0_value(code > 254 ? 254 : code) : w.block_max[b];
    }
    if (scale == 0.0f || w.block_max[b] == 0.0f) scale = 1.0f;
    w.scale[b] = scale;
    w.multiplier[b] = cap(1.0f / scale);
  }
}

// Scales of `blocks` blocks, the first of which is number `first` of the tensor.
void choose_scales(const Job& job, Work& w, int64_t first, int64_t blocks, float amax) {
  if (job.block_columns == 16) block_maxima<16>(job, w, blocks);
  else if (job.block_columns == 32) block_maxima<32>(job, w, blocks);
  else block_maxima<128>(job, w, blocks);
  if (job.format == NVFP4) {
    choose_nvfp4(job, w, blocks, amax);
    u8* out = (u8*)job.scales + first;
    for (int64_t b = 0; b < blocks; ++b) out[b] = e4m3_scale_byte(w.scale[b]);
  } else if (job.format == FP8) {
    choose_fp8(job, w, blocks);
    std::memcpy((float*)job.scales + first, w.scale.data(), blocks * 4);
  } else {
    u8* out = (u8*)job.scales + first;
    const bool fp4 = job.format == MXFP4;
    for (int64_t b = 0; b < blocks; ++b) {
      int code = mx_code(w.block_max[b], job.rule, fp4 ? 1 : 3, fp4 ? 2 : 8, fp4 ? 6.0f : 448.0f);
      out[b] = (u8)code;
      w.multiplier[b] = code == 255 ? NAN : e8m0_value(254 - code);
    }
  }
}

template <bool STOCHASTIC>
INLINE vi e2m1_codes(vf a, const u16* random) {
  E2m1 binade = e2m1_binade(a);
  if (!STOCHASTIC) return (as_int(a + binade.magic) & 7) + binade.offset;
  vi low = a < 2.0f, middle = a < 4.0f;
  vf position = a * (low ? vf{} + 2.0f : middle ? vf{} + 1.0f : vf{} + 0.5f);
  vi count = __builtin_convertvector(position, vi);
  vf fraction = (position - __builtin_convertvector(count, vf)) * 65536.0f;
  vf draw = __builtin_convertvector(__builtin_convertvector(load<vh>(random), vi), vf) + 0.5f;
  return count - (draw < fraction) + binade.offset;  // a true lane is -1
}
// WIDTH is a constant so that one block is one or two whole vectors, not the tail of a loop.
template <bool STOCHASTIC, int WIDTH>
void encode_fp4(const float* v, float m, const u16* random, u8* codes) {
  for (int j = 0; j < WIDTH; j += 16) {
    vf y = load<vf>(v + j) * m;
    vi code = e2m1_codes<STOCHASTIC>(clip6(y), random + j) | ((as_int(y) >> 28) & 8);
    code = y == y ? code : vi{} + 7;
    vb bytes = __builtin_convertvector(code, vb);
    std::memcpy(codes + j, &bytes, 16);
  }
}
template <bool STOCHASTIC, int WIDTH>
void encode_fp8(const float* v, float m, const u16* random, u8* codes) {
  for (int j = 0; j < WIDTH; ++j) {
    float y = v[j] * m;
    float a = clip(std::fabs(y), 448.0f);
    float rounded = STOCHASTIC ? e4m3_stochastic(a, random[j]) : e4m3_nearest(a);
    codes[j] = (u8)(y != y ? 0x7Fu : e4m3_byte(rounded) | (bits_of(y) >> 31 << 7));
  }
}

template <bool STOCHASTIC>
auto encoder(int format) -> void (*)(const float*, float, const u16*, u8*) {
  switch (format) {
    case NVFP4: return encode_fp4<STOCHASTIC, 16>;
    case MXFP4: return encode_fp4<STOCHASTIC, 32>;
    case MXFP8: return encode_fp8<STOCHASTIC, 32>;
    default: return encode_fp8<STOCHASTIC, 128>;
  }
}

void encode_row(const Job& job, Work& w, int64_t r, int64_t in_chunk, int64_t blocks) {
  const bool fp4 = job.format == NVFP4 || job.format == MXFP4;
  const int width = job.block_columns;
  if (job.stochastic) random_words(row_state(job.seed, job.offset, (u32)r), job.padded / 2 + 1, w.words.data());
  const u16* random = (const u16*)w.words.data();  // little-endian: even columns are the low halves
  u8* codes = fp4 ? w.codes.data() : job.codes + r * job.padded;
  auto encode = job.stochastic ? encoder<true>(job.format) : encoder<false>(job.format);
  const float* values = &w.values[in_chunk * job.padded];
  const float* multiplier = &w.multiplier[job.block_rows == 1 ? in_chunk * blocks : 0];
  for (int64_t b = 0; b < blocks; ++b)
    encode(values + b * width, multiplier[b], random + b * width, codes + b * width);
  if (!fp4) return;
  u8* out = job.codes + r * (job.padded / 2);
  const u16* pairs = (const u16*)codes;
  for (int64_t i = 0; i < job.padded / 2; ++i) out[i] = (u8)((pairs[i] & 0xF) | (pairs[i] >> 4));
}

// ---- decoding -----------------------------------------------------------------------------------------------------

template <int FORMAT>
inline float element_value(u32 code) {
  if (FORMAT == NVFP4 || FORMAT == MXFP4) return float_of(bits_of(e2m1_value(code & 7u)) | (code >> 3 << 31));
  u32 magnitude = code & 0x7Fu;
  float v = magnitude == 0x7Fu ? NAN : e4m3_value(magnitude);
  return float_of(bits_of(v) | (code >> 7 << 31));
}
template <int FORMAT>
inline float stored_scale(const void* scales, int64_t at) {
  if (FORMAT == FP8) return ((const float*)scales)[at];
  u8 byte = ((const u8*)scales)[at];
  return FORMAT != NVFP4 ? e8m0_value(byte) : byte == 0x7F ? NAN : e4m3_value(byte);
}
template <int FORMAT, int WIDTH>
void decode_row(const u8* codes, const void* scales, int64_t group, int64_t columns, u8* unpacked, float* out) {
  const u8* source = codes;
  if (FORMAT == NVFP4 || FORMAT == MXFP4) {
    u16* pairs = (u16*)unpacked;
    for (int64_t i = 0; i < columns / 2; ++i) pairs[i] = (u16)((codes[i] & 0xF) | (codes[i] >> 4 << 8));
    source = unpacked;
  }
  const int64_t blocks = columns / WIDTH;
  for (int64_t b = 0; b < blocks; ++b) {
    const float scale = stored_scale<FORMAT>(scales, group * blocks + b);
    for (int j = 0; j < WIDTH; ++j) out[b * WIDTH + j] = element_value<FORMAT>(source[b * WIDTH + j]) * scale;
  }
}

}  // namespace

extern "C" {

int qt_abi() { return 1; }

void qt_quantize(const Job* j) {
  const Job& job = *j;
  // A chunk is one row of tiles, or as many short rows of 1-D blocks as keep the loops long.
  const int64_t blocks = job.padded / job.block_columns;
  const int64_t fit = 4096 / job.padded;
  const int64_t chunk = job.block_rows > 1 || fit < 1 ? job.block_rows : fit;
  const int64_t rows = (job.rows + job.block_rows - 1) / job.block_rows * job.block_rows;
  const int64_t chunks = (rows + chunk - 1) / chunk;
  const float amax = tensor_max(job);
  *job.amax = amax;
#pragma omp parallel num_threads(job.threads)
  {
    Work w(job, chunk, blocks * (chunk / job.block_rows));
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = c * chunk, count = first + chunk > rows ? rows - first : chunk;
      for (int64_t r = 0; r < count; ++r) load_row(job, first + r, &w.values[r * job.padded]);
      choose_scales(job, w, first / job.block_rows * blocks, count / job.block_rows * blocks, amax);
      for (int64_t r = 0; r < count; ++r) encode_row(job, w, first + r, r, blocks);
    }
  }
}

// Code x block scale as fp32, [rows, columns] with `columns` counting whole blocks.
void qt_decode(const u8* codes, const void* scales, float* out, int64_t rows, int64_t columns, int32_t format,
               int32_t block_rows, int32_t threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<u8> unpacked(columns);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      float* o = out + r * columns;
      const int64_t group = r / block_rows;
      if (format == NVFP4) decode_row<NVFP4, 16>(codes + r * columns / 2, scales, group, columns, unpacked.data(), o);
      else if (format == MXFP4) decode_row<MXFP4, 32>(codes + r * columns / 2, scales, group, columns, unpacked.data(), o);
      else if (format == MXFP8) decode_row<MXFP8, 32>(codes + r * columns, scales, group, columns, unpacked.data(), o);
      else decode_row<FP8, 128>(codes + r * columns, scales, group, columns, unpacked.data(), o);
    }
  }
}
}
