"""The command line: ``eagle3`` or ``python -m deployments.cli``."""
