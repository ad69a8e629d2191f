"""Patched modules of the real source, and what tests of patches share."""
