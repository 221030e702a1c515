"""``python -m deployments.cli``."""

import sys


def run() -> int:
    """The command line; an interruption while it is still being imported is one line, too."""
    try:
        from deployments.cli.app import main
    except KeyboardInterrupt:
        print("eagle3: interrupted.", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
