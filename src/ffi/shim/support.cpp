#include "memfit.h"

namespace memfit {

static thread_local std::string last_error;

void set_last_error(const char *text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();
  }
}

}  // namespace memfit

const char *mf_last_error() noexcept { return memfit::last_error.c_str(); }
