"""Draws ``pipeline.svg``: one step of GPipe with four stages and eight micro-batches.

    python docs/pipeline.py > docs/pipeline.svg

Colours have medium brightness and the background is transparent, so that the picture is legible on
white and on black.
"""

from __future__ import annotations

from collections.abc import Iterator

STAGES, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 1, 2
"""The cells that one micro-batch occupies on a stage."""
CELL, ROW, GAP = 24, 26, 3
LEFT, TOP = 66, 26
BLUE, ORANGE, GREY = "#3b78c3", "#b85c14", "#76808c"


def cells() -> Iterator[tuple[int, int, int, int, str]]:
    """Yield the stage, micro-batch, first cell, cells and colour of each computation."""
    turn = MICROBATCHES + STAGES - 1  # when the last stage has finished its last forward
    for stage in range(STAGES):
        for m in range(MICROBATCHES):
            yield stage, m, (stage + m) * FORWARD, FORWARD, BLUE
            later = STAGES - 1 - stage
            yield stage, m, turn * FORWARD + (later + m) * BACKWARD, BACKWARD, ORANGE


def box(x: float, y: float, cells: float, colour: str, more: str = "") -> str:
    width, height = cells * CELL - GAP, ROW - GAP
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}"{more}/>'


def text(x: float, y: float, label: object, colour: str = GREY, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{label}</text>'


def svg() -> str:
    """Return the picture."""
    length = (MICROBATCHES + STAGES - 1) * (FORWARD + BACKWARD)
    width, below = LEFT + length * CELL, TOP + STAGES * ROW
    bubble = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    height = below + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-size="13" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', sans-serif\">",
        f"<title>A step of {STAGES} stages and {MICROBATCHES} micro-batches</title>",
        text(LEFT, TOP - 10, "time →"),
    ]
    for stage in range(STAGES):
        y = TOP + stage * ROW
        lines.append(text(LEFT - 10, y + 16, f"stage {stage}", anchor="end"))
        lines.append(box(LEFT, y, length, GREY, ' fill-opacity="0.2"'))
    for stage, m, first, count, colour in cells():
        x, y = LEFT + first * CELL, TOP + stage * ROW
        lines.append(box(x, y, count, colour))
        lines.append(text(x + (count * CELL - GAP) / 2, y + 16, m, "#fff", "middle"))
    x, y = LEFT, below + 8
    for colour, more, label in (
        (BLUE, "", "forward of a micro-batch"),
        (ORANGE, "", "its backward"),
        (GREY, ' fill-opacity="0.2"', f"idle, the bubble: {bubble:.0%} of the step"),
    ):
        lines += [box(x, y, 1, colour, more), text(x + CELL + 4, y + 16, label)]
        x += CELL + 40 + 7 * len(label)
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    print(svg(), end="")
