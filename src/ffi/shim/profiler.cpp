// libtorch's own profiler, Kineto, around a stretch of one thread's work.
#include <ATen/Context.h>
#include <kineto/libkineto.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "memfit.h"
#include "watcher.h"

namespace libkineto {
// No header of it comes with libtorch. Weak: where it is built otherwise, its messages stay.
class Logger {
 public:
  static std::atomic_int severityLevel_ __attribute__((weak));
};
}  // namespace libkineto

namespace profiler = torch::autograd::profiler;

struct mf_profile {
  std::unique_ptr<profiler::ProfilerResult> result;
  std::vector<mf_profiled> events;
  std::vector<std::string> names;
  std::vector<const char *> texts;
};

namespace {

// On a machine without an accelerator Kineto says at each profile that it found none.
class Quiet {
 public:
  Quiet() {
    if (&libkineto::Logger::severityLevel_ == nullptr || std::getenv("KINETO_LOG_LEVEL")) return;
    former_ = libkineto::Logger::severityLevel_.exchange(kNothing);
    on_ = true;
  }
  ~Quiet() {
    int expected = kNothing;
    if (on_) libkineto::Logger::severityLevel_.compare_exchange_strong(expected, former_);
  }
  Quiet(const Quiet &) = delete;
  Quiet &operator=(const Quiet &) = delete;

 private:
  static constexpr int kNothing = 1000;
  int former_ = 0;
  bool on_ = false;
};

// Kineto complains on standard error where another thread prepares the first profile than the
// one that has loaded the library.
void be_its_first_thread() {
  auto &kineto = libkineto::api();
  if (!kineto.isProfilerRegistered() && kineto.client()) kineto.registerClient(kineto.client());
}

std::set<profiler::ActivityType> activities() {
  std::set<profiler::ActivityType> wanted{profiler::ActivityType::CPU};
  if (at::globalContext().hasCUDA()) wanted.insert(profiler::ActivityType::CUDA);
  return wanted;
}

// What an event is here; -1 for those that are not looked at.
int kind_of(const profiler::KinetoEvent &event, const std::string &name) {
  using Activity = libkineto::ActivityType;
  switch (static_cast<Activity>(event.activityType())) {
    case Activity::CPU_OP:
    case Activity::USER_ANNOTATION:
      return 0;
    case Activity::CPU_INSTANT_EVENT:
      return name == "[memory]" ? 1 : -1;
    case Activity::GPU_MEMCPY:
    case Activity::GPU_MEMSET:
    case Activity::CONCURRENT_KERNEL:
      return 2;
    default:
      return -1;
  }
}

void collect(mf_profile &profile) {
  std::unordered_map<std::string, uint32_t> numbers;
  profile.events.reserve(profile.result->events().size());
  for (const profiler::KinetoEvent &event : profile.result->events()) {
    std::string name = event.name();
    int kind = kind_of(event, name);
    if (kind < 0) continue;
    auto [known, fresh] = numbers.emplace(name, static_cast<uint32_t>(profile.names.size()));
    if (fresh) profile.names.push_back(name);
    mf_profiled one{};
    one.name = known->second;
    one.kind = static_cast<uint32_t>(kind);
    one.thread = event.startThreadId();
    one.start = event.startNs();
    one.length = event.durationNs();
    one.bytes = kind == 1 ? event.nBytes() : 0;
    one.correlation = kind == 2 ? event.linkedCorrelationId() : event.correlationId();
    one.on_device = event.deviceType() == c10::DeviceType::CPU ? 0 : 1;
    one.crosses = kind == 0 && event.startThreadId() != event.endThreadId() ? 1 : 0;
    profile.events.push_back(one);
  }
  for (const std::string &name : profile.names) profile.texts.push_back(name.c_str());
}

}  // namespace

int mf_profiler_start(int shapes, int memory) noexcept {
  return memfit::guarded([&] {
    if (torch::profiler::impl::profilerEnabled()) {
      throw std::runtime_error("another profiler runs on this thread");
    }
    profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, shapes != 0, memory != 0);
    auto wanted = activities();
    {
      Quiet quiet;
      be_its_first_thread();
      profiler::prepareProfiler(config, wanted);
    }
    {
      // The first preparation has set a level of its own.
      Quiet quiet;
      profiler::enableProfiler(config, wanted);
    }
    memfit::profiled.store(memory != 0, std::memory_order_relaxed);
  });
}

int mf_profiler_stop(mf_profile **out) noexcept {
  *out = nullptr;
  return memfit::guarded([&] {
    memfit::profiled.store(false, std::memory_order_relaxed);
    Quiet quiet;
    auto profile = std::make_unique<mf_profile>();
    profile->result = profiler::disableProfiler();
    collect(*profile);
    *out = profile.release();
  });
}

const mf_profiled *mf_profile_events(const mf_profile *profile, size_t *count) noexcept {
  *count = profile->events.size();
  return profile->events.data();
}

const char *const *mf_profile_names(const mf_profile *profile, size_t *count) noexcept {
  *count = profile->texts.size();
  return profile->texts.data();
}

void mf_profile_trim(mf_profile *profile) noexcept {
  std::vector<mf_profiled>().swap(profile->events);
  std::vector<const char *>().swap(profile->texts);
  std::vector<std::string>().swap(profile->names);
}

int mf_profile_save(mf_profile *profile, const char *path) noexcept {
  return memfit::guarded([&] {
    Quiet quiet;
    profile->result->save(path);
  });
}

void mf_profile_drop(mf_profile *profile) noexcept {
  Quiet quiet;
  delete profile;
}
