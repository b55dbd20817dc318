// file: the number of each op that may have a policy, and its name
#pragma once

#include "policy/op_table.h"

#include <optional>
#include <string>

namespace torch_promote {

// Names are qualified and include the overload: "aten::mm", "aten::softmax.int", "mylib::op". Op entries have a number
// from the start; another op gets one with its first policy, and keeps it, even if the op is destroyed.
std::optional<OpNumber> find_op_number(const std::string& name);

// The number that the next op gets.
OpNumber next_op_number();

// Gives an op without a number the next one.
OpNumber add_op_number(const std::string& name);

// Whether an op has this number.
bool is_op_number(OpNumber op);

std::string op_name(OpNumber op);

// "aten::softmax" and "int" as "aten::softmax.int".
inline std::string join_overload(const std::string& op, const std::string& overload) {
  return overload.empty() ? op : op + "." + overload;
}

} // namespace torch_promote
