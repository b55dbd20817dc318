// file: a hash table from the keys in a vector to their positions
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torch_promote {

// Open addressing, at most half full: no allocation for an insertion, as std::unordered_map has it, and none after
// `clear`. `Key` has `size_t hash() const` and ==. The keys are in a vector of the owner's, who says what has moved.
template <class Key>
class KeyIndex {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  size_t find(const std::vector<Key>& keys, const Key& key) const {
    for (size_t slot = start(key); !slots_.empty(); slot = next(slot)) {
      if (slots_[slot] == 0) {
        break;
      }
      if (keys[slots_[slot] - 1] == key) {
        return slots_[slot] - 1;
      }
    }
    return kNone;
  }

  // Makes room for one more key. May throw, and then nothing has changed.
  void make_room(const std::vector<Key>& keys) {
    if (2 * (keys.size() + 1) <= slots_.size()) {
      return;
    }
    slots_ = std::vector<uint32_t>(std::bit_ceil(4 * keys.size() + 8), 0);
    for (size_t position = 0; position < keys.size(); ++position) {
      put(keys[position], position);
    }
  }

  // The last of the keys is new, and there is room for it.
  void added(const std::vector<Key>& keys) noexcept {
    put(keys.back(), keys.size() - 1);
  }

  // The key at one position is at another from now on; both hold it.
  void moved(const std::vector<Key>& keys, size_t from, size_t to) {
    slots_[slot_of(keys, from)] = static_cast<uint32_t>(to + 1);
  }

  // The key at this position, which still holds it, goes.
  void removed(const std::vector<Key>& keys, size_t position) {
    size_t hole = slot_of(keys, position);
    slots_[hole] = 0;
    // What has been put farther along because the place was taken moves up.
    for (size_t slot = next(hole); slots_[slot] != 0; slot = next(slot)) {
      const size_t home = start(keys[slots_[slot] - 1]);
      const bool stays = hole < slot ? hole < home && home <= slot : hole < home || home <= slot;
      if (!stays) {
        slots_[hole] = std::exchange(slots_[slot], 0);
        hole = slot;
      }
    }
  }

  void clear() {
    slots_.assign(slots_.size(), 0);
  }

 private:
  size_t start(const Key& key) const {
    return key.hash() & (slots_.size() - 1);
  }
  size_t next(size_t slot) const {
    return (slot + 1) & (slots_.size() - 1);
  }
  void put(const Key& key, size_t position) {
    size_t slot = start(key);
    while (slots_[slot] != 0) {
      slot = next(slot);
    }
    slots_[slot] = static_cast<uint32_t>(position + 1);
  }
  size_t slot_of(const std::vector<Key>& keys, size_t position) const {
    size_t slot = start(keys[position]);
    while (slots_[slot] != position + 1) {
      slot = next(slot);
    }
    return slot;
  }

  std::vector<uint32_t> slots_; // a position + 1; 0 is free. As many as a power of two
};

} // namespace torch_promote
