"""With what: plain Python below the tasks."""

import sys

__version__ = "0.1.0"

# speculators declares these; what pip installs was built for another torch, and breaks each import of transformers.
# Nothing here needs them: they count as not installed.
for _name in ("torchvision", "torchaudio"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
