"""Tests; a package so that helpers can be imported from the repository root."""
