"""``python -m tilewright`` is the command ``tilewright``."""

from __future__ import annotations

import sys

from tilewright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
