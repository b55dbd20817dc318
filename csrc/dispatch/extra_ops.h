// file: ops beyond the table's rows that have been given a policy: their numbers, names and kernels
#pragma once

#include "policy/op_table.h"

#include <string>
#include <utility>

namespace torch_promote {

// The number of an overload: a row's place in the table, or the number of a kernel that is then registered for it on
// our key, once, for good. `op` is qualified ("aten::add"), `overload` "" for the one without a name. Raises if the
// dispatcher knows no such overload, or if another library has a kernel for it on our key.
OpNumber register_op(const std::string& op, const std::string& overload);

// The number of an overload, and whether it is new: then it has no kernel yet, and its caller registers one. Raises as
// `register_op`.
std::pair<OpNumber, bool> number_for_promotion(const std::string& op, const std::string& overload);

// A number and a kernel for an op that writes tensors without bumping their version, and that this PyTorch need not
// have.
void register_unversioned_writer(const std::string& op, const std::string& overload);

// How many ops have a number.
OpNumber number_of_ops();

// "aten::mm", "aten::softmax.int", "mylib::op".
std::string op_name(OpNumber op);

} // namespace torch_promote
