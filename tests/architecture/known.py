"""What of the house is not in order yet: these lists may only become shorter."""

UPWARD = {
    ("modules.matching", "acceleration.compilation"),
    ("protocols", "core.durations"),
    ("protocols", "core.plan"),
    ("protocols", "core.records"),
    ("protocols", "core.suggestions"),
}
"""Imports of a package that stands later in the order: (file, imported file)."""

CIRCLES = [
    {"modules.activations", "modules.dry_run"},
]
"""Files that import each other in a circle."""
