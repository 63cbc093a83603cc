"""The process of one peer: it loads the model, runs it on request, and tells latencies.

`python -c "...main()" ORDER` with a `PeerOrder` as JSON. Requests come as lines of JSON on stdin, each is answered by
one line on stdout; what libraries print goes to stderr.

::

    (start)                                  {"ready": VERSION} | {"missing": PACKAGE} | {"failed": TEXT}
    {"prepare": X.npz, "outputs": Y.npz}     {"prepared": SECONDS} | {"failed": TEXT}      runs once, writes its outputs
    {"run": N}                               {"latencies_ms": [MS]}                        of the Nth caller
    {"together": SECONDS}                    {"latencies_ms": [...], "seconds": SECONDS}   all callers at once
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from relaxtune.pipeline.bench.peers.callers import Caller, Peer, PeerError, PeerOrder, run_together, timed_ms

# Characters of a library's message that are told.
_TOLD_MAX = 400


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    asked = json.loads(sys.argv[1])
    order = PeerOrder(**{field.name: asked[field.name] for field in fields(PeerOrder)})
    try:
        peer = load_peer(order)
    except ImportError as error:
        traceback.print_exc()
        answer(missing=(error.name or str(error)).partition(".")[0])
        return
    except Exception as error:  # the border of the process: whatever a library raises is told
        traceback.print_exc()
        answer(failed=_told(error))
        return
    answer(ready=peer.version)
    callers: list[Caller] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "prepare" in request:
                began = time.perf_counter()
                callers.clear()
                with np.load(request["prepare"]) as archive:
                    inputs = {name: archive[f"arr_{place}"] for place, name in enumerate(request["names"])}
                callers += peer.callers(inputs, order.streams)
                for caller in callers:
                    caller.run()
                _save(request["outputs"], callers[0].outputs(), order.outputs)
                answer(prepared=time.perf_counter() - began)
            elif "run" in request:
                answer(latencies_ms=[timed_ms(callers[request["run"]].run)])
            else:
                latencies, seconds = run_together([caller.run for caller in callers], request["together"])
                answer(latencies_ms=latencies, seconds=seconds)
        except Exception as error:  # as above
            traceback.print_exc()
            answer(failed=_told(error))


def load_peer(order: PeerOrder) -> Peer:
    """Return the model as a peer has it.

    Raises
    ------
    ImportError
        Its package is not installed here.
    PeerError
        It is, and does not take the model.
    """
    if order.peer in {"ort", "ort-cuda"}:
        from relaxtune.pipeline.bench.peers.onnxruntime_peer import OnnxRuntimePeer

        return OnnxRuntimePeer(order)
    from relaxtune.pipeline.bench.peers.torch_peer import TorchPeer

    return TorchPeer(order)


def _save(path: str, outputs: Mapping[str, np.ndarray], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in outputs]
    if missing:
        raise PeerError(f"it has no output {missing[0]!r}; it gave {', '.join(outputs)}")
    with open(path, "wb") as file:
        np.savez(file, *[outputs[name] for name in names])


def _told(error: Exception) -> str:
    """Return an error in one line, as much of it as tells the reason; its process's log has all."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, PeerError) else f"{type(error).__name__}: {text[:_TOLD_MAX]}"
