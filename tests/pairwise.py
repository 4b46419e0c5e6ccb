"""Few cases in which every pair of option values meets (Cohen et al., 1997: most faults need one option, or two)."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]

ATTEMPTS = 100


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Choice], bool]) -> list[Choice]:
    """Greedy: each case is the attempt that holds the most pairs not met before. The same list on every call.

    A pair of values that no attempt of its own makes `possible` is left out.
    """
    generator = random.Random(0)  # its own, so that nothing else moves it
    missing = dict.fromkeys(_all_pairs(factors))
    cases: list[Choice] = []
    while missing:
        wanted = next(iter(missing))
        attempts = [_attempt(factors, missing, wanted, generator) for _ in range(ATTEMPTS)]
        good = [places for places in attempts if possible(_choice(factors, places))]
        if not good:
            del missing[wanted]
            continue
        best = max(good, key=lambda places: sum(pair in missing for pair in _pairs(places)))
        met = set(_pairs(best))
        missing = {pair: None for pair in missing if pair not in met}
        cases.append(_choice(factors, best))
    return cases


def _attempt(
    factors: Mapping[str, Sequence[Any]], missing: Mapping[Pair, None], wanted: Pair, generator: random.Random
) -> dict[str, int]:
    """Keep the wanted pair; give each other factor, in random order, the value that meets the most missing pairs."""
    places = dict(wanted)
    others = [name for name in factors if name not in places]
    for name in generator.sample(others, len(others)):
        gains = [sum(_pair((name, i), other) in missing for other in places.items()) for i in range(len(factors[name]))]
        places[name] = generator.choice([i for i, gain in enumerate(gains) if gain == max(gains)])
    return places


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for a, b in combinations(sorted(factors), 2):
        yield from (((a, i), (b, j)) for i in range(len(factors[a])) for j in range(len(factors[b])))


def _pairs(places: Mapping[str, int]) -> Iterator[Pair]:
    return combinations(sorted(places.items()), 2)


def _pair(a: tuple[str, int], b: tuple[str, int]) -> Pair:
    return (a, b) if a < b else (b, a)


def _choice(factors: Mapping[str, Sequence[Any]], places: Mapping[str, int]) -> Choice:
    return {name: values[places[name]] for name, values in factors.items()}
