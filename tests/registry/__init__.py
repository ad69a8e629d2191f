"""A real registry, a fault proxy in front of it, and the tests that need them."""
