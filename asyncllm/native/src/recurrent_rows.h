// Row kernels of recurrent layers: the causal convolution, the gated delta rule, the gated norm.

#define MEMBER inline __attribute__((always_inline))

INLINE vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exponential(sub(zero(), x)))); }

// Convolves channels [first, last) of a row's tokens, in float32 from the oldest input on.
template <class T>
static void convolve_channels(const ConvArgs& a, int64_t row, int64_t first, int64_t last) {
  const StateRows& rows = a.rows;
  int64_t begin = rows.query_start[row], count = rows.query_start[row + 1] - begin;
  int64_t kept = a.width - 1, channels = a.channels;
  T* state = (T*)a.state + rows.lines[row] * kept * channels;
  const T* x = (const T*)a.x + begin * a.x_stride;
  T* out = (T*)a.out + begin * channels;
  bool fresh = rows.starts[row] == 0;
  auto input = [&](int64_t token, int64_t at, int64_t left) {
    if (token >= 0) return load_up_to(x + token * a.x_stride + at, left);
    return fresh ? zero() : load_up_to(state + (kept + token) * channels + at, left);
  };
  for (int64_t token = 0; token < count; ++token)
    for (int64_t at = first; at < last; at += W) {
      int64_t left = last - at;
      vf sum = zero();
      for (int64_t i = 0; i < a.width; ++i)
        sum = fma(input(token - kept + i, at, left), load_up_to(a.weight + i * channels + at, left),
                  sum);
      sum = rounded_to(sum, x);
      store_up_to(out + token * channels + at, div(sum, add(set1(1.0f), exponential(sub(zero(), sum)))),
                  left);
    }
  // Updating in place is safe: an input overwrites an older one, which has been read.
  for (int64_t i = 0; i < kept; ++i)
    for (int64_t at = first; at < last; at += W)
      store_up_to(state + i * channels + at, input(count - kept + i, at, last - at), last - at);
}

static void convolve(const ConvArgs& args, int64_t row, int64_t first, int64_t last) {
  with_type(args.dtype, [&](auto* type) {
    convolve_channels<typename pointee<decltype(type)>::type>(args, row, first, last);
  });
}

// Scales each of the adjacent heads to length `factor`.
static void normalise_heads(const void* x, int32_t dtype, float* out, int64_t heads, int64_t size,
                            float eps, float factor) {
  with_type(dtype, [&](auto* type) {
    auto* from = (decltype(type))x;
    for (int64_t head = 0; head < heads; ++head, from += size, out += size) {
      vf squares = zero();
      for (int64_t i = 0; i < size; i += W) {
        vf value = load_up_to(from + i, size - i);
        squares = fma(value, value, squares);
      }
      vf scale = set1(factor / __builtin_sqrtf(hsum(squares) + eps));
      for (int64_t i = 0; i < size; i += W)
        store_up_to(out + i, mul(load_up_to(from + i, size - i), scale), size - i);
    }
  });
}

// Applies a row's tokens, one by one, to N vectors of columns of a head's state S [key_dim,
// value_dim]. A column's sums over the keys are in ascending order, so that a prompt gives the same
// bits in chunks of any size. With PARTIAL, only the first `left` columns exist.
template <class T, int N, bool PARTIAL> struct DeltaColumns {
  const DeltaTask& task;
  float* state;
  int64_t stride, keys, left;

  // With PARTIAL, reads and writes nothing after the last column.
  MEMBER vf get(const float* p, int j) {
    return PARTIAL ? load_up_to(p + j * W, left) : load(p + j * W);
  }
  MEMBER void put(float* p, int j, vf x) {
    if (PARTIAL) store_up_to(p + j * W, x, left);
    else store(p + j * W, x);
  }

  // Adds S^T key to `found`.
  MEMBER void recall(const float* key, vf* found) {
    for (int64_t i = 0; i < keys; ++i)
      for (int j = 0; j < N; ++j) found[j] = fma(get(state + i * stride, j), set1(key[i]), found[j]);
  }

  // Updates the state with one token, and computes the token's output. With NEXT, it also sets
  // `found` to S^T times the next token's key.
  template <bool NEXT>
  MEMBER void step(const float* query, const float* key, const float* next, vf decay,
                   const vf* change, vf* out, vf* found) {
    for (int j = 0; j < N; ++j) out[j] = found[j] = zero();
    for (int64_t i = 0; i < keys; ++i) {
      float* at = state + i * stride;
      for (int j = 0; j < N; ++j) {
        vf value = fma(set1(key[i]), change[j], mul(decay, get(at, j)));
        put(at, j, value);
        out[j] = fma(value, set1(query[i]), out[j]);
        if (NEXT) found[j] = fma(value, set1(next[i]), found[j]);
      }
    }
  }

  MEMBER void run() {
    vf found[N], change[N], out[N];
    if (task.fresh)
      for (int64_t i = 0; i < keys; ++i)
        for (int j = 0; j < N; ++j) put(state + i * stride, j, zero());
    for (int j = 0; j < N; ++j) found[j] = zero();
    recall(task.key, found);
    for (int64_t token = 0; token < task.count; ++token) {
      const float *query = task.query + token * task.stride, *key = task.key + token * task.stride;
      float beta = task.beta[token * task.stride];
      vf decay = set1(task.decay[token * task.stride]);
      const T* v = (const T*)task.v + token * task.v_stride;
      for (int j = 0; j < N; ++j) {
        vf value = PARTIAL ? load_up_to(v + j * W, left) : load(v + j * W);
        change[j] = mul(sub(value, mul(decay, found[j])), set1(beta));
      }
      if (token + 1 < task.count)
        step<true>(query, key, key + task.stride, decay, change, out, found);
      else
        step<false>(query, key, nullptr, decay, change, out, found);
      T* to = (T*)task.out + token * task.out_stride;
      for (int j = 0; j < N; ++j) {
        if (PARTIAL) store_up_to(to + j * W, out[j], left);
        else store(to + j * W, out[j]);
      }
    }
  }
};

template <class T> static void delta_columns(const DeltaTask& whole) {
  DeltaTask task = whole;
  for (int64_t left = task.columns; left > 0;) {
    int64_t done = W;
    if (left >= 4 * W) {
      DeltaColumns<T, 4, false>{task, task.state, task.state_stride, task.keys, left}.run();
      done = 4 * W;
    } else if (left >= W) {
      DeltaColumns<T, 1, false>{task, task.state, task.state_stride, task.keys, left}.run();
    } else {
      DeltaColumns<T, 1, true>{task, task.state, task.state_stride, task.keys, left}.run();
    }
    left -= done;
    task.state += done;
    task.v = (const T*)task.v + done;
    task.out = (T*)task.out + done;
  }
}

static void delta(const DeltaTask& task) {
  with_type(task.dtype, [&](auto* type) {
    delta_columns<typename pointee<decltype(type)>::type>(task);
  });
}

// Norms each head and multiplies it by SiLU of its gate. Normed values are rounded before the
// multiplication by the weight, and again before the multiplication by the gate.
static void gated_norm(const void* x, const void* gate, const void* weight, float eps, void* out,
                       int64_t heads, int64_t size, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    P from = (P)x, gates = (P)gate, to = (P)out;
    for (int64_t head = 0; head < heads; ++head, from += size, gates += size, to += size) {
      norm_row(from, (P) nullptr, (P)weight, eps, 1.0f, 1.0f, to, size);
      for (int64_t i = 0; i < size; i += W) {
        int64_t left = size - i;
        vf z = load_up_to(gates + i, left);
        vf silu = div(z, add(set1(1.0f), exponential(sub(zero(), z))));
        store_up_to(to + i, mul(load_up_to(to + i, left), silu), left);
      }
    }
  });
}

static void sigmoid_mul(const void* x, const void* gate, void* out, int64_t width, int32_t dtype) {
  with_type(dtype, [&](auto* type) {
    using P = decltype(type);
    for (int64_t i = 0; i < width; i += W) {
      int64_t left = width - i;
      vf factor = rounded_to(sigmoid(load_up_to((P)gate + i, left)), type);
      store_up_to((P)out + i, mul(load_up_to((P)x + i, left), factor), left);
    }
  });
}
