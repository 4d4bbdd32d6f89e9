// Row kernels of experts: the clamped SwiGLU of gpt-oss, and the weighted sum of experts.
static void clamped_swiglu(const void* gate_up, void* out, int64_t width, float alpha, float limit,
                           int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    P gates = (P)gate_up, ups = gates + width;
    // The minimum is computed as -vmax of the negatives. vmax keeps NaN in its second operand.
    vf low = set1(-limit);
    for (int64_t i = 0; i < width; i += W) {
      int64_t left = width - i;
      vf gate = sub(zero(), vmax(low, sub(zero(), load_up_to(gates + i, left))));
      vf up = vmax(low, load_up_to(ups + i, left));
      up = sub(zero(), vmax(low, sub(zero(), up)));
      vf swish = div(gate, add(set1(1.0f), exponential(mul(set1(-alpha), gate))));
      store_up_to((P)out + i, mul(add(up, set1(1.0f)), swish), left);
    }
  });
}

static void weighted_sum(const SumTask& task) {
  with_type(task.dtype, [&](auto* type) {
    using P = decltype(type);
    vf factor = set1(1.0f);
    if (task.gate) {
      vf gate = set1(widen(*(P)task.gate));
      factor = rounded_to(div(set1(1.0f), add(set1(1.0f), exponential(sub(zero(), gate)))), type);
    }
    for (int64_t i = 0; i < task.width; i += W) {
      int64_t left = task.width - i;
      vf sum = zero();
      for (int64_t j = 0; j < task.count; ++j)
        sum = fma(set1(task.weights[j]), load_up_to(task.rows + task.places[j] * task.width + i, left),
                  sum);
      if (task.shared) {
        vf shared = mul(factor, load_up_to((P)task.shared + i, left));
        sum = add(rounded_to(sum, type), rounded_to(shared, type));
      }
      store_up_to((P)task.out + i, sum, left);
    }
  });
}
