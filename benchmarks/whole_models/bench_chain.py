"""What each kernel of a model takes of the whole: all of them in a CUDA graph, as an untuned artifact launches them.

    python -m benchmarks.whole_models.bench_chain build DIR [--cases llama-1b-1x128,...] [--candidates 4]
        [--functions REGEX]
    python -m benchmarks.whole_models.bench_chain run DIR [--beside DIR] [--rounds 25] [--out FILE]

`build` lowers the cases of `benchmarks.gpu_arms.cases` (Llama-1B's three where none is named) whole, and compiles each
kernel's first candidates; of functions that match `--functions`, or of all. `run` prints what the chain of first
candidates takes, what it takes without the calls of one function, and with another candidate in a function's place: in
a chain, kernels with dependent launch load weights while the one before them ends, so that the best one alone is not
always the best there. Each candidate's results are compared with the first one's. `--beside` is another build, say of
another commit, whose first candidates take turns with these.

Weights and inputs are random but for small ones (tables, positions), which are the model's own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kernels.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    median_and_p95,
    read_kernels,
    time_by_turns,
)

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.gpu_arms.cases import Case
    from relaxtune.pipeline.passes.module import LoweredModule

CASES = "llama-1b-1x128,llama-1b-decode-1x1024,llama-1b-decode-16x1024"
TARGET = "cuda:sm_90a"
CHAIN, VALUES = "chain.json", "values.npz"
# Larger tensors are drawn where the chain runs.
_KEPT_ELEMENTS = 1 << 18
_SCALE = 0.02
# Of a candidate's results beside the first one's, in the norm: half precision's own, and another order of sums.
_ERROR_MAX = 5e-3


@dataclass(frozen=True)
class Chain:
    """The calls of a model's `main`, one after another.

    Attributes
    ----------
    calls
        Function, and the buffers of its parameters in their order, outputs last.
    outputs
        How many of a function's parameters it writes.
    buffers
        Name -> shape and dtype.
    written
        Buffers that some call writes.
    """

    calls: list[tuple[str, list[str]]]
    outputs: dict[str, int]
    buffers: dict[str, tuple[list[int], str]]
    written: list[str]


def chain_of(lowered: LoweredModule) -> tuple[Chain, dict[str, np.ndarray]]:
    """Return the calls of a lowered module, and the values of its small weights and constants by their names.

    Raises
    ------
    ValueError
        `main` does something else than call kernels and pass on what they made.
    """
    from tvm import relax

    from relaxtune.pipeline.passes.kit.ir import array_of, bindings_of, called_function, is_constant, is_op, main_of

    main = main_of(lowered.mod)
    values = {name: array for name, array in lowered.weights.items() if array.size <= _KEPT_ELEMENTS}
    chain = Chain([], {}, {}, [])
    # What a variable stands for: one buffer, or those of a tuple.
    known: dict[Any, list[str]] = {}

    def declare(name: str, ty: Any) -> list[str]:
        tensors = list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]
        names = [name] if len(tensors) == 1 else [f"{name}#{place}" for place in range(len(tensors))]
        for one, tensor in zip(names, tensors, strict=True):
            chain.buffers[one] = ([int(size) for size in tensor.shape], str(tensor.dtype))
        return names

    def buffer_of(argument: Any) -> str:
        if is_constant(argument):
            (name,) = declare(f"constant#{len(chain.buffers)}", argument.ty)
            values[name] = array_of(argument)
            return name
        (name,) = known[argument]
        return name

    for param in main.params:
        known[param] = declare(param.name, param.ty)
    for binding in bindings_of(main):
        value, name = binding.value, binding.var.name
        callee = called_function(value)
        if callee is not None:
            given = value.args[1]
            read = [buffer_of(one) for one in (given.fields if isinstance(given, relax.Tuple) else [given])]
            known[binding.var] = declare(name, binding.var.ty)
            chain.calls.append((callee.name_hint, [*read, *known[binding.var]]))
            chain.outputs[callee.name_hint] = len(known[binding.var])
            chain.written.extend(known[binding.var])
        elif isinstance(value, relax.TupleGetItem):
            known[binding.var] = [known[value.tuple_value][value.index]]
        elif isinstance(value, relax.Var) or is_op(value, "reshape"):
            known[binding.var] = known[value if isinstance(value, relax.Var) else value.args[0]]
        elif not isinstance(value, relax.Tuple):
            raise ValueError(f"{name} is {type(value).__name__}, expected the call of a kernel")
    return chain, values


def build(directory: Path, case: Case, candidates: int, functions: str) -> None:
    """Compile the first candidates of every kernel of a case into a folder of its name."""
    import numpy as np
    import tvm

    from relaxtune.pipeline.prepare import ModelRequest, prepare_model
    from relaxtune.schedules.fallback import apply_fallback
    from relaxtune.schedules.registry import apply_decision, list_candidates

    prepared = prepare_model(ModelRequest(case.source, shapes=case.shapes, target=TARGET))
    chain, values = chain_of(prepared.lowered)
    with cubin_writer(directory / case.name, prepared.target) as writer:
        for name in chain.outputs:
            func = prepared.lowered.mod[name]
            found, _refused = list_candidates(func, prepared.target)
            count = candidates if re.search(functions, name) else 1
            for parameters in found[:count]:
                decision = parameters.to_json()
                writer.add(apply_decision(func, prepared.target, decision), function=name, decision=decision)
            if not found:
                alone = apply_fallback(tvm.IRModule({name: func}), prepared.target.target)
                writer.add(alone[name], function=name, decision="fallback")
            print(f"{case.name}: {name}: {min(count, len(found))} of {len(found)}", file=sys.stderr)
    # Names of the graph's inputs as Relax has them.
    inputs = {name.replace(".", "_"): array for name, array in case.inputs().items()}
    small = {name: array for name, array in inputs.items() if array.size <= _KEPT_ELEMENTS}
    np.savez(directory / case.name / VALUES, **values, **small)
    (directory / case.name / CHAIN).write_text(json.dumps(vars(chain)))


class Launches:
    """A chain's tensors and kernels on the current device."""

    def __init__(self, directory: Path) -> None:
        import numpy as np
        import torch

        self.chain = Chain(**json.loads((directory / CHAIN).read_text()))
        self.kernels = kernels_of(directory)
        values = np.load(directory / VALUES)
        self.tensors = {}
        for name, (shape, dtype) in self.chain.buffers.items():
            if name in values:
                tensor = torch.from_numpy(values[name]).cuda().to(getattr(torch, dtype)).reshape(shape)
            else:
                tensor = torch.randn(shape, device="cuda").mul_(_SCALE).to(getattr(torch, dtype))
            self.tensors[name] = tensor

    def poison(self, names: Sequence[str]) -> None:
        """Fill buffers of reals with NaN."""
        for name in names:
            if self.tensors[name].is_floating_point():
                self.tensors[name].fill_(float("nan"))

    def bound(self, kernel: Kernel, buffers: Sequence[str]) -> Callable[[], None]:
        """Return the launch of a kernel on a call's buffers."""
        names = [name for name, _shape, _dtype in kernel.entry["params"]]
        return kernel.bind({name: self.tensors[buffer] for name, buffer in zip(names, buffers, strict=True)})

    def graph(self, kernels: Mapping[str, Kernel], without: str | None = None) -> Any:
        """Return a CUDA graph of the chain, a kernel for each function, without the calls of one."""
        calls = [call for call in self.chain.calls if call[0] != without]
        return captured_graph([self.bound(kernels[function], buffers) for function, buffers in calls])

    def error(self, kernel: Kernel) -> float:
        """Return how far a kernel is from its function's first one, on what the chain has left; NaN if not written."""
        function = kernel.entry["function"]
        buffers = next(buffers for name, buffers in self.chain.calls[::-1] if name == function)
        written = buffers[-self.chain.outputs[function] :]
        results = []
        for one in (self.kernels[function][0], kernel):
            self.poison(written)
            self.bound(one, buffers)()
            results.append([self.tensors[name].double() for name in written])
        norms = [float((a - b).norm() / a.norm().clamp(min=1e-9)) for a, b in zip(*results, strict=True)]
        return max(norms, key=lambda norm: float("inf") if norm != norm else norm)


def kernels_of(directory: Path) -> dict[str, list[Kernel]]:
    """Return the kernels of a build by their functions, the first candidate first."""
    found: dict[str, list[Kernel]] = {}
    for kernel in read_kernels(directory):
        found.setdefault(kernel.entry["function"], []).append(kernel)
    return found


def run(directory: Path, beside: Path | None, rounds: int, out: Path | None) -> int:
    """Time every case's chain; return 1 when a candidate computes something else than the first."""
    import torch

    torch.zeros(1, device="cuda")
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "cases": {}}
    wrong = 0
    for path in sorted(directory.glob(f"*/{CHAIN}")):
        launches = Launches(path.parent)
        first = {function: kernels[0] for function, kernels in launches.kernels.items()}
        graphs = {"whole": launches.graph(first)}
        if beside is not None:
            others = kernels_of(beside / path.parent.name)
            graphs["beside"] = launches.graph({function: kernels[0] for function, kernels in others.items()})
        for function, kernels in launches.kernels.items():
            graphs[f"without {function}"] = launches.graph(first, function)
            for number, kernel in enumerate(kernels[1:], 1):
                graphs["whole"].replay()
                if launches.error(kernel) <= _ERROR_MAX:
                    graphs[f"{function} #{number}"] = launches.graph(first | {function: kernel})
                else:
                    wrong += 1
                    print(f"{path.parent.name}: WRONG: {function} {kernel.entry['decision']}", flush=True)
        times = time_by_turns(graphs, 1, rounds)
        _print_case(path.parent.name, launches, {arm: median_and_p95(values)[0] for arm, values in times.items()})
        decisions = {name: [one.entry["decision"] for one in found] for name, found in launches.kernels.items()}
        rounded = {arm: [round(value, 2) for value in values] for arm, values in times.items()}
        results["cases"][path.parent.name] = {"decisions": decisions, "times_us": rounded}
        del launches, graphs, first
        torch.cuda.empty_cache()
    if out is not None:
        out.write_text(json.dumps(results))
    return 1 if wrong else 0


def _print_case(name: str, launches: Launches, medians: dict[str, float]) -> None:
    whole = medians["whole"]
    print(f"{name}: {whole:.1f} us, {len(launches.chain.calls)} kernels" + _beside(medians), flush=True)
    for function, kernels in launches.kernels.items():
        runs = sum(called == function for called, _buffers in launches.chain.calls)
        saved = (whole - medians[f"without {function}"]) / runs
        print(f"  {saved:8.2f} us x {runs:3}  {function}  {kernels[0].entry['decision']}")
        for number, kernel in enumerate(kernels[1:], 1):
            if (taken := medians.get(f"{function} #{number}")) is not None:
                print(f"  {(taken - whole) / runs:+17.2f}  #{number} {kernel.entry['decision']}", flush=True)


def _beside(medians: dict[str, float]) -> str:
    return f", {medians['beside']:.1f} us beside" if "beside" in medians else ""


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    building.add_argument("--cases", default=CASES)
    building.add_argument("--candidates", type=int, default=1)
    building.add_argument("--functions", default="")
    running.add_argument("--beside", type=Path)
    running.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    if arguments.command == "build":
        from benchmarks.gpu_arms.cases import find_cases

        for case in find_cases(arguments.cases):
            build(arguments.directory, case, arguments.candidates, arguments.functions)
    else:
        sys.exit(run(arguments.directory, arguments.beside, arguments.rounds, arguments.out))


if __name__ == "__main__":
    main()
