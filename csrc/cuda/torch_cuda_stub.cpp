// Replaces libtorch_cuda.so at link time on a machine whose torch has no CUDA: it has the same name and the
// only symbol that the kernels use. It is never shipped. With it on the library path, the kernels' library
// can be loaded without a GPU, to inspect the ops that it registers.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int32_t aoti_torch_get_current_cuda_stream(int32_t,
                                                                                             void** stream) {
  *stream = nullptr;
  return 0;
}
