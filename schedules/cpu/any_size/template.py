"""The tile and the cut of a product of symbolic size as parameters: one decision for all sizes of a kernel.

The default schedule takes them from the registers and caches of a core. How many rows divide the calls' sizes well, and
whether blocks of k pay, differs by processor. They are measured at a few sizes, each a task of a static function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tvm import tirx

from relaxtune.schedules.cpu.any_size.matmul import find_product
from relaxtune.schedules.cpu.any_size.matmul_kernel import ProductKernel
from relaxtune.schedules.cpu.any_size.product import Cut, Product, find_cut
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import AT_SIZES_ATTR
from relaxtune.schedules.targets import CpuLimits, ResolvedTarget
from relaxtune.schedules.templates.base import POSITIVE, Case, KernelTemplate, Parameters, among
from relaxtune.schedules.tir.symbolic_sizes import with_named_sizes

# Rows of a tile that are tried.
_ROWS = (8, 14, 6, 10, 7, 12, 9, 5, 4)


@dataclass(frozen=True)
class AnySizeParameters(Parameters):
    """The tile and the cut of a product; for the last four, see `Cut`."""

    template: ClassVar[str] = "cpu_any_size"

    rows: int = among(8, range(1, 32))
    tiles: int = among(1, POSITIVE)
    parts: int = among(1, POSITIVE)
    blocks: int = among(1, POSITIVE)


class CpuAnySize(KernelTemplate[Product, AnySizeParameters]):
    """The template of products of packed weights: of bytes, or of float32 whose rows are known in a call.

    It proposes for a function at one set of sizes (`AT_SIZES_ATTR`), and makes that of any sizes, too.
    """

    parameters = AnySizeParameters

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Product | Refusal:
        if not isinstance(target.limits, CpuLimits):
            return Refusal(f"the target is {target.kind} {target.arch}, expected llvm")
        product = find_product(with_named_sizes(func), target.limits)
        if product is None or product.con.panel is None or product.con.steps is None:
            return Refusal("it is no product of packed weights in float32 or bytes")
        if product.con.group == 1 and not product.is_symbolic and not (func.attrs and AT_SIZES_ATTR in func.attrs):
            return Refusal("its sizes are known (the search makes such functions)")
        return product

    def own(self, func: tirx.PrimFunc, target: ResolvedTarget) -> AnySizeParameters | Refusal:
        """Return the parameters of a function's default schedule, or why it is not of this template."""
        product = self._recognise(func, target)
        return product if isinstance(product, Refusal) else _parameters(product.rows, product.cut)

    def _propose(self, case: Case[Product]) -> Sequence[AnySizeParameters] | Refusal:
        product, limits = case.found, case.target.limits
        if product.is_symbolic or not isinstance(limits, CpuLimits):
            return Refusal("its sizes are symbolic (the default schedules make such functions)")
        fitting = [rows for rows in _ROWS if rows <= product.rows]
        cuts = [(rows, find_cut(product.con, limits, rows)) for rows in fitting]
        whole = [(rows, replace(cut, parts=1, blocks=1)) for rows, cut in cuts]
        alone = [(rows, replace(cut, tiles=1)) for rows, cut in whole]
        listed = [(product.rows, product.cut), *(one for few in zip(whole, alone, strict=True) for one in few), *cuts]
        found = [_parameters(rows, cut) for rows, cut in listed]
        return list(dict.fromkeys(found))

    def _make(self, case: Case[Product], p: AnySizeParameters) -> tirx.PrimFunc | Refusal:
        product, length = case.found, case.found.con.steps
        assert length is not None
        refused = p.refuse_values()
        if refused is not None or p.rows > product.rows or p.parts * p.blocks > length:
            return refused or Refusal(f"{p.rows} rows, or {p.parts * p.blocks} blocks of {length} steps, do not fit")
        fetching = p.tiles if product.cut.all_fetch else product.cut.fetching
        cut = replace(
            product.cut,
            tiles=p.tiles,
            parts=p.parts,
            blocks=p.blocks,
            length=-(-length // (p.parts * p.blocks)),
            fetching=fetching,
        )
        return ProductKernel(replace(product, rows=p.rows, cut=cut)).build()


def _parameters(rows: int, cut: Cut) -> AnySizeParameters:
    return AnySizeParameters(rows, cut.tiles, cut.parts, cut.blocks)
