// y = x W^T + b with weights of 4 or 8 bits, and inputs that are rounded to 8-bit integers in spans,
// each with its own scale. A span is summed in integers. The spans' sums are added in ascending
// order, in float32 and without fused multiply-add, so that all instruction sets give the same
// result.
//
// Weights in groups have a scale, and possibly a zero point, for each output and group of inputs. A
// byte of a packed weight is multiplied as two 4-bit integers. In 4-bit weights these are the values
// of two inputs QUAD apart. In 8-bit weights they are the halves of one value, with two sums per
// span; with BYTE_PRODUCTS a code is multiplied whole.
//
// int8 weights with a scale per output are multiplied here with BYTE_PRODUCTS only. They are stored
// as [n / panel][k / QUAD][panel][QUAD], k padded to SPAN, each 128 larger. So the sums of a span
// start from minus 128 times the sum of its inputs. The inputs' scales are divided by 2^21, the most
// that a span's sum can be, and the weights' multiplied by it: so a sum overflows no earlier than y.
enum { QUADS = SPAN / QUAD };
const float INT8_UNIT = 0x1p-21f;

// Bytes of one span of inputs in a panel.
static constexpr int64_t span_bytes(int32_t dtype) {
  if (block_form(dtype).elements) return PANEL * block_span_bytes(block_form(dtype));
  return PANEL * SPAN / (dtype == DTYPE_U4 ? 2 : 1);
}
INLINE int64_t count_spans(int64_t k) { return (k + SPAN - 1) / SPAN; }

// Byte, in a span of a panel, with the value of input i and an output; `shift` is the number of
// bits to shift the byte to the right.
INLINE int64_t place_in_span(int64_t i, int64_t output, int32_t dtype, int* shift) {
  int64_t quad = i / QUAD;
  *shift = dtype == DTYPE_U4 ? quad % 2 * 4 : 0;
  if (dtype == DTYPE_U4) quad /= 2;
  return (quad * PANEL + output) * QUAD + i % QUAD;
}

// Spreads four 4-bit integers in 16 bits to one per byte.
INLINE uint32_t spread(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ff;
  return (codes | codes << 4) & 0x0f0f0f0f;
}

// Defined in blocks.h, for weights in blocks of GGUF.
struct SpanBlock;
template <int32_t DTYPE, int M>
static void block_tile(const PackedView& weights, const LinearTask& task, int64_t row,
                       int64_t panel, const SpanBlock& block, float* out);
static void pack_blocks(const GroupedArgs& args, const PackedView& view, int64_t panel);
static void gather_block_row(const PackedView& weights, int64_t row, void* out, int32_t dtype);

// Calls f with a null pointer to an array whose size is the type: a constant in f.
template <class F> INLINE void with_block_type(int32_t dtype, F&& f) {
  switch (dtype) {
    case DTYPE_Q4_1: return f((char(*)[DTYPE_Q4_1])nullptr);
    case DTYPE_Q5_0: return f((char(*)[DTYPE_Q5_0])nullptr);
    case DTYPE_Q5_1: return f((char(*)[DTYPE_Q5_1])nullptr);
    case DTYPE_Q4_K: return f((char(*)[DTYPE_Q4_K])nullptr);
    case DTYPE_Q5_K: return f((char(*)[DTYPE_Q5_K])nullptr);
    case DTYPE_Q6_K: return f((char(*)[DTYPE_Q6_K])nullptr);
    case DTYPE_IQ4_NL: return f((char(*)[DTYPE_IQ4_NL])nullptr);
  }
}

// Packs `bytes` of a row's values, at most a span, for one output of a panel.
INLINE void pack_span(const uint8_t* row, int64_t bytes, int32_t dtype, uint8_t* to) {
  uint8_t codes[SPAN] = {};
  __builtin_memcpy(codes, row, bytes);
  for (int64_t i = 0; i < QUADS; ++i) {
    uint32_t quad;
    if (dtype == DTYPE_U4 && i == QUADS / 2) return;
    __builtin_memcpy(&quad, codes + i * QUAD, sizeof(quad));
    // Inputs QUAD apart share a byte.
    if (dtype == DTYPE_U4) quad = spread(quad & 0xffff) | spread(quad >> 16) << 4;
    __builtin_memcpy(to + i * PANEL * QUAD, &quad, sizeof(quad));
  }
}

// Packs the values, scales and zero points of panels [first, last).
static void pack_grouped(const GroupedArgs& args, const PackedView& view, int64_t first,
                         int64_t last) {
  if (block_form(args.dtype).elements) {
    for (int64_t panel = first; panel < last; ++panel) pack_blocks(args, view, panel);
    return;
  }
  int64_t bytes = span_bytes(args.dtype), width = args.scale_dtype == DTYPE_F32 ? 4 : 2;
  int64_t per_byte = args.dtype == DTYPE_U4 ? 2 : 1;
  int64_t row_bytes = (args.k + per_byte - 1) / per_byte;
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* codes = (uint8_t*)view.data + panel * view.panel_elements;
    __builtin_memset(codes, 0, view.panel_elements);
    for (int64_t column = 0; column < PANEL; ++column) {
      int64_t output = panel * PANEL + column;
      bool exists = output < args.n;
      const uint8_t* row = (const uint8_t*)args.values + (exists ? output * args.row_bytes : 0);
      for (int64_t span = 0; exists && span < count_spans(args.k); ++span) {
        int64_t from = span * SPAN / per_byte, size = least(SPAN / per_byte, row_bytes - from);
        pack_span(row + from, size, args.dtype, codes + span * bytes + column * QUAD);
      }
      for (int64_t group = 0; group < view.groups; ++group) {
        int64_t from = output * view.groups + group;
        int64_t to = (panel * view.groups + group) * PANEL + column;
        char* scale = (char*)view.group_scales + to * width;
        __builtin_memset(scale, 0, width);
        if (exists) __builtin_memcpy(scale, (const char*)args.scales + from * width, width);
        if (view.zeros) ((uint8_t*)view.zeros)[to] = exists ? args.zeros[from] : 0;
      }
    }
  }
}

template <class T>
static void quantise_spans(const T* x, int8_t* out, Span* spans, int64_t k, bool by_channel) {
  const float unit = by_channel ? INT8_UNIT : 1.0f;
  const int32_t start = by_channel ? -128 : 1;
  for (int64_t span = 0; span < count_spans(k); ++span) {
    const T* from = x + span * SPAN;
    int64_t left = k - span * SPAN;
    vf values[SPAN / W], top = zero(), halves[2] = {zero(), zero()};
#pragma GCC unroll 8
    for (int64_t i = 0; i < SPAN / W; ++i) {
      values[i] = left >= SPAN ? load(from + i * W) : load_some(from + i * W, left - i * W);
      top = vmax(vmax(values[i], sub(zero(), values[i])), top);
    }
    float largest = hmax(top), limit = 127.0f;
    vf factor = set1(largest > 1e-30f ? limit / largest : 0.0f);
#pragma GCC unroll 8
    for (int64_t i = 0; i < SPAN / W; ++i) {
      values[i] = round_even(mul(values[i], factor));
      vf& sums = halves[i / (SPAN / W / 2)];
      sums = add(sums, values[i]);
    }
    // It is NaN if an input was NaN, or infinite: then the factor is 0.
    float half = hsum(halves[0]), sum = half + hsum(halves[1]);
    bool finite = sum == sum;
#pragma GCC unroll 8
    for (int64_t i = 0; i < SPAN / W; ++i)
      store(out + span * SPAN + i * W, finite ? values[i] : zero());
    spans[span] = {finite ? largest / limit * unit : __builtin_nanf(""),
                   finite ? (int32_t)sum * start : 0, finite ? (int32_t)half * start : 0};
  }
}

static void quantise_row_spans(const void* x, int32_t dtype, int8_t* out, Span* spans, int64_t k,
                               int32_t weights_dtype) {
  with_type(dtype, [&](auto* type) {
    quantise_spans((decltype(type))x, out, spans, k, weights_dtype == DTYPE_I8);
  });
}

// Constants for the multiplication of a tile by weights of a type.
template <int32_t DTYPE> struct Form {
  static constexpr bool BY_CHANNEL = DTYPE == DTYPE_I8;
  static constexpr bool IS_BLOCK = block_form(DTYPE).elements > 0;
  static constexpr int64_t BYTES = span_bytes(DTYPE);
  static constexpr int BITS = DTYPE == DTYPE_U4 ? 4 : 8;
  static constexpr bool WHOLE = BITS == 8 && SPANS_INT8;
  static constexpr int SUMS = BITS == 8 && !WHOLE ? 2 : 1;  // of a span, for each output
  // Rows for whose sums of a span there are registers. Blocks have no more than one sum for each
  // where products of bytes are summed in 32 bits, or codes have 4 bits.
  static constexpr bool ONE_SUM =
      SPANS_INT8 || (block_form(DTYPE).bits == 4 && DTYPE != DTYPE_IQ4_NL);
  static constexpr int ROWS = IS_BLOCK ? (ONE_SUM ? 4 : 2) : WHOLE ? 6 : 16 / BITS;
};

INLINE vf load_scales(const PackedView& weights, int64_t at) {
  if (weights.scale_dtype == DTYPE_BF16) return load((const bf16*)weights.group_scales + at);
  if (weights.scale_dtype == DTYPE_F16) return load((const f16*)weights.group_scales + at);
  return load((const float*)weights.group_scales + at);
}

// Adds a span's integer sums, times both scales, to `out` [M][PANEL].
template <int32_t DTYPE, int M>
INLINE void add_span(const PackedView& weights, int64_t at, const va sums[][M][NV],
                     const Span* const* spans, float* out) {
  using F = Form<DTYPE>;
  if (F::BY_CHANNEL) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vf factor = set1(spans[m]->scale);
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) {
        float* to = out + (m * NV + i) * W;
        store(to, add(load(to), mul(factor, to_floats(total(sums[0][m][i])))));
      }
    }
    return;
  }
#pragma GCC unroll 8
  for (int i = 0; i < NV; ++i) {
    vf scale = zero();
    vi zeros = {};
    if (!F::BY_CHANNEL) {
      scale = load_scales(weights, at + i * W);
      zeros = weights.zeros ? load_bytes(weights.zeros + at + i * W)
                            : set_integers(F::BITS == 4 ? 8 : 128);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      vi sum = total(sums[0][m][i]);
      if (F::SUMS == 2) sum = add_sixteenfold(sum, total(sums[F::SUMS - 1][m][i]));
      if (!F::BY_CHANNEL) sum = less_product(sum, zeros, spans[m]->sum);
      vf factor = set1(spans[m]->scale);
      if (!F::BY_CHANNEL) factor = mul(scale, factor);
      float* to = out + (m * NV + i) * W;
      store(to, add(load(to), mul(factor, to_floats(sum))));
    }
  }
}

// Bytes of a block of a panel; and of the panels that a group of rows is multiplied by before the
// next one, so that they stay in the second-level cache.
enum { BLOCK_BYTES = 8192, PART_BYTES = 512 << 10 };

// Spans [first, last) of a panel, and the cache lines to prefetch with each, BLOCK_BYTES ahead.
struct SpanBlock {
  int64_t first, last, line, lines;
};

// Adds the products of M rows of x and a block of a panel to `out` [M][PANEL].
template <int32_t DTYPE, int M>
static __attribute__((noinline)) void spanned_tile(const PackedView& weights,
                                                   const LinearTask& task, int64_t row,
                                                   int64_t panel, const SpanBlock& block,
                                                   float* out) {
  using F = Form<DTYPE>;
  const int64_t spans = count_spans(weights.k), stride = spans * SPAN;
  const int64_t bytes = F::BYTES, spans_per_group = weights.group / SPAN;
  const uint8_t* w = (const uint8_t*)weights.data + panel * weights.panel_elements;
  const int8_t* x = task.x8 + row * stride + block.first * SPAN;
  const int64_t ahead = BLOCK_BYTES + block.line * 64;
  int64_t group = panel * weights.groups, until = 0;
  if (!F::BY_CHANNEL) {
    group += block.first / spans_per_group;
    until = spans_per_group - block.first % spans_per_group;
  }
  w += block.first * bytes;
  const int8_t* x3 = x + 3 * stride;
  for (int64_t span = block.first; span < block.last; ++span) {
    prefetch_lines(w + ahead, block.lines);
    const Span* of[M];
    va sums[F::SUMS][M][NV];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      of[m] = task.spans + (row + m) * spans + span;
      va first = no_sums();
#ifdef BYTE_PRODUCTS
      if (F::BY_CHANNEL) first = set_integers(of[m]->sum);
#endif
#pragma GCC unroll 8
      for (int i = 0; i < NV * F::SUMS; ++i) sums[i / NV][m][i % NV] = first;
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < QUADS; quad += 8 / F::BITS) {
      vb low[NV], high[NV];
      const uint8_t* codes = w + quad * QUAD * PANEL * F::BITS / 8;
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) {
#ifdef BYTE_PRODUCTS
        if (F::WHOLE)
          low[i] = high[i] = load_quads(codes + i * QUAD * W);
        else
#endif
          load_codes(codes + i * QUAD * W, low[i], high[i]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const int8_t* at = (m < 3 ? x : x3) + m % 3 * stride + quad * QUAD;
        // The barrier keeps GCC from loading the inputs of all rows first, which would spill sums.
        asm volatile("" ::: "memory");
        vb first = set_quad(at), second = F::BITS == 4 ? set_quad(at + QUAD) : first;
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) {
          sums[0][m][i] = dot_codes(sums[0][m][i], low[i], first);
          va& other = sums[F::SUMS - 1][m][i];
          if (!F::WHOLE) other = dot_codes(other, high[i], second);
        }
      }
    }
    add_span<DTYPE, M>(weights, group * PANEL, sums, of, out);
    if (--until == 0) {
      ++group;
      until = spans_per_group;
    }
    w += bytes, x += SPAN, x3 += SPAN;
  }
}

// Multiplies `rows` rows from `row` on, at most GROUP_ROWS, by a panel.
template <int32_t DTYPE>
static void spanned_panel(const PackedView& weights, const LinearTask& task, int64_t row,
                          int64_t rows, int64_t panel) {
  using F = Form<DTYPE>;
  alignas(64) float sums[GROUP_ROWS * PANEL];
  zero_floats(sums, rows * PANEL);
  const int64_t spans = count_spans(weights.k);
  const int64_t step = rows <= F::ROWS ? spans : BLOCK_BYTES / F::BYTES;
  for (int64_t span = 0; span < spans; span += step)
    each_tile<F::ROWS>(rows, (F::BYTES + 63) / 64, [&](auto tile) {
      constexpr int ROWS = decltype(tile)::ROWS;
      SpanBlock block = {span, least(spans, span + step), tile.line, tile.lines};
      float* own = sums + tile.row * PANEL;
      if constexpr (F::IS_BLOCK)
        block_tile<DTYPE, ROWS>(weights, task, row + tile.row, panel, block, own);
      else
        spanned_tile<DTYPE, ROWS>(weights, task, row + tile.row, panel, block, own);
    });
  if (F::BY_CHANNEL) {
    for (int64_t i = 0; i < rows * NV; ++i) {
      vf scale = mul(load(weights.scales + panel * PANEL + i % NV * W), set1(1 / INT8_UNIT));
      store(sums + i * W, mul(load(sums + i * W), scale));
    }
  }
  finish_tile(weights, task, sums, row, rows, panel, 1);
}

template <int32_t DTYPE>
static void spanned_panels(const PackedView& weights, const LinearTask& task) {
  const int64_t step = most(1, PART_BYTES / weights.panel_elements);
  for (int64_t first = task.first; first < task.last; first += step)
    for (int64_t row = task.first_row; row < task.last_row; row += GROUP_ROWS)
      for (int64_t panel = first; panel < least(task.last, first + step); ++panel)
        spanned_panel<DTYPE>(weights, task, row, least(GROUP_ROWS, task.last_row - row), panel);
}

static void spanned_linear(const PackedView& weights, const LinearTask& task) {
  if (weights.dtype == DTYPE_U4) return spanned_panels<DTYPE_U4>(weights, task);
  if (weights.dtype == DTYPE_U8) return spanned_panels<DTYPE_U8>(weights, task);
  if (block_form(weights.dtype).elements) {
    return with_block_type(weights.dtype, [&](auto* type) {
      spanned_panels<sizeof(*type)>(weights, task);
    });
  }
#ifdef BYTE_PRODUCTS
  spanned_panels<DTYPE_I8>(weights, task);
#endif
}

// Dequantises one row of the weight, an output, from its panel.
template <class S, class Out>
static void gather_grouped(const PackedView& weights, int64_t row, Out* out) {
  int64_t panel = row / PANEL, column = row % PANEL, bytes = span_bytes(weights.dtype);
  const uint8_t* codes = (const uint8_t*)weights.data + panel * weights.panel_elements;
  int mask = weights.dtype == DTYPE_U4 ? 15 : 255, middle = weights.dtype == DTYPE_U4 ? 8 : 128;
  for (int64_t i = 0; i < weights.k; ++i) {
    int shift;
    int64_t at = i / SPAN * bytes + place_in_span(i % SPAN, column, weights.dtype, &shift);
    int64_t group = (panel * weights.groups + i / weights.group) * PANEL + column;
    int zero = weights.zeros ? weights.zeros[group] : middle;
    float scale = widen(((const S*)weights.group_scales)[group]);
    narrow((float)((codes[at] >> shift & mask) - zero) * scale, out + i);
  }
}

static void gather_grouped_row(const PackedView& weights, int64_t row, void* out, int32_t dtype) {
  if (block_form(weights.dtype).elements) return gather_block_row(weights, row, out, dtype);
  with_type(weights.scale_dtype, [&](auto* type) {
    using S = typename pointee<decltype(type)>::type;
    with_type(dtype, [&](auto* to) { gather_grouped<S>(weights, row, (decltype(to))out); });
  });
}
