"""The laws: what is promised, each against a hand-written loop."""
