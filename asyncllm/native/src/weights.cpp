// Packs weights into the layout of a context's kernels.
#include "weights.h"

#include <string.h>

namespace {

void* map_weights(int64_t bytes, Memory* memory) {
  *memory = bytes >= HUGE_PAGE ? Memory::mapped : Memory::allocated;
  return *memory == Memory::mapped ? map_pages(bytes) : allocate(bytes);
}

int64_t whole_lines(int64_t bytes) { return divide_up(bytes, CACHE_LINE) * CACHE_LINE; }

// Bytes of the codes or values of all panels, of their scales, and of their zero points. Each of
// the three begins at a multiple of CACHE_LINE.
struct Sizes {
  int64_t panels, values, scales, zeros;
};

Sizes sizes_of(const Kernels* kernels, const PanelArgs& a) {
  int64_t panels = divide_up(a.n, kernels->panel);
  if (!is_grouped(a.dtype)) {
    int64_t values = panels * kernels->panel_elements(a.k, a.dtype) * size_of(a.dtype);
    return {panels, values, a.dtype == DTYPE_I8 ? panels * kernels->panel * 4 : 0, 0};
  }
  int64_t scales = panels * divide_up(a.k, a.group) * kernels->panel;
  if (block_form(a.dtype).has_minimum) scales *= 2;
  return {panels, panels * divide_up(a.k, SPAN) * kernels->span_bytes(a.dtype),
          scales * size_of(a.scale_dtype), a.has_zeros ? scales : 0};
}

bool is_valid(const PanelArgs& a) {
  if (a.n < 1 || a.k < 1 || a.n > INT32_MAX || a.k > INT32_MAX) return false;
  if (!is_grouped(a.dtype))
    return is_dtype(a.dtype) || (a.dtype == DTYPE_I8 && largest_integer(a.k) >= 1);
  if (const int64_t elements = block_form(a.dtype).elements)
    return a.k % elements == 0 && a.group == elements && a.scale_dtype == DTYPE_F16 && !a.has_zeros;
  return a.dtype <= DTYPE_U8 && a.group >= SPAN && a.group % SPAN == 0 && is_dtype(a.scale_dtype);
}

// Makes weights of panels at `data`, or of new ones if it is null.
Weights* make_weights(const Kernels* kernels, const PanelArgs& a, void* data, const float* bias) {
  Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  if (!weights) return nullptr;
  Sizes sizes = sizes_of(kernels, a);
  int64_t scales = whole_lines(sizes.values), zeros = scales + whole_lines(sizes.scales);
  weights->kernels = kernels;
  weights->bytes = sizes.zeros ? zeros + sizes.zeros : sizes.scales ? zeros : sizes.values;
  weights->memory = Memory::borrowed;
  char* at = static_cast<char*>(data ? data : map_weights(weights->bytes, &weights->memory));
  PackedView& view = weights->view;
  view.data = at;
  view.n = a.n;
  view.k = a.k;
  view.dtype = a.dtype;
  view.panel_elements = sizes.values / sizes.panels / (is_grouped(a.dtype) ? 1 : size_of(a.dtype));
  if (is_grouped(a.dtype)) {
    view.scale_dtype = a.scale_dtype;
    view.group = a.group;
    view.groups = divide_up(a.k, a.group);
    view.group_scales = at + scales;
    if (a.has_zeros) view.zeros = reinterpret_cast<uint8_t*>(at + zeros);
  } else if (sizes.scales) {
    view.scales = reinterpret_cast<float*>(at + scales);
  }
  int64_t outputs = sizes.panels * kernels->panel;
  float* own_bias = bias ? static_cast<float*>(allocate(outputs * 4)) : nullptr;
  if (own_bias) {
    memcpy(own_bias, bias, a.n * 4);
    memset(own_bias + a.n, 0, (outputs - a.n) * 4);
  }
  view.bias = own_bias;
  if (!at || (bias && !own_bias)) {
    asyncllm_free_weights(weights);
    return nullptr;
  }
  if (!data && scales < weights->bytes) {
    // The padding of values and scales is written as well, so that equal weights have equal bytes.
    memset(at + sizes.values, 0, scales - sizes.values);
    memset(at + scales, 0, weights->bytes - scales);
  }
  return weights;
}

}  // namespace

API int32_t asyncllm_layout(void) { return LAYOUT; }

API Weights* asyncllm_pack(Context* context, const void* values, int32_t dtype, int64_t n,
                           int64_t k, int64_t row_stride, const float* scales,
                           const float* bias) {
  PanelArgs panels = {n, k, 0, dtype, 0, 0};
  if (!is_open(context) || !is_valid(panels) || is_grouped(dtype) || !values ||
      (n > 1 && row_stride < k))
    return nullptr;
  if (dtype == DTYPE_I8 ? !scales : scales || !is_matrix(values, dtype, n, k, row_stride))
    return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = make_weights(kernels, panels, nullptr, bias);
  if (!weights) return nullptr;
  PackedView& view = weights->view;
  if (scales) memcpy(const_cast<float*>(view.scales), scales, n * 4);
  PlainView plain = {values, n, k, row_stride, dtype};
  void* data = const_cast<void*>(view.data);
  share(context, divide_up(n, kernels->panel), n * k,
        [&](int64_t panel, int) { kernels->pack(plain, data, panel, panel + 1); });
  return weights;
}

API Weights* asyncllm_pack_grouped(Context* context, const GroupedArgs* args) {
  const GroupedArgs& a = *args;
  PanelArgs panels = {a.n, a.k, a.group, a.dtype, a.scale_dtype, a.zeros != nullptr};
  if (!is_open(context) || !is_grouped(a.dtype) || !is_valid(panels) || !a.values) return nullptr;
  const BlockForm block = block_form(a.dtype);
  int64_t row_bytes = block.elements ? a.k / block.elements * block.bytes
                      : a.dtype == DTYPE_U4 ? divide_up(a.k, 2) : a.k;
  if (a.row_bytes < row_bytes || !a.scales != (block.elements > 0)) return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = make_weights(kernels, panels, nullptr, a.bias);
  if (!weights) return nullptr;
  share(context, divide_up(a.n, kernels->panel), a.n * a.k, [&](int64_t panel, int) {
    kernels->pack_grouped(a, weights->view, panel, panel + 1);
  });
  return weights;
}

API Weights* asyncllm_view_weights(Context* context, const PanelArgs* args, const void* data,
                                   int64_t bytes, const float* bias) {
  if (!is_open(context) || !is_valid(*args) || !data || !aligned(data, CACHE_LINE)) return nullptr;
  Weights* weights = make_weights(context->kernels, *args, const_cast<void*>(data), bias);
  if (!weights || weights->bytes == bytes) return weights;
  asyncllm_free_weights(weights);
  return nullptr;
}

API const void* asyncllm_describe_weights(const Weights* weights, PanelArgs* args) {
  const PackedView& view = weights->view;
  *args = {view.n, view.k, view.group, view.dtype, view.scale_dtype, view.zeros != nullptr};
  return view.data;
}

API int32_t asyncllm_round(Context* context, const RoundArgs* args) {
  if (!is_open(context)) return STATUS_CLOSED;
  const RoundArgs& a = *args;
  bool grouped = a.bits == 4;
  if ((!grouped && a.bits != 8) || a.n < 1 || a.k < 1 ||
      !is_matrix(a.values, a.dtype, a.n, a.k, a.row_stride) || !a.values_out || !a.scales ||
      !aligned(a.scales, grouped ? 2 : 4) || (grouped && (a.k % 2 || !a.zeros)))
    return STATUS_INVALID;
  share(context, a.n, a.n * a.k, [&](int64_t row, int) { context->kernels->round_row(a, row); });
  return STATUS_OK;
}

API void asyncllm_free_weights(Weights* weights) {
  if (!weights) return;
  void* data = const_cast<void*>(weights->view.data);
  if (data && weights->memory == Memory::mapped)
    unmap_pages(data, weights->bytes);
  else if (weights->memory == Memory::allocated)
    free_aligned(data);
  free_aligned(const_cast<float*>(weights->view.bias));
  free(weights);
}

API int64_t asyncllm_weights_bytes(const Weights* weights) { return weights->bytes; }
