// file: notes the calls of ops in the regions whose overrides name ops
#include "region/note_call.h"

#include "region/frames.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace torch_promote {

bool note_call_in_regions(OpNumber op) {
  const bool unknown_region = open_frames().empty() || c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (unknown_region && op < called_in_unknown_region.size() &&
      !called_in_unknown_region[op].load(std::memory_order_relaxed)) {
    called_in_unknown_region[op].store(true, std::memory_order_relaxed);
  }
  bool notes_inside = false;
  bool notes_calls = open_frames().empty();
  for (const Frame& frame : open_frames()) {
    if (NamedUse* use = frame.named.get(); use != nullptr) {
      if (use->named->overrides(op)) {
        use->named->note(op);
      } else {
        notes_inside |= use->named->any_uncalled();
      }
      notes_calls |= use->named->any_uncalled();
    }
  }
  tls_notes_calls = notes_calls;
  return notes_inside;
}

} // namespace torch_promote
