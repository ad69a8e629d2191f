"""`python -m entrypoints`."""

import sys

from entrypoints.cli import main

sys.exit(main(sys.argv[1:]))
