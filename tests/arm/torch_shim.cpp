// As much of torch's C interface as libfp8serve_cpu.so uses, in one small library with the name of torch's
// own.
//
// The kernels are cross-compiled for a processor that only an emulator runs here. torch for that processor is
// 400 MB and loads CUDA's libraries; the kernels need tensors, a table of ops, lists and strings of it, which
// are below.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct Tensor {
  std::shared_ptr<char[]> storage;
  char* data = nullptr;
  int32_t dtype = 0;
  std::vector<int64_t> sizes, strides;

  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) {
      if (sizes[d] != 1 && strides[d] != stride) return count() == 0;
    }
    return true;
  }
};

struct Op {
  uint64_t inputs = 0, outputs = 0;
  void (*kernel)(StableIValue*, uint64_t, uint64_t) = nullptr;
};
std::map<std::string, Op>& ops() {
  static std::map<std::string, Op> all;
  return all;
}

Tensor& get(AtenTensorHandle handle) { return *reinterpret_cast<Tensor*>(handle); }
AtenTensorHandle handle_of(Tensor tensor) {
  return reinterpret_cast<AtenTensorHandle>(new Tensor(std::move(tensor)));
}
using List = std::vector<StableIValue>;
List& get(StableListHandle handle) { return *reinterpret_cast<List*>(handle); }
std::string& get(StringHandle handle) { return *reinterpret_cast<std::string*>(handle); }

Tensor make(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  Tensor t;
  t.dtype = dtype;
  t.sizes.assign(sizes, sizes + dims);
  t.strides.assign(strides, strides + dims);
  int64_t span = t.count() == 0 ? 0 : 1;
  for (int64_t d = 0; d < dims && span > 0; ++d) span += (sizes[d] - 1) * strides[d];
  const auto bytes = static_cast<size_t>(span) * aoti_torch_dtype_element_size(dtype);
  t.storage = std::make_shared<char[]>(bytes + 64);
  t.data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(t.storage.get()) + 63) / 64 * 64);
  return t;
}

Tensor contiguous(const Tensor& from) {
  if (from.is_contiguous()) return from;
  std::vector<int64_t> strides(from.sizes.size());
  int64_t stride = 1;
  for (size_t d = strides.size(); d-- > 0; stride *= from.sizes[d]) strides[d] = stride;
  Tensor to = make(static_cast<int64_t>(strides.size()), from.sizes.data(), strides.data(), from.dtype);
  const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(from.dtype));
  for (int64_t i = 0; i < from.count(); ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < strides.size(); ++d) at += i / strides[d] % from.sizes[d] * from.strides[d];
    std::memcpy(to.data + i * size, from.data + at * size, static_cast<size_t>(size));
  }
  return to;
}

}  // namespace

#define RETURN(name, value) \
  *name = value;            \
  return 0

extern "C" {

// The order of torch's ScalarType.
#define DTYPE(name, code) \
  int32_t name() { return code; }
DTYPE(aoti_torch_dtype_uint8, 0)
DTYPE(aoti_torch_dtype_int8, 1)
DTYPE(aoti_torch_dtype_int16, 2)
DTYPE(aoti_torch_dtype_int32, 3)
DTYPE(aoti_torch_dtype_int64, 4)
DTYPE(aoti_torch_dtype_float16, 5)
DTYPE(aoti_torch_dtype_float32, 6)
DTYPE(aoti_torch_dtype_float64, 7)
DTYPE(aoti_torch_dtype_complex32, 8)
DTYPE(aoti_torch_dtype_complex64, 9)
DTYPE(aoti_torch_dtype_complex128, 10)
DTYPE(aoti_torch_dtype_bool, 11)
DTYPE(aoti_torch_dtype_bfloat16, 15)
DTYPE(aoti_torch_dtype_float8_e5m2, 23)
DTYPE(aoti_torch_dtype_float8_e4m3fn, 24)
DTYPE(aoti_torch_dtype_float8_e5m2fnuz, 25)
DTYPE(aoti_torch_dtype_float8_e4m3fnuz, 26)
DTYPE(aoti_torch_dtype_uint16, 27)
DTYPE(aoti_torch_dtype_uint32, 28)
DTYPE(aoti_torch_dtype_uint64, 29)
DTYPE(torch_dtype_float8_e8m0fnu, 44)
DTYPE(torch_dtype_float4_e2m1fn_x2, 45)
DTYPE(aoti_torch_device_type_cpu, 0)
DTYPE(aoti_torch_memory_format_contiguous_format, 0)

size_t aoti_torch_dtype_element_size(int32_t dtype) {
  constexpr int sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2};
  return dtype < 16 ? sizes[dtype] : dtype == 27 ? 2 : dtype == 28 ? 4 : dtype == 29 ? 8 : 1;
}
uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }

// --- tensors

AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t, int32_t, AtenTensorHandle* result) {
  RETURN(result, handle_of(make(dims, sizes, strides, dtype)));
}
AOTITorchError aoti_torch_new_uninitialized_tensor(AtenTensorHandle* result) {
  RETURN(result, handle_of({}));
}
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* result) {
  RETURN(result, handle_of(get(from)));
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  delete &get(tensor);
  return 0;
}
AOTITorchError aoti_torch_aten_narrow(AtenTensorHandle from, int64_t dim, int64_t start, int64_t length,
                                      AtenTensorHandle* result) {
  Tensor part = get(from);
  const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(part.dtype));
  part.data += start * part.strides[static_cast<size_t>(dim)] * size;
  part.sizes[static_cast<size_t>(dim)] = length;
  RETURN(result, handle_of(std::move(part)));
}
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle t, void** result) { RETURN(result, get(t).data); }
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* result) { RETURN(result, 0); }
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle t, int32_t* result) { RETURN(result, get(t).dtype); }
AOTITorchError aoti_torch_get_dim(AtenTensorHandle t, int64_t* result) {
  RETURN(result, static_cast<int64_t>(get(t).sizes.size()));
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle t, int64_t* result) { RETURN(result, get(t).count()); }
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle t, int64_t** result) {
  RETURN(result, get(t).sizes.data());
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle t, int64_t dim, int64_t* result) {
  RETURN(result, get(t).sizes.end()[dim < 0 ? dim : dim - static_cast<int64_t>(get(t).sizes.size())]);
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle t, int64_t dim, int64_t* result) {
  RETURN(result, get(t).strides.end()[dim < 0 ? dim : dim - static_cast<int64_t>(get(t).sizes.size())]);
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle t, bool* result) {
  RETURN(result, get(t).is_contiguous());
}

// --- lists and strings

AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle* result) {
  RETURN(result, reinterpret_cast<StableListHandle>(new List));
}
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue value) {
  get(list).push_back(value);
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* result) { RETURN(result, get(list).size()); }
AOTITorchError torch_list_get_item(StableListHandle list, size_t i, StableIValue* result) {
  RETURN(result, get(list)[i]);
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete &get(list);
  return 0;
}
AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* result) {
  RETURN(result, reinterpret_cast<StringHandle>(new std::string(data, length)));
}
AOTITorchError torch_string_length(StringHandle s, size_t* result) { RETURN(result, get(s).size()); }
AOTITorchError torch_string_c_str(StringHandle s, const char** result) { RETURN(result, get(s).c_str()); }
AOTITorchError torch_delete_string(StringHandle s) {
  delete &get(s);
  return 0;
}

// --- threads and ops

AOTITorchError torch_get_num_threads(uint32_t* result) { RETURN(result, 2); }

AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                            TorchLibraryHandle* result) {
  RETURN(result, nullptr);
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  ops()[name].kernel = kernel;
  return 0;
}
// Only the numbers of arguments and of results are read from a schema such as "op(Tensor x, int[] n) ->
// (Tensor, Tensor)".
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char* schema) {
  const std::string_view text(schema);
  const size_t open = text.find('('), arrow = text.rfind(" -> ");
  const auto count = [](std::string_view part) {
    return part.find_first_not_of(" ()") == part.npos ? 0 : 1 + std::ranges::count(part, ',');
  };
  Op& op = ops()[std::string(text.substr(0, open))];
  op.inputs = static_cast<uint64_t>(count(text.substr(open, arrow - open)));
  op.outputs = static_cast<uint64_t>(count(text.substr(arrow + 4)));
  return 0;
}
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  const std::string_view full(name);
  if (full == "aten::contiguous") {
    auto* from = reinterpret_cast<AtenTensorHandle>(stack[0]);
    stack[0] = reinterpret_cast<StableIValue>(handle_of(contiguous(get(from))));
    return aoti_torch_delete_tensor_object(from);
  }
  const auto op = ops().find(std::string(full.substr(full.rfind(':') + 1)));
  if (op == ops().end() || op->second.kernel == nullptr) return 1;
  op->second.kernel(stack, op->second.inputs, op->second.outputs);
  return 0;
}

}  // extern "C"
