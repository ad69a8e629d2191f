"""`python -m buildctl`."""

from buildctl.cli import main

main()
