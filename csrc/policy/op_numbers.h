// file: the number of each op that may have a policy, and its name
#pragma once

#include "policy/op_table.h"

#include <optional>
#include <string>

namespace torch_promote {

// Names are qualified and include the overload: "aten::mm", "aten::softmax.int", "mylib::op". Op entries have a number
// from the start; another op gets one with its first policy, and keeps it until it is gone: see
// NOTE [ Ops that are gone ] in dispatch/registration.h.
std::optional<OpNumber> find_op_number(const std::string& name);

// The number that the next op gets: one that was freed, or the first that no op has had.
OpNumber next_op_number();

// Gives an op without a number the next one.
OpNumber add_op_number(const std::string& name);

// Takes an op's number away. No policy may refer to it.
void free_op_number(OpNumber op);

// Whether an op has this number.
bool is_op_number(OpNumber op);

// "" if no op has the number.
std::string op_name(OpNumber op);

// "aten::softmax" and "int" as "aten::softmax.int".
inline std::string join_overload(const std::string& op, const std::string& overload) {
  return overload.empty() ? op : op + "." + overload;
}

} // namespace torch_promote
