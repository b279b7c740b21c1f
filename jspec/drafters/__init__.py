"""Drafters, one a file; `base` says what a drafter is."""
