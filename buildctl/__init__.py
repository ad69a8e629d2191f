"""buildctl: compose, build, prove and push layered SGLang images for CUDA 13 and SM120."""

__version__ = "0.1.0"
