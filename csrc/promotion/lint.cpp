// file: classifies silent promotion for the lint
#include "promotion/lint.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace torch_promote {

namespace {

using c10::ScalarType;

// The binary digits that a dtype has for whole numbers and for the exponent; 0 where the lint does not need them.
struct Digits {
  int precision;
  int exponent;
};

Digits digits_of(ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case ScalarType::Bool:
      return {1, 0};
    case ScalarType::Char:
      return {7, 0};
    case ScalarType::Byte:
      return {8, 0};
    case ScalarType::Short:
      return {15, 0};
    case ScalarType::UInt16:
      return {16, 0};
    case ScalarType::Int:
      return {31, 0};
    case ScalarType::UInt32:
      return {32, 0};
    case ScalarType::Long:
      return {63, 0};
    case ScalarType::UInt64:
      return {64, 0};
    case ScalarType::BFloat16:
      return {8, 8};
    case ScalarType::Half:
      return {11, 5};
    case ScalarType::Float:
      return {24, 8};
    case ScalarType::Double:
      return {53, 11};
    default:
      return {0, 0};
  }
}

bool is_integral(ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true);
}

bool is_signed(ScalarType dtype) {
  return dtype == ScalarType::Char || dtype == ScalarType::Short || dtype == ScalarType::Int ||
         dtype == ScalarType::Long;
}

// Whether one dtype has values that another cannot represent.
bool loses(ScalarType from, ScalarType to) {
  const Digits source = digits_of(from);
  const Digits target = digits_of(to);
  if (source.precision == 0 || target.precision == 0) {
    return false;
  }
  return source.precision > target.precision || (is_integral(to) && is_signed(from) && !is_signed(to)) ||
         (!is_integral(from) && source.exponent > target.exponent);
}

bool is_low_precision(ScalarType dtype) {
  const ScalarType real = c10::toRealValueType(dtype);
  return real == ScalarType::Half || real == ScalarType::BFloat16;
}

bool is_double(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::ComplexDouble;
}

// Whether an integral dtype cannot represent an int.
bool overflows(int64_t value, ScalarType dtype) {
  if (dtype == ScalarType::Bool) {
    return false;
  }
  const int digits = digits_of(dtype).precision;
  if (digits >= 63) {
    return value < 0 && !is_signed(dtype);
  }
  const int64_t limit = int64_t{1} << digits;
  return value >= limit || value < (is_signed(dtype) ? -limit : 0);
}

// The least value that rounds to infinity in a floating dtype; infinity where there is none below that.
double overflow_threshold(ScalarType dtype) {
  const Digits digits = digits_of(dtype);
  if (digits.exponent == 0) {
    return std::numeric_limits<double>::infinity();
  }
  return std::ldexp(2.0 - std::ldexp(1.0, -digits.precision), (1 << (digits.exponent - 1)) - 1);
}

// Whether a finite Python number becomes infinity in a floating dtype.
bool overflows(const Operand& operand, ScalarType computed) {
  if (is_integral(computed)) {
    return false;
  }
  const double limit = overflow_threshold(computed);
  const auto is_too_large = [limit](double value) { return std::isfinite(value) && std::abs(value) >= limit; };
  if (const auto value = operand.int_value(); value.has_value()) {
    return is_too_large(static_cast<double>(*value));
  }
  const auto value = operand.value();
  return value.has_value() && (is_too_large(value->real()) || is_too_large(value->imag()));
}

bool is_changed(const Operand& operand, ScalarType computed) {
  return !operand.number.has_value() && operand.dtype != computed;
}

bool is_of(LintKind kind, const Operand& operand, ScalarType computed) {
  switch (kind) {
    case LintKind::zero_dim:
      return is_changed(operand, computed) && operand.is_zero_dim() && loses(operand.dtype, computed);
    case LintKind::overflow: {
      const auto value = operand.int_value();
      return value.has_value() && is_integral(computed) && overflows(*value, computed);
    }
    case LintKind::float_overflow:
      return overflows(operand, computed);
    case LintKind::low_precision:
      return is_changed(operand, computed) && is_integral(operand.dtype) && is_low_precision(computed) &&
             loses(operand.dtype, computed);
    case LintKind::float64:
      return is_changed(operand, computed) && is_double(computed);
    default:
      return is_changed(operand, computed);
  }
}

bool describes(LintKind kind, const Operands& operands, ScalarType computed) {
  return std::any_of(
      operands.begin(), operands.end(), [&](const Operand& operand) { return is_of(kind, operand, computed); });
}

uint8_t bit_of(LintKind kind) {
  return static_cast<uint8_t>(1U << static_cast<unsigned>(kind));
}

} // namespace

uint8_t kinds_of_promotion(const Promotion& promotion, const Operands& operands, ScalarType computed) {
  uint8_t kinds = 0;
  for (const LintKind kind :
       {LintKind::overflow, LintKind::float_overflow, LintKind::low_precision, LintKind::zero_dim, LintKind::float64}) {
    if (promotion.options.reports(kind) && describes(kind, operands, computed)) {
      kinds |= bit_of(kind);
    }
  }
  if (kinds == 0 && promotion.options.reports(LintKind::any) && describes(LintKind::any, operands, computed)) {
    kinds = bit_of(LintKind::any);
  }
  return kinds;
}

} // namespace torch_promote
