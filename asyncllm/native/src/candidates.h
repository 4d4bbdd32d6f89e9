// Candidates: the largest logits of a row, sorted.
#pragma once
#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <functional>

#include "context.h"

inline int64_t num_chunks(int64_t count) { return divide_up(count, CHUNK); }

// A row of logits and the maxima of its chunks.
struct Extremes {
  const Kernels* kernels;
  LogitsRow row;
  const float* maxima;

  int64_t chunks() const { return num_chunks(row.count); }
  // The largest logit; NaN if any logit is NaN or positive infinity.
  float largest() const {
    float most = -INFINITY;
    for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
      if (maxima[chunk] != maxima[chunk]) return maxima[chunk];
      if (maxima[chunk] > most) most = maxima[chunk];
    }
    return most;
  }
  // The first token whose logit is `value`, which has to be the maximum of some chunk.
  int64_t find(float value) const {
    int64_t chunk = 0;
    while (maxima[chunk] != value) ++chunk;
    float logits[CHUNK];
    kernels->read_chunk(row, chunk, logits);
    int64_t at = 0;
    while (logits[at] != value) ++at;
    return chunk * CHUNK + at;
  }
  float value_of(int64_t token) const {
    float logits[CHUNK];
    kernels->read_chunk(row, token / CHUNK, logits);
    return logits[token % CHUNK];
  }
  // The mass of all tokens, from the chunks' sums, where a logit of `shift` has mass 1.
  double mass(const float* sums, float shift) const {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks(); ++chunk)
      if (sums[chunk] > 0) total += sums[chunk] * exp(double(maxima[chunk]) - shift);
    return total;
  }
  // Number of tokens whose logit is greater than `value`.
  int64_t count_above(float value) const {
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < chunks(); ++chunk) {
      if (!(maxima[chunk] > value)) continue;
      float logits[CHUNK];
      kernels->read_chunk(row, chunk, logits);
      for (float logit : logits) count += logit > value;
    }
    return count;
  }
};

// Descending lower bounds for a search that collects the logits above each in turn.
class Descent {
 public:
  Descent(float largest, float lowest) : largest_(largest), lowest_(lowest) {}
  float next() {
    float bound = distance_ < 64 ? largest_ - distance_ : lowest_;
    distance_ *= 2;
    return bound > lowest_ ? bound : lowest_;
  }

 private:
  float largest_, lowest_, distance_ = 4;
};

class Candidates {
  // Number of logits in a group, whose maximum is a bound where a row has few chunks.
  enum { GROUP = 16 };
  static_assert(CHUNK % GROUP == 0, "a chunk has whole groups");

 public:
  // Bytes of scratch memory for rows of `count` logits.
  static int64_t scratch(int64_t count) {
    return count * 2 * sizeof(uint64_t) + divide_up(count, GROUP) * sizeof(float);
  }

  Candidates(const Extremes& extremes, void* scratch)
      : extremes_(extremes),
        keys_(static_cast<uint64_t*>(scratch)),
        spare_(keys_ + extremes.row.count),
        maxima_(reinterpret_cast<float*>(spare_ + extremes.row.count)) {}

  int64_t count() const { return count_; }
  int64_t token(int64_t i) const { return uint32_t(keys_[i]); }
  float value(int64_t i) const {
    uint32_t order = ~uint32_t(keys_[i] >> 32);
    uint32_t bits = order & 0x80000000u ? order & 0x7fffffffu : ~order;
    float out;
    memcpy(&out, &bits, 4);
    return out;
  }

  // The k-th largest of the chunks' maxima, a lower bound of the k-th largest logit. k is at most
  // the number of chunks, and no maximum is NaN.
  float bound_of(int64_t k) {
    memcpy(maxima_, extremes_.maxima, extremes_.chunks() * sizeof(float));
    return largest_of_maxima(k, extremes_.chunks());
  }

  // Collects and sorts all tokens with logits of at least `bound`, equal ones by their ids.
  void take(float bound) {
    count_ = 0;
    for (int64_t chunk = 0; chunk < extremes_.chunks(); ++chunk) {
      if (!(extremes_.maxima[chunk] >= bound)) continue;
      float logits[CHUNK];
      extremes_.kernels->read_chunk(extremes_.row, chunk, logits);
      int64_t first = chunk * CHUNK, left = least(CHUNK, extremes_.row.count - first);
      for (int64_t i = 0; i < left; ++i) {
        keys_[count_] = key_of(logits[i], first + i);
        count_ += logits[i] >= bound;
      }
    }
    sort();
  }

  // Collects and sorts the k largest and possibly more, but none if `largest` is NaN.
  void take_top(int64_t k, float largest) {
    count_ = 0;
    if (largest != largest) return;
    if (k <= extremes_.chunks()) return take(bound_of(k));
    if (k <= extremes_.row.count / GROUP) return take(group_bound_of(k));
    for (Descent descent(largest, -INFINITY); count_ < k;) take(descent.next());
  }

 private:
  // The k-th largest of the groups' maxima, a lower bound like that of `bound_of`.
  float group_bound_of(int64_t k) {
    int64_t groups = 0;
    for (int64_t chunk = 0; chunk < extremes_.chunks(); ++chunk) {
      float logits[CHUNK];
      extremes_.kernels->read_chunk(extremes_.row, chunk, logits);
      int64_t left = least(CHUNK, extremes_.row.count - chunk * CHUNK);
      for (int64_t first = 0; first < left; first += GROUP)
        maxima_[groups++] = *std::max_element(logits + first, logits + least(first + GROUP, left));
    }
    return largest_of_maxima(k, groups);
  }

  float largest_of_maxima(int64_t k, int64_t count) {
    std::nth_element(maxima_, maxima_ + k - 1, maxima_ + count, std::greater<float>());
    return maxima_[k - 1];
  }

  // Keys ascend as logits descend, then as tokens ascend. 0 and -0 give the same key.
  static uint64_t key_of(float value, int64_t token) {
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, 4);
    uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(~order) << 32 | uint64_t(token);
  }

  void sort() {
    if (count_ <= 512) {
      // libc++ has the sort by std::less in its library, and not in its header.
      std::sort(keys_, keys_ + count_, [](uint64_t a, uint64_t b) { return a < b; });
      return;
    }
    // A radix sort, which is stable, by the logit alone: tokens are already in ascending order.
    enum { BITS = 11, DIGITS = 1 << BITS };
    for (int shift = 32; shift < 64; shift += BITS) {
      int64_t starts[DIGITS] = {}, sum = 0;
      for (int64_t i = 0; i < count_; ++i) ++starts[keys_[i] >> shift & (DIGITS - 1)];
      for (int64_t& start : starts) {
        int64_t size = start;
        start = sum;
        sum += size;
      }
      for (int64_t i = 0; i < count_; ++i)
        spare_[starts[keys_[i] >> shift & (DIGITS - 1)]++] = keys_[i];
      std::swap(keys_, spare_);
    }
  }

  const Extremes& extremes_;
  uint64_t* keys_;
  uint64_t* spare_;
  float* maxima_;
  int64_t count_ = 0;
};
