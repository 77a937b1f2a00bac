"""`python -m inlay`: the same as the `inlay` script."""

import sys

from inlay.cli import main

sys.exit(main())
