"""Events: what happens to a round while it goes on by itself. Each is a line in the log, too."""

from dataclasses import dataclass
from logging import Logger


@dataclass(frozen=True)
class Event:
    """Something that happened and was dealt with.

    Attributes:
        name: what happened, e.g. ``server.hang`` or ``disk.pause``.
        resource: to what, e.g. ``server.vllm-extract`` or ``round.smoke``.
        text: one line for people.
    """

    name: str
    resource: str
    text: str

    def tell(self, log: Logger) -> None:
        """Log the text as a warning; the record's attribute ``event`` is this event, for whoever shows events."""
        log.warning(self.text, extra={"event": self})
