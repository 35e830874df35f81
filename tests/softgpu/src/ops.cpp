// Computes torch's operations on CUDA tensors on the CPU, over the same memory: the device's memory here is the host's.
//
// Every kernel that torch has registered for CUDA and for CPU is replaced, for CUDA, by a call of the CPU's on tensors that are views of
// the same memory. Allocation, views, storages, streams, IPC and what waits for the device stay torch's own CUDA code.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <unordered_set>

struct sg_range { void* start; size_t size; };
extern "C" int sg_launch(cudaStream_t stream);
extern "C" int sg_enqueue(cudaStream_t stream, void (*run)(void*), void* data, sg_range to, sg_range from);

namespace {

using c10::optional;
using torch::jit::Stack;
using Convert = std::function<at::Tensor(const at::Tensor&)>;

void check(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }
cudaStream_t stream_of(optional<c10::Device> device) {
  return device ? c10::cuda::getCurrentCUDAStream(device->index()).stream() : c10::cuda::getCurrentCUDAStream().stream();
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A CPU tensor over the memory of `t`, which it does not own.
at::Tensor host_view(const at::Tensor& t, c10::Storage storage) {
  auto view = tensor_over(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}
c10::Storage host_storage(const at::Tensor& t) {
  c10::DataPtr pointer(const_cast<void*>(t.storage().data()), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(pointer), c10::GetAllocator(c10::kCPU), true};
}

// What may run late (streams.c), into memory that it does not own, as a kernel does: what is given to others meanwhile is theirs.
using Work = std::function<void()>;
void run_work(void* data) {
  std::unique_ptr<Work> work(*static_cast<Work**>(data));
  at::AutoDispatchBelowADInplaceOrView below;
  (*work)();
}
void enqueue(c10::Device device, Work work, sg_range to, sg_range from) {
  auto** data = static_cast<Work**>(std::malloc(sizeof(Work*)));
  *data = new Work(std::move(work));
  check(sg_enqueue(stream_of(device), run_work, data, to, from));
}
sg_range range_of(const at::Tensor& t) { return {t.storage().mutable_data(), t.storage().nbytes()}; }

// The tensors of one call, on both sides. Tensors that share a storage share one on the other side.
struct Tensors {
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals;                             // by the CPU's view
  std::unordered_map<c10::StorageImpl*, std::pair<at::Tensor, c10::Storage>> storages;  // by CUDA's: a tensor of it, and the CPU's
  std::unordered_map<c10::StorageImpl*, at::Tensor> owners;                               // by the CPU's: a tensor of CUDA's
  std::vector<at::Tensor> views;
  optional<c10::Device> device;
  bool host = false;  // there are some that are the host's, which it may change

  at::Tensor to_cpu(const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) {
      host |= t.defined() && !t.unsafeGetTensorImpl()->is_wrapped_number();
      return t;
    }
    device = t.device();
    auto* key = t.storage().unsafeGetStorageImpl();
    auto entry = storages.find(key);
    if (entry == storages.end()) {
      auto made = host_storage(t);
      owners.emplace(made.unsafeGetStorageImpl(), t);
      entry = storages.emplace(key, std::make_pair(t, made)).first;
    }
    auto view = host_view(t, entry->second.second);
    originals.emplace(view.unsafeGetTensorImpl(), t);
    views.push_back(view);
    return view;
  }

  at::Tensor to_cuda(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    auto original = originals.find(t.unsafeGetTensorImpl());
    if (original != originals.end()) return original->second;
    if (!device) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
    auto owner = owners.find(t.storage().unsafeGetStorageImpl());
    if (owner != owners.end() && t.storage().data() == owner->second.storage().data())  // a view of an argument
      return tensor_over(owner->second.storage(), owner->second.key_set(), t);
    c10::cuda::CUDAGuard guard(*device);
    auto dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
    auto made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(*device));
    if (dense.numel())  // what a kernel has computed may be there late
      enqueue(*device, [dense, to = made.data_ptr()]() { std::memcpy(to, dense.data_ptr(), dense.nbytes()); }, range_of(made), {});
    return made;
  }

  void resize_originals() {  // as the operation has resized their views
    for (auto& view : views) {
      auto original = originals.at(view.unsafeGetTensorImpl());
      bool moved = view.storage().data() != original.storage().data();
      if (!moved && view.sizes() == original.sizes() && view.strides() == original.strides()) continue;
      original.resize_(view.sizes());
      if (view.strides() != original.strides()) original.as_strided_(view.sizes(), view.strides());
      if (moved && view.numel()) std::memcpy(original.data_ptr(), view.data_ptr(), view.nbytes());
    }
  }
};

c10::IValue map_tensors(const c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const auto& t : value.toTensorVector()) made.push_back(convert(t));
    return c10::IValue(made);
  }
  if (value.isOptionalTensorList()) {
    c10::List<optional<at::Tensor>> made;
    for (optional<at::Tensor> t : value.toOptionalTensorList()) made.push_back(t ? optional<at::Tensor>(convert(*t)) : c10::nullopt);
    return c10::IValue(made);
  }
  return value;
}

// The numbers that a CUDA generator gives next: not CUDA's, but they follow from its seed and its offset, which moves on.
at::Generator numbers_of(const optional<at::Generator>& argument, optional<c10::Device> device) {
  auto index = device ? device->index() : c10::cuda::current_device();
  at::Generator generator = argument ? *argument : at::cuda::detail::getDefaultCUDAGenerator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  uint64_t seed = generator.current_seed(), offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(seed ^ (offset * 0x9E3779B97F4A7C15ull));
}

// Whether an operation takes tensors of the host, other than numbers, beside those of a device.
bool mixes_devices(const std::string& name) {
  for (const char* part : {"index", "copy", "_fused_adam", "_pack_padded", "_foreach", "repeat_interleave"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

void check_devices(const std::string& name, const Stack& stack, size_t begin) {
  if (mixes_devices(name)) return;
  optional<c10::Device> first;
  const char* message = "Expected all tensors to be on the same device, but found at least two devices, ";
  bool host = false;
  for (size_t i = begin; i < stack.size(); i++) {
    std::vector<at::Tensor> tensors;
    if (stack[i].isTensor()) tensors.push_back(stack[i].toTensor());
    else if (stack[i].isTensorList()) tensors = stack[i].toTensorVector();
    for (const auto& t : tensors) {
      if (!t.defined()) continue;
      if (t.device().is_cpu()) host |= t.dim() > 0;
      if (!t.is_cuda()) continue;
      TORCH_CHECK(!first || *first == t.device(), message, *first, " and ", t.device(), "! (", name, ")");
      first = t.device();
    }
  }
  TORCH_CHECK(!first || !host, message, *first, " and cpu! (", name, ")");
}

// Whether an operation does nothing but write into its first argument, or its tensors: `add_`, `_fused_adamw_`.
bool writes_in_place(const std::string& name) { return name.back() == '_' && name[name.size() - 2] != '_'; }

// The results that an operation with `out=` writes into, if they have their size already.
std::vector<at::Tensor> given_results(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (!schema.arguments()[i].is_out()) continue;
    auto tensors = arguments[i].isTensorList() ? arguments[i].toTensorVector() : std::vector<at::Tensor>{arguments[i].toTensor()};
    for (const auto& t : tensors) if (!t.is_cuda() || !t.numel()) return {};
    made.insert(made.end(), tensors.begin(), tensors.end());
  }
  return made;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  Tensors tensors;
  check_devices(schema.name(), *stack, begin);
  auto originals = torch::jit::last(*stack, count).vec();
  auto written = given_results(schema, originals);
  if (writes_in_place(schema.name())) written = {originals[0].isTensor() ? originals[0].toTensor() : originals[0].toTensorVector().at(0)};
  for (size_t i = begin; i < begin + count; i++) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      tensors.device = value.toDevice();
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (!value.isDevice() && !value.isGenerator()) {
      value = map_tensors(value, [&](const at::Tensor& t) { return tensors.to_cpu(t); });
    }
  }
  if (tensors.device && !tensors.device->has_index()) tensors.device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  for (size_t i = 0; i < count; i++) {
    auto type = schema.arguments()[i].type();
    if (auto inner = type->cast<c10::OptionalType>()) type = inner->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    auto& value = (*stack)[begin + i];
    auto generator = value.isGenerator() ? optional<at::Generator>(value.toGenerator()) : c10::nullopt;
    if (!generator || !generator->device().is_cpu()) value = c10::IValue(numbers_of(generator, tensors.device));
  }
  if (tensors.device && !tensors.host && !written.empty()) {
    auto arguments = torch::jit::last(*stack, count).vec();
    enqueue(*tensors.device, [op, arguments]() mutable { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments); },
            range_of(written[0]), {});
    torch::jit::drop(*stack, count);
    if (schema.returns().empty()) return;
    if (!schema.arguments().back().is_out()) stack->push_back(originals[0]);
    for (size_t i = 0; i < count; i++) if (schema.arguments()[i].is_out()) stack->push_back(originals[i]);
    return;
  }
  check(sg_launch(stream_of(tensors.device)));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  tensors.resize_originals();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& t) { return tensors.to_cuda(t); });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  auto to = host_view(self, host_storage(self)), from = host_view(source, host_storage(source)).expand_as(to);
  auto device = self.is_cuda() ? self.device() : source.device();
  auto late = [&](const at::Tensor& t) { return t.is_cuda() || (non_blocking && t.is_pinned()); };
  if (!late(self) || !late(source) || self.is_same(source)) {
    check(sg_launch(stream_of(device)));
    if (!self.is_cuda() || source.is_cuda()) {
      to.copy_(from);
      return self;
    }
    from = from.clone();  // ordinary memory may be changed as soon as the call returns, before the copy has arrived
  }
  enqueue(device, [to, from]() { at::Tensor(to).copy_(from); }, range_of(self), late(source) ? range_of(source) : sg_range{});
  return self;
}
void foreach_copy_(at::TensorList self, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(self.size() == sources.size(), "Tensor lists must have the same number of tensors, got ", self.size(), " and ", sources.size());
  for (size_t i = 0; i < self.size(); i++) at::Tensor(self[i]).copy_(sources[i], non_blocking);
}
int64_t choose_math(const at::Tensor&, const at::Tensor&, const at::Tensor&, const optional<at::Tensor>&, double, bool, optional<double>, bool) {
  return 0;  // scaled_dot_product_attention by plain operations
}

// What stays torch's code for CUDA: it allocates, or makes views, or waits.
const std::unordered_set<std::string> kept = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Tensor",
    "aten::set_.source_Storage_storage_offset", "aten::resize_", "aten::view", "aten::as_strided", "aten::_reshape_alias",
    "aten::unfold", "aten::record_stream", "aten::_local_scalar_dense", "aten::is_set_to", "aten::view.dtype", "aten::is_pinned",
    "aten::_pin_memory", "aten::_efficientzerotensor", "aten::_nested_view_from_buffer", "aten::view_as_real", "aten::view_as_complex",
};
const std::unordered_set<std::string> replaced = {"aten::copy_", "aten::_foreach_copy_", "aten::_fused_sdp_choice"};

struct Installed {
  torch::Library library{torch::Library::IMPL, "aten", c10::make_optional(c10::DispatchKey::CUDA), __FILE__, __LINE__};
  Installed() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
      auto handle = dispatcher.findOp(name);
      std::string text = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      if (text.rfind("aten::", 0) || kept.count(text) || replaced.count(text)) continue;
      if (!handle || !handle->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
      if (text.find("quantize") != std::string::npos || text.find("sparse") != std::string::npos) continue;
      library.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    library.impl("copy_", TORCH_FN(copy_));
    library.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
    library.impl("_fused_sdp_choice", TORCH_FN(choose_math));
  }
};
Installed* installed = new Installed();

}  // namespace
