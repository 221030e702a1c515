"""``python -m infra.environments``: builds and lists the environments, under a bare Python."""

import sys

from infra.environments.building import main

sys.exit(main())
