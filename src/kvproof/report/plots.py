"""The two plots of the report, as inline SVG that takes its colours from the page's CSS.

Drawn by hand rather than by a plotting library: the page's dark mode then applies to them, text
stays text, and both together are a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup

SERIES = 12  # colours in the page's CSS: .s0 ... .s11
WIDTH, HEIGHT = 760, 400
SMALL_WIDTH, SMALL_HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 116, 18, 48
LABEL_GAP = 14  # px between the lines of neighbouring labels

Row = Mapping[str, Any]


def _markup(parts: Sequence[str], title: str, width: int, height: int) -> Markup:
    from markupsafe import Markup

    head = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
    return Markup(head + "".join(parts) + "</svg>")


def _text(x: float, y: float, text: str, css: str = "tick", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _name(r: Row) -> str:
    """`q8_0` for q8_0/q8_0: labels have little room."""
    return str(r["key"] if r["key"] == r["value"] else r["pair"])


def _spread(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Label heights near the wanted ones, at least LABEL_GAP apart where there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(LABEL_GAP, (high - low) / max(len(wanted) - 1, 1))
    placed = [0.0] * len(wanted)
    previous = low - gap
    for i in order:
        placed[i] = previous = max(wanted[i], previous + gap)
    previous = high + gap
    for i in reversed(order):
        placed[i] = previous = min(placed[i], previous - gap)
    return placed


def quality_against_bytes(rows: Sequence[Row], bound: float) -> Markup | None:
    """KL divergence (log scale) against the size of the cache; None without a measured pair."""
    points = [r for r in rows if r["kld"] and r["share"] is not None]
    if not points:
        return None
    floor = max((r["quality"].get("kld_floor", 0.0) for r in points), default=0.0)
    lowest = min([bound, *(max(r["kld"]["low"], r["kld"]["value"] / 3, 1e-7) for r in points)])
    bottom = math.floor(math.log10(lowest))
    top = math.ceil(math.log10(max([bound, *(r["kld"]["high"] for r in points)])))
    top = max(top, bottom + 1)
    x_max = max(0.6, math.ceil(10 * max(r["share"] for r in points)) / 10)

    def x(share: float) -> float:
        return float(LEFT + share / x_max * (WIDTH - LEFT - RIGHT))

    def y(kld: float) -> float:
        inner = HEIGHT - TOP - BOTTOM
        level = (math.log10(max(kld, 10.0**bottom)) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - inner * min(level, 1.0)

    right = WIDTH - RIGHT
    parts = [
        f'<rect x="{LEFT}" y="{y(bound):.1f}" width="{right - LEFT}" '
        f'height="{HEIGHT - BOTTOM - y(bound):.1f}" class="good"/>'
    ]
    for e in range(bottom, top + 1):
        parts.append(_line(LEFT, y(10.0**e), right, y(10.0**e), "grid"))
        parts.append(_text(LEFT - 8, y(10.0**e) + 4, f"{10.0**e:.{max(-e, 0)}f}", anchor="end"))
    for i in range(0, round(10 * x_max) + 1, 2 if x_max > 0.7 else 1):
        parts.append(_text(x(i / 10), HEIGHT - BOTTOM + 18, f"{10 * i} %"))
        parts.append(_line(x(i / 10), HEIGHT - BOTTOM, x(i / 10), HEIGHT - BOTTOM + 4, "axis"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, right, HEIGHT - BOTTOM, "axis"))
    parts.append(_line(LEFT, y(bound), right, y(bound), "bound"))
    parts.append(_text(LEFT + 6, y(bound) - 6, f"policy bound {bound:g}", "note", "start"))
    if floor > 0:
        below = ", below this scale" if floor < 10.0**bottom else ""
        note = f"noise of the engine {floor:.1g}{below}"
        parts.append(_line(LEFT, y(floor), right, y(floor), "floor"))
        parts.append(_text(LEFT + 6, y(floor) - 6, note, "note", "start"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, "cache size, of the f16 cache", "label"))
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(14 {HEIGHT / 2 - 10:.0f}) '
        'rotate(-90)">KL divergence, nats per token (lower is better)</text>'
    )
    heights = _spread([y(r["kld"]["value"]) for r in points], TOP, HEIGHT - BOTTOM)
    for r, height in zip(points, heights, strict=True):
        px, py = x(r["share"]), y(r["kld"]["value"])
        css = f"s{r['series']}"
        low, high = y(r["kld"]["low"]), y(r["kld"]["high"])
        parts.append(_line(px, low, px, high, f"bar {css}"))
        if r["status"] == "chosen":
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="10" class="ring"/>')
        hollow = "" if r["status"] in ("chosen", "accepted") else " hollow"
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" class="dot {css}{hollow}"/>')
        parts.append(_line(px + 7, py, right + 6, height, "leader"))
        parts.append(_text(right + 10, height + 4, _name(r), f"name {css}", "start"))
    title = "KL divergence against cache size, one point per candidate"
    return _markup(parts, title, WIDTH, HEIGHT)


def speed_against_depth(rows: Sequence[Row], phase: str, least: float) -> Markup | None:
    """Speed relative to f16 against the tokens already cached; None without a measured pair."""
    lines = []
    for r in rows:
        points = sorted((d, s) for (p, d), s in r["speeds"].items() if p == phase)
        if points:
            lines.append((r, points))
    if not lines:
        return None
    width, height = SMALL_WIDTH, SMALL_HEIGHT
    depths = sorted({d for _, points in lines for d, _ in points})
    values = [s[k] for _, points in lines for _, s in points for k in ("low", "high")]
    low, high = min(*values, least, 1.0), max(*values, 1.0)
    step = 0.05 if high - low < 0.4 else 0.1 if high - low < 0.9 else 0.5
    # Half a step of room below the bound, where its name stands.
    low = math.floor(min(low, least - step / 2) / step) * step
    high = math.ceil(high / step) * step
    right = width - RIGHT

    def x(depth: float) -> float:
        if len(depths) == 1:
            return (LEFT + right) / 2
        first, last = math.log2(depths[0]), math.log2(depths[-1])
        return LEFT + 30 + (math.log2(depth) - first) / (last - first) * (right - LEFT - 60)

    def y(ratio: float) -> float:
        return float(height - BOTTOM - (ratio - low) / (high - low) * (height - TOP - BOTTOM))

    parts = [
        f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{y(least) - TOP:.1f}" '
        'class="good"/>'
    ]
    for i in range(round((high - low) / step) + 1):
        value = low + i * step
        parts.append(_line(LEFT, y(value), right, y(value), "grid"))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.2f}x", anchor="end"))
    parts.append(_line(LEFT, y(1.0), right, y(1.0), "one"))
    parts.append(_line(LEFT, y(least), right, y(least), "bound"))
    parts.append(_text(LEFT + 6, y(least) + 13, f"policy bound {least:g}x", "note", "start"))
    for d in depths:
        parts.append(_line(x(d), height - BOTTOM, x(d), height - BOTTOM + 4, "axis"))
        parts.append(_text(x(d), height - BOTTOM + 18, f"{d:,}"))
    parts.append(_line(LEFT, height - BOTTOM, right, height - BOTTOM, "axis"))
    parts.append(_text((LEFT + right) / 2, height - 8, "tokens in the cache", "label"))
    ends = _spread([y(points[-1][1]["value"]) for _, points in lines], TOP, height - BOTTOM)
    for n, ((r, points), end) in enumerate(zip(lines, ends, strict=True)):
        shift = 7.0 * (n - (len(lines) - 1) / 2)
        css = f"s{r['series']}"
        path = " ".join(f"{x(d) + shift:.1f},{y(s['value']):.1f}" for d, s in points)
        parts.append(f'<polyline points="{path}" class="curve {css}"/>')
        for d, s in points:
            px = x(d) + shift
            parts.append(_line(px, y(s["low"]), px, y(s["high"]), f"bar {css}"))
            parts.append(
                f'<circle cx="{px:.1f}" cy="{y(s["value"]):.1f}" r="4" class="dot {css}"/>'
            )
        last = x(points[-1][0]) + shift
        parts.append(_line(last + 6, y(points[-1][1]["value"]), right + 6, end, "leader"))
        parts.append(_text(right + 10, end + 4, _name(r), f"name {css}", "start"))
    what = "Decode" if phase == "tg" else "Prompt"
    title = f"{what} speed relative to f16 against tokens in the cache"
    return _markup(parts, title, width, height)
