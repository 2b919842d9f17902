"""Makes the pictures of the README from a real run of its first program: `python docs/images/make_images.py`.

`terminal.svg` is what the program prints, `confusion.png` the plot of its report. Needs the dependency group `docs` and
the extra `plot`.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI

HERE = Path(__file__).parent
PROGRAM = re.search(r"^```python\n(.*?)^```$", (HERE.parents[1] / "README.md").read_text(), re.M | re.S)


def main() -> None:
    """Run the program and write both pictures."""
    assert PROGRAM is not None
    torch.set_num_threads(1)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(PROGRAM[1], names)
    names["trainer"].report(names["val"]).plot(HERE / "confusion.png")

    text = printed.getvalue().rstrip()
    console = Console(record=True, width=max(map(len, text.splitlines())) + 1, file=io.StringIO())
    console.print(f"$ python digits.py\n{text}", highlight=False, markup=False)
    svg = console.export_svg(title="trainwright", theme=MONOKAI)
    # Rich names fonts of a server; the reader's own will do.
    (HERE / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S))


if __name__ == "__main__":
    main()
