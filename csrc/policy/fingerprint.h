// file: the fingerprint of a policy table
#pragma once

#include "policy/op_table.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace torch_promote {

// NOTE [ Policy fingerprint ]
// PyTorch does not know our policy tables, but three parts of it must distinguish policies:
// - Dynamo must recompile a function that it compiled under another policy. It guards on the enabled flag and the dtype
//   of each Autocast device.
// - AOTAutograd's cache on disk must not return code compiled under another policy. Its key contains the dtypes
//   of the enabled devices.
// - The autograd engine's device threads, and tasks of at::launch, must find the policy of the thread that called them.
//   at::ThreadLocalState carries the dispatch keys and the autocast dtypes to them.
// So a region whose policy is not stock's writes a hash of the table, its fingerprint, into the autocast dtypes of
// device types that this library does not serve. Under the stock policy these slots keep their values, and only
// kAutocastKey distinguishes our regions from stock's.
//
// Why not a guard of our own: a guard on a global or a thread-local covers only frames that read it, and the compiled
// frames are the user's. Installing it in every frame means replacing OutputGraph.init_ambient_guards, which is private
// and differs between releases, and it would not help the other two parts.
//
// Collisions: a backend that has tensors on one of these device types and autocasts them would read a wrong dtype
// inside regions with such a policy. A fingerprint has 25 bits. Within a process, the registry (find_or_add) salts the
// second of two tables with equal fingerprints. Two processes that share a cache on disk cannot do that, so the cache's
// key also gets a digest of the whole policy (torch_promote/integrations/compile.py, _complete_disk_cache_keys).
constexpr std::array<c10::DeviceType, std::tuple_size_v<Fingerprint>> kSlots = {
    c10::DeviceType::PrivateUse1, // kAutocastKey's device type; its dtype shows whether there is a fingerprint
    c10::DeviceType::IPU,         c10::DeviceType::MAIA, c10::DeviceType::HPU, c10::DeviceType::MTIA,
};

// The first slot's dtype without a fingerprint: PyTorch's default for PrivateUse1. No fingerprint uses it.
constexpr c10::ScalarType kNoFingerprint = c10::ScalarType::Half;

// FNV-1a: the same in every process, which a cache on disk needs.
class Hash {
 public:
  void mix(uint64_t value) {
    hash_ = (hash_ ^ value) * 1099511628211ULL;
  }
  void mix(const std::string& text) {
    for (const char c : text) {
      mix(static_cast<uint8_t>(c));
    }
  }
  uint64_t value() const {
    return hash_ ^ hash_ >> 32;
  }

 private:
  uint64_t hash_ = 14695981039346656037ULL;
};

// The policies that differ from stock's, without the promotion rule.
std::vector<Override> overrides_of(const PolicyTable& table);

// Hashes the ops' names, because their numbers depend on the version of the table and on the order in which a program
// names other ops. `salt` is 0 unless another table of this process has that fingerprint.
Fingerprint fingerprint_of(const PolicyTable& table, PolicyByte salt);

} // namespace torch_promote
