# CUTLASS: headers only, from the nvidia-cutlass package of this Python or from FP8SERVE_CUTLASS_DIR. Sets HAVE_CUTLASS.
# Also a script, for its test: cmake -DFP8SERVE_CUTLASS_DIR=... -P cutlass.cmake
if(NOT FP8SERVE_CUTLASS_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0], end='')"
    OUTPUT_VARIABLE CUTLASS_LIBRARY ERROR_QUIET RESULT_VARIABLE CUTLASS_MISSING)
  if(NOT CUTLASS_MISSING)
    set(FP8SERVE_CUTLASS_DIR ${CUTLASS_LIBRARY}/source)
  endif()
endif()
set(OLDEST_CUTLASS 4.2)  # whose block scales and families of chips these kernels are written for
set(CUTLASS_VERSION_FILE "${FP8SERVE_CUTLASS_DIR}/include/cutlass/version.h")
set(HAVE_CUTLASS FALSE)
if(EXISTS "${CUTLASS_VERSION_FILE}")
  file(STRINGS "${CUTLASS_VERSION_FILE}" CUTLASS_LINES REGEX "define CUTLASS_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" CUTLASS_VERSION "${CUTLASS_LINES}")
  if(CUTLASS_VERSION VERSION_LESS OLDEST_CUTLASS)
    message(WARNING "fp8serve: CUTLASS ${CUTLASS_VERSION} is too old, ${OLDEST_CUTLASS} is needed, so Hopper and "
                    "Blackwell get the mma.sync GEMM only, which is slower there. Run: pip install "
                    "'nvidia-cutlass>=${OLDEST_CUTLASS}', and build again.")
  else()
    set(HAVE_CUTLASS TRUE)
  endif()
else()
  message(WARNING "fp8serve: the nvidia-cutlass package was not found, so Hopper and Blackwell get the mma.sync GEMM "
                  "only, which is slower there. Run: pip install nvidia-cutlass, and build again.")
endif()
