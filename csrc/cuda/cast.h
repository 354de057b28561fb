// Eight elements at a time: the unit in which every cast kernel reads, scales, encodes and writes.
//
// A chunk of 8 BF16 or FP16 numbers is one 16-byte load (FP32: two) and one 8-byte store; neighbouring
// threads take neighbouring chunks, so a warp's accesses are whole 128-byte lines. Where a row does not begin
// on such a boundary the same kernels run with `kAligned` false, element by element.
#pragma once

#include "cuda/tensors.h"

namespace fp8serve {

constexpr int kChunk = 8;

struct Chunk {
  float value[kChunk];
};

__device__ __forceinline__ void unpack_halves(uint4 words, Chunk& out, BF16) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.value[2 * i] = __uint_as_float(word[i] << 16);
    out.value[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack_halves(uint4 words, Chunk& out, F16) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.value[2 * i] = half_to_float(static_cast<uint16_t>(word[i] & 0xffff));
    out.value[2 * i + 1] = half_to_float(static_cast<uint16_t>(word[i] >> 16));
  }
}

// Loaded elements that are not yet unpacked: keeps loads in flight in few registers.
template <class T>
struct Raw {
  uint4 words[sizeof(T) == 4 ? 2 : 1];
};

template <class T>
__device__ __forceinline__ Raw<T> load_raw(const T* x) {
  Raw<T> raw;
  const auto* from = reinterpret_cast<const uint4*>(x);
  raw.words[0] = from[0];
  if constexpr (sizeof(T) == 4) raw.words[1] = from[1];
  return raw;
}

template <class T>
__device__ __forceinline__ Chunk unpack(const Raw<T>& raw) {
  Chunk out;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.value[4 * i] = __uint_as_float(raw.words[i].x);
      out.value[4 * i + 1] = __uint_as_float(raw.words[i].y);
      out.value[4 * i + 2] = __uint_as_float(raw.words[i].z);
      out.value[4 * i + 3] = __uint_as_float(raw.words[i].w);
    }
  } else {
    unpack_halves(raw.words[0], out, T{});
  }
  return out;
}

// The elements [begin, begin + 8) of a row of n; zeros past its end.
template <bool kAligned, class T>
__device__ __forceinline__ Chunk load_chunk(const T* row, int64_t begin, int64_t n) {
  if constexpr (kAligned) {
    if (begin < n) return unpack(load_raw(row + begin));
    return Chunk{};
  } else {
    Chunk out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out.value[i] = begin + i < n ? load(row[begin + i]) : 0.0f;
    return out;
  }
}

__device__ __forceinline__ float amax_of(const Chunk& x, float seen) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) seen = fmaxf(seen, fabsf(x.value[i]));  // fmaxf ignores NaN
  return seen;
}
// As above, over the first `count` elements.
__device__ __forceinline__ float amax_of(const Chunk& x, float seen, int64_t count) {
  if (count >= kChunk) return amax_of(x, seen);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) seen = i < count ? fmaxf(seen, fabsf(x.value[i])) : seen;
  return seen;
}

// Returns the FP8 values of x * scale. The conversion instruction loses the sign of a NaN, so it is
// restored.
template <class F>
__device__ __forceinline__ uint2 encode_chunk(const Chunk& x, float scale) {
  uint16_t pair[4];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = x.value[2 * i], high = x.value[2 * i + 1];
    pair[i] = encode_pair<is_e5m2<F>>(low * scale, high * scale);
    nan |= either_nan(low, high);
  }
  if (nan) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (isnan(x.value[2 * i]))
        pair[i] |= static_cast<uint16_t>(__float_as_uint(x.value[2 * i]) >> 24 & 0x80);
      if (isnan(x.value[2 * i + 1])) {
        pair[i] |= static_cast<uint16_t>(__float_as_uint(x.value[2 * i + 1]) >> 16 & 0x8000);
      }
    }
  }
  return {pair[0] | static_cast<uint32_t>(pair[1]) << 16, pair[2] | static_cast<uint32_t>(pair[3]) << 16};
}

// As encode_chunk, for one value.
template <class F>
__device__ __forceinline__ uint8_t encode_one(float x, float scale) {
  const uint32_t code = encode_pair<is_e5m2<F>>(x * scale, 0.0f) & 0xff;
  const uint32_t sign = isnan(x) ? __float_as_uint(x) >> 24 & 0x80 : 0;
  return static_cast<uint8_t>(code | sign);
}

template <bool kAligned>
__device__ __forceinline__ void store_chunk(uint2 bytes, uint8_t* row, int64_t begin, int64_t n) {
  if constexpr (kAligned) {
    if (begin < n) *reinterpret_cast<uint2*>(row + begin) = bytes;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t word = i < 4 ? bytes.x : bytes.y;
      if (begin + i < n) row[begin + i] = static_cast<uint8_t>(word >> (8 * (i % 4)));
    }
  }
}

// Stores eight numbers in high precision, rounded to nearest even.
template <bool kAligned, class U>
__device__ __forceinline__ void store_high(const Chunk& x, U* row, int64_t begin, int64_t n) {
  if constexpr (kAligned) {
    U values[kChunk];
    uint4 words[sizeof(U) == 4 ? 2 : 1];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) store(x.value[i], values + i);
    memcpy(words, values, sizeof(values));
    auto* to = reinterpret_cast<uint4*>(row + begin);
    to[0] = words[0];
    if constexpr (sizeof(U) == 4) to[1] = words[1];
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (begin + i < n) store(x.value[i], row + begin + i);
    }
  }
}

// Returns x rounded to T and converted back.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  T value;
  store(x, &value);
  return load(value);
}

// --- reductions
// -------------------------------------------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xffffffffu;

// Returns, in every lane, the largest value of its group of kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Returns, in every lane, the sum over the warp, in a fixed order.
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Returns, in every thread, the largest value of a block of up to 1024 threads. `memory` holds 32 floats.
__device__ __forceinline__ float block_max(float value, float* memory) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  value = lanes_max<32>(value);
  if (lane == 0) memory[warp] = value;
  __syncthreads();
  return lanes_max<32>(lane < warps ? memory[lane] : 0.0f);
}

// Returns, in every thread, the sum over the block, in a fixed order. `memory` holds 32 floats.
__device__ __forceinline__ float block_sum(float value, float* memory) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  value = lanes_sum(value);
  if (lane == 0) memory[warp] = value;
  __syncthreads();
  return lanes_sum(lane < warps ? memory[lane] : 0.0f);
}

// Sets *amax to the larger of *amax and value. Both must be >= 0, so that their bits have the same order.
__device__ __forceinline__ void atomic_max_float(float* amax, float value) {
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

}  // namespace fp8serve
