// file: what `Values` says of a CPU tensor: statistics of its bits, a digest, the squares' sum and a sketch
#include "python/bindings.h"

#include "cast/cast.h"
#include "cast/vectorized.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace py = pybind11;

namespace torch_promote {

namespace {

// NOTE [ Digest and sketch ]
// Both read the elements in their order, as rows of 1021, a prime, so that columns of the usual widths spread over
// the places of a row. Rows form pieces of 4096.
//
// Digest: an element consists of words of at most 32 bits. A row has two sums of words times random numbers of their
// places, whose bits are complementary: with one sum, changes of the highest bit alone could cancel out. The digest is
// the sum of the rows times random odd numbers, modulo 2**64. It is linear, but not in the place of an element.
//
// Sketch: element l of row r gets a random sign, and is added to bucket (l + 631 r) % 1021. So no column stays in one
// bucket: 631/1021 approximates the golden ratio, whose multiples are far from integers. The projections are products
// of the buckets with a matrix of random signs. Elements that are not finite count as 0.
constexpr int64_t kRow = 1021;
constexpr int64_t kShift = 631;
constexpr int64_t kPieceRows = 4096;
constexpr int64_t kGroup = 64; // rows with a sign of `outer`, each with another of `inner`
constexpr size_t kProjections = 16;
constexpr size_t kBounds = 8;
// What a thread computes at a time. The result does not depend on the number of threads.
constexpr int64_t kChunkRows = 512;
constexpr int64_t kChunksOfAThread = 4;

using Signs = std::array<uint8_t, kRow>; // 0x80 for minus

// A generator of random numbers that is the same everywhere.
uint64_t splitmix(uint64_t number) {
  uint64_t z = (number + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// The first of the random numbers of each table; a table of pieces has no end.
constexpr uint64_t kOfTables = 0;
constexpr uint64_t kOfPieceSigns = uint64_t{1} << 62;
constexpr uint64_t kOfPieceFactors = uint64_t{1} << 63;

struct Tables {
  std::array<std::array<uint32_t, kRow>, 4> places; // two for the low word, two for the high one
  std::array<uint64_t, kPieceRows> rows;
  std::array<Signs, kGroup> inner;
  std::array<Signs, kPieceRows / kGroup> outer;
  std::array<std::array<double, kProjections>, kRow> projections;

  Tables() {
    uint64_t next = kOfTables;
    for (auto& table : places) {
      for (uint32_t& one : table) {
        one = static_cast<uint32_t>(splitmix(next++) >> 32);
      }
    }
    for (uint64_t& one : rows) {
      one = splitmix(next++) | 1;
    }
    const auto fill = [&next](Signs& signs) {
      for (uint8_t& one : signs) {
        one = (splitmix(next++) >> 56) & 0x80;
      }
    };
    std::for_each(inner.begin(), inner.end(), fill);
    std::for_each(outer.begin(), outer.end(), fill);
    for (auto& column : projections) {
      for (double& one : column) {
        one = splitmix(next++) >> 63 != 0 ? -0.25 : 0.25;
      }
    }
  }
};

const Tables& tables() {
  static const Tables* const made = new Tables;
  return *made;
}

// The sign and the odd factor by which pieces differ. The first piece, mostly the only one, has neither.
uint8_t piece_sign(int64_t piece, int64_t place) {
  return piece == 0 ? 0 : (splitmix(kOfPieceSigns + static_cast<uint64_t>(piece * kRow + place)) >> 56) & 0x80;
}

uint64_t piece_factor(int64_t piece) {
  return piece == 0 ? 1 : splitmix(kOfPieceFactors + static_cast<uint64_t>(piece)) | 1;
}

// --- Rows and chunks

// Calls `function(chunk)` for all chunks of a tensor, in several threads if there are many. Not at::parallel_for, which
// is serial in an extension without OpenMP.
template <class Function>
void for_chunks(int64_t count, const Function& function) {
  const auto run = [&](int64_t first, int64_t step) {
    for (int64_t chunk = first; chunk < count; chunk += step) {
      function(chunk);
    }
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count / kChunksOfAThread);
  std::vector<std::thread> others;
  int64_t started = 1;
  try {
    for (; started < threads; ++started) {
      others.emplace_back(run, started, threads);
    }
  } catch (const std::system_error&) { // no more threads: this one does their part
  }
  for (int64_t first = started; first < threads; ++first) {
    run(first, threads);
  }
  run(0, std::max<int64_t>(threads, 1));
  for (std::thread& other : others) {
    other.join();
  }
}

int64_t count_chunks(int64_t count) {
  return (count + kRow * kChunkRows - 1) / (kRow * kChunkRows);
}

// Calls `function(row, elements, their number)` for the rows of a chunk.
template <class T, class Function>
void for_rows(const at::Tensor& tensor, int64_t chunk, const Function& function) {
  const T* const elements = static_cast<const T*>(tensor.const_data_ptr());
  const int64_t end = std::min(tensor.numel(), (chunk + 1) * kChunkRows * kRow);
  for (int64_t row = chunk * kChunkRows; row * kRow < end; ++row) {
    function(row, elements + row * kRow, static_cast<size_t>(std::min(kRow, end - row * kRow)));
  }
}

// --- Digest

struct Sums {
  uint64_t a = 0;
  uint64_t b = 0;
};

template <class Word>
VECTORIZED Sums sum_words(const Word* words, size_t count, const Tables& tables) {
  Sums sums;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t word = words[i] & 0xFFFFFFFFU;
    sums.a += word * tables.places[0][i];
    sums.b += word * tables.places[1][i];
  }
  if constexpr (sizeof(Word) == 8) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t high = words[i] >> 32;
      sums.a += high * tables.places[2][i];
      sums.b += high * tables.places[3][i];
    }
  }
  return sums;
}

template <class Word>
uint64_t digest_as(const at::Tensor& tensor) {
  const int64_t chunks = count_chunks(tensor.numel());
  std::vector<uint64_t> parts(static_cast<size_t>(chunks));
  for_chunks(chunks, [&](int64_t chunk) {
    uint64_t part = 0;
    for_rows<Word>(tensor, chunk, [&](int64_t row, const Word* words, size_t count) {
      const Sums sums = sum_words(words, count, tables());
      const uint64_t factor = tables().rows[static_cast<size_t>(row % kPieceRows)];
      part += (sums.a + std::rotl(sums.b, 32)) * factor * piece_factor(row / kPieceRows);
    });
    parts[static_cast<size_t>(chunk)] = part;
  });
  return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
}

void check_memory(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_complex() && !tensor.is_neg() && !tensor._is_zerotensor(),
      "not a tensor whose memory has its elements in order");
}

uint64_t digest(const at::Tensor& tensor) {
  check_memory(tensor);
  TORCH_CHECK(tensor.element_size() <= 8, "elements of ", tensor.element_size(), " bytes");
  const py::gil_scoped_release no_gil;
  switch (tensor.element_size()) {
    case 1:
      return digest_as<uint8_t>(tensor);
    case 2:
      return digest_as<uint16_t>(tensor);
    case 4:
      return digest_as<uint32_t>(tensor);
    default:
      return digest_as<uint64_t>(tensor);
  }
}

// Whether `digest` and `measure` can read a tensor as it is.
bool is_measurable(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return is_plain(*tensor.unsafeGetTensorImpl()) && tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() > 0 &&
         (c10::isIntegralType(dtype, /*includeBool=*/true) || dtype == at::kFloat || dtype == at::kDouble ||
          dtype == at::kHalf || dtype == at::kBFloat16) &&
         static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.element_size() <=
             tensor.storage().nbytes();
}

// --- Statistics and sketch of floating point numbers, given by their bits

template <class Word>
struct Format {
  static constexpr bool kDouble = sizeof(Word) == 8;
  using Float = std::conditional_t<kDouble, double, float>;
  using Exponent = std::conditional_t<kDouble, uint16_t, uint8_t>;
  static constexpr int kMantissa = kDouble ? 52 : 23;
  static constexpr size_t kExponents = kDouble ? 2048 : 256;
  static constexpr Word kMagnitude = std::numeric_limits<Word>::max() >> 1;
  static constexpr Word kInfinity = static_cast<Word>(kExponents - 1) << kMantissa;
};

constexpr size_t kLanes = 8;

// Of a chunk, or the sum of all.
template <class Word>
struct Part {
  Word largest = 0;                        // of the finite magnitudes
  Word smallest = Format<Word>::kInfinity; // of the finite magnitudes but 0
  std::array<int64_t, kBounds> above{};    // the number of magnitudes from each bound on
  std::array<int64_t, Format<Word>::kExponents> exponents{};
  std::array<double, kLanes> squares{};
  std::array<double, kRow> buckets{};

  void add(const Part& other) {
    largest = std::max(largest, other.largest);
    smallest = std::min(smallest, other.smallest);
    const auto add_each = [](auto& to, const auto& from) {
      std::transform(to.begin(), to.end(), from.begin(), to.begin(), std::plus<>());
    };
    add_each(above, other.above);
    add_each(exponents, other.exponents);
    add_each(squares, other.squares);
    add_each(buckets, other.buckets);
  }
};

// The ends of the magnitudes of a row.
template <class Word>
struct Ends {
  Word low = Format<Word>::kMagnitude;
  Word nonzero = std::numeric_limits<Word>::max(); // the lowest but 0, less 1; for zeros alone the initial value
  Word high = 0;
};

template <class Word>
VECTORIZED Ends<Word> find_ends(const Word* bits, size_t count) {
  Ends<Word> ends;
  for (size_t i = 0; i < count; ++i) {
    const Word magnitude = bits[i] & Format<Word>::kMagnitude;
    ends.low = std::min(ends.low, magnitude);
    ends.nonzero = std::min<Word>(ends.nonzero, magnitude - 1);
    ends.high = std::max(ends.high, magnitude);
  }
  return ends;
}

template <class Word>
VECTORIZED Word count_from(const Word* bits, size_t count, Word bound) {
  Word found = 0;
  for (size_t i = 0; i < count; ++i) {
    found += (bits[i] & Format<Word>::kMagnitude) >= bound ? 1 : 0;
  }
  return found;
}

// The numbers with their signs changed, and 0 for those that are not finite.
template <class Word>
VECTORIZED void change_signs(
    const Word* __restrict bits,
    const uint8_t* __restrict inner,
    const uint8_t* __restrict outer,
    Word* __restrict to,
    size_t count) {
  using Of = Format<Word>;
  for (size_t i = 0; i < count; ++i) {
    const Word sign = static_cast<Word>(static_cast<uint8_t>(inner[i] ^ outer[i])) << 8 * (sizeof(Word) - 1);
    to[i] = (bits[i] & Of::kMagnitude) < Of::kInfinity ? bits[i] ^ sign : 0;
  }
}

// Adds numbers to buckets, and their squares to lanes.
template <class Word>
VECTORIZED void add_numbers(
    const Word* __restrict numbers, double* __restrict buckets, double* __restrict lanes, size_t count) {
  const auto add = [&](size_t i, double& squares) {
    const auto value = static_cast<double>(std::bit_cast<typename Format<Word>::Float>(numbers[i]));
    buckets[i] += value;
    squares += value * value;
  };
  std::array<double, kLanes> sums{};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      add(i + lane, sums[lane]);
    }
  }
  for (; i < count; ++i) {
    add(i, sums[i % kLanes]);
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lanes[lane] += sums[lane];
  }
}

// --- Counting exponents: most rows have few, and comparing a row with each of them is faster than a table of counters

constexpr size_t kPadded = 1024; // a row of exponents, padded
constexpr size_t kComparedAtOnce = 64;
constexpr size_t kMostCompared = 48;

template <class Word>
using Exponents = std::array<typename Format<Word>::Exponent, kPadded>;

template <class Word>
VECTORIZED void find_exponents(const Word* __restrict bits, Exponents<Word>& to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    to[i] =
        static_cast<typename Format<Word>::Exponent>((bits[i] & Format<Word>::kMagnitude) >> Format<Word>::kMantissa);
  }
}

template <class Exponent>
VECTORIZED int64_t count_equal(const Exponent* exponents, Exponent asked) {
  std::array<Exponent, kComparedAtOnce> found{};
  for (size_t i = 0; i < kPadded; i += kComparedAtOnce) {
    for (size_t lane = 0; lane < kComparedAtOnce; ++lane) {
      found[lane] += exponents[i + lane] == asked ? 1 : 0;
    }
  }
  int64_t sum = 0;
  for (const Exponent one : found) { // inlined here, unlike std::accumulate
    sum += one;
  }
  return sum;
}

template <class Word>
void count_exponents(Part<Word>& part, const Word* bits, size_t count, const Ends<Word>& ends) {
  using Exponent = typename Format<Word>::Exponent;
  if (ends.high == 0) {
    part.exponents[0] += static_cast<int64_t>(count);
    return;
  }
  const auto exponent = [](Word magnitude) { return static_cast<size_t>(magnitude >> Format<Word>::kMantissa); };
  const size_t first = exponent(ends.nonzero + 1);
  const size_t last = exponent(ends.high);
  if (last - first >= kMostCompared) {
    for (size_t i = 0; i < count; ++i) {
      ++part.exponents[exponent(bits[i] & Format<Word>::kMagnitude)];
    }
    return;
  }
  Exponents<Word> exponents;
  find_exponents<Word>(bits, exponents, count);
  std::fill(exponents.begin() + static_cast<std::ptrdiff_t>(count), exponents.end(), static_cast<Exponent>(first));
  part.exponents[first] -= static_cast<int64_t>(kPadded - count);
  if (ends.low == 0 && first > 0) {
    part.exponents[0] += count_equal<Exponent>(exponents.data(), 0);
  }
  for (size_t one = first; one <= last; ++one) {
    part.exponents[one] += count_equal(exponents.data(), static_cast<Exponent>(one));
  }
}

template <class Word>
void add_elements(
    Part<Word>& part,
    const Word* bits,
    size_t count,
    const std::array<Word, kBounds>& bounds,
    const Signs& inner,
    const Signs& outer,
    int64_t row) {
  using Of = Format<Word>;
  const Ends<Word> ends = find_ends(bits, count);
  for (size_t i = 0; i < kBounds; ++i) { // the ends answer most questions
    if (ends.low >= bounds[i]) {
      part.above[i] += static_cast<int64_t>(count);
    } else if (ends.high >= bounds[i]) {
      part.above[i] += static_cast<int64_t>(count_from(bits, count, bounds[i]));
    }
  }
  if (ends.high >= Of::kInfinity) {
    for (size_t i = 0; i < count; ++i) {
      const Word magnitude = bits[i] & Of::kMagnitude;
      if (magnitude != 0 && magnitude < Of::kInfinity) {
        part.largest = std::max(part.largest, magnitude);
        part.smallest = std::min(part.smallest, magnitude);
      }
    }
  } else if (ends.high > 0) {
    part.largest = std::max(part.largest, ends.high);
    part.smallest = std::min<Word>(part.smallest, ends.nonzero + 1);
  }
  count_exponents(part, bits, count, ends);
  std::array<Word, kRow> numbers;
  change_signs<Word>(bits, inner.data(), outer.data(), numbers.data(), count);
  const auto first = static_cast<size_t>(row * kShift % kRow);
  const size_t before_end = std::min(count, static_cast<size_t>(kRow) - first);
  add_numbers<Word>(numbers.data(), part.buckets.data() + first, part.squares.data(), before_end);
  add_numbers<Word>(numbers.data() + before_end, part.buckets.data(), part.squares.data(), count - before_end);
}

// --- float16 and bfloat16 as float32, with exact values and without arithmetic on subnormal numbers

VECTORIZED void widen_bfloat16(const uint16_t* from, uint32_t* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    to[i] = static_cast<uint32_t>(from[i]) << 16;
  }
}

VECTORIZED void widen_float16(const uint16_t* from, uint32_t* to, size_t count) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t sign = static_cast<uint32_t>(from[i] & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(from[i] & 0x7FFF) << 13;
    const uint32_t normal = magnitude + kRebias + (magnitude >= 0x0F800000 ? kRebias : 0); // inf and NaN twice
    const float shifted = std::bit_cast<float>(magnitude | kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
    to[i] = sign | (magnitude < 0x00800000 ? std::bit_cast<uint32_t>(shifted) : normal);
  }
}

using Projections = std::array<double, kProjections>;

// The products of the first buckets with the matrix. Two sums of each, because an addition has to wait for the one
// before.
VECTORIZED void project(const double* buckets, size_t count, const Projections* matrix, Projections& sketch) {
  Projections even{};
  Projections odd{};
  for (size_t i = 0; i + 1 < count; i += 2) {
    for (size_t j = 0; j < kProjections; ++j) {
      even[j] += buckets[i] * matrix[i][j];
      odd[j] += buckets[i + 1] * matrix[i + 1][j];
    }
  }
  for (size_t j = 0; j < kProjections; ++j) {
    sketch[j] = even[j] + odd[j] + (count % 2 != 0 ? buckets[count - 1] * matrix[count - 1][j] : 0);
  }
}

// A sketch in Base64: 24 bits of an exponent, and the projections as integers of so many bits, a multiple of 6, of
// which the largest magnitude needs all. Empty if a projection is not finite.
std::string pack(const Projections& sketch, int bits) {
  const auto magnitude = [](double one) { return std::fabs(one); };
  const double largest = magnitude(std::ranges::max(sketch, {}, magnitude));
  if (!std::ranges::all_of(sketch, [](double one) { return std::isfinite(one); })) {
    return "";
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  const auto scaled = [&](double one) {
    return static_cast<int64_t>(std::nearbyint(std::ldexp(one, bits - 1 - exponent)));
  };
  const int64_t half = int64_t{1} << (bits - 1);
  if (scaled(largest) == half) { // rounded up to the next power of two
    ++exponent;
  }
  std::string text;
  const auto put = [&text](int64_t number, int width) {
    constexpr const char* kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int shift = width - 6; shift >= 0; shift -= 6) {
      text += kDigits[(number >> shift) & 63];
    }
  };
  put(exponent + (1 << 23), 24);
  for (const double one : sketch) {
    put(scaled(one) + half, bits);
  }
  return text;
}

// --- All of it

template <class Stored, class Word, class Widen>
py::bytes measure_as(
    const at::Tensor& tensor, const std::array<int64_t, kBounds>& given, int bits, const Widen& widen) {
  std::array<Word, kBounds> bounds;
  std::transform(given.begin(), given.end(), bounds.begin(), [](int64_t one) { return static_cast<Word>(one); });
  const int64_t numel = tensor.numel();
  const int64_t chunks = count_chunks(numel);
  auto total = std::make_unique<Part<Word>>();
  Projections sketch{};
  double squares = 0;
  {
    const py::gil_scoped_release no_gil;
    std::vector<Part<Word>> parts(static_cast<size_t>(std::max<int64_t>(chunks - 1, 0)));
    for_chunks(chunks, [&](int64_t chunk) {
      Part<Word>& part = chunk == 0 ? *total : parts[static_cast<size_t>(chunk - 1)];
      Signs outer{};
      int64_t group = -1;
      std::array<Word, kRow> buffer;
      for_rows<Stored>(tensor, chunk, [&](int64_t row, const Stored* elements, size_t count) {
        if (row / kGroup != group) {
          group = row / kGroup;
          outer = tables().outer[static_cast<size_t>(group % (kPieceRows / kGroup))];
          const int64_t piece = row / kPieceRows;
          for (size_t i = 0; piece > 0 && i < outer.size(); ++i) {
            outer[i] ^= piece_sign(piece, static_cast<int64_t>(i));
          }
        }
        const Signs& inner = tables().inner[static_cast<size_t>(row % kGroup)];
        const Word* const bits = widen(elements, buffer.data(), count);
        add_elements(part, bits, count, bounds, inner, outer, row);
      });
    });
    for (const Part<Word>& part : parts) {
      total->add(part);
    }
    const auto used = static_cast<size_t>(std::min(numel, kRow)); // a shorter tensor has no second row
    project(total->buckets.data(), used, tables().projections.data(), sketch);
    squares = std::accumulate(total->squares.begin(), total->squares.end(), 0.0);
  }
  const auto& counts = total->exponents;
  const auto used = [](int64_t number) { return number != 0; };
  const auto first = std::find_if(counts.begin(), counts.end(), used);
  const auto end = std::find_if(counts.rbegin(), counts.rend(), used).base();
  std::string found; // see `Numbers` in torch_promote/recording/values.py
  const auto put = [&found](const auto* from, size_t size) {
    found.append(reinterpret_cast<const char*>(from), size * sizeof(*from));
  };
  const std::array<int64_t, 4> ends = {
      static_cast<int64_t>(total->largest), static_cast<int64_t>(total->smallest), first - counts.begin(), end - first};
  put(ends.data(), ends.size());
  put(total->above.data(), total->above.size());
  put(&squares, 1);
  put(std::to_address(first), static_cast<size_t>(end - first));
  found += std::isfinite(squares) ? pack(sketch, bits) : "";
  return py::bytes(found);
}

py::bytes measure(const at::Tensor& tensor, const std::array<int64_t, kBounds>& bounds, int bits) {
  check_memory(tensor);
  const auto as_is = [](const auto* elements, auto* /*buffer*/, size_t /*count*/) { return elements; };
  const auto widened = [](const auto& function) {
    return [&function](const uint16_t* elements, uint32_t* buffer, size_t count) -> const uint32_t* {
      function(elements, buffer, count);
      return buffer;
    };
  };
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return measure_as<uint32_t, uint32_t>(tensor, bounds, bits, as_is);
    case at::kDouble:
      return measure_as<uint64_t, uint64_t>(tensor, bounds, bits, as_is);
    case at::kHalf:
      return measure_as<uint16_t, uint32_t>(tensor, bounds, bits, widened(widen_float16));
    case at::kBFloat16:
      return measure_as<uint16_t, uint32_t>(tensor, bounds, bits, widened(widen_bfloat16));
    default:
      TORCH_CHECK(false, "no statistics of ", tensor.scalar_type());
  }
}

} // namespace

void add_measure(py::module_& m) {
  m.def("is_measurable", &is_measurable);
  m.def("digest", [](const at::Tensor& tensor) { return py::str("{:016x}").format(digest(tensor)); });
  m.def("measure", &measure);
}

} // namespace torch_promote
