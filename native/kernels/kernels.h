// Interface between the driver (attention.cpp, codec.cpp) and the leaf kernels of one instruction
// set.
//
// The row-major bytes of a format are the cache layout: kernels read rows in place through a base
// pointer and a token stride. A leaf works on a tile of at most TILE tokens of one KV head; the
// driver strings leaves together and owns threads, masks and merging.
//
// Three paths lead to a dot product, by where a format keeps its scale:
//   row    one scale a row, integer codes:   16-bit query x 16-bit codes in int32, scaled per token
//          (rows that are not laid out as one of tq8, tq4 and tq3 are repacked first: layout_of)
//   block  one scale per 32 or 128 values:   the same, flushed to float once a block or more
//   real   float elements:                   float FMA
//
// Tokens of a tile are split by parity, because V is multiplied as pairs of tokens (one int16
// multiply-add takes two): scores, probabilities and row scales live in two planes,
// [parity][token / 2][row].
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvproof {

enum Fmt : int {
  F16,
  BF16,
  FP8_E4M3,
  Q8_0,
  Q4_0,
  TBQ4_0,
  TBQ3_0,
  TQ4,
  TQ3,
  Q4_0_ROT,
  TQ8,
  TQ5,
  TQ2,
  TCQ4,
  TCQ4_64,
  TCQ3,
  TCQ3_64,
  TCQ2,
  TCQ2_64,
  Q4_POLAR,
  Q4_POLAR_RES,
  TBQ3_TCQ,
  QJL1_256,
  FORMATS,
  FIVE = FORMATS,  // no format: 5-bit codes as the kernels read them, see fifth_bit
  LAYOUTS
};
enum Path : int { ROW, BLOCK, REAL, PATHS };

constexpr int TILE = 64;       // tokens decoded at once: 64 x 128 int16 is half of a 32 KiB L1
constexpr int SUPER = 256;     // tokens per softmax step
constexpr int MAX_DIM = 4096;  // widest row
constexpr int GROUP = 32;      // codes per decoding step, also the block of the block formats
constexpr int QMAX = 16383;    // largest quantised query value
constexpr int WIDTHS = 3;      // row-group widths: 1, 2 and 4 query rows share each load
constexpr int WIDE = 128;      // values of a block of polar, trellis and sketch formats
constexpr int SKETCH = 256;    // and the sign bits of a sketch of them
constexpr double SKETCH_FACTOR = 1.2533141373155003 / SKETCH;  // of norm times sign: sqrt(pi / 2)
constexpr double ROOT = 11.313708498984761;                    // of 128
constexpr double RESIDUAL = 0.5 / ROOT;  // step of a residual, in units of the centroids
constexpr int SLICE = 4;  // groups of values decoded at once: a wider tile would leave L1

constexpr Path path_of(int f) {
  switch (f) {
    case F16:
    case BF16:
    case FP8_E4M3:
      return REAL;
    case Q8_0:
    case Q4_0:
    case Q4_0_ROT:
    case TBQ4_0:
    case TBQ3_0:
    case Q4_POLAR:
    case Q4_POLAR_RES:
    case TBQ3_TCQ:
    case QJL1_256:
      return BLOCK;
    default:
      return ROW;
  }
}

// Format whose kernels read the rows of f: f itself, or what its rows are repacked to.
constexpr int layout_of(int f) {
  switch (f) {
    case Q4_0_ROT:
      return Q4_0;
    case TQ5:
    case TCQ4:
    case TCQ4_64:
      return FIVE;
    case TQ2:
    case TCQ3:
    case TCQ3_64:
    case TCQ2:
    case TCQ2_64:
      return TQ4;
    default:
      return f;
  }
}

// Bytes of a block, or of an element; 0 for whole-row formats.
constexpr int block_bytes(int f) {
  switch (f) {
    case F16:
    case BF16:
      return 2;
    case FP8_E4M3:
      return 1;
    case Q8_0:
      return 34;
    case Q4_0:
    case Q4_0_ROT:
    case TBQ4_0:
      return 18;
    case TBQ3_0:
      return 14;
    case Q4_POLAR:
    case Q4_POLAR_RES:
      return 82;
    case TBQ3_TCQ:
      return 52;
    case QJL1_256:
      return 34;
    default:
      return 0;
  }
}

// Formats of one name but another number of states share their functions.
constexpr int trellis_of(int f) {
  return f == TCQ4_64 ? TCQ4 : f == TCQ3_64 ? TCQ3 : f == TCQ2_64 ? TCQ2 : f;
}
constexpr bool has_trellis(int f) { return f >= TCQ4 && f <= TCQ2_64; }

// Bits of a code of a row format, and bytes of the unit at the end of a row.
constexpr int code_bits(int f) {
  switch (trellis_of(f)) {
    case TQ8:
      return 8;
    case TQ5:
      return 5;
    case TQ4:
    case TCQ4:
      return 4;
    case TQ3:
    case TCQ3:
      return 3;
    default:
      return 2;
  }
}
constexpr int unit_bytes(int f) { return has_trellis(f) ? 1 : 2; }
// And of the bits of the path before the row, which some trellis formats store before the unit.
constexpr int start_bytes(int f) { return f == TCQ3_64 || f == TCQ2 || f == TCQ2_64; }

// Block formats: values of a row in one block, and groups of 32 codes in it. A sketch has two codes
// a value.
constexpr bool wide(int f) { return f >= Q4_POLAR && f <= QJL1_256; }
constexpr int block_values(int f) { return wide(f) ? WIDE : GROUP; }
constexpr int stored_dim(int f, int dim) { return f == QJL1_256 ? 2 * dim : dim; }
constexpr int block_groups(int f) { return stored_dim(f, block_values(f)) / GROUP; }

// Where the codes of group g and the scale that belongs to them start in a row of blocks.
constexpr std::ptrdiff_t codes_at(int f, int g) {
  const int bits = f == Q8_0 ? 8 : f == TBQ3_0 || f == TBQ3_TCQ ? 3 : f == QJL1_256 ? 1 : 4;
  const unsigned n = unsigned(block_groups(f)), at = unsigned(g);  // unsigned divides by a shift
  return std::ptrdiff_t(at / n) * block_bytes(f) + (f == QJL1_256 ? 0 : 2) +
         std::ptrdiff_t(at % n) * (GROUP / 8 * bits);
}
constexpr std::ptrdiff_t scale_at(int f, int g) {
  return std::ptrdiff_t(unsigned(g) / unsigned(block_groups(f))) * block_bytes(f) +
         (f == QJL1_256 ? 32 : 0);
}

constexpr std::ptrdiff_t row_bytes(int f, int dim) {
  switch (path_of(f)) {
    case REAL:
      return std::ptrdiff_t(block_bytes(f)) * dim;
    case BLOCK:
      return std::ptrdiff_t(block_bytes(f)) * (dim / block_values(f));
    default:
      if (f == FIVE) return dim / 2 + 4 * ((dim + GROUP - 1) / GROUP) + 2;
      return std::ptrdiff_t(dim) * code_bits(f) / 8 + start_bytes(f) + unit_bytes(f);
  }
}

// 16 bytes a group: byte j holds code j in its low and code j + 16 in its high nibble.
constexpr bool packed4(int f) {
  return f == Q4_0 || f == TBQ4_0 || f == Q4_POLAR || f == Q4_POLAR_RES || f == TQ4;
}
// Those that are scored with a token in each lane, where a residual would cost a sum per token.
constexpr bool scored_by_lanes(int f) { return f == FIVE || (packed4(f) && f != Q4_POLAR_RES); }
// Those whose keys are bytes: all row formats, and blocks of integers.
constexpr bool byte_entries(int f) { return path_of(f) == ROW || f == Q8_0 || f == Q4_0; }
// Code c of a group as value of the group: polar formats pack neighbours into a byte.
constexpr int value_of_code(int f, int c) {
  return f == Q4_POLAR || f == Q4_POLAR_RES ? c % 16 * 2 + c / 16 : c;
}

// Rows of 5-bit codes have the low nibbles as tq4 has them, then 32 bits a group, then the unit.
// This is the bit of a code there: the four bytes of a nibble row's word k take their fifth bits
// from one bit position of four bytes, so that one shift brings them all to the top.
constexpr int fifth_bit(int code) {
  const int word = code % 16 / 4, high = code / 16;
  return code % 4 * 8 + word % 2 * 4 + high * 2 + word / 2;
}

constexpr int groups_of(int dim) { return (dim + GROUP - 1) / GROUP; }
constexpr int padded(int dim) { return groups_of(dim) * GROUP; }

// n tokens of one KV head.
struct Rows {
  const std::uint8_t* base;
  std::ptrdiff_t stride;
  int n;
  int dim;
};

// Integer table of a codebook: value = (entry - offset) / scale. Shorter books are repeated to 32.
struct Table {
  std::int16_t entry[32];
  float scale;
  int largest;  // magnitude of entry - offset
  int offset;
  const std::int32_t* pairs = nullptr;     // see WideTrellis
  const std::int16_t* residual = nullptr;  // entries to add: see key_words and value_words
};

// The 512-state trellis of tbq3_tcq. A state is 9 bits of the code stream, and the next one starts
// 3 bits later, so that 12 bits hold two: pairs[bits] has the entry of the first in its low half.
struct WideTrellis {
  static constexpr int STATES = 512, PAIRS = 4096;
  float value[STATES];
  float of_predecessor[8][STATES / 8];  // [p][j]: value[8 * j + p]
  float scale;
  int largest;
  std::int32_t pairs[PAIRS];  // for keys and values: half of a 32 KiB L1
};

constexpr int MAX_STATES = 64;
constexpr int MAX_WALKS = 4;  // through a trellis at once

constexpr int MAX_TAPS[2] = {2, 5};

// A trellis code: see trellis.h.
struct Trellis {
  int states = 0;
  int start_bytes = 0;  // 1: the encoder chooses the bits before a row, and stores them
  // Steps back to the bits of the path whose XOR is bit 0 and bit 1 of the subset.
  int n_taps[2] = {};
  std::int64_t tap[2][5] = {};
  int n_offsets = 0;  // units tried: bytes beside the nearest one
  int offset[16] = {};
  float entry[4][8] = {}, cut[4][8] = {};       // of each subset, ascending
  std::uint8_t subset_of[2 * MAX_STATES] = {};  // by the last bits of the path, newest in bit 0
};

// Units that a row names by one byte.
struct Units {
  std::uint16_t half[256];
  float value[256], inverse[256];  // inverse[0] is 0
  float cut[256];                  // nearest byte = number of cuts below, 256: beyond the table
};

// Bytes by a level or another small index. `change` is what sixteen entries have other bits than
// the sixteen before them, for sets whose shuffles see as many.
constexpr int MAX_LEVELS = 128;
struct LevelTable {
  alignas(64) std::uint8_t at[MAX_LEVELS];
  alignas(64) std::uint8_t change[MAX_LEVELS];
};

// The unit search of tq5, tq4, tq3 and tq2: see rows.h.
constexpr int MAX_TRIES = 16;
constexpr int levels_of(int f) { return f == TQ5 ? MAX_LEVELS : 64; }
constexpr int tries_of(int f) { return f == TQ5 ? MAX_TRIES : 8; }
struct UnitSearch {
  float grid;  // width of a position in a row whose root mean square is 1
  LevelTable cost[MAX_TRIES], entry[MAX_TRIES];
  std::int32_t beyond[MAX_TRIES];
  // Magnitudes by buckets, none of which has two cuts: below[bucket] is how many lie below it,
  // cut[bucket] where the one in it is, or 127. half[]: the positive entries.
  LevelTable below, cut, half;
};
template <int F>
constexpr int HALF = 1 << (code_bits(F) - 1);
// Of magnitudes in eighths of a codebook unit.
template <int F>
constexpr int SHIFT = F == TQ5 ? 5 : 6;
template <int F>
constexpr int BUCKETS = F == TQ5 ? 32 : 16;
// Rows that are encoded together, and the values of them.
constexpr int MAX_ROWS = 16, MAX_BATCH = MAX_DIM;

// Everything about a codebook format that Python hands over at import.
struct Book {
  int count = 0;         // 4, 8, 16 or 32
  float value[32] = {};  // ascending
  float cut[31] = {};    // code = number of cuts < z
  float start = 0;       // row formats: unit of a unit-variance row
  Table key = {}, value_side = {};
  const UnitSearch* search = nullptr;               // of the row formats without a trellis
  const Trellis* trellis = nullptr;                 // where it has one,
  const Units* units = nullptr;                     // and its units
  const WideTrellis* wide_trellis = nullptr;        // tbq3_tcq
  const float* projection = nullptr;                // qjl1_256: [128][256]
  const float* residual = nullptr;                  // q4_polar_res: [128] signs of RESIDUAL
  const float *before = nullptr, *after = nullptr;  // tbq3_tcq: signs of R128, [128]
};

struct Counts {
  std::int64_t saturated = 0, flushed = 0;
};

struct RowGroup {    // up to 4 query rows that share K and V loads
  int first, width;  // width 1, 2 or 4; rows beyond the block are padding
};

// Rows x to rows y, which may be the same.
struct Rotation {
  const float* x;
  std::ptrdiff_t x_stride;
  float* y;
  std::ptrdiff_t y_stride;
  int rows;
};

// One table per instruction set. Widths are indexed 0, 1, 2 for 1, 2, 4 rows.
struct Kernels {
  const char* name;
  // Entries of the row formats have to be shifted to 0..255: see Table.
  bool unsigned_rows;
  // Rows of a format whose layout_of is another: out[token] becomes its row in that layout. Null
  // for the others, whose rows are read as they are stored.
  void (*repack[FORMATS])(const Rows&, const Book&, std::uint8_t* out, std::ptrdiff_t stride);
  // The functions down to `score` take layouts as formats.
  // Position 0..31 of a group as decode_keys, score and decode_values order it -> its code.
  int (*key_element)(int format, int position);
  int (*score_element)(int format, int position);
  int (*value_element)(int format, int position);

  // Decode a tile into scratch: int16 [token][padded dim], or float. Scales go to
  // scales[(t & 1) * TILE / 2 + t / 2] (row) or scales[t * groups + g] (block).
  // False if a stored scale is NaN or infinite.
  bool (*decode_keys[LAYOUTS])(const Rows&, const Table&, void* out, float* scales);
  // Groups [first, last) of a tile: pairs [token / 2][width][2], where width is 32 times the
  // groups, int16 or what the set prefers for the row formats, with scales[(g - first) * TILE + (t
  // & 1) * TILE / 2 + t / 2] (row: g = first). On the real path float [token][width].
  bool (*decode_values[LAYOUTS])(const Rows&, const Table&, int first, int last, void* out,
                                 float* scales);

  // Scores of `width` rows against n decoded tokens, to the two planes at out. `start` (row path)
  // is what the sum of each row starts from: -offset times the sum of its query.
  void (*dot[PATHS][WIDTHS])(const void* query, std::ptrdiff_t query_stride, const float* row_scale,
                             const std::int32_t* start, const void* keys, const float* scales,
                             int n, int dim, float* out, std::ptrdiff_t plane);
  // decode_keys and dot together, for one group of rows; null on the real path.
  bool (*score[LAYOUTS][WIDTHS])(const Rows&, const Table&, const void* query,
                                 std::ptrdiff_t query_stride, const float* row_scale,
                                 const std::int32_t* start, float* scales, float* out,
                                 std::ptrdiff_t plane);
  // Online softmax (base 2) over n tokens in two planes: scores become probabilities relative to
  // the new maximum; returns true if an earlier sum has to be multiplied by alpha.
  bool (*softmax[WIDTHS])(float* scores, std::ptrdiff_t plane, int n, float* maximum, float* sum,
                          float* alpha);
  // 16-bit weight pairs of probability x stored scale: words [token / 2][width], step [width].
  void (*weights[WIDTHS])(const float* probability, std::ptrdiff_t plane, const float* scales,
                          int n, int largest, float* scratch, std::int32_t* words, float* step);
  // out[row][padded dim] += weights x (values - offset). Block formats: `plane` is 0 where all
  // groups share the weights of a token.
  void (*accumulate[PATHS][WIDTHS])(const void* weights, std::ptrdiff_t plane, const float* step,
                                    const void* values, int n, int dim, int offset, float* out,
                                    std::ptrdiff_t out_stride);

  // Many query rows: panels of `panel` rows, see panel.h.
  int panel;
  // As decode_values, but int16 pairs for row formats too.
  bool (*decode_pairs[LAYOUTS])(const Rows&, const Table&, int first, int last, void* out,
                                float* scales);
  void (*panel_scores)(const std::int32_t* query, const std::int16_t* keys, int width,
                       const float* unit, int n, float* scores);
  void (*panel_scores_real)(const float* query, const float* keys, int width, int n, bool first,
                            float* scores);
  bool (*panel_softmax)(float* scores, int n, bool masked, const float* factor, const float* unit,
                        float room, float* maximum, float* sum, float* alpha, std::int32_t* words,
                        float* step);
  void (*panel_values)(const std::int32_t* weights, const std::int16_t* values, int width,
                       int pairs, const float* step, float* out);
  void (*panel_values_real)(const float* weights, const float* values, int width, int n,
                            float* out);
  void (*panel_scale)(float* out, int width, const float* alpha);
  void (*level_keys)(std::int16_t* keys, int n, int groups, int largest, float* scales, float norm,
                     float* unit);
  void (*value_units)(const float* scales, int columns, float* unit);
  void (*level_values)(std::int16_t* values, int n, int groups, int block_groups, int shift,
                       const float* scales, const float* unit);
  void (*centre)(std::int16_t* entry, int n, int offset);

  void (*scale_row)(float* x, int n, float factor);
  // Query row (stored domain, natural order) -> int16 in natural order; returns the step.
  float (*quantize)(const float* x, int n, int largest, std::int16_t* out);
  // y = x * signs (null: x) in Hadamard blocks, normalised; signs repeat after `period` values.
  void (*rotate)(const Rotation&, const float* signs, int period, const int* parts, int n_parts);
  // Every 128 values times a [128][256] table, to 256.
  void (*project)(const float* x, int dim, const float* table, float* out);

  // Up to MAX_ROWS rows of the stored domain, of MAX_BATCH values together; `y` reads 0 from dim to
  // the next multiple of 64. Formats with blocks of 128 take the plain basis: their norm comes
  // before the rotation.
  void (*encode[FORMATS])(const float* y, std::ptrdiff_t stride, int rows, int dim, const Book&,
                          std::uint8_t* out, Counts&);
  bool (*decode[LAYOUTS])(const std::uint8_t* row, int dim, const Book&, float* out);
  // Bits of the largest magnitude, as an infinity or more where one is not finite.
  std::uint32_t (*largest_bits)(const float* x, std::ptrdiff_t n);
  bool (*finite)(const float* x, std::ptrdiff_t n);
  // True only if all magnitudes are below `limit`, of which the square is finite. It may be false
  // where some come close, and is where one is not finite.
  bool (*all_below)(const float* x, std::ptrdiff_t n, float limit);
};

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx2vnni;
extern const Kernels kernels_avx512;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif

}  // namespace kvproof
