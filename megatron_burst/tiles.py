"""Which tiles make up what one rank's queries see of another rank's keys."""

from collections.abc import Sequence
from itertools import groupby

from megatron_burst.layout import Interval, Layout
from megatron_burst.mask import Mask, Relation
from megatron_burst.plan import Tile


class Tiling:
    """The tiles of every pair of ranks under one layout and mask, made when asked for."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self.ranks = layout.ranks
        self._layout, self._mask = layout, mask
        self._known: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def __call__(self, query_owner: int, key_owner: int) -> tuple[Tile, ...]:
        """Return the tiles of these queries against these keys; see `tiles_of_pair`."""
        pair = (query_owner, key_owner)
        if pair not in self._known:
            self._known[pair] = tiles_of_pair(self._layout, self._mask, *pair)
        return self._known[pair]


def tiles_of_pair(layout: Layout, mask: Mask, query_owner: int, key_owner: int) -> tuple[Tile, ...]:
    """Return the fewest tiles that cover what one rank's queries see of another's keys.

    Neighbouring intervals with the same relation share a tile, because few large kernel calls
    run faster than many small ones.
    """
    queries, keys = layout.local_rows(query_owner), layout.local_rows(key_owner)
    table = [
        [mask.relation(query, key) for key in layout.shards[key_owner]]
        for query in layout.shards[query_owner]
    ]

    def tile(rows: Sequence[int], columns: Sequence[int], relation: Relation) -> Tile:
        return Tile(
            query_owner,
            key_owner,
            Interval(queries[rows[0]].start, queries[rows[-1]].stop),
            Interval(keys[columns[0]].start, keys[columns[-1]].stop),
            relation,
        )

    if _is_lower_triangle(table):
        whole = range(len(table))
        return (tile(whole, whole, Relation.CAUSAL),)
    return tuple(
        tile(rows, columns, relation)
        for rows in _runs(table)
        for columns in _runs(table[rows[0]])
        if (relation := table[rows[0]][columns[0]]) is not Relation.EMPTY
    )


def thirds(tile: Tile) -> tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]:
    """Cut a tile into a half and two quarters of its pairs, each a tuple of at most one tile.

    A causal square falls into the full square below the diagonal and the two causal ones on it; a
    full tile into rows. Of fewer than four rows some parts are empty.
    """
    rows = tile.query_rows
    parts: Sequence[tuple[Interval, Interval, Relation]]
    middle = rows.start + rows.length // 2
    if tile.relation is Relation.CAUSAL:
        keys_middle = tile.key_rows.start + rows.length // 2
        early = (Interval(rows.start, middle), Interval(tile.key_rows.start, keys_middle))
        late = (Interval(middle, rows.stop), Interval(keys_middle, tile.key_rows.stop))
        parts = (
            (late[0], early[1], Relation.FULL),
            (*early, Relation.CAUSAL),
            (*late, Relation.CAUSAL),
        )
    else:
        cut = middle + (rows.stop - middle) // 2
        parts = tuple(
            (Interval(start, stop), tile.key_rows, tile.relation)
            for start, stop in ((rows.start, middle), (middle, cut), (cut, rows.stop))
        )
    half, first, second = (
        (Tile(tile.query_owner, tile.key_owner, *part),)
        if part[0].length and part[1].length
        else ()
        for part in parts
    )
    return half, first, second


def _is_lower_triangle(table: Sequence[Sequence[Relation]]) -> bool:
    """Whether the rows in local order make one causal square, as a rank's own tile does."""
    return all(
        relation is (Relation.FULL if c < r else Relation.CAUSAL if c == r else Relation.EMPTY)
        for r, row in enumerate(table)
        for c, relation in enumerate(row)
    )


def _runs[T](values: Sequence[T]) -> list[list[int]]:
    """Group the indices of neighbours that are equal."""
    return [list(group) for _, group in groupby(range(len(values)), values.__getitem__)]
