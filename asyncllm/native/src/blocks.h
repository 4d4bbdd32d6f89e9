// Weights in blocks of GGUF, which are repacked and not rounded again. A span of a panel has the
// low 4 bits of its codes, as DTYPE_U4 has them; the higher bits of its codes, one byte for those
// of four quads (2 bits each) or of eight (1 bit each); its byte scales; and its byte minima. Bytes
// that are signed in the file are 128 larger here.
//
// A byte times a float16 is exact in float32, and so are the products with a span's integer sum.
// They are added to the output as in grouped.h.

// A block's parts: float16 scale and minimum, scales and minima of its spans, and its codes.
struct Block {
  uint16_t scale, minimum;
  uint8_t byte_scales[16], byte_minima[8], codes[256];
};

// Values of IQ4_NL plus 128.
alignas(16) static const uint8_t IQ4_NL_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                      129, 141, 153, 166, 181, 197, 217, 241};
// Their low and high 4 bits.
alignas(16) static const uint8_t IQ4_NL_HALVES[2][16] = {
    {1, 8, 13, 15, 15, 13, 10, 6, 1, 13, 9, 6, 5, 5, 9, 1},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 15}};

template <int32_t DTYPE> static void read_block(const uint8_t* from, Block& to) {
  constexpr BlockForm FORM = block_form(DTYPE);
  if (DTYPE == DTYPE_Q6_K) {
    __builtin_memcpy(&to.scale, from + 208, 2);
    for (int i = 0; i < 16; ++i) to.byte_scales[i] = from[192 + i] ^ 128;
    for (int part = 0; part < 8; ++part) {
      const uint8_t* low = from + part / 4 * 64 + part % 2 * 32;
      const uint8_t* high = from + 128 + part / 4 * 32;
      for (int i = 0; i < SPAN; ++i)
        to.codes[part * SPAN + i] =
            (low[i] >> part / 2 % 2 * 4 & 15) | (high[i] >> part % 4 * 2 & 3) << 4;
    }
    return;
  }
  __builtin_memcpy(&to.scale, from, 2);
  if (FORM.has_minimum) __builtin_memcpy(&to.minimum, from + 2, 2);
  from += FORM.has_minimum ? 4 : 2;
  if (FORM.elements == SPAN) {
    // The file adds the minimum, and the kernels subtract it.
    to.minimum ^= 0x8000;
    uint32_t high = 0;
    if (FORM.bits == 5) {
      __builtin_memcpy(&high, from, 4);
      from += 4;
    }
    for (int i = 0; i < SPAN; ++i)
      to.codes[i] = (from[i % 16] >> i / 16 * 4 & 15) | (high >> i & 1) << 4;
    return;
  }
  // A span's scale and minimum have 6 bits: the upper 2 of the last four are in the first's bytes.
  for (int i = 0; i < 4; ++i) {
    to.byte_scales[i] = from[i] & 63;
    to.byte_minima[i] = from[i + 4] & 63;
    to.byte_scales[i + 4] = (from[i + 8] & 15) | from[i] >> 6 << 4;
    to.byte_minima[i + 4] = from[i + 8] >> 4 | from[i + 4] >> 6 << 4;
  }
  const uint8_t* high = from + 12;
  from += FORM.bits == 5 ? 44 : 12;
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < SPAN; ++i) {
      int code = from[part / 2 * SPAN + i] >> part % 2 * 4 & 15;
      to.codes[part * SPAN + i] = FORM.bits == 5 ? code | (high[i] >> part & 1) << 4 : code;
    }
}

// Offsets within a span of a panel.
template <int32_t DTYPE> struct SpanPlaces {
  static constexpr BlockForm FORM = block_form(DTYPE);
  static constexpr int64_t HIGH = PANEL * SPAN / 2;
  static constexpr int64_t SCALES = HIGH + PANEL * (FORM.bits - 4) * SPAN / 8;
  static constexpr int64_t MINIMA = SCALES + PANEL * FORM.byte_scales;
  // Quads whose higher bits are in one byte, and spans of a block.
  static constexpr int64_t QUADS_PER_BYTE = FORM.bits == 5 ? 8 : 4;
  static constexpr int64_t SPANS = FORM.elements / SPAN;
  static constexpr int64_t FLOATS = 1 + FORM.has_minimum;  // of a block and output
};

template <int32_t DTYPE>
static void write_block(const Block& block, uint8_t* to, f16* floats, int64_t column) {
  using P = SpanPlaces<DTYPE>;
  floats[column].bits = block.scale;
  if (P::FORM.has_minimum) floats[PANEL + column].bits = block.minimum;
  for (int64_t span = 0; span < P::SPANS; ++span, to += span_bytes(DTYPE)) {
    uint32_t quads[QUADS], high[2] = {};
    __builtin_memcpy(quads, block.codes + span * SPAN, sizeof(quads));
    for (int i = 0; i < QUADS; i += 2) {
      uint32_t both = (quads[i] & 0x0f0f0f0f) | (quads[i + 1] & 0x0f0f0f0f) << 4;
      __builtin_memcpy(to + (i / 2 * PANEL + column) * QUAD, &both, QUAD);
    }
    constexpr uint32_t BITS = P::FORM.bits == 5 ? 0x01010101 : 0x03030303;
    for (int i = 0; i < QUADS; ++i)
      high[i / P::QUADS_PER_BYTE] |= (quads[i] >> 4 & BITS)
                                     << i % P::QUADS_PER_BYTE * (P::FORM.bits - 4);
    for (int i = 0; i < P::FORM.bits - 4; ++i)
      __builtin_memcpy(to + P::HIGH + (i * PANEL + column) * QUAD, high + i, QUAD);
    for (int i = 0; i < P::FORM.byte_scales; ++i)
      to[P::SCALES + i * PANEL + column] = block.byte_scales[span * P::FORM.byte_scales + i];
    if (P::FORM.byte_scales && P::FORM.has_minimum)
      to[P::MINIMA + column] = block.byte_minima[span];
  }
}

template <int32_t DTYPE>
static void pack_block_panel(const GroupedArgs& args, const PackedView& view, int64_t panel) {
  using P = SpanPlaces<DTYPE>;
  uint8_t* data = (uint8_t*)view.data + panel * view.panel_elements;
  f16* floats = (f16*)view.group_scales + panel * view.groups * P::FLOATS * PANEL;
  if ((panel + 1) * PANEL > args.n) {
    __builtin_memset(data, 0, view.panel_elements);
    __builtin_memset(floats, 0, view.groups * P::FLOATS * PANEL * sizeof(f16));
  }
  Block block;
  for (int64_t group = 0; group < view.groups; ++group)
    for (int64_t column = 0; column < least(PANEL, args.n - panel * PANEL); ++column) {
      const uint8_t* row = (const uint8_t*)args.values + (panel * PANEL + column) * args.row_bytes;
      read_block<DTYPE>(row + group * P::FORM.bytes, block);
      write_block<DTYPE>(block, data + group * P::SPANS * span_bytes(DTYPE),
                         floats + group * P::FLOATS * PANEL, column);
    }
}

static void pack_blocks(const GroupedArgs& args, const PackedView& view, int64_t panel) {
  with_block_type(args.dtype, [&](auto* type) {
    pack_block_panel<sizeof(*type)>(args, view, panel);
  });
}

INLINE vf load_byte_floats(const uint8_t* p, int32_t offset) {
  vf values = to_floats(load_bytes(p));
  return offset ? sub(values, set1((float)offset)) : values;
}

// Constants for the multiplication of a tile by blocks of a type.
template <int32_t DTYPE> struct BlockTile {
  static constexpr BlockForm FORM = block_form(DTYPE);
  static constexpr bool TABLE = DTYPE == DTYPE_IQ4_NL;
#ifdef BYTE_PRODUCTS
  static constexpr int SUMS = 1, PIECES = 1;
#else
  // Values of the table are multiplied as two 4-bit integers. Sums of 16 bits hold products of
  // 5-bit codes with half a span, and of 6-bit codes with a quarter.
  static constexpr int SUMS = TABLE ? 2 : 1, PIECES = FORM.bits == 4 ? 1 : 2;
#endif
  static constexpr int PARTS = FORM.byte_scales == 2 ? 2 : 1;  // of a span, with a scale each
  static constexpr int PIECE = QUADS / PARTS / PIECES;         // quads of a part that are one sum
};

// The codes of two quads of W outputs, as unsigned bytes; or halves of the table's values.
template <int32_t DTYPE>
INLINE void load_block_codes(const uint8_t* w, int quad, int i, vb& low, vb& high) {
  using P = SpanPlaces<DTYPE>;
  load_codes(w + (quad / 2 * PANEL + i * W) * QUAD, low, high);
  if constexpr (P::FORM.bits > 4) {
    constexpr int BITS = P::FORM.bits - 4;
    vb upper = load_quads(w + P::HIGH + (quad / P::QUADS_PER_BYTE * PANEL + i * W) * QUAD);
    int place = quad % P::QUADS_PER_BYTE * BITS;
    constexpr uint8_t MASK = BITS == 1 ? 0x10 : 0x30;
    low = add_bits(low, upper, place - 4, MASK);
    high = add_bits(high, upper, place + BITS - 4, MASK);
  }
}

// Adds the products of M rows of x and a block of a panel to `out` [M][PANEL].
template <int32_t DTYPE, int M>
static __attribute__((noinline)) void block_tile(const PackedView& weights, const LinearTask& task,
                                                 int64_t row, int64_t panel,
                                                 const SpanBlock& block, float* out) {
  using T = BlockTile<DTYPE>;
  using P = SpanPlaces<DTYPE>;
  const int64_t spans = count_spans(weights.k), stride = spans * SPAN;
  const uint8_t* w = (const uint8_t*)weights.data + panel * weights.panel_elements;
  const f16* floats = (const f16*)weights.group_scales + panel * weights.groups * P::FLOATS * PANEL;
  const int8_t* x = task.x8 + row * stride + block.first * SPAN;
  const int64_t ahead = BLOCK_BYTES + block.line * 64;
  w += block.first * span_bytes(DTYPE);
  const int8_t* x3 = x + 3 * stride;
  for (int64_t span = block.first; span < block.last; ++span) {
    prefetch_lines(w + ahead, block.lines);
    const f16* scales = floats + span / P::SPANS * P::FLOATS * PANEL;
    const Span* of[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) of[m] = task.spans + (row + m) * spans + span;
#pragma GCC unroll 2
    for (int part = 0; part < T::PARTS; ++part) {
      int32_t offsets[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t sum = T::PARTS == 1 ? of[m]->sum : part ? of[m]->sum - of[m]->half : of[m]->half;
        offsets[m] = P::FORM.offset * sum;
      }
      vi whole[T::SUMS][M][NV];
#pragma GCC unroll 2
      for (int piece = 0; piece < T::PIECES; ++piece) {
        va sums[T::SUMS][M][NV];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          va first = no_sums();
#ifdef BYTE_PRODUCTS
          if (P::FORM.offset) first = set_integers(-offsets[m]);
#endif
#pragma GCC unroll 8
          for (int i = 0; i < NV * T::SUMS; ++i) sums[i / NV][m][i % NV] = first;
        }
#pragma GCC unroll 8
        for (int step = 0; step < T::PIECE; step += 2) {
          const int quad = (part * T::PIECES + piece) * T::PIECE + step;
          vb low[NV], high[NV];
#pragma GCC unroll 8
          for (int i = 0; i < NV; ++i) load_block_codes<DTYPE>(w, quad, i, low[i], high[i]);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const int8_t* at = (m < 3 ? x : x3) + m % 3 * stride + quad * QUAD;
            // The barrier keeps GCC from loading the inputs of all rows first.
            asm volatile("" ::: "memory");
            vb first = set_quad(at), second = set_quad(at + QUAD);
#pragma GCC unroll 8
            for (int i = 0; i < NV; ++i)
#pragma GCC unroll 2
              for (int s = 0; s < T::SUMS; ++s) {
                vb a = low[i], b = high[i];
                if constexpr (T::TABLE) {
                  a = T::SUMS == 1 ? look_up(IQ4_NL_VALUES, a) : look_up(IQ4_NL_HALVES[s], a);
                  b = T::SUMS == 1 ? look_up(IQ4_NL_VALUES, b) : look_up(IQ4_NL_HALVES[s], b);
                }
                sums[s][m][i] = dot_codes(dot_codes(sums[s][m][i], a, first), b, second);
              }
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < M * NV * T::SUMS; ++i) {
          int s = i / (M * NV), m = i / NV % M;
          vi sum = total(sums[s][m][i % NV]);
          if constexpr (T::PIECES > 1)
            if (piece) sum = whole[s][m][i % NV] + sum;
          whole[s][m][i % NV] = sum;
        }
      }
      vf scale[NV], minimum[NV];
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) {
        scale[i] = load(scales + i * W);
        if (P::FORM.byte_scales)
          scale[i] = mul(scale[i], load_byte_floats(w + P::SCALES + part * PANEL + i * W,
                                                    T::PARTS == 2 ? 128 : 0));
        if (P::FORM.has_minimum) minimum[i] = load(scales + PANEL + i * W);
        if (P::FORM.has_minimum && P::FORM.byte_scales)
          minimum[i] = mul(minimum[i], load_byte_floats(w + P::MINIMA + i * W, 0));
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const vf factor = set1(of[m]->scale);
        const vf below = set1(of[m]->scale * (float)of[m]->sum);
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) {
          vi sum = whole[0][m][i];
          if (T::SUMS == 2) sum = add_sixteenfold(sum, whole[T::SUMS - 1][m][i]);
#ifndef BYTE_PRODUCTS
          if (P::FORM.offset) sum = less_product(sum, set_integers(1), offsets[m]);
#endif
          float* to = out + (m * NV + i) * W;
          vf y = add(load(to), mul(mul(scale[i], factor), to_floats(sum)));
          if (P::FORM.has_minimum) y = sub(y, mul(minimum[i], below));
          store(to, y);
        }
      }
    }
    w += span_bytes(DTYPE), x += SPAN, x3 += SPAN;
  }
}

template <int32_t DTYPE, class Out>
static void gather_block_weights(const PackedView& weights, int64_t row, Out* out) {
  using P = SpanPlaces<DTYPE>;
  int64_t panel = row / PANEL, column = row % PANEL;
  const uint8_t* w = (const uint8_t*)weights.data + panel * weights.panel_elements;
  const f16* floats = (const f16*)weights.group_scales + panel * weights.groups * P::FLOATS * PANEL;
  for (int64_t i = 0; i < weights.k; ++i) {
    int64_t within = i % SPAN, quad = within / QUAD, lane = column * QUAD + i % QUAD;
    const uint8_t* span = w + i / SPAN * span_bytes(DTYPE);
    int shift;
    int64_t at = place_in_span(within, column, DTYPE_U4, &shift);
    int code = span[at] >> shift & 15;
    if (P::FORM.bits > 4) {
      int byte = span[P::HIGH + quad / P::QUADS_PER_BYTE * PANEL * QUAD + lane];
      int bits = P::FORM.bits - 4;
      code |= (byte >> quad % P::QUADS_PER_BYTE * bits & ((1 << bits) - 1)) << 4;
    }
    if (DTYPE == DTYPE_IQ4_NL) code = IQ4_NL_VALUES[code];
    const f16* of = floats + i / P::FORM.elements * P::FLOATS * PANEL + column;
    float scale = widen(of[0]), minimum = P::FORM.has_minimum ? widen(of[PANEL]) : 0.0f;
    if (P::FORM.byte_scales == 2)
      scale *= span[P::SCALES + within / (SPAN / 2) * PANEL + column] - 128;
    if (P::FORM.byte_scales == 1) scale *= span[P::SCALES + column];
    if (P::FORM.byte_scales && P::FORM.has_minimum) minimum *= span[P::MINIMA + column];
    float value = scale * (code - P::FORM.offset);
    narrow(P::FORM.has_minimum ? value - minimum : value, out + i);
  }
}

static void gather_block_row(const PackedView& weights, int64_t row, void* out, int32_t dtype) {
  with_block_type(weights.dtype, [&](auto* block) {
    with_type(dtype, [&](auto* to) {
      gather_block_weights<sizeof(*block)>(weights, row, (decltype(to))out);
    });
  });
}
