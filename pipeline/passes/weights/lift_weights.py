"""Pass: turn large constants into parameters of `main`, named after their ONNX initialisers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np
import tvm
from onnx import helper
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, bindings_of, constants_in, is_op, main_of, with_functions
from relaxtune.pipeline.passes.kit.rewrite import replace_constants
from relaxtune.pipeline.passes.kit.state import LoweringState

Fingerprint = tuple[str, tuple[int, ...], bytes]

_SAMPLE = 4096


def _fingerprint(array: np.ndarray) -> Fingerprint:
    """Return dtype, shape and a hash of a sample: equal for equal arrays; those with equal ones are to be compared."""
    flat = array.reshape(-1)
    sample = np.ascontiguousarray(flat[:: max(1, flat.size // _SAMPLE)])
    return str(array.dtype), array.shape, hashlib.blake2b(sample.tobytes(), digest_size=16).digest()


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays of one dtype and shape hold the same bits (NaN equals itself, -0 is not 0)."""
    left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return bool(np.array_equal(left, right))


def lift_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with each constant of `weight_bytes_min` bytes or more as a parameter after the inputs.

    So is a constant that is an output, or that a view is made of: `Module` gives out copies of its parameters. So is
    one without elements, which TVM's executable cannot hold. Equal
    matrices share one parameter. Vectors do not: before training, biases are all alike, as scales are, and an
    artifact is to take trained ones (`pipeline.registry.refit`). A weight is called after the initialiser with the same
    content, else (folded, transposed, combined or cast) after the initialisers that the ONNX nodes of its first reader
    take, else `weight_N`.
    The function attribute `num_input` is the number of inputs: what follows is constant from run to run.
    """
    main = main_of(mod)
    inputs = len(main.params)
    if state.options.embed_weights:
        return mod
    readers: dict[tvm.ir.Expr, str] = {}
    results = constants_in(main.body.body)
    given_out = set(results)
    for binding in bindings_of(main):
        for constant in constants_in(binding.value):
            readers.setdefault(constant, binding.var.name)
            if (
                isinstance(binding.value, relax.Tuple)
                or binding.value.same_as(constant)
                or is_op(binding.value, "reshape")
            ):
                given_out.add(constant)
    readers = {**dict.fromkeys(results, ""), **readers}
    names = _Names(state, {param.name for param in main.params})
    lifted: list[relax.Var] = []
    params: dict[tvm.ir.Expr, relax.Var] = {}
    shared: dict[Fingerprint, list[relax.Var]] = {}
    for constant, reader in readers.items():
        array = array_of(constant)
        if 0 < array.nbytes < state.options.weight_bytes_min and constant not in given_out:
            continue
        is_matrix = sum(size > 1 for size in array.shape) > 1
        alike = shared.setdefault(_fingerprint(array), []) if is_matrix else []
        param = next((var for var in alike if _same_bytes(state.weights[var.name], array)), None)
        if param is None:
            param = relax.Var(names.choose(array, state.sources.get(reader, ())), constant.ty)
            state.weights[param.name] = array
            alike.append(param)
            lifted.append(param)
        params[constant] = param
    body = replace_constants(main, lambda constant, _reader: params.get(constant, constant))
    function = relax.Function([*body.params, *lifted], body.body, body.ret_ty, body.is_pure, body.attrs)
    return with_functions(mod, {mod.get_global_var("main"): function.with_attr("num_input", inputs)})


class _Names:
    """Chooses a name for each weight, each name once."""

    def __init__(self, state: LoweringState, taken: set[str]) -> None:
        self._taken = taken
        graph = state.graph.model.proto.graph
        self._shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._read_by = {node.name: [i for i in node.input if i in self._shapes] for node in graph.node}
        self._array = state.graph.model.array
        self._unread: dict[tuple[tuple[int, ...], np.dtype[np.generic]], list[str]] = {}
        for tensor in graph.initializer:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            self._unread.setdefault((tuple(tensor.dims), dtype), []).append(tensor.name)
        self._by_content: dict[Fingerprint, list[str]] = {}

    def choose(self, array: np.ndarray, nodes: Iterable[str]) -> str:
        """Return a free name for `array`, read by a kernel that computes `nodes`."""
        name = self._of_content(array, nodes) or self._of_nodes(array, nodes)
        base = re.sub(r"\W", "_", name) if name else ""
        if base and base[0].isdigit():
            base = f"w_{base}"
        candidate, index = base or "weight_0", 0
        while candidate in self._taken:
            index += 1
            candidate = f"{base}_{index}" if base else f"weight_{index}"
        self._taken.add(candidate)
        return candidate

    def _of_content(self, array: np.ndarray, nodes: Iterable[str]) -> str | None:
        """Return the initialiser of the same content, of several one that the nodes read."""
        for name in self._unread.pop((array.shape, array.dtype), ()):
            self._by_content.setdefault(_fingerprint(self._array(name)), []).append(name)
        read = {name for node in nodes for name in self._read_by.get(node, ())}
        alike = sorted(self._by_content.get(_fingerprint(array), []), key=lambda name: name not in read)
        return next((name for name in alike if _same_bytes(self._array(name), array)), None)

    def _of_nodes(self, array: np.ndarray, nodes: Iterable[str]) -> str | None:
        """Return the names of the readers' initialisers that could make up `array`: same size in total, no mixed ranks.

        Rank 1 is apart from the others; a matrix may have been packed into panels.
        """
        read = dict.fromkeys(name for node in nodes for name in self._read_by.get(node, ()))
        alike = [name for name in read if (len(self._shapes[name]) > 1) == (array.ndim > 1) and array.size > 1]
        for names in ([n for n in alike if int(np.prod(self._shapes[n])) == array.size][:1], alike):
            if names and sum(int(np.prod(self._shapes[n])) for n in names) == array.size:
                return "__".join(names)
        return None
