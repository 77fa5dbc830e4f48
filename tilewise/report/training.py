"""The same small GPT trained twice from one seed, with standard attention and with tilewise, step by step in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..examples.char_gpt import AttentionFunction, Size, train


@dataclass(slots=True)
class Curves:
    """Losses in nats per character, one a step."""

    standard: list[float] = field(default_factory=list)
    tilewise: list[float] = field(default_factory=list)

    @property
    def largest_difference(self) -> float:
        """Over all steps. NaN in either curve gives NaN, which is below no bound.

        >>> Curves([4.0, 3.0], [4.0, 3.25]).largest_difference
        0.25
        """
        differences = [abs(a - b) for a, b in zip(self.standard, self.tilewise, strict=True)]
        return max(differences, key=lambda x: (x != x, x), default=0.0)

    def final(self, steps: int = 20) -> tuple[float, float]:
        """(standard, tilewise): the mean loss of the last `steps` steps, for one batch's loss is a matter of luck."""
        standard, tilewise = self.standard[-steps:], self.tilewise[-steps:]
        return sum(standard) / len(standard), sum(tilewise) / len(tilewise)


def compare(
    standard: AttentionFunction, tilewise: AttentionFunction, steps: int, size: Size, seed: int, device: str
) -> Iterator[Curves]:
    """The curves as they grow, after each step of both. The two runs share nothing but the seed.

    >>> from tilewise.examples.char_gpt import standard_attention
    >>> size = Size(context=8, layers=1, heads=1, width=8, batch=2)
    >>> *_, curves = compare(standard_attention, standard_attention, 3, size, 0, "cpu")
    >>> len(curves.standard), curves.largest_difference
    (3, 0.0)
    """
    curves = Curves()
    runs = (train(attend, steps, size, seed, device) for attend in (standard, tilewise))
    for loss, other in zip(*runs, strict=True):
        curves.standard.append(loss)
        curves.tilewise.append(other)
        yield curves
