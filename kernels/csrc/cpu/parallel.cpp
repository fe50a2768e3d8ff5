#include "parallel.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>

namespace qt {
namespace {

struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread)() = nullptr;
  int (*threads)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  std::string path;
};

int find_openmp(dl_phdr_info* info, size_t, void* found) {
  const char* name = std::strrchr(info->dlpi_name, '/');
  name = name == nullptr ? info->dlpi_name : name + 1;
  for (const char* known : {"libgomp", "libiomp5", "libomp"}) {
    if (std::strncmp(name, known, std::strlen(known)) == 0) {
      *static_cast<std::string*>(found) = info->dlpi_name;
      return 1;
    }
  }
  return 0;
}

template <class Function>
void lookup(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

Runtime load_runtime() {
  Runtime runtime;
  std::string path;
  dl_iterate_phdr(find_openmp, &path);
  if (path.empty()) path = "libgomp.so.1";
  void* library = dlopen(path.c_str(), RTLD_NOW);
  if (library == nullptr) return runtime;
  // LLVM's and Intel's runtimes export GNU's entry point as well.
  lookup(library, "GOMP_parallel", runtime.parallel);
  lookup(library, "omp_get_thread_num", runtime.thread);
  lookup(library, "omp_get_num_threads", runtime.threads);
  lookup(library, "omp_get_max_threads", runtime.max_threads);
  lookup(library, "omp_in_parallel", runtime.in_parallel);
  if (!runtime.parallel || !runtime.thread || !runtime.threads || !runtime.max_threads ||
      !runtime.in_parallel) {
    return {};
  }
  runtime.path = path;
  return runtime;
}

const Runtime& runtime() {
  static const Runtime instance = load_runtime();
  return instance;
}

struct Call {
  Task task;
  void* context;
};

void enter(void* data) {
  const Call& call = *static_cast<Call*>(data);
  call.task(call.context, runtime().thread(), runtime().threads());
}

}  // namespace

int max_threads() {
  const Runtime& omp = runtime();
  return omp.parallel == nullptr || omp.in_parallel() ? 1 : omp.max_threads();
}

void fork_join(int threads, Task task, void* context) {
  if (runtime().parallel == nullptr) {
    task(context, 0, 1);
    return;
  }
  Call call{task, context};
  runtime().parallel(enter, &call, static_cast<unsigned>(threads), 0);
}

const char* runtime_path() { return runtime().path.c_str(); }

}  // namespace qt
