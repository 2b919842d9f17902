"""Recognises why a step failed, from what its frames hold: a cause, and what to write instead."""

from __future__ import annotations

from trainwright.run.sites import Site


def cause_of(site: Site) -> tuple[str, str] | None:
    """Why a step failed and what to write instead, or None where it is not known."""
    return None
