"""Between taps and the layer ids that an engine understands.

Tap k is the residual stream that enters decoder layer k; tap L is the last layer's output before the final norm.
What an engine captures for an id depends on engine, version and model family, so every rule is a row of the engine's
own ``layer_ids.py`` with its source, and what no row covers is refused. The convention gate then proves the row by
measuring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infra.config.round import TargetShape
from infra.config.version import Version, dotted, read_version
from infra.errors import ConfigError, EngineError


@dataclass(frozen=True)
class Unless:
    """Lists of ids that an engine reads in another way than the rest of them.

    Args:
        when: which lists: those whose first id is 1, or whose largest id is the number of layers L.
        offset: engine id minus tap for these lists.
    """

    when: Literal["first is 1", "largest is L"]
    offset: int

    def covers(self, ids: Sequence[int], layers: int) -> bool:
        """Whether the engine reads ``ids`` in this way."""
        return ids[0] == 1 if self.when == "first is 1" else max(ids) == layers


@dataclass(frozen=True)
class Rule:
    """How an engine numbers captured layers for some families.

    Args:
        families: config.json's ``model_type`` of the (text part of the) target.
        since: first version, (major, minor, patch), the row holds for.
        until: last version, (major, minor, patch), included.
        offset: engine id minus tap.
        lowest_tap: lowest tap that can be captured.
        final: "id": tap L is asked for by its own id; "none": it cannot be asked for.
        source: where this was read or what was run.
        unless: lists of ids that the engine reads in another way.
    """

    families: tuple[str, ...]
    since: Version
    until: Version
    offset: int
    lowest_tap: int
    final: Literal["id", "none"]
    source: str
    unless: Unless | None = None

    def taps(self, ids: Sequence[int], layers: int) -> tuple[int, ...]:
        """Taps that the engine captures for ``ids``, at least one, of a target of ``layers`` layers."""
        offset = self.unless.offset if self.unless is not None and self.unless.covers(ids, layers) else self.offset
        return tuple(number - offset for number in ids)


@dataclass(frozen=True)
class LayerNumbers:
    """The ids that make an engine feed a draft its taps.

    Args:
        version: the engine version they were made for.
        since: first version of the engine that is known to number so.
        until: last such version.
        taps: the draft's taps, ascending.
        ids: the engine's ids for them, in the same order.
    """

    version: str
    since: str
    until: str
    taps: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def range(self) -> str:
        """The versions in words."""
        return self.since if self.since == self.until else f"{self.since} to {self.until}"

    def from_version(self, first: Version) -> "LayerNumbers":
        """These ids, for no version before ``first``."""
        return replace(self, since=dotted(max(read_version(self.since), first)))


@dataclass(frozen=True)
class Numbering:
    """How one engine numbers captured layers.

    Args:
        engine: its name.
        rules: its rows.
    """

    engine: str
    rules: tuple[Rule, ...]

    def ids(self, version: str, family: str, taps: Sequence[int], layers: int) -> tuple[int, ...]:
        """Ids that make the engine capture ``taps`` and, where it can be asked for, tap L as the last one.

        Args:
            version: the engine's version, e.g. "0.32.0".
            family: the target's ``model_type``.
            taps: taps, ascending, different, each below ``layers``.
            layers: number of decoder layers L.

        Raises:
            EngineError: no row covers version and family, or the taps cannot be asked for.
        """
        rule = self.find_rule(version, family)
        if not taps or list(taps) != sorted(set(taps)):
            raise EngineError(f"taps {list(taps)} cannot be captured", expected="ascending, different taps")
        for tap in taps:
            if not rule.lowest_tap <= tap < layers:
                raise EngineError(
                    f"tap {tap} cannot be captured by {self.engine} {version} from a {family} target of {layers} "
                    "layers",
                    expected=f"taps from {rule.lowest_tap} to {layers - 1}; tap {layers} is added where the engine "
                    "has it",
                )
        wanted = (*taps, layers) if rule.final == "id" else tuple(taps)
        ids = tuple(tap + rule.offset for tap in wanted)
        if (found := rule.taps(ids, layers)) != wanted:
            raise EngineError(
                f"taps {list(taps)} cannot be captured by {self.engine} {version} from a {family} target: it reads "
                f"ids {list(ids)} as taps {list(found)}",
                expected="a list of taps that does not begin with 1",
                fix="choose another first tap, as [2, L // 2, L - 3]",
            )
        return ids

    def numbers(self, taps: Sequence[int], shape: TargetShape, version: str | None) -> LayerNumbers:
        """A draft's taps in the engine's numbering, and the versions that it holds for.

        Args:
            taps: the draft's taps, ascending.
            shape: the target's.
            version: the engine's version; None for the newest one whose numbering is known.

        Raises:
            EngineError: as :meth:`ids`.
        """
        version = version or self._newest(shape.family)
        rule = self.find_rule(version, shape.family)
        ids = self.ids(version, shape.family, taps, shape.layers)
        return LayerNumbers(version, dotted(rule.since), dotted(rule.until), tuple(taps), tuple(ids))

    def find_rule(self, version: str, family: str) -> Rule:
        """The row for a version of the engine and a model family.

        Raises:
            EngineError: there is none, or the version cannot be read.
        """
        try:
            number = read_version(version)
        except ConfigError as error:
            raise EngineError(error.what, expected=error.expected) from error
        of_family = [rule for rule in self.rules if family in rule.families]
        for rule in of_family:
            if rule.since <= number <= rule.until:
                return rule
        known = sorted({name for rule in self.rules for name in rule.families})
        versions = [f"{dotted(rule.since)} to {dotted(rule.until)}" for rule in of_family]
        raise EngineError(
            f"how {self.engine} {version} numbers the captured layers of a {family!r} target is not known",
            expected=f"{self.engine} {' or '.join(versions)}"
            if versions
            else f"one of the families {known} for engine {self.engine!r}",
            fix=f"read the engine's source for this family, add a row with its source to {self._place}, and let the "
            "convention gate prove it",
        )

    def _newest(self, family: str) -> str:
        known = [rule.until for rule in self.rules if family in rule.families]
        if not known:
            raise EngineError(
                f"how {self.engine} numbers the captured layers of a {family!r} target is not known",
                fix=f"add a row with its source to {self._place}",
            )
        return dotted(max(known))

    @property
    def _place(self) -> str:
        return f"infra/engines/{self.engine}/layer_ids.py"
