"""Draws the packages and the imports between them, as they are in the source, to docs/development/layers.svg.

python tests/architecture/draw_layers.py
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from layers import LAYERS, ORDER, ROOT, files, folder_imports, place

PICTURE = ROOT / "docs" / "development" / "layers.svg"
WHAT = {
    "__main__.py": "the demo",
    "__init__.py": "the public names",
    "tools": "functions that take a trainer",
    "testing.py": "checks for objects of your own",
    "trainer.py": "the loop",
    "fit": "one fit",
    "acceleration": "compile, layout, device data",
    "evaluation": "passes without a trace",
    "diagnostics": "why a step failed",
    "observers": "console, journal, loggers",
    "checkpointing": "write, verify, resume",
    "data": "batches and their order",
    "update": "one update",
    "optim": "optimizers, gradients",
    "precision": "autocast, loss scale",
    "schedules": "the learning rate",
    "metrics": "exact means and scores",
    "distributed": "ranks, DDP, FSDP",
    "modules": "a user's nn.Module",
    "core": "records, errors, devices",
    "protocols.py": "what a user may implement",
}
HUES = ("#64748b", "#0f766e", "#b91c1c", "#c2410c", "#a16207", "#15803d", "#0e7490", "#1d4ed8", "#6d28d9", "#334155")
LEFT, RIGHT, TOP, BOTTOM = 24, 24, 76, 20
COLUMN, WIDTH, HEIGHT = 106, 94, 38
GAP, LANE = 34, 18
"""Below a row lie the lanes of its boxes: the first so far below, the others so far apart."""
FONT = "font-family=\"-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif\""


@dataclass(frozen=True, slots=True)
class Box:
    """A folder or file: its center, its top, and the height of the lane on which its imports leave."""

    name: str
    x: int
    y: int
    lane: int

    @property
    def color(self) -> str:
        return HUES[LAYERS[self.name] % len(HUES)]


def picture() -> str:
    """The SVG: a box per folder in the row of its layer, and a line from each to what it imports, with the number."""
    boxes, height = laid_out({place(path) for path in files()})
    width = LEFT + COLUMN * len(boxes) + RIGHT
    edges = folder_imports()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{FONT} role="img" aria-label="The packages of trainwright and the imports between them">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        '<text x="24" y="36" font-size="19" font-weight="600" fill="#0f172a">The packages of trainwright</text>',
        '<text x="24" y="58" font-size="13" fill="#64748b">The line under a box turns down at every box it '
        "imports from; the number counts the imports.</text>",
        *(_row(box, width) for box in boxes.values()),
        *(_trunk(boxes, box, edges) for box in boxes.values()),
        *(_lane(boxes, box, edges) for box in boxes.values()),
        *(_box(box) for box in boxes.values()),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def laid_out(places: set[str]) -> tuple[dict[str, Box], int]:
    """The boxes by name, from top left to bottom right; the picture's height."""
    boxes: dict[str, Box] = {}
    top = TOP
    for name in [name for name in reversed(ORDER) if name in places]:
        boxes[name] = Box(name, LEFT + COLUMN * len(boxes) + COLUMN // 2, top, top + HEIGHT + GAP - 16)
        top += HEIGHT + GAP
    return boxes, top + BOTTOM


def _row(box: Box, width: int) -> str:
    """A thin line above the row of a box, and at its left or right what the box holds."""
    left = box.x > width // 2
    x, anchor = (box.x - WIDTH // 2 - 12, "end") if left else (width - 24, "end")
    return (
        f'<line x1="24" y1="{box.y - 8}" x2="{width - 24}" y2="{box.y - 8}" stroke="#e2e8f0"/>'
        f'<text x="{x}" y="{box.y + HEIGHT // 2 + 5}" font-size="12" fill="#475569" text-anchor="{anchor}">'
        f"{html.escape(WHAT[box.name])}</text>"
    )


def _trunk(boxes: dict[str, Box], box: Box, edges: dict[tuple[str, str], int]) -> str:
    """The line down into a box, from the highest lane that imports from it."""
    sources = [boxes[here] for here, there in edges if there == box.name and boxes[here].x < box.x]
    if not sources:
        return ""
    start, end = min(source.lane for source in sources), box.y - 7
    return (
        f'<line x1="{box.x}" y1="{start}" x2="{box.x}" y2="{end}" stroke="{box.color}" stroke-width="1.5" '
        f'stroke-opacity="0.55"/><path d="M{box.x - 5} {end - 1} h10 l-5 7 z" fill="{box.color}"/>'
    )


def _lane(boxes: dict[str, Box], box: Box, edges: dict[tuple[str, str], int]) -> str:
    """The line out of a box, along its lane, with a dot and the number of imports at each box it imports from."""
    named = [(boxes[there].x, n) for (here, there), n in edges.items() if here == box.name]
    targets = sorted(target for target in named if target[0] > box.x)  # others: tests/architecture/known.py
    if not targets:
        return ""
    line = (
        f'<path d="M{box.x} {box.y + HEIGHT} V{box.lane - 6} q0 6 6 6 H{targets[-1][0]}" fill="none" '
        f'stroke="{box.color}" stroke-width="1.5"/>'
    )
    dots = "".join(
        f'<circle cx="{x}" cy="{box.lane}" r="3.5" fill="{box.color}"/>'
        f'<text x="{x + 6}" y="{box.lane - 4}" font-size="11.5" font-weight="600" stroke="#ffffff" stroke-width="4" '
        f'stroke-linejoin="round">{n}</text>'
        f'<text x="{x + 6}" y="{box.lane - 4}" font-size="11.5" font-weight="600" fill="{box.color}">{n}</text>'
        for x, n in targets
    )
    return line + dots


def _box(box: Box) -> str:
    return (
        f'<rect x="{box.x - WIDTH // 2}" y="{box.y}" width="{WIDTH}" height="{HEIGHT}" rx="7" fill="{box.color}"/>'
        f'<text x="{box.x}" y="{box.y + HEIGHT // 2 + 5}" font-size="13" font-weight="600" text-anchor="middle" '
        f'fill="#ffffff">{box.name}</text>'
    )


def main() -> None:
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
