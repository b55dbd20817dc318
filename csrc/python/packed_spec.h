// file: the packed spec of a region as Python has it, a str
#pragma once

#include "region/region_spec.h"

#include <Python.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace torch_promote {

// In Python a packed spec is a str of 16 hexadecimal digits. The spec has to be a constant of a graph: Dynamo treats a
// str as a constant, but an int that changes between calls as a symbol.
inline constexpr Py_ssize_t kSpecDigits = 16;

inline std::optional<uint64_t> parse_digits(PyObject* text) {
  if (!PyUnicode_Check(text) || PyUnicode_GET_LENGTH(text) != kSpecDigits || !PyUnicode_IS_ASCII(text)) {
    return std::nullopt;
  }
  const Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
  uint64_t packed = 0;
  for (Py_ssize_t i = 0; i < kSpecDigits; ++i) {
    const Py_UCS1 c = digits[i];
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) {
      return std::nullopt;
    }
    packed = packed << 4 | static_cast<uint64_t>(value);
  }
  return packed;
}

inline PyObject* spell_digits(uint64_t packed) {
  PyObject* text = PyUnicode_New(kSpecDigits, 127);
  if (text != nullptr) {
    Py_UCS1* digits = PyUnicode_1BYTE_DATA(text);
    for (Py_ssize_t i = kSpecDigits; i-- > 0; packed >>= 4) {
      digits[i] = static_cast<Py_UCS1>("0123456789abcdef"[packed & 0xF]);
    }
  }
  return text;
}

// The spec that was packed or unpacked last, with its str: a loop uses the same spec repeatedly. Holding the str
// prevents another str from getting its address. Written only under the GIL.
struct LastSpec {
  PyObject* text = nullptr;
  uint64_t packed = 0;
  RegionSpec spec;

  void put(PyObject* new_text, uint64_t new_packed) {
    packed = new_packed;
    spec = RegionSpec::unpack(new_packed);
    Py_INCREF(new_text);
    Py_XDECREF(std::exchange(text, new_text));
  }
};

inline LastSpec last_spec;

// Null, with Python's error set, if the text is not a packed spec.
inline const RegionSpec* unpack_text(PyObject* text) {
  if (text != last_spec.text) {
    const std::optional<uint64_t> packed = parse_digits(text);
    if (!packed.has_value()) {
      PyErr_SetString(PyExc_ValueError, "a packed spec must be a str of 16 hexadecimal digits");
      return nullptr;
    }
    last_spec.put(text, *packed);
  }
  return &last_spec.spec;
}

} // namespace torch_promote
