// The scan of custom_operator.py on CUDA: h[t] = decay[t] * h[t-1] + input[t], and its gradients.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <tuple>

using at::Tensor;

void check(const Tensor& one, const Tensor& other);  // as on the CPU

namespace {

constexpr int THREADS = 128;

// A thread walks through the steps of one channel of one row; its neighbors read the channels beside it.
template <typename T>
__global__ void forward(const T* decay, const T* entered, T* states, int64_t columns, int64_t steps, int64_t channels) {
  const int64_t column = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (column >= columns) return;
  int64_t at = column / channels * steps * channels + column % channels;
  T state = 0;
  for (int64_t step = 0; step < steps; ++step, at += channels)
    states[at] = state = decay[at] * state + entered[at];
}

template <typename T>
__global__ void backward(
    const T* arrived, const T* decay, const T* states, T* to_decay, T* to_input,
    int64_t columns, int64_t steps, int64_t channels) {
  const int64_t column = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (column >= columns) return;
  int64_t at = (column / channels * steps + steps - 1) * channels + column % channels;
  T later = 0;
  for (int64_t step = steps - 1; step >= 0; --step, at -= channels) {
    const T all = to_input[at] = arrived[at] + later;
    if (step) to_decay[at] = all * states[at - channels];
    later = decay[at] * all;
  }
}

unsigned blocks(int64_t columns) { return unsigned((columns + THREADS - 1) / THREADS); }

Tensor scan(const Tensor& decays, const Tensor& inputs) {
  check(decays, inputs);
  const c10::cuda::CUDAGuard there(inputs.device());
  auto a = decays.contiguous(), x = inputs.contiguous();
  auto states = at::empty_like(x);
  const int64_t columns = x.size(0) * x.size(2);
  if (states.numel() == 0) return states;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scan", [&] {
    forward<<<blocks(columns), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
        a.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), states.mutable_data_ptr<scalar_t>(),
        columns, x.size(1), x.size(2));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return states;
}

std::tuple<Tensor, Tensor> scan_backward(const Tensor& grad, const Tensor& decays, const Tensor& states) {
  check(grad, decays);
  check(decays, states);
  const c10::cuda::CUDAGuard there(grad.device());
  auto g = grad.contiguous(), a = decays.contiguous(), h = states.contiguous();
  auto by_decays = at::zeros_like(g), by_inputs = at::empty_like(g);
  const int64_t columns = g.size(0) * g.size(2);
  if (g.numel() == 0) return {by_decays, by_inputs};
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "scan_backward", [&] {
    backward<<<blocks(columns), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
        g.const_data_ptr<scalar_t>(), a.const_data_ptr<scalar_t>(), h.const_data_ptr<scalar_t>(),
        by_decays.mutable_data_ptr<scalar_t>(), by_inputs.mutable_data_ptr<scalar_t>(),
        columns, g.size(1), g.size(2));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {by_decays, by_inputs};
}

}  // namespace

TORCH_LIBRARY_IMPL(example, CUDA, library) {
  library.impl("scan", &scan);
  library.impl("scan_backward", &scan_backward);
}
