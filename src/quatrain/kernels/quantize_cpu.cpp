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

inline float e2m1_nearest(float a) {  // a in [0, 6]
  float half = (a + 6291456.0f) - 6291456.0f;    // steps of 1/2
  float one = (a + 12582912.0f) - 12582912.0f;   // of 1
  float two = (a + 25165824.0f) - 25165824.0f;   // of 2
  return a < 2.0f ? half : a < 4.0f ? one : two;
}
inline u32 e2m1_code(float v) {  // of a non-negative value on the grid
  float a = v + v, b = v + 2.0f, c = v * 0.5f + 4.0f;
  float m = a < b ? a : b;
  return (u32)(int32_t)(m < c ? m : c);
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
inline float e2m1_stochastic(float a, u32 random) {
  float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f, inverse = a < 2.0f ? 2.0f : a < 4.0f ? 1.0f : 0.5f;
  return stochastic(a, step, inverse, random);
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

// Runs of n = hadamard size, 16 at a time side by side, so that each butterfly stage is a vector operation.
void hadamard_row(float* row, int64_t length, int n, const float* signs, int bf16) {
  const float norm = (float)(1.0 / std::sqrt((double)n));
  float tile[128][16];
  for (int64_t base = 0; base < length; base += 16 * (int64_t)n) {
    int64_t left = (length - base) / n;
    int lanes = left < 16 ? (int)left : 16;
    for (int k = 0; k < n; ++k)
      for (int l = 0; l < 16; ++l) tile[k][l] = l < lanes ? row[base + l * (int64_t)n + k] * signs[k] : 0.0f;
    for (int half = 1; half < n; half *= 2)
      for (int i = 0; i < n; i += 2 * half)
        for (int j = i; j < i + half; ++j)
          for (int l = 0; l < 16; ++l) {
            float a = tile[j][l], b = tile[j + half][l];
            tile[j][l] = a + b;
            tile[j + half][l] = a - b;
          }
    for (int k = 0; k < n; ++k)
      for (int l = 0; l < lanes; ++l) {
        float v = tile[k][l] * norm;
        row[base + l * (int64_t)n + k] = bf16 ? float_of(round_bf16(bits_of(v))) : v;
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
  std::vector<float> values, block_max, ideal, scale, multiplier, error, best_error;
  std::vector<u8> codes;
  std::vector<u32> words;
  Work(const Job& j, int64_t blocks)
      : values(j.block_rows * j.padded), block_max(blocks), ideal(blocks), scale(blocks), multiplier(blocks),
        error(blocks), best_error(blocks), codes(j.padded), words(j.padded / 2 + 1) {}
};

template <int WIDTH>
void block_maxima(const Job& job, Work& w, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    u32 top = 0;
    for (int r = 0; r < job.block_rows; ++r) {
      const float* v = &w.values[r * job.padded + b * WIDTH];
      for (int j = 0; j < WIDTH; ++j) {
        u32 m = bits_of(v[j]) & 0x7FFFFFFFu;
        top = m > top ? m : top;
      }
    }
    w.block_max[b] = float_of(top);
  }
}

// Sum of 16 in the order 8+8, 4+4, 2+2, 1+1.
inline float tree16(const float* t) {
  float a[8], b[4];
  for (int j = 0; j < 8; ++j) a[j] = t[j] + t[j + 8];
  for (int j = 0; j < 4; ++j) b[j] = a[j] + a[j + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

template <int ERROR>
float block_error(const Job& job, const float* values, float scale, float multiplier, float amax) {
  float sums[16], worst = 0.0f;
  for (int r = 0; r < job.block_rows; ++r) {
    const float* v = values + r * job.padded;
    float term[16];
    for (int j = 0; j < 16; ++j) {
      float y = v[j] * multiplier;
      float rounded = std::copysign(e2m1_nearest(clip(std::fabs(y), 6.0f)), y);
      float difference = std::fabs(rounded * scale * amax / job.constant - v[j]);
      term[j] = ERROR == MSE ? difference * difference : difference;
    }
    if (ERROR == ABSMAX) {
      for (int j = 0; j < 16; ++j) worst = term[j] > worst ? term[j] : worst;
    } else {
      sums[r] = tree16(term);
    }
  }
  if (ERROR == ABSMAX) return worst;
  return job.block_rows == 1 ? sums[0] : tree16(sums);
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
  std::vector<float> scale(blocks), mult(blocks);
  auto errors = job.error == MSE ? errors_of<MSE> : job.error == MAE ? errors_of<MAE> : errors_of<ABSMAX>;
  for (int i = 0; i < count; ++i) {
    candidate(job, w, blocks, factors[i], decode, scale.data(), mult.data());
    errors(job, w, blocks, scale.data(), mult.data(), amax, w.error.data());
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

void choose_scales(const Job& job, Work& w, int64_t group, int64_t blocks, float amax) {
  if (job.block_columns == 16) block_maxima<16>(job, w, blocks);
  else if (job.block_columns == 32) block_maxima<32>(job, w, blocks);
  else block_maxima<128>(job, w, blocks);
  if (job.format == NVFP4) {
    choose_nvfp4(job, w, blocks, amax);
    u8* out = (u8*)job.scales + group * blocks;
    for (int64_t b = 0; b < blocks; ++b) out[b] = e4m3_scale_byte(w.scale[b]);
  } else if (job.format == FP8) {
    choose_fp8(job, w, blocks);
    std::memcpy((float*)job.scales + group * blocks, w.scale.data(), blocks * 4);
  } else {
    u8* out = (u8*)job.scales + group * blocks;
    const bool fp4 = job.format == MXFP4;
    for (int64_t b = 0; b < blocks; ++b) {
      int code = mx_code(w.block_max[b], job.rule, fp4 ? 1 : 3, fp4 ? 2 : 8, fp4 ? 6.0f : 448.0f);
      out[b] = (u8)code;
      w.multiplier[b] = code == 255 ? NAN : e8m0_value(254 - code);
    }
  }
}

// WIDTH is a constant so that one block is one or two whole vectors, not the tail of a loop.
template <bool STOCHASTIC, int WIDTH>
void encode_fp4(const float* v, float m, const u16* random, u8* codes) {
  for (int j = 0; j < WIDTH; ++j) {
    float y = v[j] * m;
    float a = clip(std::fabs(y), 6.0f);
    float rounded = STOCHASTIC ? e2m1_stochastic(a, random[j]) : e2m1_nearest(a);
    codes[j] = (u8)(e2m1_code(rounded) | (bits_of(y) >> 31 << 3));
  }
}
template <bool STOCHASTIC, int WIDTH>
void encode_fp8(const float* v, float m, const u16* random, u8* codes) {
  for (int j = 0; j < WIDTH; ++j) {
    float y = v[j] * m;
    float a = clip(std::fabs(y), 448.0f);
    float rounded = STOCHASTIC ? e4m3_stochastic(a, random[j]) : e4m3_nearest(a);
    u32 byte = y != y ? 0x7Fu : e4m3_byte(rounded);
    codes[j] = (u8)(byte | (bits_of(y) >> 31 << 7));
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

void encode_row(const Job& job, Work& w, int64_t r, int in_group, int64_t blocks) {
  const bool fp4 = job.format == NVFP4 || job.format == MXFP4;
  const int width = job.block_columns;
  if (job.stochastic) random_words(row_state(job.seed, job.offset, (u32)r), job.padded / 2 + 1, w.words.data());
  const u16* random = (const u16*)w.words.data();  // little-endian: even columns are the low halves
  u8* codes = fp4 ? w.codes.data() : job.codes + r * job.padded;
  auto encode = job.stochastic ? encoder<true>(job.format) : encoder<false>(job.format);
  for (int64_t b = 0; b < blocks; ++b)
    encode(&w.values[in_group * job.padded + b * width], w.multiplier[b], random + b * width, codes + b * width);
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
  const int64_t groups = (job.rows + job.block_rows - 1) / job.block_rows;
  const int64_t blocks = job.padded / job.block_columns;
  const float amax = tensor_max(job);
  *job.amax = amax;
#pragma omp parallel num_threads(job.threads)
  {
    Work w(job, blocks);
#pragma omp for schedule(static)
    for (int64_t g = 0; g < groups; ++g) {
      for (int r = 0; r < job.block_rows; ++r) load_row(job, g * job.block_rows + r, &w.values[r * job.padded]);
      choose_scales(job, w, g, blocks, amax);
      for (int r = 0; r < job.block_rows; ++r) encode_row(job, w, g * job.block_rows + r, r, blocks);
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
