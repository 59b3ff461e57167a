// The floating-point state that the kernels' bits rely on.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace commkern {

// Round to nearest, denormals kept, for the guard's lifetime: a caller may have asked
// for flush-to-zero (torch.set_flush_denormal), which would change results.
class FloatStateGuard {
 public:
  FloatStateGuard() : saved_(read()) { write(saved_ & ~kChanged); }
  ~FloatStateGuard() { write(saved_); }
  FloatStateGuard(const FloatStateGuard&) = delete;
  FloatStateGuard& operator=(const FloatStateGuard&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kChanged = 0x8000u | 0x0040u | 0x6000u;  // FTZ, DAZ, rounding
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kChanged = (1u << 24) | (3u << 22) | (1u << 19);
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kChanged = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word saved_;
};

}  // namespace commkern
