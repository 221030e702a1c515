"""``eagle3 fields``: every field of a round, from the types."""

import sys

from deployments.cli.output import Json, print_json


def fields(as_json: Json = False) -> None:
    """Print every field of a round and every setting of the machine, as Markdown."""
    from deployments.fields import as_facts, page

    if as_json:
        print_json(as_facts())
    else:
        sys.stdout.write(page())
