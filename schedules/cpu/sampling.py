"""The loops that sample tokens on a CPU; `schedules.functions.sampling` says what they compute.

    parallel chunks of all rows     x; the largest x and logit of the chunk
    parallel chunks of all rows     the sum of the model's probabilities; masses into bins by -d
    parallel chunks of all rows     the tokens of the bins that the first filter may keep, into one list a row
    parallel rows                   filters on the list, each by radix selection; the draw

A list keeps the order of its tokens. Rows at a temperature of 0 have no bins and no list.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

from relaxtune.schedules.cpu.any_size.emit import Buffers, build_function, wide
from relaxtune.schedules.cpu.sampling_arithmetic import (
    bin_of,
    difference,
    long,
    mass,
    multiply_add,
    random,
    share,
    single,
    whole_mass,
    without_nan,
)
from relaxtune.schedules.functions import sampling as rules
from relaxtune.schedules.functions.sampling import SamplingSpec
from relaxtune.schedules.marks import SCHEDULED_ATTR

# The bits of a word of the mask.
_LANES = 32
_CHUNK = 4096
_DIGITS = 256
_INFINITY = float("inf")


def sampling_loops(spec: SamplingSpec) -> PrimFunc:
    """Return the code of a sampling function."""
    names = [name for name, _, _ in [*spec.inputs, *spec.outputs]]

    def emit(buffers: Buffers) -> None:
        _Loops(spec, dict(zip(names, buffers.values(), strict=True))).emit()

    return build_function(spec.declare(), emit).with_attr(SCHEDULED_ATTR, True)


class _Loops:
    """Emits into the current IRBuilder; `b` is a row, `v` a token."""

    def __init__(self, spec: SamplingSpec, buffers: dict[str, tirx.Var]) -> None:
        self._spec, self._buffers = spec, buffers
        self._columns = spec.vocabulary
        self._bits = spec.dtype == "bfloat16"
        if self._bits:
            # TVM's conversion of bfloat16 takes the bits for a number where a function has no blocks.
            shape, data = [wide(spec.batch), wide(self._columns)], buffers["logits"].data
            self._buffers = {**buffers, "logits": T.decl_buffer(shape, "uint16", data=data)}
        self._chunks = -(-self._columns // _CHUNK)

    def emit(self) -> None:
        jobs = wide(self._spec.batch) * self._chunks
        self._largest, self._largest_logit, self._sums = (_array("float32", jobs) for _ in range(3))
        self._bins = _array("int64", jobs * rules.BINS)
        # Each chunk's own part of the lists, and how many tokens it has there.
        self._list, self._masses = (_array("int32", jobs * _CHUNK) for _ in range(2))
        self._listed = _array("int64", jobs)
        self._share_chunks(self._process)
        self._share_chunks(self._sum)
        self._share_chunks(self._fill_list)
        with T.parallel(0, wide(self._spec.batch)) as b:
            self._begin_row(b)
            self._finish()

    def _share_chunks(self, body: Callable[[tirx.Expr], None]) -> None:
        with T.parallel(0, wide(self._spec.batch) * self._chunks) as job:
            self._begin_row(T.Bind(job // self._chunks))
            self._first = T.Bind(job % self._chunks * _CHUNK)
            self._count = T.Bind(tirx.min(wide(_CHUNK), self._columns - self._first))
            body(job)

    def _begin_row(self, b: tirx.Expr) -> None:
        self._b = b
        given = self._buffers["parameters"]
        self._parameter = {name: T.Bind(given[b, wide(at)]) for at, name in enumerate(rules.PARAMETERS)}
        self._greedy = self._parameter["temperature"] < single(rules.GREEDY_BELOW)
        top_k = self._parameter["top_k"]
        self._limits_count = tirx.all(top_k >= single(1), top_k < single(self._columns))

    def _each(self, body: Callable[[tirx.Expr, tirx.Expr], None]) -> None:
        """Run a body for each token of the chunk, given the lane of a vector too."""
        whole = T.Bind(self._count // _LANES)
        with T.serial(0, whole) as number, T.vectorized(0, _LANES) as lane:
            body(self._first + number * _LANES + wide(lane), lane)
        with T.serial(whole * _LANES, self._count) as rest:
            body(self._first + rest, tirx.IntImm("int32", 0))

    def _process(self, job: tirx.Expr) -> None:
        best, best_logit = _filled("float32", _LANES, -_INFINITY), _filled("float32", _LANES, -_INFINITY)

        def process(v: tirx.Expr, lane: tirx.Expr) -> None:
            logit = T.Bind(self._logit(v))
            x = T.Bind(self._processed(logit, v))
            T.buffer_store(best_logit, tirx.max(best_logit[lane], logit), [lane])
            T.buffer_store(best, tirx.max(best[lane], x), [lane])
            T.buffer_store(self._buffers["scratch"], x, [self._b, v])

        self._each(process)
        for all_chunks, lanes in ((self._largest, best), (self._largest_logit, best_logit)):
            T.buffer_store(all_chunks, _reduced(lanes, tirx.max), [job])

    def _logit(self, v: tirx.Expr) -> tirx.Expr:
        logit = self._buffers["logits"][self._b, v]
        if self._bits:
            logit = tirx.reinterpret("float32", tirx.Cast("uint32", logit) << tirx.const(16, "uint32"))
        return without_nan(T.Bind(tirx.Cast("float32", logit)))

    def _processed(self, x: tirx.Expr, v: tirx.Expr) -> tirx.Expr:
        buffers, parameter, b = self._buffers, self._parameter, self._b
        if self._spec.counts:
            word = T.Bind(buffers["counts"][b, v])
            generated = T.Bind(tirx.Cast("float32", word & tirx.const(2**31 - 1, "int32")))
            repetition = parameter["repetition"]
            repeated = tirx.Select(x < single(0), x * repetition, x / repetition)
            x = T.Bind(tirx.Select(word != 0, repeated, x))
            x = multiply_add(single(0) - parameter["frequency"], generated, x)
            x = x - tirx.Select(generated > single(0), parameter["presence"], single(0))
        if self._spec.bias:
            x = x + buffers["bias"][b, v]
        if self._spec.mask:
            word = buffers["mask"][b, v // _LANES]
            allowed = (word >> tirx.Cast("int32", v % _LANES)) & tirx.const(1, "int32")
            x = tirx.Select(allowed != 0, x, single(-_INFINITY))
        x = T.Bind(x / tirx.Select(self._greedy, single(1), parameter["temperature"]))
        # -0 is 0.
        return without_nan(T.Bind(tirx.Select(x == single(0), single(0), x)))

    def _row_max(self, of_chunks: tirx.Var) -> tirx.Expr:
        best = _filled("float32", 1, -_INFINITY)
        with T.serial(0, wide(self._chunks)) as chunk:
            T.buffer_store(best, tirx.max(best[0], of_chunks[self._b * self._chunks + chunk]), [0])
        return T.Bind(best[0])

    def _sum(self, job: tirx.Expr) -> None:
        largest, sums = self._row_max(self._largest_logit), _filled("float32", _LANES, 0.0)

        def add(v: tirx.Expr, lane: tirx.Expr) -> None:
            T.buffer_store(sums, sums[lane] + mass(difference(T.Bind(self._logit(v)), largest)), [lane])

        self._each(add)
        T.buffer_store(self._sums, _reduced(sums, tirx.Add), [job])
        with T.If(tirx.Not(self._greedy)), T.Then():
            self._fill_bins(job)

    def _fill_bins(self, job: tirx.Expr) -> None:
        largest, bins = self._row_max(self._largest), self._bins
        places, weights = _array("int32", _CHUNK), _array("int32", _CHUNK)

        def place(v: tirx.Expr, _lane: tirx.Expr) -> None:
            d = T.Bind(difference(self._buffers["scratch"][self._b, v], largest))
            weight = tirx.Select(self._limits_count, tirx.const(1, "int32"), whole_mass(d))
            T.buffer_store(weights, weight, [v - self._first])
            T.buffer_store(places, bin_of(d), [v - self._first])

        self._each(place)
        with T.serial(0, wide(rules.BINS)) as number:
            T.buffer_store(bins, long(0), [job * rules.BINS + number])
        with T.serial(0, self._count) as at:
            to = T.Bind(job * rules.BINS + wide(places[at]))
            T.buffer_store(bins, bins[to] + wide(weights[at]), [to])

    def _fill_list(self, job: tirx.Expr) -> None:
        with T.If(tirx.Not(self._greedy)), T.Then():
            last, _ = self._last_bin()
            largest, count = self._row_max(self._largest), _filled("int64", 1, 0)
            with T.serial(self._first, self._first + self._count) as v:
                d = T.Bind(difference(self._buffers["scratch"][self._b, v], largest))
                with T.If(bin_of(d) <= last), T.Then():
                    T.buffer_store(self._list, tirx.Cast("int32", v), [job * _CHUNK + count[0]])
                    T.buffer_store(self._masses, whole_mass(d), [job * _CHUNK + count[0]])
                    T.buffer_store(count, count[0] + 1, [0])
            T.buffer_store(self._listed, count[0], [job])

    def _last_bin(self) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the last bin that the first filter may keep tokens of, and what that has to reach."""
        sums = _filled("int64", rules.BINS, 0)
        with T.serial(0, wide(self._chunks)) as chunk, T.serial(0, wide(rules.BINS)) as number:
            weight = self._bins[(self._b * self._chunks + chunk) * rules.BINS + number]
            T.buffer_store(sums, sums[number] + weight, [number])
        total = _sum(wide(rules.BINS), lambda number: sums[number])
        parameter, last, reached = self._parameter, _filled("int64", 1, rules.BINS - 1), _filled("int64", 1, 0)
        top_k, top_p = tirx.Cast("int64", parameter["top_k"]), share(parameter["top_p"], total)
        goal = T.Bind(tirx.Select(self._limits_count, top_k, top_p))
        with T.If(tirx.any(self._limits_count, parameter["top_p"] < single(1))):
            with T.Then():
                T.buffer_store(last, long(0), [0])
                T.buffer_store(reached, sums[last[0]], [0])
                with T.While(reached[0] < goal):
                    T.buffer_store(last, last[0] + 1, [0])
                    T.buffer_store(reached, reached[0] + sums[last[0]], [0])
            with T.Else(), T.If(parameter["min_p"] > single(0)), T.Then():
                # One more, for the logarithm's rounding.
                d = tirx.min(tirx.log(parameter["min_p"]), single(0)) - single(1 / rules.STEPS)
                T.buffer_store(last, wide(bin_of(d)), [0])
        return T.Bind(last[0]), goal

    def _finish(self) -> None:
        token, buffers = _filled("int64", 1, 0), self._buffers
        largest = self._row_max(self._largest)
        with T.If(tirx.any(self._greedy, largest == single(-_INFINITY))):
            with T.Then():
                chunk, scratch = _filled("int64", 1, 0), buffers["scratch"]
                with T.While(self._largest[self._b * self._chunks + chunk[0]] != largest):
                    T.buffer_store(chunk, chunk[0] + 1, [0])
                T.buffer_store(token, chunk[0] * _CHUNK, [0])
                with T.While(scratch[self._b, token[0]] != largest):
                    T.buffer_store(token, token[0] + 1, [0])
            with T.Else():
                self._draw(token, largest)
        T.buffer_store(buffers["token"], token[0], [self._b])
        total = _sum(wide(self._chunks), lambda chunk: self._sums[self._b * self._chunks + chunk], "float32")
        d = difference(self._logit(token[0]), self._row_max(self._largest_logit))
        found = d - tirx.log(total * single(2.0**-rules.MASS_BITS))
        nothing = largest == single(-_INFINITY)
        T.buffer_store(buffers["log_probability"], tirx.Select(nothing, single(-_INFINITY), found), [self._b])
        if self._spec.counts:
            counts = buffers["counts"]
            T.buffer_store(counts, counts[self._b, token[0]] + 1, [self._b, token[0]])

    def _draw(self, token: tirx.Var, largest: tirx.Expr) -> None:
        parameter = self._parameter
        self._held, self._digits = _filled("int64", 1, 0), _array("int64", _DIGITS)
        self._row = T.Bind(self._b * (self._chunks * _CHUNK))
        with T.serial(0, wide(self._chunks)) as chunk, T.serial(0, self._listed[self._b * self._chunks + chunk]) as at:
            self._move(chunk * _CHUNK + at, self._held)
        goal = _filled("int64", 1, self._last_bin()[1])
        with T.If(self._limits_count), T.Then():
            border, _ = self._select(self._descending, lambda _at: long(1), goal[0])
            self._keep(lambda at: self._descending(at) <= border)
            T.buffer_store(goal, share(parameter["top_p"], self._total()), [0])
        with T.If(parameter["top_p"] < single(1)), T.Then():
            self._keep_top_p(T.Bind(goal[0]))
        with T.If(parameter["min_p"] > single(0)), T.Then():
            least = tirx.Cast("float64", parameter["min_p"]) * tirx.const(2.0**rules.MASS_BITS, "float64")
            self._keep(lambda at: tirx.Cast("float64", self._mass_of(at)) >= least)
        with T.If(tirx.all(parameter["typical_p"] > single(0), parameter["typical_p"] < single(1))), T.Then():
            self._keep_typical(largest)
        part = random(self._buffers["seed"][self._b], self._buffers["position"][self._b])
        drawn = T.Bind(tirx.Cast("int64", part * tirx.Cast("float64", self._total())))
        at, sums = _filled("int64", 1, 0), _filled("int64", 1, self._mass_of(wide(0)))
        with T.While(tirx.all(sums[0] <= drawn, at[0] < self._held[0] - 1)):
            T.buffer_store(at, at[0] + 1, [0])
            T.buffer_store(sums, sums[0] + self._mass_of(at[0]), [0])
        T.buffer_store(token, self._token_of(at[0]), [0])

    def _keep_top_p(self, goal: tirx.Expr) -> None:
        border, below = self._select(self._descending, self._mass_of, goal)
        of_one, ties = _filled("int64", 1, 1), _filled("int64", 1, 0)
        with T.serial(0, self._held[0]) as at, T.If(self._descending(at) == border), T.Then():
            T.buffer_store(of_one, tirx.max(self._mass_of(at), long(1)), [0])
        needed = T.Bind((goal - below + of_one[0] - 1) // of_one[0])

        def stays(at: tirx.Expr) -> tirx.Expr:
            key = T.Bind(self._descending(at))
            with T.If(key == border), T.Then():
                T.buffer_store(ties, ties[0] + 1, [0])
            return tirx.any(key < border, tirx.all(key == border, ties[0] <= needed))

        self._keep(stays)

    def _keep_typical(self, largest: tirx.Expr) -> None:
        ten_bits = tirx.const(1024.0, "float64")

        def d_of(at: tirx.Expr) -> tirx.Expr:
            return difference(self._buffers["scratch"][self._b, self._token_of(at)], largest)

        def weighted(at: tirx.Expr) -> tirx.Expr:
            # A token without mass may be -inf.
            d = tirx.max(d_of(at), single(rules.LOWEST))
            return tirx.Cast("int64", tirx.Cast("float64", self._mass_of(at)) * tirx.Cast("float64", d) * ten_bits)

        total = self._total()
        mean = tirx.Cast("float64", _sum(self._held[0], weighted)) / ten_bits / tirx.Cast("float64", total)
        mean = T.Bind(tirx.Cast("float32", mean))

        def distance(at: tirx.Expr) -> tirx.Expr:
            return tirx.reinterpret("uint32", tirx.abs(d_of(at) - mean))

        border, _ = self._select(distance, self._mass_of, share(self._parameter["typical_p"], total))
        self._keep(lambda at: distance(at) <= border)

    def _token_of(self, at: tirx.Expr) -> tirx.Expr:
        return wide(self._list[self._row + at])

    def _mass_of(self, at: tirx.Expr) -> tirx.Expr:
        return wide(self._masses[self._row + at])

    def _move(self, at: tirx.Expr, to: tirx.Var) -> None:
        """Move a token of the list to a place that counts on."""
        for listed in (self._list, self._masses):
            T.buffer_store(listed, listed[self._row + at], [self._row + to[0]])
        T.buffer_store(to, to[0] + 1, [0])

    def _descending(self, at: tirx.Expr) -> tirx.Expr:
        """Return the bits of an x, so ordered that the largest is the lowest number."""
        bits = T.Bind(tirx.reinterpret("int32", self._buffers["scratch"][self._b, self._token_of(at)]))
        turned = bits ^ ((bits >> 31) & tirx.const(2**31 - 1, "int32"))
        return tirx.reinterpret("uint32", tirx.const(2**31 - 1, "int32") ^ turned)

    def _total(self) -> tirx.Expr:
        return _sum(self._held[0], self._mass_of)

    def _select(
        self, key: Callable[[tirx.Expr], tirx.Expr], weight: Callable[[tirx.Expr], tirx.Expr], target: tirx.Expr
    ) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the lowest key up to which the weights' sum reaches a target, and the sum below that key."""
        found, below, digit = _filled("uint32", 1, 0), _filled("int64", 1, 0), _filled("int64", 1, 0)
        digits, target = self._digits, T.Bind(target)
        for shift in (24, 16, 8, 0):
            with T.serial(0, wide(_DIGITS)) as number:
                T.buffer_store(digits, long(0), [number])
            with T.serial(0, self._held[0]) as at:
                own = T.Bind(key(at))
                higher = tirx.const(0xFFFFFF00 << shift & 0xFFFFFFFF, "uint32")
                with T.If((own & higher) == found[0]), T.Then():
                    to = T.Bind(wide((own >> tirx.const(shift, "uint32")) & tirx.const(255, "uint32")))
                    T.buffer_store(digits, digits[to] + weight(at), [to])
            T.buffer_store(digit, long(0), [0])
            with T.While(tirx.all(below[0] + digits[digit[0]] < target, digit[0] < _DIGITS - 1)):
                T.buffer_store(below, below[0] + digits[digit[0]], [0])
                T.buffer_store(digit, digit[0] + 1, [0])
            shifted = tirx.Cast("uint32", digit[0]) << tirx.const(shift, "uint32")
            T.buffer_store(found, found[0] | shifted, [0])
        return T.Bind(found[0]), T.Bind(below[0])

    def _keep(self, condition: Callable[[tirx.Expr], tirx.Expr]) -> None:
        kept = _filled("int64", 1, 0)
        with T.serial(0, self._held[0]) as at, T.If(condition(at)), T.Then():
            self._move(at, kept)
        T.buffer_store(self._held, kept[0], [0])


def _array(dtype: str, size: tirx.Expr | int) -> tirx.Var:
    return T.alloc_buffer([size], dtype, scope="global")


def _filled(dtype: str, size: int, value: tirx.Expr | float) -> tirx.Var:
    array = _array(dtype, size)
    value = tirx.const(value, dtype) if isinstance(value, int | float) else value
    if size == 1:
        T.buffer_store(array, value, [0])
    else:
        with T.serial(0, wide(size)) as at:
            T.buffer_store(array, value, [at])
    return array


def _sum(count: tirx.Expr, term: Callable[[tirx.Expr], tirx.Expr], dtype: str = "int64") -> tirx.Expr:
    total = _filled(dtype, 1, 0)
    with T.serial(0, count) as at:
        T.buffer_store(total, total[0] + term(at), [0])
    return T.Bind(total[0])


def _reduced(lanes: tirx.Var, combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.Expr:
    parts = [lanes[lane] for lane in range(_LANES)]
    while len(parts) > 1:
        parts = [combine(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
