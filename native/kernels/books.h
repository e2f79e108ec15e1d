// Formats by name, and the codebooks and signs that Python hands over at import, so that they exist
// once. Everything here throws std::invalid_argument on names and sizes that do not fit.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops.h"

namespace kvproof {

std::vector<std::string> format_names();
int format_index(const std::string& name);
// A format by name, or by the identity that add_variant was called with.
Coded coded_of(const std::string& identity);

void set_book(const std::string& format, std::span<const float> values, std::span<const float> cuts,
              float start);
// Tables of the unit search of a row format, `cost` and `entry` [tries][levels]; the format's book
// has been set.
void set_search(const std::string& format, float grid, std::span<const std::uint8_t> cost,
                std::span<const std::uint8_t> entry, std::span<const std::int32_t> beyond);
// Bit j of a set of taps stands for the path's bit j steps ago; the format's book has been set.
void set_trellis(const std::string& format, int states, std::uint32_t taps0, std::uint32_t taps1,
                 std::span<const int> offsets);
void set_units(std::span<const float> values, std::span<const float> cuts);
// `table` is the 512 values of a trellis or a [128][256] projection. Adding an identity twice
// leaves the first: it names the contents.
void add_variant(const std::string& format, const std::string& identity,
                 std::span<const float> table);
void set_signs(std::span<const float> signs32, std::span<const float> head,
               std::span<const float> signs128, std::span<const float> polar);

}  // namespace kvproof
