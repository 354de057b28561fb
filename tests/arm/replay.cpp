// Runs every op on the arguments that tests/arm/record.py has recorded, and compares the bits of its results
// with those of the machine that recorded them: replay LIBRARY RECORD LEVEL... The last level must be the one
// that the library finds in this processor. It uses torch's C interface only.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "replay: %s\n", why.c_str());
  std::exit(2);
}
void check(AOTITorchError error) {
  if (error != 0) fail("a function of torch failed");
}
template <class T>
StableIValue boxed(T value) {
  StableIValue result = 0;
  std::memcpy(&result, &value, sizeof value);
  return result;
}

struct Reader {
  const char* at;

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
    return value;
  }
  std::string text() {
    const auto size = number<uint32_t>();
    at += size;
    return {at - size, size};
  }
  AtenTensorHandle tensor() {
    const auto dtype = number<int32_t>();
    std::vector<int64_t> sizes(number<uint32_t>()), strides(sizes.size());
    for (int64_t& size : sizes) size = number<int64_t>();
    for (int64_t& stride : strides) stride = number<int64_t>();
    AtenTensorHandle result;
    check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, 0,
                                   0, &result));
    void* data;
    check(aoti_torch_get_data_ptr(result, &data));
    const auto bytes = number<uint64_t>();
    std::memcpy(data, at, bytes);
    at += bytes;
    return result;
  }
  // Reads an argument. `tensors` collects a second handle of every tensor in it.
  StableIValue value(std::vector<AtenTensorHandle>& tensors) {
    switch (number<char>()) {
      case 'n':
        return 0;
      case 'o':
        return boxed(new StableIValue(value(tensors)));
      case 'i':
        return boxed(number<int64_t>());
      case 'f':
        return boxed(number<double>());
      case 'b':
        return boxed(number<char>() != 0);
      case 'd':
        return boxed(number<int32_t>());
      case 's': {
        const std::string chars = text();
        StringHandle string;
        check(torch_new_string_handle(chars.data(), chars.size(), &string));
        return boxed(string);
      }
      case 'l': {
        StableListHandle list;
        check(torch_new_list_reserve_size(0, &list));
        for (auto left = number<uint32_t>(); left > 0; --left)
          check(torch_list_push_back(list, value(tensors)));
        return boxed(list);
      }
      case 't': {
        AtenTensorHandle result = tensor();
        check(aoti_torch_new_tensor_handle(result, &tensors.emplace_back()));
        return boxed(result);
      }
      default:
        fail("the record has a value of an unknown kind");
    }
  }
};

// Whether an element is NaN, of the types whose NaN may have any bits.
bool is_nan(const char* p, int32_t dtype) {
  uint32_t bits = 0;
  if (dtype == aoti_torch_dtype_float32()) return std::memcpy(&bits, p, 4), (bits & 0x7fffffff) > 0x7f800000;
  std::memcpy(&bits, p, 2);
  if (dtype == aoti_torch_dtype_bfloat16()) return (bits & 0x7fff) > 0x7f80;
  return dtype == aoti_torch_dtype_float16() && (bits & 0x7fff) > 0x7c00;
}

// The number of elements whose bits differ, or -1 where the types or the sizes do.
int64_t differences(AtenTensorHandle a, AtenTensorHandle b) {
  struct View {
    int32_t dtype;
    int64_t dims;
    std::vector<int64_t> sizes, strides;
    const char* data;
    explicit View(AtenTensorHandle t) {
      check(aoti_torch_get_dtype(t, &dtype));
      check(aoti_torch_get_dim(t, &dims));
      for (int64_t d = 0; d < dims; ++d) {
        check(aoti_torch_get_size(t, d, &sizes.emplace_back()));
        check(aoti_torch_get_stride(t, d, &strides.emplace_back()));
      }
      void* pointer;
      check(aoti_torch_get_data_ptr(t, &pointer));
      data = static_cast<const char*>(pointer);
    }
    const char* element(int64_t i, size_t size) const {
      int64_t at = 0;
      for (size_t d = sizes.size(); d-- > 0; i /= sizes[d]) at += i % sizes[d] * strides[d];
      return data + at * static_cast<int64_t>(size);
    }
  };
  const View x(a), y(b);
  if (x.dtype != y.dtype || x.sizes != y.sizes) return -1;
  const size_t size = aoti_torch_dtype_element_size(x.dtype);
  int64_t count, result = 0;
  check(aoti_torch_get_numel(a, &count));
  for (int64_t i = 0; i < count; ++i) {
    const char *p = x.element(i, size), *q = y.element(i, size);
    result += std::memcmp(p, q, size) != 0 && !(is_nan(p, x.dtype) && is_nan(q, x.dtype));
  }
  return result;
}

// Calls an op that takes a string, or nothing, and returns one.
std::string call_text(const char* op, const char* argument) {
  StableIValue stack[1] = {};
  if (argument != nullptr) {
    StringHandle string;
    check(torch_new_string_handle(argument, std::strlen(argument), &string));
    stack[0] = boxed(string);
  }
  check(torch_call_dispatcher(op, "", stack, aoti_torch_abi_version()));
  auto* result = reinterpret_cast<StringHandle>(stack[0]);
  const char* chars;
  check(torch_string_c_str(result, &chars));
  return chars;
}

// Runs all cases of the record at a level, and returns how many differ.
int replay(Reader record, const char* level) {
  const std::string active = call_text("fp8serve::cpu_isa", level);
  if (active != level) fail("level " + std::string(level) + " is not here, but " + active);
  const std::string kernels = call_text("fp8serve::cpu_kernels", nullptr);
  int cases = 0, failed = 0;
  std::set<std::string> names;
  for (auto left = record.number<uint32_t>(); left > 0; --left, ++cases) {
    const std::string op = record.text(), name = record.text(), numerics = record.text();
    names.insert(op);
    const size_t variant = kernels.find("\"" + op + "\": {");
    const std::string listed = kernels.substr(variant, kernels.find('}', variant) - variant);
    std::vector<AtenTensorHandle> arguments;
    std::vector<StableIValue> stack(32);
    const auto num_arguments = record.number<uint32_t>();
    for (uint32_t i = 0; i < num_arguments; ++i) stack[i] = record.value(arguments);
    std::string message;
    if (listed.find("\"" + numerics + "\"") == listed.npos) message = "is of another class than " + numerics;
    try {
      check(torch_call_dispatcher(("fp8serve::" + op).c_str(), "", stack.data(), aoti_torch_abi_version()));
    } catch (const std::exception& error) {
      fail(op + ", " + name + ": " + error.what());
    }
    const auto num_outputs = record.number<uint32_t>(), num_results = record.number<uint32_t>();
    for (uint32_t i = 0; i < num_results; ++i) {
      AtenTensorHandle expected = record.tensor();
      AtenTensorHandle actual =
          i < num_outputs ? reinterpret_cast<AtenTensorHandle>(stack[i]) : arguments[i - num_outputs];
      const int64_t count = differences(actual, expected);
      if (count != 0)
        message += " result " + std::to_string(i) + ": " + std::to_string(count) + " elements differ;";
      check(aoti_torch_delete_tensor_object(actual));
      check(aoti_torch_delete_tensor_object(expected));
    }
    if (message.empty()) continue;
    ++failed;
    std::printf("%s at %s, %s: %s\n", op.c_str(), level, name.c_str(), message.c_str());
  }
  std::printf("%s: %d of %d cases of %zu ops differ\n", level, failed, cases, names.size());
  return failed;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) fail("usage: replay LIBRARY RECORD LEVEL...");
  if (dlopen(arguments[1], RTLD_NOW) == nullptr) fail(dlerror());
  std::ifstream file(arguments[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (bytes.empty()) fail("the record cannot be read");
  Reader record{bytes.data()};
  for (auto left = record.number<uint32_t>(); left > 0; --left)
    check(aoti_torch_library_def(nullptr, record.text().c_str()));
  const std::string best = call_text("fp8serve::cpu_isa", "best"), last = arguments[count - 1];
  if (best != last) fail("the best level of this processor is " + best + ", must be " + last);
  int failed = 0;
  for (int i = 3; i < count; ++i) failed += replay(record, arguments[i]);
  return failed == 0 ? 0 : 1;
}
