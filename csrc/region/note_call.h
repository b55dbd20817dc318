// file: notes the calls of ops in the regions whose overrides name ops
#pragma once

#include "region/named_use.h"

namespace torch_promote {

bool note_call_in_regions(OpNumber op);

// Notes a call of an op under a policy table; see NOTE [ Unused overrides ]. Returns whether an override that names
// another op has met no call, so that what this op calls may be of interest.
inline bool note_call(const PolicyTable& table, OpNumber op) {
  return table.notes_calls.get() && tls_notes_calls && note_call_in_regions(op);
}

} // namespace torch_promote
