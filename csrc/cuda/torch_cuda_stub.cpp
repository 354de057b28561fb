// Stands in for libtorch_cuda.so at link time on a machine whose torch has no CUDA: same name, the one symbol
// the kernels take from it. Never shipped; with it on the library path the library can be loaded, and its
// registrations looked at, without a GPU.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t,
                                                                                             void** stream) {
  *stream = nullptr;
  return 0;
}
