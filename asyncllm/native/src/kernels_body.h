// All kernels, on the vector types of the simd_*.h that was included before; included into an
// anonymous namespace.
template <class P> struct pointee;
template <class T> struct pointee<T*> { typedef T type; };
#include "vector_math.h"
#include "linear.h"
#include "grouped.h"
#include "blocks.h"
#include "rounding.h"
#include "rows.h"
#include "experts_rows.h"
#include "recurrent_rows.h"
#include "attention.h"
#include "logits_rows.h"

#define KERNELS(name)                                                                        \
  {name,         W,         PANEL,     MAX_ROWS,          TAKES_BFLOAT16 != 0, SPANS_INT8 != 0, panel_elements, \
   pack,         widen_row, linear,    quantise,          quantise_row_spans,  span_bytes,     \
   pack_grouped, round_row, gather,    attention_scratch, attention,           merge,          \
   rms_norm,     rope,      gated_mul, add_row,           scale_row,           softcap_row,    \
   clamped_swiglu, weighted_sum, convolve, normalise_heads, delta, gated_norm, sigmoid_mul,    \
   reduce_chunks, read_chunk}
