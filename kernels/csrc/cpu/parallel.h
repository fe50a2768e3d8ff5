// Fork-join over the threads of the OpenMP runtime that torch has already loaded.
//
// Two pools that spin on the same cores slow each other by an order of magnitude, so this module links no
// OpenMP runtime: it finds the one in the process (whatever name the wheel gave it) and uses its entry
// points.
#pragma once

namespace qt {

using Task = void (*)(void* context, int thread, int threads);

// Threads a region may use now; follows torch.set_num_threads.
int max_threads();

// Runs `task` once on each of up to `threads` threads and waits for all of them.
void fork_join(int threads, Task task, void* context);

// Path of the OpenMP runtime in use; empty when there is none and everything runs on the calling thread.
const char* runtime_path();

template <class Body>
inline void parallel(int threads, const Body& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
  fork_join(
      threads,
      [](void* context, int thread, int count) { (*static_cast<const Body*>(context))(thread, count); },
      const_cast<Body*>(&body));
}

// Thread count for work of `bytes` touched: a region costs about a microsecond, so small work stays at home.
inline int threads_for(long bytes, long bytes_per_thread = 32768) {
  if (bytes < 2 * bytes_per_thread) return 1;
  const int limit = max_threads();
  const long wanted = bytes / bytes_per_thread;
  return wanted < limit ? static_cast<int>(wanted) : limit;
}

struct Range {
  long begin, end;
};

// The part of [0, count) that belongs to `thread`; parts differ by one at most.
inline Range share(long count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace qt
