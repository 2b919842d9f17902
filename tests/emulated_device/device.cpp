// A device whose memory is apart from the host's, emulated: every operation runs on copies on the CPU, and its results
// come back.
//
// Its tensors are plain ones that the host cannot read but by copying, and that no operation takes beside tensors of the
// host, but for those without a dimension, and for indices, as on CUDA. So code that mixes the two fails here as it does
// on a GPU, and what is right gives the very bits that the CPU gives.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace {

constexpr auto APART = c10::DeviceType::PrivateUse1;
const c10::Device PLACE(APART, 0);
constexpr auto MIXED =
    "Expected all tensors to be on the same device, but found at least two devices, apart:0 and cpu! when checking arguments of ";

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return APART; }
  c10::Device exchangeDevice(c10::Device) const override { return PLACE; }
  c10::Device getDevice() const override { return PLACE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, PLACE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, PLACE); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, PLACE); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, PLACE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  // what the engine records between threads' streams is done already
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* held = c10::alloc_cpu(size);
    return {held, held, &c10::free_cpu, PLACE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    std::memcpy(target, source, size);
  }
};
Memory memory;
REGISTER_ALLOCATOR(APART, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto larger = memory.allocate(size);
    if (storage.data() != nullptr)
      std::memcpy(larger.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks hooks;

at::Tensor on_host(const at::Tensor& one) {  // the same memory
  return at::from_blob(one.storage().data() ? one.data_ptr() : nullptr, one.sizes(), one.strides(),
                       one.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  auto here = source.is_cpu() ? source : on_host(source);
  auto there = target.is_cpu() ? target : on_host(target);
  there.copy_(here);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar item(const at::Tensor& one) { return on_host(one).item(); }

// Of gates by torch/nn/modules/rnn.py: reset, update, new. What other devices have as one operation.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& inputs, const at::Tensor& hiddens, const at::Tensor& state,
                                            const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  auto from_input = (input_bias && input_bias->defined() ? inputs + *input_bias : inputs).chunk(3, 1);
  auto from_hidden = (hidden_bias && hidden_bias->defined() ? hiddens + *hidden_bias : hiddens).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  auto update = (from_input[1] + from_hidden[1]).sigmoid();
  auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(state - fresh) * update + fresh, at::cat({reset, update, fresh, state, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3], &from_hidden = parts[4];
  auto of_fresh = gradient * (1 - update) * (1 - fresh * fresh);
  auto of_update = gradient * (state - fresh) * (1 - update) * update;
  auto of_reset = of_fresh * from_hidden * (1 - reset) * reset;
  auto of_inputs = at::cat({of_reset, of_update, of_fresh}, 1);
  auto of_hiddens = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  auto bias = [&](const at::Tensor& one) { return has_bias ? one.sum(0) : at::Tensor(); };
  return {of_inputs, of_hiddens, gradient * update, bias(of_inputs), bias(of_hiddens)};
}

at::Tensor convolved(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                     c10::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(input.device() == weight.device() && (!bias || !bias->defined() || bias->device() == input.device()), MIXED,
              "convolution");
  std::optional<at::Tensor> moved;
  if (bias && bias->defined()) moved = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), moved, stride, padding, dilation, transposed, output_padding, groups)
      .to(PLACE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolved_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), c10::IntArrayRef(gradient.size(1)), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  auto back = [](const at::Tensor& one) { return one.defined() ? one.to(PLACE) : one; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// Its schema does not say that it writes to the running statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto host = [](const std::optional<at::Tensor>& one) -> std::optional<at::Tensor> {
    if (!one || !one->defined()) return std::nullopt;
    TORCH_CHECK(one->device() == PLACE, MIXED, "batch_norm");
    return on_host(*one);
  };
  auto [output, of_mean, of_variance] = at::native_batch_norm(
      input.cpu(), host(weight), host(bias), host(mean), host(variance), training, momentum, eps);
  return {output.to(PLACE), of_mean.to(PLACE), of_variance.to(PLACE)};
}

void refuse_mixed(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool here = false, there = false;
  auto look = [&](const at::Tensor& one) {
    if (!one.defined()) return;
    there |= one.device().type() == APART;
    here |= one.is_cpu() && one.dim() > 0;
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor& one : value.toTensorVector()) look(one);
  }
  const auto& name = op.schema().name();  // indexing by host tensors is allowed, as on CUDA
  bool indexing = name.find("aten::index") == 0 || name.find("aten::_index_put") == 0 || name.find("aten::_unsafe_index") == 0;
  TORCH_CHECK(!(here && there) || indexing, MIXED, name);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_mixed(op, *stack);
  at::native::cpu_fallback(op, stack);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", [](at::Tensor& one, c10::Storage source) -> at::Tensor& {
    return at::native::set_storage_cpu_(one, source, 0, {static_cast<int64_t>(source.nbytes() / one.itemsize())}, {});
  });
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("convolution_overrideable", &convolved);
  m.impl("convolution_backward_overrideable", &convolved_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#define FULL_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_SET)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
}


// Registered with torch when this is loaded.
static const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);
