"""Numbers as people read them."""

from __future__ import annotations


def size(n: float) -> str:
    """Bytes in decimal units, as data sheets have them.

    >>> size(999), size(1536), size(52_428_800)
    ('999 B', '1.54 kB', '52.4 MB')
    """
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops(n: float) -> str:
    """
    >>> flops(8.6e9)
    '8.60 GFLOP'
    """
    return _scaled(n, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def kib(n: float) -> str:
    """Bytes of on-chip memory, which comes in powers of two.

    >>> kib(102_400)
    '100 KiB'
    """
    return f"{n / 1024:.0f} KiB"


def duration(seconds: float) -> str:
    """
    >>> duration(0.00042), duration(0.042), duration(4.2)
    ('420 us', '42.0 ms', '4.20 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def three_digits(x: float) -> str:
    """
    >>> three_digits(1.234), three_digits(12.34), three_digits(1234)
    ('1.23', '12.3', '1234')
    """
    return f"{x:.{2 if x < 9.995 else 1 if x < 99.95 else 0}f}"


def _scaled(n: float, units: tuple[str, ...]) -> str:
    unit = 0
    while n >= 999.5 and unit < len(units) - 1:
        n, unit = n / 1000, unit + 1
    return f"{n:.0f} {units[0]}" if unit == 0 else f"{three_digits(n)} {units[unit]}"
