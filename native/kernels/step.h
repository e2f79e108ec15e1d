// What one new token does to one layer of a cache, without a call for each part of it: see
// step.cpp.
#pragma once

#include <vector>

#include "ops.h"

namespace kvproof {

// Rows of one token, a head each: base + head * stride.
struct TokenRows {
  const float* base;
  std::ptrdiff_t stride;
};
struct TokenCodes {
  std::uint8_t* base;
  std::ptrdiff_t stride;
};

// What is done to keys before they are encoded, as src/kvproof/conditioner.py has it. Means of
// pages are float16 rows: of every KV head, or (pairs >= 0) of (cos, sin, 1 ...), which turn
// `mean`.
struct Condition {
  const float* scale;  // [kv heads][dim of keys]
  const float* mean;   // [kv heads][dim of keys], null where pages hold means
  int pairs;           // of channels (j, j + pairs) that turn; -1: pages hold means
};

struct Shape {
  int heads, kv_heads, dim_k, dim_v;
};

// Where a token's codes go: rows, a head each, or a slot of tiles.
struct Slot {
  std::uint8_t* base;
  std::ptrdiff_t stride;
  const TileBuffer* tiles;  // not null: these, and
  std::ptrdiff_t at;        // the slot
};

// Encodes the key and the value of a token to where the cache holds them. `condition` may be null;
// `page` is the float16 row, or rows, of the token's page. Scales are null, or one a KV head.
// False if a number is not finite; the slots are then not to be used.
bool append_token(const Kernels& isa, Coded key, Coded value, const Shape& shape, TokenRows k,
                  TokenRows v, const float* k_scale, const float* v_scale,
                  const Condition* condition, const std::uint8_t* page, std::ptrdiff_t page_stride,
                  const Slot& k_slot, const Slot& v_slot);

// The coded rows of a layer.
struct Held {
  Side keys, values;
  const TileKernels* tiles;  // not null: in tiles
  TileSide key_tiles, value_tiles;
  int n, kv_heads, dim_v;
};

// First tokens in f16, and which of them the query sees.
struct Sinks {
  Side keys, values;
  Mask mask;
};

// Pages of the coded rows: `means` are their rows, [page][kv head, or 1], row t is of page
// (phase + t) / page. page 0: one mean for all rows.
struct Pages {
  Side means;
  std::int64_t page, phase;
};

// Attention of one token (q.n is 1) over sinks (may be null) and coded rows whose keys may be
// conditioned, joined. False if a number is not finite, of the query or stored.
bool attend_token(const Kernels& isa, int threads, const Query& q, const Held& held, Mask mask,
                  float scale, const Sinks* sinks, const Condition* condition, const Pages& pages,
                  float* out);

}  // namespace kvproof
