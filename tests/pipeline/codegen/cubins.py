"""Reading cubins, which are ELF files."""

from __future__ import annotations

import struct


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """Return the sections with machine code by name (ELF-64: section headers of 64 bytes, `e_shoff` at 0x28)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, offset, size in headers:
        text = cubin[strings + name : cubin.index(0, strings + name)].decode()
        if text.startswith(".text."):
            found[text.removeprefix(".text.")] = cubin[offset : offset + size]
    return found
