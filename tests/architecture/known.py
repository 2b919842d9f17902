"""What is not in order yet: these lists may only become shorter."""

UPWARD = {
    ("protocols", "core.durations"),
    ("protocols", "core.plan"),
    ("protocols", "core.records"),
    ("protocols", "core.suggestions"),
}
"""Imports of a package that stands later in the order: (file, imported file)."""

CIRCLES: list[set[str]] = []
"""Files that import each other in a circle."""
