// The main function of a program that runs kernels of its own on the emulated GPU, without torch
// (tests/cuda/programs.py):
//
//     program WHAT SEED BACKWARDS [LEFT_OUT]
//
// prints what `run` returns for WHAT, or its error, and then the barriers and waits that kernels have
// reached, one per line. SEED is of the order of resident blocks, BACKWARDS (0 or 1) of threads and blocks,
// LEFT_OUT the site of a barrier or wait that orders nothing. It ends with status 1 after an error, and,
// compiled with ThreadSanitizer, with status 66 if it finds a race.
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

#include "cuda/settings.h"

namespace fp8serve::emulator {

template <class F>
[[noreturn]] void run_program(char** arguments, const F& run) {
  settings.seed = static_cast<unsigned>(std::stoul(arguments[2]));
  settings.backwards = std::string(arguments[3]) == "1";
  if (arguments[4] != nullptr) settings.left_out = arguments[4];
  int status = 0;
  try {
    std::cout << run(arguments[1]) << '\n';
  } catch (const std::exception& error) {
    std::cout << error.what() << '\n';
    status = 1;
  }
  for (const std::string& site : settings.reached) std::cout << site << '\n';
  std::cout.flush();
  std::_Exit(status);  // threads that an error has stopped hold memory that only they may free
}

}  // namespace fp8serve::emulator
