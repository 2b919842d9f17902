// The scan of custom_operator.py on the CPU: h[t] = decay[t] * h[t-1] + input[t], and its gradients.
// A few headers in place of torch/extension.h make the build several times shorter.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>
#include <tuple>

using at::Tensor;

void check(const Tensor& one, const Tensor& other) {
  TORCH_CHECK_VALUE(
      one.dim() == 3 && one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && one.device() == other.device(),
      "scan: two tensors (rows, steps, channels) of one shape, type and device, not ",
      one.sizes(), " ", one.scalar_type(), " on ", one.device(), " and ",
      other.sizes(), " ", other.scalar_type(), " on ", other.device());
}

Tensor scan(const Tensor& decays, const Tensor& inputs) {
  check(decays, inputs);
  auto a = decays.contiguous(), x = inputs.contiguous();
  auto states = at::empty_like(x);
  const int64_t steps = x.size(1), channels = x.size(2);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scan", [&] {
    const auto* decay = a.const_data_ptr<scalar_t>();
    const auto* entered = x.const_data_ptr<scalar_t>();
    auto* state = states.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t step = 0; step < steps; ++step) {
          const int64_t at = (row * steps + step) * channels;
          for (int64_t c = at; c < at + channels; ++c)  // channels lie side by side: this loop is vectorised
            state[c] = step ? decay[c] * state[c - channels] + entered[c] : entered[c];
        }
    });
  });
  return states;
}

std::tuple<Tensor, Tensor> scan_backward(const Tensor& grad, const Tensor& decays, const Tensor& states) {
  check(grad, decays);
  check(decays, states);
  auto g = grad.contiguous(), a = decays.contiguous(), h = states.contiguous();
  auto by_decays = at::zeros_like(g), by_inputs = at::empty_like(g);
  const int64_t steps = g.size(1), channels = g.size(2);
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "scan_backward", [&] {
    const auto* arrived = g.const_data_ptr<scalar_t>();
    const auto* decay = a.const_data_ptr<scalar_t>();
    const auto* state = h.const_data_ptr<scalar_t>();
    auto* to_decay = by_decays.mutable_data_ptr<scalar_t>();
    auto* to_input = by_inputs.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, g.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t step = steps - 1; step >= 0; --step) {
          const int64_t at = (row * steps + step) * channels;
          for (int64_t c = at; c < at + channels; ++c) {
            const auto later = step + 1 < steps ? decay[c + channels] * to_input[c + channels] : scalar_t(0);
            to_input[c] = arrived[c] + later;
            if (step) to_decay[c] = to_input[c] * state[c - channels];
          }
        }
    });
  });
  return {by_decays, by_inputs};
}

TORCH_LIBRARY_IMPL(example, CPU, library) {
  library.impl("scan", &scan);
  library.impl("scan_backward", &scan_backward);
}
