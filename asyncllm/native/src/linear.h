// y = x W^T + b. Each output is one sum over k in ascending order, for any number of rows, so that
// a row's result does not depend on the others.
enum { PANEL = NV * W, MAX_ROWS = 6 };
#ifdef PAIRED_BFLOAT16
enum { TAKES_BFLOAT16 = 1 };
#else
enum { TAKES_BFLOAT16 = 0 };
#endif

// Defined in grouped.h, for weights with scales per group of inputs.
static void spanned_linear(const PackedView& weights, const LinearTask& task);
static void gather_grouped_row(const PackedView& weights, int64_t row, void* out, int32_t dtype);

// int8 weights with a scale per output take inputs as 8-bit integers in spans, of which QUAD are
// multiplied and summed by one instruction, or as 16-bit integers.
#ifdef BYTE_PRODUCTS
enum { QUAD = 4, SPANS_INT8 = 1, INT8_ADJACENT = QUAD };
#else
enum { QUAD = 4, SPANS_INT8 = 0, INT8_ADJACENT = 2 };
#endif

// Number of an output's inputs that are adjacent in a panel.
INLINE int64_t adjacent_inputs(int32_t dtype) {
  if (dtype == DTYPE_I8) return INT8_ADJACENT;
  return TAKES_BFLOAT16 && dtype == DTYPE_BF16 ? 2 : 1;
}

INLINE int64_t panel_elements(int64_t k, int32_t dtype) {
  int64_t unit = adjacent_inputs(dtype);
  if (SPANS_INT8 && dtype == DTYPE_I8) unit = SPAN;
  return (k + unit - 1) / unit * unit * PANEL;
}

// Index of output `column` among the PANEL elements of one k. bfloat16 vectors are interleaved in
// pairs, which load_pair separates.
INLINE int64_t place_in_panel(int64_t column, int32_t dtype) {
  if (dtype != DTYPE_BF16) return column;
  int64_t pair = column / (2 * W), vector = column / W % 2;
  return pair * 2 * W + column % W * 2 + vector;
}

// Calls f with a null pointer to the element type of weights.
template <class F> INLINE void with_weight_type(int32_t dtype, F&& f) {
  if (dtype == DTYPE_I8)
    f((int8_t*)nullptr);
  else
    with_type(dtype, f);
}

// int8 weights that are multiplied by inputs in spans are stored as unsigned codes: the weight plus
// 128.
template <class T> INLINE T to_code(T weight) { return weight; }
INLINE int8_t to_code(int8_t weight) { return SPANS_INT8 ? (int8_t)(weight ^ -128) : weight; }

// Number of inputs to pack at a time, so few that the written part of a panel stays in the
// first-level cache until all PANEL rows have been read.
enum { PACKED_INPUTS = 64 };

template <class T, int UNIT>
static void pack_panel(const PlainView& plain, T* data, int64_t panel) {
  const T* values = (const T*)plain.values;
  int64_t elements = panel_elements(plain.k, plain.dtype), depth = elements / PANEL;
  T* out = data + panel * elements;
  for (int64_t first = 0; first < depth; first += PACKED_INPUTS)
    for (int64_t column = 0; column < PANEL; ++column) {
      int64_t output = panel * PANEL + column, last = least(first + PACKED_INPUTS, depth);
      int64_t known = output < plain.n ? least(last, plain.k) : first;
      const T* row = values + (output < plain.n ? output * plain.row_stride : 0);
      T* to = out + (UNIT > 1 ? column * UNIT : place_in_panel(column, plain.dtype));
      for (int64_t i = first; i < last; i += UNIT) {
        T unit[UNIT] = {};
        if (i + UNIT <= known)
          __builtin_memcpy(unit, row + i, sizeof(unit));
        else if (i < known)
          __builtin_memcpy(unit, row + i, sizeof(T) * (known - i));
        for (int j = 0; j < UNIT; ++j) unit[j] = to_code(unit[j]);
        __builtin_memcpy(to + i * PANEL, unit, sizeof(unit));
      }
    }
}

static void pack(const PlainView& plain, void* data, int64_t first, int64_t last) {
  with_weight_type(plain.dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    for (int64_t panel = first; panel < last; ++panel)
      if (plain.dtype == DTYPE_I8)
        pack_panel<T, INT8_ADJACENT>(plain, (T*)data, panel);
      else if (adjacent_inputs(plain.dtype) == 2)
        pack_panel<T, 2>(plain, (T*)data, panel);
      else
        pack_panel<T, 1>(plain, (T*)data, panel);
  });
}

INLINE void load_panel(const float* p, vf* out) {
  for (int i = 0; i < NV; ++i) out[i] = load(p + i * W);
}
INLINE void load_panel(const f16* p, vf* out) {
  for (int i = 0; i < NV; ++i) out[i] = load(p + i * W);
}
INLINE void load_panel(const bf16* p, vf* out) {
  for (int i = 0; i < NV; i += 2) load_pair(p + i * W, out[i], out[i + 1]);
}

// Updates `largest` with `count` outputs from index `output` on. Of equal outputs the first is
// kept.
template <class T>
INLINE void keep_largest(Largest* largest, vf x, int64_t output, int64_t count, const T* type) {
  float values[W];
  store(values, rounded_to(x, type));
  for (int64_t i = count; i < W; ++i) values[i] = -__builtin_inff();
  vf found = load(values);
  store(largest->broken, note_broken(load(largest->broken), found));
  if (!(hmax(found) > largest->value)) return;
  for (int i = 0; i < W; ++i)
    if (values[i] > largest->value) {
      largest->value = values[i];
      largest->output = output + i;
    }
}

// Scales the sums [rows][panels * PANEL] of a tile if rows have a scale, adds the bias, and either
// writes the sums to y or updates task.largest. It is not inlined, because it contains code for every type of y.
static __attribute__((noinline)) void finish_tile(const PackedView& weights,
                                                  const LinearTask& task, const float* sums,
                                                  int64_t row, int64_t rows, int64_t panel,
                                                  int64_t panels) {
  int64_t first = panel * PANEL, width = panels * PANEL;
  bool as_it_is = !task.x_scales && !weights.bias && !task.largest && first + width <= weights.n;
  with_type(task.dtype, [&](auto* type) {
    if (as_it_is) {
      auto* y = (decltype(type))task.y + row * task.y_stride + first;
      for (int64_t m = 0; m < rows; ++m, y += task.y_stride)
        for (int64_t i = 0; i < width; i += W) store(y + i, load(sums + m * width + i));
      return;
    }
    for (int64_t m = 0; m < rows; ++m) {
      auto* y = task.largest ? type : (decltype(type))task.y + (row + m) * task.y_stride + first;
      for (int64_t i = 0; i < width && first + i < weights.n; i += W) {
        vf sum = load(sums + m * width + i);
        if (task.x_scales)
          sum = mul(sum, mul(set1(task.x_scales[row + m]), load(weights.scales + first + i)));
        if (weights.bias) sum = add(sum, load(weights.bias + first + i));
        if (task.largest)
          keep_largest(task.largest + row + m, sum, first + i, weights.n - first - i, type);
        else
          store_up_to(y + i, sum, weights.n - first - i);
      }
    }
  });
}

// Multiplies M rows of x by P panels.
template <class T, int M, int P>
static void packed_tile(const PackedView& weights, const LinearTask& task, int64_t row,
                        int64_t panel) {
  const T* w = (const T*)weights.data + panel * weights.panel_elements;
  const float* x = task.x + row * task.x_stride;
  vf sums[M][P][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[m][p][i] = zero();
  for (int64_t k = 0; k < weights.k; ++k) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const T* at = w + p * weights.panel_elements + k * PANEL;
      __builtin_prefetch(at + 4096 / sizeof(T));
      vf values[NV];
      load_panel(at, values);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        vf factor = set1(x[m * task.x_stride + k]);
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) sums[m][p][i] = fma(factor, values[i], sums[m][p][i]);
      }
    }
  }
  float out[M * P * PANEL];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) store(out + ((m * P + p) * NV + i) * W, sums[m][p][i]);
  finish_tile(weights, task, out, row, M, panel, P);
}

#ifdef PAIRED_BFLOAT16
template <int M, int P>
static void paired_tile(const PackedView& weights, const LinearTask& task, int64_t row,
                        int64_t panel) {
  const bf16* w = (const bf16*)weights.data + panel * weights.panel_elements;
  const uint16_t* x = task.x16 + row * task.x_stride;
  vf sums[M][P][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[m][p][i] = zero();
  for (int64_t k = 0; k < weights.k; k += 2) {
    uint32_t pairs[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const uint16_t* at = x + m * task.x_stride + k;
      pairs[m] = at[0] | (k + 1 < weights.k ? (uint32_t)at[1] << 16 : 0);
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const bf16* at = w + p * weights.panel_elements + k * PANEL;
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          sums[m][p][i] = dot_pair(sums[m][p][i], at + i * 2 * W, pairs[m]);
    }
  }
  float out[M * P * PANEL];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) store(out + ((m * P + p) * NV + i) * W, sums[m][p][i]);
  finish_tile(weights, task, out, row, M, panel, P);
}
#endif

#ifndef BYTE_PRODUCTS
template <int M, int P>
static void int8_tile(const PackedView& weights, const LinearTask& task, int64_t row,
                      int64_t panel) {
  const int8_t* w = (const int8_t*)weights.data + panel * weights.panel_elements;
  const int64_t stride = task.x_stride, depth = weights.k, elements = weights.panel_elements;
  const int16_t* x = task.xq + row * stride;
  vi sums[M][P][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[m][p][i] = zero_integers();
  for (int64_t k = 0; k < depth; k += 2) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const int8_t* at = w + p * elements + k * PANEL;
      if (M <= 2) __builtin_prefetch(at + 4096);
      vs values[NV];
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) values[i] = load_shorts(at + i * 2 * W);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        // The barrier keeps GCC from loading the factors of all rows first, which would spill sums.
        asm volatile("" ::: "memory");
        vs factor = set_pair(x + m * stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) sums[m][p][i] = dot_shorts(sums[m][p][i], values[i], factor);
      }
    }
  }
  float out[M * P * PANEL];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i)
        store(out + ((m * P + p) * NV + i) * W, to_floats(sums[m][p][i]));
  finish_tile(weights, task, out, row, M, panel, P);
}
#endif

// Rows whose sums are kept while a panel passes in blocks, which stay in the first-level cache. A
// block is read once for all of them, and the next arrives from memory meanwhile.
enum { GROUP_ROWS = 48 };

// A tile of a group's rows, with its share of the cache lines to prefetch in each step.
template <int M> struct RowTile {
  enum { ROWS = M };
  int64_t row, line, lines;
};
template <int M, class F>
INLINE void call_tile(int64_t rows, int64_t row, int64_t line, int64_t lines, F&& f) {
  if constexpr (M > 1) {
    if (rows < M) return call_tile<M - 1>(rows, row, line, lines, f);
  }
  f(RowTile<M>{row, line, lines});
}

// Calls f for the fewest tiles of at most M rows, whose sizes differ by one at most.
template <int M, class F> INLINE void each_tile(int64_t rows, int64_t lines, F&& f) {
  const int64_t tiles = (rows + M - 1) / M;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t row = rows * tile / tiles, line = lines * tile / tiles;
    call_tile<M>(rows * (tile + 1) / tiles - row, row, line, lines * (tile + 1) / tiles - line, f);
  }
}

INLINE void prefetch_lines(const void* p, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i) __builtin_prefetch((const char*)p + i * 64);
}

// Whether the weights of more than MAX_ROWS rows are converted to float32 once for a group: with
// AVX-512 conversions take turns with multiplications.
template <class T> struct Widened { enum { ONCE = W == 16 && sizeof(T) == 2 }; };
// Inputs of a block that is converted, and of the steps of its multiplication.
enum { WIDE_INPUTS = 64, WIDE_STEP = 8 };

// Adds the products of M rows of x and `count` inputs of a panel, `w`, to `out` [M][PANEL].
template <int M>
static __attribute__((noinline)) void widened_tile(const float* w, const float* x, int64_t stride,
                                                   int64_t count, float* out, const char* ahead,
                                                   int64_t lines) {
  const float* x3 = x + 3 * stride;
  vf sums[M][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) sums[m][i] = load(out + (m * NV + i) * W);
  for (int64_t k = 0; k < count; ++k, w += PANEL) {
    if (k % WIDE_STEP == 0) {
      prefetch_lines(ahead, lines);
      ahead += lines * 64;
    }
    vf values[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) values[i] = load(w + i * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vf factor = set1(((m < 3 ? x : x3) + m % 3 * stride)[k]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) sums[m][i] = fma(factor, values[i], sums[m][i]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) store(out + (m * NV + i) * W, sums[m][i]);
}

// Multiplies `rows` rows from `row` on, at most GROUP_ROWS, by a panel.
template <class T>
static void widened_panel(const PackedView& weights, const LinearTask& task, int64_t row,
                          int64_t rows, int64_t panel) {
  alignas(64) float sums[GROUP_ROWS * PANEL], wide[WIDE_INPUTS * PANEL];
  const T* w = (const T*)weights.data + panel * weights.panel_elements;
  const float* x = task.x + row * task.x_stride;
  zero_floats(sums, rows * PANEL);
  for (int64_t k = 0; k < weights.k; k += WIDE_INPUTS, w += WIDE_INPUTS * PANEL) {
    int64_t count = least(WIDE_INPUTS, weights.k - k);
    for (int64_t i = 0; i < count; ++i) {
      vf values[NV];
      load_panel(w + i * PANEL, values);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) store(wide + i * PANEL + j * W, values[j]);
    }
    const char* ahead = (const char*)(w + WIDE_INPUTS * PANEL);
    each_tile<MAX_ROWS>(rows, PANEL * sizeof(T) * WIDE_STEP / 64, [&](auto tile) {
      widened_tile<decltype(tile)::ROWS>(wide, x + tile.row * task.x_stride + k, task.x_stride,
                                         count, sums + tile.row * PANEL,
                                         ahead + tile.line * 64 * (WIDE_INPUTS / WIDE_STEP),
                                         tile.lines);
    });
  }
  finish_tile(weights, task, sums, row, rows, panel, 1);
}

template <class T, int M, int P> struct Runner {
  static void run(const PackedView& weights, const LinearTask& task, int64_t row, int64_t panel) {
    packed_tile<T, M, P>(weights, task, row, panel);
  }
};
#ifndef BYTE_PRODUCTS
template <int M, int P> struct Runner<int8_t, M, P> {
  static void run(const PackedView& weights, const LinearTask& task, int64_t row, int64_t panel) {
    int8_tile<M, P>(weights, task, row, panel);
  }
};
#endif
#ifdef PAIRED_BFLOAT16
template <> struct Widened<bf16> { enum { ONCE = 0 }; };
template <int M, int P> struct Runner<bf16, M, P> {
  static void run(const PackedView& weights, const LinearTask& task, int64_t row, int64_t panel) {
    paired_tile<M, P>(weights, task, row, panel);
  }
};
#endif

template <class T, int M, int P>
static void run_rows(const PackedView& weights, const LinearTask& task, int64_t row) {
  int64_t panel = task.first;
  for (; panel + P <= task.last; panel += P) Runner<T, M, P>::run(weights, task, row, panel);
  for (; panel < task.last; ++panel) Runner<T, M, 1>::run(weights, task, row, panel);
}

// Number of panels to multiply at a time, for 1 row and for 2 or 3: one panel would have too few
// independent sums to hide the latency of multiplications.
enum { ONE_ROW_PANELS = 8 / NV, FEW_ROW_PANELS = 2 };

template <class T>
static void packed_linear(const PackedView& weights, const LinearTask& task) {
  int64_t rows = task.last_row - task.first_row;
  if (rows == 1) return run_rows<T, 1, ONE_ROW_PANELS>(weights, task, task.first_row);
  if (rows == 2) return run_rows<T, 2, FEW_ROW_PANELS>(weights, task, task.first_row);
  if (rows == 3) return run_rows<T, 3, FEW_ROW_PANELS>(weights, task, task.first_row);
  if constexpr (Widened<T>::ONCE) {
    if (rows > MAX_ROWS) {
      for (int64_t panel = task.first; panel < task.last; ++panel)
        for (int64_t row = task.first_row; row < task.last_row; row += GROUP_ROWS)
          widened_panel<T>(weights, task, row, least(GROUP_ROWS, task.last_row - row), panel);
      return;
    }
  }
  for (int64_t panel = task.first; panel < task.last; ++panel) {
    int64_t row = task.first_row;
    for (; row + MAX_ROWS <= task.last_row; row += MAX_ROWS)
      Runner<T, MAX_ROWS, 1>::run(weights, task, row, panel);
    switch (task.last_row - row) {
      case 1: Runner<T, 1, 1>::run(weights, task, row, panel); break;
      case 2: Runner<T, 2, 1>::run(weights, task, row, panel); break;
      case 3: Runner<T, 3, 1>::run(weights, task, row, panel); break;
      case 4: Runner<T, 4, 1>::run(weights, task, row, panel); break;
      case 5: Runner<T, 5, 1>::run(weights, task, row, panel); break;
    }
  }
}

static void linear(const PackedView& weights, const LinearTask& task) {
  if (is_grouped(weights.dtype) || (SPANS_INT8 && weights.dtype == DTYPE_I8))
    return spanned_linear(weights, task);
  auto run = [&](auto* type) {
    packed_linear<typename pointee<decltype(type)>::type>(weights, task);
  };
#ifdef BYTE_PRODUCTS
  with_type(weights.dtype, run);
#else
  with_weight_type(weights.dtype, run);
#endif
}

#ifdef BYTE_PRODUCTS
static const decltype(Kernels::quantise) quantise = nullptr;
#else
template <class T>
static float quantise_row(const T* x, int16_t* out, int64_t k, float limit) {
  vf top = zero(), broken = zero();
  for (int64_t i = 0; i < k; i += W) {
    vf value = load_up_to(x + i, k - i);
    top = vmax(vmax(value, sub(zero(), value)), top);
    broken = fma(value, zero(), broken);
  }
  float most = hmax(top);
  if (hsum(broken) != 0.0f) {
    __builtin_memset(out, 0, (k + 1) / 2 * 2 * sizeof(int16_t));
    return __builtin_nanf("");
  }
  vf factor = set1(most > 1e-30f ? limit / most : 0.0f);
  for (int64_t i = 0; i < k; i += W) {
    float rounded[W];
    store(rounded, round_even(mul(load_up_to(x + i, k - i), factor)));
    for (int64_t j = 0; j < W && i + j < k; ++j) out[i + j] = (int16_t)rounded[j];
  }
  if (k % 2) out[k] = 0;
  return most / limit;
}

static float quantise(const void* x, int32_t dtype, int16_t* out, int64_t k, float limit) {
  float scale = 0.0f;
  with_type(dtype, [&](auto* type) { scale = quantise_row((decltype(type))x, out, k, limit); });
  return scale;
}
#endif

INLINE void copy_weight(bf16 from, float, bf16* to) { *to = from; }
INLINE void copy_weight(f16 from, float, f16* to) { *to = from; }
template <class T, class Out> INLINE void copy_weight(T from, float, Out* to) {
  narrow(widen(from), to);
}
template <class Out> INLINE void copy_weight(int8_t from, float scale, Out* to) {
  narrow((float)from * scale, to);
}

// Unpacks one row of the weight, an output, from its panel.
template <class T, class Out>
static void gather_row(const PackedView& weights, int64_t row, Out* out) {
  int64_t column = row % PANEL;
  const T* panel = (const T*)weights.data + row / PANEL * weights.panel_elements;
  float scale = weights.scales ? weights.scales[row] : 1.0f;
  int64_t unit = adjacent_inputs(weights.dtype);
  if (unit > 1) {
    const T* from = panel + column * unit;
    for (int64_t i = 0; i < weights.k; ++i)
      copy_weight(to_code(from[i / unit * PANEL * unit + i % unit]), scale, out + i);
    return;
  }
  const T* from = panel + place_in_panel(column, weights.dtype);
  for (int64_t i = 0; i < weights.k; ++i) copy_weight(from[i * PANEL], scale, out + i);
}

static void gather(const PackedView& weights, int64_t row, void* out, int32_t dtype) {
  if (is_grouped(weights.dtype)) return gather_grouped_row(weights, row, out, dtype);
  with_weight_type(weights.dtype, [&](auto* type) {
    using T = typename pointee<decltype(type)>::type;
    with_type(dtype, [&](auto* to) { gather_row<T>(weights, row, (decltype(to))out); });
  });
}

// Multiplies M rows of x by 4 rows of T, with vectors over k.
template <class T, int M>
INLINE void dot_tile(const float* x, int64_t x_stride, const T* const* rows, int64_t k,
                     float out[M][4]) {
  vf sums[M][4];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[m][j] = zero();
  int64_t i = 0;
  for (; i + W <= k; i += W) {
    vf factors[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) factors[m] = load(x + m * x_stride + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      vf value = load(rows[j] + i);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sums[m][j] = fma(factors[m], value, sums[m][j]);
    }
  }
  if (i < k) {
    for (int j = 0; j < 4; ++j) {
      vf value = load_some(rows[j] + i, k - i);
      for (int m = 0; m < M; ++m)
        sums[m][j] = fma(load_some(x + m * x_stride + i, k - i), value, sums[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3], out[m]);
}
