"""Bytes and times as people read them; shown in one way everywhere."""


def size(count: float) -> str:
    """Bytes in decimal units: ``512 B``, ``57.3 kB``, ``431 MB``, ``547 GB``."""
    value = float(count)
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or abs(value) >= 100 else 1
    return f"{value:,.{digits}f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: ``30 s``, ``8.2 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
