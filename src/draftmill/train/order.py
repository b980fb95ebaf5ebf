"""Which samples a step trains on: a shuffled order that depends on the seed and the epoch alone, cut into packs."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the endless stream of packs: the next pack to train on is number `cursor` of `epoch`."""

    epoch: int = 0
    cursor: int = 0


def shuffled(samples: Sequence[int], *, seed: int, epoch: int) -> list[int]:
    """`samples` in the order of one epoch: the same for the same seed and epoch, on any platform."""
    order = list(samples)
    # A string seeds by SHA-512, so near seeds and epochs give unrelated orders.
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def packs(order: Sequence[int], rows: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cuts `order` into packs of whole samples, each of at most `budget` rows.

    Args:
        order: sample indices.
        rows: for every sample of the store, the rows that it takes in a pack.
        budget: rows a pack may hold. A sample longer than that is a pack of its own: nothing is cut, nothing dropped.

    Returns:
        Packs that hold every index of `order` exactly once, in that order.
    """
    done: list[tuple[int, ...]] = []
    pack: list[int] = []
    used = 0
    for index in order:
        if pack and used + rows[index] > budget:
            done.append(tuple(pack))
            pack, used = [], 0
        pack.append(index)
        used += rows[index]
    if pack:
        done.append(tuple(pack))
    return done


def stream(
    samples: Sequence[int], rows: Sequence[int], *, budget: int, seed: int, start: Position
) -> Iterator[tuple[tuple[int, ...], Position]]:
    """Packs without end from `start` on, each with the position after it, which is where a resumed run starts."""
    epoch, cursor = start.epoch, start.cursor
    while True:
        of_epoch = packs(shuffled(samples, seed=seed, epoch=epoch), rows, budget)
        while cursor < len(of_epoch):
            cursor += 1
            after = Position(epoch=epoch, cursor=cursor)
            yield of_epoch[cursor - 1], after if cursor < len(of_epoch) else Position(epoch=epoch + 1)
        epoch, cursor = epoch + 1, 0


def shares(
    packs: Iterator[tuple[tuple[int, ...], Position]], *, each_step: int, rank: int, ranks: int
) -> Iterator[tuple[tuple[int, ...], Position]]:
    """One rank's packs: of every `each_step` packs that one step takes each `ranks`th, with the position after all."""
    for group in itertools.batched(packs, each_step):
        after = group[-1][1]
        yield from ((indices, after) for indices, _ in group[rank::ranks])
