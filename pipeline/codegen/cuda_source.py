"""CUDA source as TVM writes it, made light: the headers that a kernel does not use are not read.

TVM starts every source with the same block of includes. For NVRTC that block costs 0.95 s, all of it libcu++'s
`<cuda/std/type_traits>` (and 0.4 s more for `<cuda/barrier>` with `<cooperative_groups.h>`, where an intrinsic asked
for them), whatever the kernel is. The block needs eight class templates of it; these are given here in 40 lines, as a
header that NVRTC finds in memory under the same name. A source that includes more of libcu++, or names anything else
in `cuda::`, is compiled with the real headers.

Large arrays of float32 registers (accumulators) become variables, one an element. NVRTC makes registers of both, and
the same machine code. But each time LLVM's "Combine redundant instructions" changes what uses an array, it goes through
all uses of the array again: 45 % of NVRTC's time for an attention of BERT-base.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from relaxtune.pipeline.codegen import mma_fragments

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]+)[>\"][^\n]*$", re.MULTILINE)
# The lines of TVM's own block that name something in `cuda::`.
_USING = re.compile(r"^[ \t]*using cuda::std::\w+;[ \t]*$", re.MULTILINE)
_LIBCU_NAMES = re.compile(r"\bcuda::|\bcooperative_groups\b|\bcg::")
# Each has one of them: to look for a text takes a thirtieth of the time.
_LIBCU_TEXTS = ("cuda::", "cooperative_groups", "cg::")

_TYPE_TRAITS = "cuda/std/type_traits"
_ON_DEMAND = frozenset({"cuda/barrier", "cooperative_groups.h"})
# 0.01 s together; type_traits is what costs.
_LIGHT = frozenset({"cuda/std/cstdint", _TYPE_TRAITS})
_LIBCU_PREFIXES = ("cuda/", "cub/", "thrust/", "cooperative_groups")
# NVRTC compiles for the device only and has no driver header.
_HOST_ONLY = "cuda.h"

# What NVRTC has no header for, and TVM's code may use. cuda.h's layout of a tensor map: 128 bytes, 64-byte aligned.
_PRELUDE = """\
#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#ifndef NAN
#define NAN (__int_as_float(0x7fffffff))
#endif
"""
_TENSOR_MAP = """\
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
"""

# Where a kernel is declared or defined, and an array of registers, as TVM writes them.
_KERNEL = re.compile(r"^(?=extern \"C\" __global__ )", re.MULTILINE)
_ARRAY = re.compile(r"^( *)alignas\(\d+\) (\w+) (\w+)\[(\d+)\];$", re.MULTILINE)
# Smaller arrays have few uses; with variables in their place, some kernels had other machine code.
_ELEMENTS_MIN = 16

_TYPE_TRAITS_TEXT = """\
#pragma once
namespace cuda { namespace std {
template <class T, T V> struct integral_constant { static constexpr T value = V; };
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <class T> struct remove_cv { using type = T; };
template <class T> struct remove_cv<const T> { using type = T; };
template <class T> struct remove_cv<volatile T> { using type = T; };
template <class T> struct remove_cv<const volatile T> { using type = T; };
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <class T, class... Ts> inline constexpr bool relaxtune_one_of = (is_same<T, Ts>::value || ...);
template <class T> inline constexpr bool relaxtune_integral = relaxtune_one_of<T, bool, char, signed char,
    unsigned char, wchar_t, char16_t, char32_t, short, unsigned short, int, unsigned int, long, unsigned long,
    long long, unsigned long long, __int128_t, __uint128_t>;
template <class T> inline constexpr bool relaxtune_floating = relaxtune_one_of<T, float, double>;
template <class T, bool = relaxtune_integral<T> || relaxtune_floating<T>> struct relaxtune_sign {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_unsigned = !is_signed;
};
template <class T> struct relaxtune_sign<T, false> {
  static constexpr bool is_signed = false, is_unsigned = false;
};
template <class T> struct is_integral : integral_constant<bool, relaxtune_integral<typename remove_cv<T>::type>> {};
template <class T> struct is_floating_point
    : integral_constant<bool, relaxtune_floating<typename remove_cv<T>::type>> {};
template <class T> struct is_signed
    : integral_constant<bool, relaxtune_sign<typename remove_cv<T>::type>::is_signed> {};
template <class T> struct is_unsigned
    : integral_constant<bool, relaxtune_sign<typename remove_cv<T>::type>::is_unsigned> {};
} }
"""


@dataclass(frozen=True)
class DeviceSource:
    """What NVRTC is given: the source, and headers by the name under which they are included."""

    code: str
    headers: Mapping[str, str]


def prepare_source(code: str) -> DeviceSource:
    """Return TVM's CUDA source for NVRTC, without the headers it does not use."""
    dropped = {_HOST_ONLY}
    includes = set(_INCLUDE.findall(code))
    own = _INCLUDE.sub("", _USING.sub("", code))
    uses_libcu = any(text in own for text in _LIBCU_TEXTS) and bool(_LIBCU_NAMES.search(own))
    if not uses_libcu:
        dropped |= _ON_DEMAND
    left = includes - dropped
    needs_real = uses_libcu or any(name.startswith(_LIBCU_PREFIXES) for name in left - _LIGHT)
    headers = {_TYPE_TRAITS: _TYPE_TRAITS_TEXT} if _TYPE_TRAITS in left and not needs_real else {}
    if mma_fragments.HEADER in left:
        headers[mma_fragments.HEADER] = mma_fragments.TEXT
    light = _INCLUDE.sub(lambda match: "" if match.group(1) in dropped else match.group(0), code)
    prelude = _PRELUDE + (_TENSOR_MAP if "CUtensorMap" in code else "")
    return DeviceSource(prelude + "".join(map(_with_variables, _KERNEL.split(light))), headers)


def _with_variables(kernel: str) -> str:
    """Return a kernel's source with variables for its large arrays of float32 of which elements alone are used."""
    arrays = _ARRAY.findall(kernel)
    times = Counter(name for _, _, name, _ in arrays)
    large = {name: int(size) for _, dtype, name, size in arrays if dtype == "float" and int(size) >= _ELEMENTS_MIN}
    if not large:
        return kernel
    names = "|".join(large)
    element = re.compile(rf"\b({names})\b(?:\[(\d+)\])?")
    used = defaultdict(set)
    places = list(element.finditer(kernel))
    for name, number in (place.groups() for place in places):
        used[name].add(int(number or -1))
    addressed = re.findall(rf"(?<!&)&[\s(]*({names})\b", kernel)
    # The declaration reads as the element after the last one.
    split = {
        name
        for name, size in large.items()
        if times[name] == 1 and name not in addressed and min(used[name]) >= 0 and max(used[name]) == size
    }

    def declare(array: re.Match[str]) -> str:
        indent, dtype, name, size = array.groups()
        # LLVM takes variables the last one first, and elements of an array the first one first.
        variables = ", ".join(f"{name}_at{number}" for number in reversed(range(int(size))))
        return f"{indent}{dtype} {variables};" if name in split else array[0]

    pieces, end = [], 0
    for place in places:
        name, number = place.groups()
        if name in split and int(number) < large[name]:
            pieces += [kernel[end : place.start()], f"{name}_at{number}"]
            end = place.end()
    return _ARRAY.sub(declare, "".join([*pieces, kernel[end:]]))
