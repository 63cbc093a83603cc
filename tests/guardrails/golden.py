"""Write the golden answers of the fuzzing tests: what ONNX Runtime gives for a few cases, a few numbers of each output.

python -m tests.guardrails.golden
"""

from __future__ import annotations

import json
from dataclasses import asdict

from relaxtune.models import load_model
from relaxtune.pipeline.validate.reference import Reference
from tests.guardrails.fuzz_cases import ARTIFACTS, FuzzCase, Fuzzed, make_inputs
from tests.guardrails.fuzz_run import summarise
from tests.guardrails.test_fuzz import GOLDEN

# Of each artifact: an ordinary call, no token kept, one kept, values that are not finite.
_KINDS = (("right", "usual"), ("none", "large"), ("one left", "infinite"), ("ragged", "nan"))


def golden_cases(fuzzed: Fuzzed) -> list[FuzzCase]:
    """Return the cases of one artifact."""
    length = 17 if fuzzed.length else 0
    return [FuzzCase(fuzzed.model, 3, length, mask, values, seed) for seed, (mask, values) in enumerate(_KINDS)]


def main() -> None:
    entries = []
    for fuzzed in ARTIFACTS:
        model = load_model(fuzzed.model, shapes=fuzzed.shapes)
        reference = Reference(model)
        for case in golden_cases(fuzzed):
            outputs = reference.run(make_inputs(case, fuzzed, model))
            entries.append(
                {"case": asdict(case), "outputs": {name: summarise(array) for name, array in outputs.items()}}
            )
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    GOLDEN.write_text(f"[\n{lines}\n]\n")
    print(f"{len(entries)} golden cases, {GOLDEN.stat().st_size} bytes: {GOLDEN}")


if __name__ == "__main__":
    main()
