"""`Module`: an artifact, loaded to be called. Needs nothing but the artifact directory and TVM's runtime."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Self, TypedDict, TypeVar, Unpack

import numpy as np
from tvm_ffi import Device, Tensor

from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.calls.bucket_routing import Router, RouteStatistics
from relaxtune.pipeline.artifact.calls.tensor_checks import (
    SupportsDLPack,
    borrowed_input,
    check_inputs,
    check_limits,
    check_outputs,
    refused_tensors,
    warn_without_limits,
)
from relaxtune.pipeline.artifact.calls.token_list import TokenList
from relaxtune.pipeline.artifact.device_choice import device_for
from relaxtune.pipeline.artifact.directory import load_manifest, verify_artifact
from relaxtune.pipeline.artifact.generation.generator import CHUNK, GREEDY, Generator, Outputs, Sampling, Step
from relaxtune.pipeline.artifact.gpu.size_graphs import SizeGraphs, Sizes
from relaxtune.pipeline.artifact.gpu.static_graph import StaticGraph, input_buffers
from relaxtune.pipeline.artifact.gpu.turns import SupportsCudaStream, Turns, on_default_stream, on_stream
from relaxtune.pipeline.artifact.loading import load_machine, read_weights, shared_outputs, with_weights
from relaxtune.pipeline.artifact.manifest import ENCODER_FOLDER, MODULE_FILE, PARAMS_FILE, Manifest
from relaxtune.pipeline.artifact.signature import require_signature
from relaxtune.pipeline.artifact.text.embedder import Embedder
from relaxtune.pipeline.artifact.text.tokenizer import artifact_tokenizer
from relaxtune.pipeline.codegen.cuda_libraries import WHOLE_CALL, offer_library
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.tvm_runtime.library import VirtualMachine, array_of, fill, runtime_function, synchronise
from relaxtune.pipeline.tvm_runtime.threads import configure_threads, default_threads
from relaxtune.schedules.libraries.vendors import named_libraries

Result = TypeVar("Result")
_MAIN = "main"
# Sets of sizes whose memory the pool keeps at a time.
_SIZES_MAX = 64

# Called by the virtual machine before and after each of its calls: (function, its name, whether before, the returned
# value, arguments) -> 0, or 1 to skip the call.
Instrument = Callable[..., int]


class GenerateOptions(TypedDict, total=False):
    """The arguments of `Module.generate` behind the prompt."""

    inputs: Mapping[str, np.ndarray] | None
    max_new_tokens: int | None
    stop: Collection[int | Sequence[int]]
    sampling: Sampling
    chunk: int


class Module:
    """A loaded artifact.

    `run` takes and returns NumPy arrays by name. `run_device` takes tensors already on the device and leaves the
    outputs there; on CUDA such outputs live in memory that the next run writes again, so copy what must last.

    A module that runs as a CUDA graph reads its inputs at fixed addresses: tensors given to `run_device` are copied
    into `input_buffers` first, except those that are these buffers themselves. A module with symbolic sizes has a graph
    for each set of sizes that comes again (`pipeline.artifact.gpu.size_graphs`).

    Threads may call one module; calls take turns, since a run works in buffers that belong to the module. Several
    modules, of one artifact or of several, run at once. On a GPU `run_device` goes to the stream that is current there
    (`tvm_ffi.use_torch_stream`), or to the one that it is given. `pipeline.artifact.gpu.turns` says which calls wait.

    A module with shape buckets sends each call to the best of them (`pipeline.artifact.calls.bucket_routing`), padded
    where the manifest says that this was proved, and runs what fits none with symbolic shapes; `statistics` counts.

    Attributes
    ----------
    manifest
        The artifact's description of itself.
    inputs, outputs
        In the model's order.
    device, threads
        Where it runs, and the CPU threads that each call asks for.
    """

    def __init__(
        self,
        manifest: Manifest,
        machine: VirtualMachine,
        device: Device,
        weights: Sequence[Tensor],
        threads: int,
        entry: str = _MAIN,
        turn: Turns | None = None,
        *,
        pooled: bool = True,
    ) -> None:
        """Hold a loaded module; use `Module.load`."""
        self.manifest, self.device = manifest, device
        self.inputs, self.outputs = manifest.inputs, manifest.outputs
        self.threads = threads
        self._machine = machine
        self._weights = tuple(weights)
        # Code of earlier versions takes a pool of TVM's, of each calling thread.
        self._pooled = pooled or manifest.target.kind == "cuda"
        apart = not named_libraries(manifest.target.libraries)
        self._turn = turn or Turns(device, apart=apart, forks=self._pooled)
        self._turn.end_with(self)
        self._kernels = with_weights(machine[entry], self._weights)
        self._thread: tuple[int, ThreadPoolExecutor] | None = None
        self._router: Router | None = None
        self._directory: Path | None = None
        self._embedder: Embedder | None = None
        # Numbers of the outputs that lie in memory of others; what they are is known from the first call on.
        self._shared_outputs: frozenset[int] | None = None
        self._watched = False
        captures = manifest.target.cuda_graph
        self._static: StaticGraph | None = None
        self._graphs: SizeGraphs | None = None
        self._generator: Generator | None = None
        self._encoder: Module | None = None
        if captures and self._is_static and manifest.generation is None:
            buffers = input_buffers(manifest.inputs, device, self._turn)
            self._static = StaticGraph(machine, entry, buffers, self._weights, self._turn)
        # Not of steps that generate: a graph may read copies of its inputs, and these write their caches in place.
        elif captures and not self._is_static and manifest.generation is None:
            whole = entry + WHOLE_CALL
            kernels = with_weights(machine[whole], self._weights) if whole in machine else self._kernels
            self._graphs = SizeGraphs(machine, device, self._kernels, self._turn, kernels)
        self._sizes: set[Sizes] | None = None if self._is_static else set()
        unpadding = manifest.unpadding
        self._tokens = TokenList(machine, device, manifest.inputs, unpadding) if unpadding is not None else None

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        device: str | None = None,
        verify: bool = True,
        threads: int | None = None,
        verify_key: Path | str | None = None,
        beside: Module | None = None,
    ) -> Module:
        """Return the module of an artifact directory, its weights on the device.

        Raises `ArtifactError`: the artifact is missing, damaged, not signed by `verify_key`, or for a target that this
        machine does not have; `UsageError`: `verify_key` is no public key.

        Parameters
        ----------
        directory : Path or str
            The artifact.
        device : str or None
            Such as `cpu`, `cuda` or `cuda:1`; by default the first device of the artifact's kind.
        verify : bool
            Whether every file's sha256 is checked first; the manifest's always is.
        threads : int or None
            CPU threads; by default `$TVM_NUM_THREADS`, else one for each physical core within the CPU quota.
        verify_key : Path, str or None
            The public key (PEM) of who must have signed the artifact. It is checked before anything of it runs, and
            so is every file's sha256.
        beside : Module or None
            Another form of the model, loaded. If both artifacts have one file of weights, the modules share them.
        """
        directory = Path(directory)
        if verify_key is not None:
            require_signature(directory, Path(verify_key))
            verify = True
        manifest = verify_artifact(directory) if verify else load_manifest(directory)
        warn_without_limits(manifest, directory)
        chosen = device_for(manifest, device, directory)
        threads = default_threads() if threads is None else threads
        for library in named_libraries(manifest.target.libraries):
            offer_library(library)
        turn = Turns(chosen)
        weights_file = directory / PARAMS_FILE
        if beside is not None and beside._has_weights_of(weights_file, manifest, chosen):
            stored = dict(zip(beside.manifest.weights, beside._weights, strict=True))
        else:
            stored = {name: turn.placed(array) for name, array in read_weights(weights_file, manifest)}

        def loaded(own: Manifest, file: str) -> Module:
            with turn.alone:  # constants in the code are copied to the device
                machine, pooled = load_machine(directory / file, chosen, threads)
            return cls(own, machine, chosen, [stored[name] for name in own.weights], threads, pooled=pooled)

        module = loaded(manifest, MODULE_FILE)
        module._directory = directory
        if manifest.generation is not None and manifest.generation.names.context:
            module._encoder = cls.load(directory / ENCODER_FOLDER, device=device, verify=False, threads=threads)
        if manifest.buckets is not None:
            modules = [loaded(manifest.of_bucket(one), one.file) for one in manifest.buckets.entries]
            module._router = Router(manifest.buckets, modules, manifest.inputs, manifest.outputs)
        return module

    def _has_weights_of(self, file: Path, manifest: Manifest, device: Device) -> bool:
        mine = None if self._directory is None else self._directory / PARAMS_FILE
        one_file = mine is not None and mine.is_file() and file.is_file() and file.samefile(mine)
        return one_file and self.manifest.weights == manifest.weights and self.device == device

    def variant(self, entry: str) -> Self:
        """Return another entry of the same code as a module, on the same weights; see `pipeline.artifact.compile`."""
        shared = (self.manifest, self._machine, self.device, self._weights, self.threads)
        return type(self)(*shared, entry, self._turn, pooled=self._pooled)

    @property
    def statistics(self) -> RouteStatistics:
        """Counts of the calls so far, by shape bucket; all zero for an artifact without buckets."""
        return self._router.statistics if self._router is not None else RouteStatistics()

    def statistics_text(self) -> str:
        """Return `statistics` in the text format of Prometheus, for the page that it collects."""
        return self.statistics.to_prometheus(self.manifest.model)

    def bucket_module(self, number: int) -> Module:
        """Return the module of one bucket, in the manifest's order, which runs its own sizes only.

        Raises `PipelineError`: there is no such bucket.
        """
        modules = self._buckets_loaded()
        if number >= len(modules):
            raise PipelineError(f"artifact of {self.manifest.model} has {len(modules)} buckets, got number {number}")
        return modules[number]

    def _buckets_loaded(self) -> list[Module]:
        found = self._router.modules if self._router is not None else ()
        return [module for module in found if isinstance(module, Module)]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs, by name, as arrays of their own.

        Raises `PipelineError`: an input is missing, unexpected, or of another dtype or shape than the signature says;
        an axis is beyond the artifact's limits; or a table is looked up outside of it.
        """
        self._refuse_generation()
        check_inputs(inputs, self.inputs, self.manifest)
        routed = self._router.run(inputs) if self._router is not None else None
        if routed is not None:
            return routed
        with on_default_stream(self.device), self._turn:
            if self._static is None:
                outputs = self._call(self.to_device(inputs))
            else:
                for buffer, spec in zip(self._static.buffers, self.inputs, strict=True):
                    fill(buffer, inputs[spec.name])
                outputs = self._call(self._static.buffers)
            return {spec.name: array_of(tensor) for spec, tensor in zip(self.outputs, outputs, strict=True)}

    async def run_async(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return what `run` does, without holding up the event loop: the module's calls run in a thread of its own."""
        return await self._in_thread(self.run, inputs)

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        import asyncio

        if self._thread is None or self._thread[0] != os.getpid():  # a forked process has no such thread
            self._thread = (os.getpid(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="relaxtune"))
        return await asyncio.get_running_loop().run_in_executor(self._thread[1], function, *arguments)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector of each text, float32 [texts, width], as the model pools and normalises it.

        Texts of similar lengths run together; longer ones than the model takes are cut.

        Raises `UsageError`: the artifact carries no tokenizer, makes no vector of each text, or has sizes that are not
        free; or the package tokenizers is not installed.
        """
        return self.embedder(texts)

    @property
    def embedder(self) -> Embedder:
        """The tokenizer and the batches of an artifact that embeds; errors are those of `embed`."""
        if self._embedder is None:
            if self._directory is None:
                raise UsageError("a part of an artifact does not embed; load the artifact")
            self._refuse_generation()
            self._embedder = Embedder(self.manifest, self.run, artifact_tokenizer(self._directory))
        return self._embedder

    def generate(self, ids: Sequence[int] = (), **options: Unpack[GenerateOptions]) -> Iterator[int]:
        """Give the tokens that follow a prompt, each as soon as it is there.

        Raises `UsageError`: the artifact does not generate, the prompt is empty or longer than its caches, or a token
        is none of the vocabulary; the model has an encoder and no `inputs`, or inputs without an encoder.

        Parameters
        ----------
        ids : sequence of int
            The tokens of the prompt. Behind an encoder they may be left out: the text then begins with the token that
            the model's configuration names.
        inputs : mapping or None
            Inputs of the encoder by name, such as `input_ids` or `input_features`, with a first axis of 1. A mask that
            is not given hides nothing.
        max_new_tokens : int or None
            The most tokens; None goes on until the caches are full.
        stop : collection of int or of sequences of int
            Tokens, or several tokens in turn, that end a sequence; they are given too.
        sampling : Sampling
            How tokens are drawn; by default each is the one with the largest logit.
        chunk : int
            Tokens of the prompt that are computed at a time.
        """
        return (token for (token,) in self.generate_batch([ids], **options) if token is not None)

    async def generate_async(self, ids: Sequence[int] = (), **options: Unpack[GenerateOptions]) -> AsyncIterator[int]:
        """Give the tokens that `generate` gives, without holding up the event loop; arguments and errors as of that."""
        tokens = await self._in_thread(lambda: self.generate(ids, **options))
        while (token := await self._in_thread(next, tokens, None)) is not None:
            yield token

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]] = (),
        *,
        inputs: Mapping[str, np.ndarray] | None = None,
        max_new_tokens: int | None = None,
        stop: Collection[int | Sequence[int]] = (),
        sampling: Sampling = GREEDY,
        chunk: int = CHUNK,
    ) -> Iterator[list[int | None]]:
        """Give the next token of each of several sequences, None behind the end of one; arguments as of `generate`.

        Raises `UsageError`: see `generate`; or prompts have several lengths, and the model has no mask that hides
        padding.
        """
        generator = self.generator
        context = self._encoded(inputs)
        start = generator.generation.start
        if context and start is not None:
            count = len(next(iter(context.values())))
            prompts = [prompt if len(prompt) else [start] for prompt in prompts or [[]] * count]
        given = [[int(token) for token in prompt] for prompt in prompts]
        generator.check(given, chunk, max_new_tokens, context)
        ends = [(one,) if isinstance(one, int) else tuple(one) for one in stop]
        return generator.generate(given, max_new_tokens, ends, chunk, sampling, context)

    def _encoded(self, inputs: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        """Return what a decoder needs of its encoder, by the decoder's names; nothing where there is none."""
        encoder, generation = self._encoder, self.manifest.generation
        if encoder is None or generation is None:
            if inputs is not None:
                raise UsageError(f"{self.manifest.model} has no encoder; expected a prompt alone, without inputs")
            return {}
        named = ", ".join(map(str, encoder.inputs))
        if inputs is None:
            raise UsageError(f"{self.manifest.model} is the decoder of an encoder; give inputs of that too: {named}")
        given = {name: np.asarray(array) for name, array in inputs.items()}
        for spec in encoder.inputs:
            if spec.name in given:
                given[spec.name] = given[spec.name].astype(numpy_dtype(spec.dtype), copy=False)
            elif "mask" in spec.name and (shapes := [one.shape[:2] for one in given.values()]):
                given[spec.name] = np.ones(shapes[0], numpy_dtype(spec.dtype))
        made = encoder.run(given) | {f"encoder_{name}": array for name, array in given.items()}
        return {name: made[name] for name in generation.names.context}

    @property
    def generator(self) -> Generator:
        """The state and the steps of an artifact that generates.

        Raises `UsageError`: the artifact does not.
        """
        generation = self.manifest.generation
        if generation is None:
            raise UsageError(
                f"the artifact of {self.manifest.model} does not generate; compile the decoder with --generate"
            )
        if self._generator is None:
            entries = self.manifest.buckets.entries if self.manifest.buckets is not None else ()
            steps = [one._step(entry.sizes) for one, entry in zip(self._buckets_loaded(), entries, strict=True)]
            self._generator = Generator(generation, self.inputs, [self._step({}), *steps], self.device, self._turn)
        return self._generator

    def _step(self, sizes: Mapping[str, int]) -> Step:
        def bind(inputs: Sequence[Tensor]) -> Callable[[], Outputs]:
            if self.manifest.target.cuda_graph and self._is_static:
                graph = StaticGraph(self._machine, _MAIN, inputs, self._weights, self._turn)
                return lambda: graph(graph.buffers)
            return lambda: self._run_sizes(inputs)

        return Step(sizes, bind)

    @property
    def input_buffers(self) -> tuple[Tensor, ...] | None:
        """The tensors that a CUDA graph reads its inputs from, to be filled by the caller; None without a graph."""
        return None if self._static is None else self._static.buffers

    def to_device(self, inputs: Mapping[str, np.ndarray]) -> tuple[Tensor, ...]:
        """Return the inputs as tensors on the device, in the model's order, for `run_device`."""
        return tuple(self._turn.placed(np.asarray(inputs[spec.name], order="C")) for spec in self.inputs)

    def run_device(
        self, tensors: Sequence[Tensor | SupportsDLPack], *, stream: int | SupportsCudaStream | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs as tensors on the device; of dtypes and shapes only the limits of axes are checked.

        Values are not looked at. An index outside of a table reads the table's first or last row.

        Nothing is copied or waited for. Outputs have `__dlpack__`, for `torch.from_dlpack` and its like.

        Raises `PipelineError`: a tensor of another library is on another device, has gaps, or is not aligned to 64
        bytes; an axis is smaller or larger than the artifact's limits; a CPU is given a stream; or a stream is being
        captured.

        Parameters
        ----------
        tensors : sequence of tvm_ffi.Tensor or of what has `__dlpack__` (PyTorch, CuPy, NumPy)
            One for each input, in the model's order, on `device`. A call goes to a shape bucket when it has exactly its
            sizes; nothing is padded here. A CUDA graph of symbolic sizes that reads them in place holds them until the
            next call.
        stream : int, an object with `__cuda_stream__`, or None
            The CUDA stream that the work goes to, such as `torch.cuda.current_stream()`; None takes the current one of
            `tvm_ffi`. The inputs must be ready there.
        """
        self._refuse_generation()
        with on_stream(self.device, stream):
            self._turn.refuse_capture()
            if self._graphs is not None:
                with self._turn:
                    again = self._graphs.again(tensors)
                    if again is not None:
                        return self._without_sharing(again)
            given = [
                one
                if isinstance(one, Tensor)
                else borrowed_input(one, self.inputs[n].name, self.manifest.model, self.device)
                for n, one in enumerate(tensors)
            ]
            if self._router is not None:
                check_limits([one.shape for one in given], self.manifest)
                routed = self._router.run_device(given)
                if routed is not None:
                    return routed
            with self._turn:
                return self._call(given)

    def synchronise(self) -> None:
        """Wait until the device has finished all that was started."""
        synchronise(self.device)

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Have every call of the virtual machine go by `instrument` inside the block; for diagnosis.

        Raises `PipelineError`: the module runs as a CUDA graph, whose kernels the machine does not call one by one.
        """
        if self.manifest.target.cuda_graph:
            raise PipelineError(
                f"{self.manifest.model} runs as one CUDA graph, inside which no kernel can be watched; compile it "
                "without a graph for that"
            )
        modules = [self, *self._buckets_loaded()]
        for module in modules:
            module._machine.set_instrument(instrument)
            module._watched = True
        try:
            yield
        finally:
            for module in modules:
                module._machine.set_instrument(None)
                module._watched = False

    def _refuse_generation(self) -> None:
        if self.manifest.generation is not None:
            raise UsageError(
                f"the artifact of {self.manifest.model} generates tokens and owns its caches: call `generate`, or "
                "compile the model without --generate"
            )

    def _run_sizes(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not self._pooled:
            configure_threads(self.threads)
        with nullcontext() if self._tokens is None else self._turn.pool():
            if self._tokens is not None:
                tensors = [*tensors, *self._tokens(tensors)]
            sizes = tuple([tensor.shape for tensor in tensors])
            self._note_sizes(sizes)
            return (self._graphs or self._run_kernels)(tensors, sizes)

    def _call(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        try:
            outputs = self._run_sizes(tensors) if self._static is None else self._static(tensors)
        except (TypeError, ValueError, RuntimeError) as e:
            refusal = refused_tensors(self.manifest, e, static=self._is_static)
            if refusal is None:
                raise
            raise refusal from e
        if self._shared_outputs is None:
            check_outputs(outputs, self.manifest)
            if self._watched:  # the second run below would be one too many where kernels are counted
                return tuple(self._turn.copied(one) for one in outputs)
            # A constant inside the code is where two runs put their output, although the first one's is still held.
            embedded = () if self._weights or self._static is not None else self._run_kernels(tensors)
            others = [*tensors, *(self.input_buffers or ()), *self._weights, *embedded]
            self._shared_outputs = shared_outputs(outputs, others)
        return self._without_sharing(outputs)

    def _without_sharing(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of a call, copies of those that lie in memory of others."""
        shared = self._shared_outputs
        if not shared:
            return outputs
        return tuple(self._turn.copied(one) if n in shared else one for n, one in enumerate(outputs))

    def _run_kernels(self, tensors: Sequence[Tensor], _sizes: Sizes = ()) -> tuple[Tensor, ...]:
        with self._turn.pool():
            return self._kernels(tensors)

    def _note_sizes(self, sizes: Sizes) -> None:
        """Check sizes that are new, and give memory back now and then: TVM's pool keeps what each set took for it."""
        if self._sizes is None or sizes in self._sizes:
            return
        check_limits(sizes, self.manifest)
        self._sizes.add(sizes)
        if len(self._sizes) > _SIZES_MAX:
            self._sizes.clear()
            runtime_function("vm.builtin.memory_manager.clear")()

    @property
    def _is_static(self) -> bool:
        """Whether all sizes are known; how many tokens a mask leaves is not."""
        return self.manifest.unpadding is None and all(spec.is_static for spec in self.inputs)
