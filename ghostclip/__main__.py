"""``python -m ghostclip`` is the ``ghostclip`` command."""

import sys

from ghostclip.cli import main

if __name__ == "__main__":
    sys.exit(main())
