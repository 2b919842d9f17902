"""Draws the layers and the imports between them, as they are in the source, to docs/layers.svg.

python tests/architecture/draw_layers.py
"""

from __future__ import annotations

from dataclasses import dataclass

from layers import LAYERS, ROOT, files, folder_imports, place

PICTURE = ROOT / "docs" / "layers.svg"
WHAT = {
    9: "the demo",
    8: "the public names",
    7: "functions that take a trainer",
    6: "the loop",
    5: "what one fit needs around it",
    4: "what changes a run, feeds it, watches it",
    3: "the processes of a run",
    2: "device, gradients, files",
    1: "records, spans, Protocols, errors",
}
COLOURS = {
    "__main__.py": "#64748b",
    "__init__.py": "#475569",
    "tools": "#0f766e",
    "trainer.py": "#b91c1c",
    "run": "#c2410c",
    "slots": "#a16207",
    "data": "#15803d",
    "observers": "#0e7490",
    "parallel": "#1d4ed8",
    "runtime": "#6d28d9",
    "base": "#334155",
}
LEFT, RIGHT, TOP, BOTTOM = 232, 24, 76, 20
COLUMN, WIDTH, HEIGHT = 106, 94, 38
GAP, LANE = 34, 18
"""Below a row lie the lanes of its boxes: the first so far below, the others so far apart."""
FONT = "font-family=\"-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif\""


@dataclass(frozen=True, slots=True)
class Box:
    """A folder or file: its centre, its top, and the height of the lane on which its imports leave."""

    name: str
    x: int
    y: int
    lane: int

    @property
    def colour(self) -> str:
        return COLOURS[self.name]


def picture() -> str:
    """The SVG: a box per folder in the row of its layer, and a line from each to what it imports, with the number."""
    boxes, bands, height = laid_out({place(path) for path in files()})
    width = LEFT + COLUMN * len(boxes) + RIGHT
    edges = folder_imports()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{FONT} role="img" aria-label="The layers of trainwright and the imports between them">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        '<text x="24" y="36" font-size="19" font-weight="600" fill="#0f172a">The layers of trainwright</text>',
        '<text x="24" y="58" font-size="13" fill="#64748b">The line under a box turns down at every box it '
        "imports from; the number counts the imports. Nothing points up.</text>",
        *(_band(number, top, bottom, width) for number, (top, bottom) in bands.items()),
        *(_trunk(boxes, box, edges) for box in boxes.values()),
        *(_lane(boxes, box, edges) for box in boxes.values()),
        *(_box(box) for box in boxes.values()),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def laid_out(places: set[str]) -> tuple[dict[str, Box], dict[int, tuple[int, int]], int]:
    """The boxes by name, from top left to bottom right; top and bottom of each layer's band; the picture's height."""
    boxes: dict[str, Box] = {}
    bands: dict[int, tuple[int, int]] = {}
    top, column = TOP, 0
    for number in sorted(set(LAYERS.values()), reverse=True):
        row = [name for name in LAYERS if LAYERS[name] == number and name in places]
        if not row:
            continue
        for index, name in enumerate(row):
            lane = top + HEIGHT + GAP + LANE * (len(row) - 1 - index) - 16
            boxes[name] = Box(name, LEFT + COLUMN * column + COLUMN // 2, top, lane)
            column += 1
        bottom = top + HEIGHT + (GAP + LANE * (len(row) - 1) if number > 1 else 0)
        bands[number] = (top, bottom)
        top = bottom
    return boxes, bands, top + BOTTOM


def _band(number: int, top: int, bottom: int, width: int) -> str:
    middle = top + HEIGHT // 2
    return (
        f'<line x1="24" y1="{top - 8}" x2="{width - 24}" y2="{top - 8}" stroke="#e2e8f0"/>'
        f'<text x="24" y="{middle + 5}" font-size="15" font-weight="600" fill="#0f172a">{number}</text>'
        f'<text x="44" y="{middle + 5}" font-size="12" fill="#475569">{WHAT[number]}</text>'
    )


def _trunk(boxes: dict[str, Box], box: Box, edges: dict[tuple[str, str], int]) -> str:
    """The line down into a box, from the highest lane that imports from it."""
    sources = [boxes[here] for here, there in edges if there == box.name]
    if not sources:
        return ""
    start, end = min(source.lane for source in sources), box.y - 7
    return (
        f'<line x1="{box.x}" y1="{start}" x2="{box.x}" y2="{end}" stroke="{box.colour}" stroke-width="1.5" '
        f'stroke-opacity="0.55"/><path d="M{box.x - 5} {end - 1} h10 l-5 7 z" fill="{box.colour}"/>'
    )


def _lane(boxes: dict[str, Box], box: Box, edges: dict[tuple[str, str], int]) -> str:
    """The line out of a box, along its lane, with a dot and the number of imports at each box it imports from."""
    targets = sorted((boxes[there].x, n) for (here, there), n in edges.items() if here == box.name)
    if not targets:
        return ""
    assert targets[0][0] > box.x, f"{box.name} imports upward"
    line = (
        f'<path d="M{box.x} {box.y + HEIGHT} V{box.lane - 6} q0 6 6 6 H{targets[-1][0]}" fill="none" '
        f'stroke="{box.colour}" stroke-width="1.5"/>'
    )
    dots = "".join(
        f'<circle cx="{x}" cy="{box.lane}" r="3.5" fill="{box.colour}"/>'
        f'<text x="{x + 6}" y="{box.lane - 4}" font-size="11.5" font-weight="600" stroke="#ffffff" stroke-width="4" '
        f'stroke-linejoin="round">{n}</text>'
        f'<text x="{x + 6}" y="{box.lane - 4}" font-size="11.5" font-weight="600" fill="{box.colour}">{n}</text>'
        for x, n in targets
    )
    return line + dots


def _box(box: Box) -> str:
    return (
        f'<rect x="{box.x - WIDTH // 2}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{box.colour}"/>'
        f'<text x="{box.x}" y="{box.y + HEIGHT // 2 + 5}" font-size="13" font-weight="600" text-anchor="middle" '
        f'fill="#ffffff">{box.name}</text>'
    )


def main() -> None:
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
