"""The program inside the image: serve, benchmark, check. It imports nothing of buildctl."""

__version__ = "0.1.0"
