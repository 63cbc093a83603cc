"""Every chunk of a tile is copied once, and nothing beside the tile."""

from __future__ import annotations

from collections import Counter

import pytest
from tvm import tirx

from relaxtune.schedules.templates.emit.async_copy import TileChunks
from relaxtune.schedules.templates.emit.tensor_cores import CHUNK


@pytest.mark.parametrize(
    ("threads", "rows", "width"),
    # 24 chunks are a head of 192, 40 a head of 320; the others divide the threads, or are few for them.
    [(32, 32, 24), (128, 64, 24), (128, 80, 24), (256, 16, 24), (64, 48, 40), (128, 64, 8), (32, 16, 32), (256, 8, 4)],
)
def test_each_chunk_is_copied_once_and_none_beside_the_tile(threads: int, rows: int, width: int) -> None:
    copied: Counter[int] = Counter()
    for thread in range(threads):
        chunks = TileChunks(threads, tirx.IntImm("int32", thread), rows, width)
        for number in range(chunks.count):
            if all(int(condition) for condition in chunks.inside(number)):
                copied[int(chunks.place(number))] += 1
    assert copied == dict.fromkeys(range(0, rows * width * CHUNK, CHUNK), 1)
