// Packs weights into the layout of a context's kernels.
#include "weights.h"

#include <string.h>

namespace {

void* map_weights(int64_t bytes, bool* mapped) {
  *mapped = bytes >= HUGE_PAGE;
  return *mapped ? map_pages(bytes) : allocate(bytes);
}

float* pad(const float* values, int64_t count, int64_t padded) {
  float* out = static_cast<float*>(allocate(padded * 4));
  if (!out) return nullptr;
  memcpy(out, values, count * 4);
  memset(out + count, 0, (padded - count) * 4);
  return out;
}

}  // namespace

API Weights* asyncllm_pack(Context* context, const void* values, int32_t dtype, int64_t n,
                           int64_t k, int64_t row_stride, const float* scales,
                           const float* bias) {
  if (!is_open(context) || n < 1 || k < 1 || !values || (n > 1 && row_stride < k)) return nullptr;
  if (dtype == DTYPE_I8 ? !scales || largest_integer(k) < 1
                        : scales || !is_matrix(values, dtype, n, k, row_stride))
    return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  if (!weights) return nullptr;
  int64_t panels = divide_up(n, kernels->panel), elements = kernels->panel_elements(k, dtype);
  weights->kernels = kernels;
  weights->bytes = panels * elements * size_of(dtype);
  void* data = map_weights(weights->bytes, &weights->mapped);
  const float* own_scales = scales ? pad(scales, n, panels * kernels->panel) : nullptr;
  const float* own_bias = bias ? pad(bias, n, panels * kernels->panel) : nullptr;
  PackedView& view = weights->view;
  view.data = data;
  view.scales = own_scales;
  view.bias = own_bias;
  view.n = n;
  view.k = k;
  view.panel_elements = elements;
  view.dtype = dtype;
  if (!data || (scales && !own_scales) || (bias && !own_bias)) {
    asyncllm_free_weights(weights);
    return nullptr;
  }
  PlainView plain = {values, n, k, row_stride, dtype};
  share(context, panels, n * k,
        [&](int64_t panel, int) { kernels->pack(plain, data, panel, panel + 1); });
  return weights;
}

API Weights* asyncllm_pack_grouped(Context* context, const GroupedArgs* args) {
  const GroupedArgs& a = *args;
  if (!is_open(context) || !is_grouped(a.dtype) || a.n < 1 || a.k < 1 || a.group < SPAN ||
      a.group % SPAN || !a.values || !a.scales || !is_dtype(a.scale_dtype) ||
      a.row_bytes < (a.dtype == DTYPE_U4 ? divide_up(a.k, 2) : a.k))
    return nullptr;
  const Kernels* kernels = context->kernels;
  Weights* weights = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  if (!weights) return nullptr;
  int64_t panels = divide_up(a.n, kernels->panel), groups = divide_up(a.k, a.group);
  int64_t panel_bytes = divide_up(a.k, SPAN) * kernels->span_bytes(a.dtype);
  int64_t scales = panels * groups * kernels->panel;
  int64_t scale_bytes = divide_up(scales * size_of(a.scale_dtype), CACHE_LINE) * CACHE_LINE;
  weights->kernels = kernels;
  weights->bytes = panels * panel_bytes + scale_bytes + (a.zeros ? scales : 0);
  char* data = static_cast<char*>(map_weights(weights->bytes, &weights->mapped));
  const float* own_bias = a.bias ? pad(a.bias, a.n, panels * kernels->panel) : nullptr;
  PackedView& view = weights->view;
  view.data = data;
  view.bias = own_bias;
  view.n = a.n;
  view.k = a.k;
  view.panel_elements = panel_bytes;
  view.dtype = a.dtype;
  view.scale_dtype = a.scale_dtype;
  view.group = a.group;
  view.groups = groups;
  if (!data || (a.bias && !own_bias)) {
    asyncllm_free_weights(weights);
    return nullptr;
  }
  view.group_scales = data + panels * panel_bytes;
  if (a.zeros)
    view.zeros = reinterpret_cast<uint8_t*>(data + panels * panel_bytes + scale_bytes);
  share(context, panels, a.n * a.k,
        [&](int64_t panel, int) { kernels->pack_grouped(a, view, panel, panel + 1); });
  return weights;
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
  if (data && weights->mapped)
    unmap_pages(data, weights->bytes);
  else
    free_aligned(data);
  free_aligned(const_cast<float*>(weights->view.scales));
  free_aligned(const_cast<float*>(weights->view.bias));
  free(weights);
}

API int64_t asyncllm_weights_bytes(const Weights* weights) { return weights->bytes; }
