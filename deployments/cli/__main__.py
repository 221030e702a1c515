"""``python -m deployments.cli``."""

import sys

from deployments.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
