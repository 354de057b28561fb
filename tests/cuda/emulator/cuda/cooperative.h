// The emulated counterpart of csrc/cuda/cooperative.h.
//
// A release whose site is left out (settings.h) becomes a relaxed store, an acquire a relaxed load, and a
// cluster's barrier only a barrier: the kernel runs as before, but ThreadSanitizer sees nothing ordered.
#pragma once

#include "cuda/device.h"

namespace fp8serve {

constexpr int kMostInCluster = 8;  // blocks, on every chip that has clusters (Hopper and later)

template <class... P, class... A>
void launch_cooperative(void (*kernel)(P...), dim3 grid, int threads, int shared_bytes, Stream,
                        const A&... args) {
  run_kernel({.cooperative = true}, kernel, grid, threads, shared_bytes, args...);
}

template <class... P, class... A>
void launch_clusters(void (*kernel)(P...), dim3 grid, int cluster, int threads, int shared_bytes, Stream,
                     const A&... args) {
  if (emulator::settings.chip.capability < 90 || cluster < 1 || cluster > kMostInCluster) {
    throw std::runtime_error("emulator: this chip could not launch this");
  }
  run_kernel({.cluster = static_cast<unsigned>(cluster)}, kernel, grid, threads, shared_bytes, args...);
}

inline unsigned load_acquire(const unsigned* at, const Site& site = Site::current()) {
  emulator::poll(site);
  auto* const word = const_cast<unsigned*>(at);
  emulator::carry_acquire(word);
  const unsigned value = std::atomic_ref<unsigned>(*word).load(std::memory_order_relaxed);
  if (emulator::is_executed(site)) emulator::races::happens_after(word);
  return value;
}
inline void store_release(unsigned* at, unsigned value, const Site& site = Site::current()) {
  if (emulator::is_executed(site)) emulator::races::happens_before(at);
  emulator::carry_release(at);
  std::atomic_ref<unsigned>(*at).store(value, std::memory_order_relaxed);
}
inline void add_release(unsigned* at, unsigned value, const Site& site = Site::current()) {
  if (emulator::is_executed(site)) emulator::races::happens_before(at);
  emulator::carry_release(at);
  std::atomic_ref<unsigned>(*at).fetch_add(value, std::memory_order_relaxed);
}

inline int rank_in_cluster() {
  return static_cast<int>(emulator::machine.block->place % emulator::machine.cluster);
}
inline void cluster_arrive(const Site& site = Site::current()) {
  emulator::arrive_at_cluster(emulator::is_executed(site));
}
inline void cluster_wait(const Site& site = Site::current()) {
  emulator::wait_for_cluster(emulator::is_executed(site));
}
template <class T>
T* shared_of_rank(T* shared, int rank) {
  return reinterpret_cast<T*>(emulator::shared_of_rank(reinterpret_cast<unsigned char*>(shared), rank));
}

}  // namespace fp8serve
