"""Small training programs, each written once per library in the way that the library's documentation shows."""

NAMES = ("trainwright", "plain", "lightning", "accelerate", "transformers", "ignite")
"""The libraries in the order of the tables; the module of each is `of_<name>`."""
