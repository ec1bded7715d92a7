# SPDX-License-Identifier: Apache-2.0
"""Numbers side by side in a vector register, for loops that numba compiles.

``Lanes`` are 64 bytes of numbers of the type that is computed with: 16 of float32 or 8 of float64, whatever registers
the processor has (the compiler makes several of one where they are narrower). They are read from rows of matrices,
stored there, added, multiplied, compared and summed. So a loop says itself what is computed together and in which
order, and its bits are no optimiser's affair: a column has the same ones whatever columns are beside it.

bfloat16 is read from and stored as the int16 that NumPy has in its place, and computed with in float32.
"""

import math
import operator

import numpy as np
from llvmlite import ir
from numba import literal_unroll, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

NBYTES = 64
"""Of lanes."""
_SHIFTS = {types.float32: 1.5 * 2**23, types.float64: 1.5 * 2**52}
"""What has no bits for fractions, and is so large that what is added to it is rounded to whole numbers."""
TOGETHER = 4
"""Rows that ``dots`` takes together."""
_INT32, _INT8 = ir.IntType(32), ir.IntType(8)


class Lanes(types.Type):
    """Of numbers of one type."""

    def __init__(self, scalar):
        self.scalar = scalar
        self.count = NBYTES * 8 // scalar.bitwidth
        super().__init__(f"Lanes({scalar})")


def _ir(scalar):
    return ir.FloatType() if scalar is types.float32 else ir.DoubleType()


def _vector(lanes):
    return ir.VectorType(_ir(lanes.scalar), lanes.count)


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, _vector(lanes))


def computed(stored):
    """The type that numbers of a matrix are computed with."""
    return types.float32 if stored is types.int16 else stored


def _element(context, builder, array_type, array, row, column, stored):
    """A pointer to the lanes that begin there."""
    value = context.make_array(array_type)(context, builder, array)
    place = cgutils.get_item_pointer(context, builder, array_type, value, [row, column], wraparound=False)
    return builder.bitcast(place, stored.as_pointer())


def _mask(builder, column, limit, count):
    """Which of the lanes from ``column`` on are before ``limit``."""
    numbers = ir.Constant(ir.VectorType(_INT32, count), list(range(count)))
    left = builder.trunc(builder.sub(limit, column), _INT32)
    return builder.icmp_signed("<", numbers, _splat(builder, left, numbers.type))


def _splat(builder, value, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT32, 0))
    nowhere = ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), nowhere)


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _suffix(vector):
    name = {"float": "f32", "double": "f64", "i16": "i16"}[str(vector.element)]
    return f"v{vector.count}{name}"


def _stored(matrix):
    """Lanes as they lie in a matrix."""
    count = Lanes(computed(matrix.dtype)).count
    return ir.VectorType(ir.IntType(16) if matrix.dtype is types.int16 else _ir(matrix.dtype), count)


def _read(builder, matrix, place, mask):
    """Lanes from ``place`` on; of a ``mask``, if there is one, those that it has, and 0."""
    stored = _stored(matrix)
    if mask is None:
        found = builder.load(place, align=matrix.dtype.bitwidth // 8)
    else:
        read = [place, ir.Constant(_INT32, 2), mask, ir.Constant(stored, [0] * stored.count)]
        found = _call(builder, f"llvm.masked.load.{_suffix(stored)}.p0", stored, read)
    if matrix.dtype is not types.int16:
        return found
    wide = ir.VectorType(_INT32, stored.count)
    shifted = builder.shl(builder.zext(found, wide), ir.Constant(wide, [16] * stored.count))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), stored.count))


@intrinsic
def load(_, matrix, row, column, limit):
    """``Lanes`` of a row of ``matrix`` from ``column`` on; 0 at and beyond column ``limit``."""
    lanes = Lanes(computed(matrix.dtype))

    def generate(context, builder, signature, arguments):
        array, row, column, limit = arguments
        place = _element(context, builder, matrix, array, row, column, _stored(matrix))
        return _read(builder, matrix, place, _mask(builder, column, limit, lanes.count))

    return lanes(matrix, types.intp, types.intp, types.intp), generate


@intrinsic
def store(_, matrix, row, column, limit, lanes):
    """Write ``lanes`` to a row of ``matrix`` from ``column`` on, not at and beyond column ``limit``."""

    def generate(context, builder, signature, arguments):
        array, row, column, limit, value = arguments
        mask = _mask(builder, column, limit, lanes.count)
        if matrix.dtype is types.int16:
            value = _rounded(builder, value, lanes.count)
        place = _element(context, builder, matrix, array, row, column, value.type)
        written = [value, place, ir.Constant(_INT32, 2), mask]
        _call(builder, f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(), written)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, types.intp, lanes), generate


def _rounded(builder, value, count):
    """float32 as bfloat16, to the nearest, ties to even; NaN stays one."""
    wide, narrow = ir.VectorType(_INT32, count), ir.VectorType(ir.IntType(16), count)

    def constant(number):
        return ir.Constant(wide, [number] * count)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    up = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, constant(0x7FC00000), up)
    return builder.trunc(builder.lshr(bits, constant(16)), narrow)


@intrinsic
def load_halves(_, matrix, row, halves, like):
    """``Lanes`` of the type of ``like`` of two stretches of a row of ``matrix``, half of the lanes each. ``halves``:
    where these begin, and how many numbers each has; 0 behind them."""
    lanes = Lanes(like.dtype)

    def generate(context, builder, signature, arguments):
        array, row, halves, _ = arguments
        first, other, *counts = cgutils.unpack_tuple(builder, halves)
        half, kind = lanes.count // 2, _ir(matrix.dtype)
        vector, found = ir.VectorType(kind, half), []
        for column, count in ((first, counts[0]), (other, counts[1])):
            place = _element(context, builder, matrix, array, row, column, vector)
            mask = _mask(builder, ir.Constant(count.type, 0), count, half)
            read = [place, ir.Constant(_INT32, 2), mask, ir.Constant(vector, [0.0] * half)]
            found.append(_call(builder, f"llvm.masked.load.{_suffix(vector)}.p0", vector, read))
        both = builder.shuffle_vector(*found, ir.Constant(ir.VectorType(_INT32, 2 * half), list(range(2 * half))))
        if matrix.dtype is lanes.scalar:
            return both
        return (builder.fptrunc if lanes.scalar is types.float32 else builder.fpext)(both, _vector(lanes))

    return lanes(matrix, types.intp, halves, like), generate


@intrinsic
def store_halves(_, matrix, row, halves, lanes):
    """Write ``lanes`` to two stretches of a row of ``matrix``, as ``load_halves`` reads them."""

    def generate(context, builder, signature, arguments):
        array, row, halves, value = arguments
        first, other, *counts = cgutils.unpack_tuple(builder, halves)
        half = lanes.count // 2
        for number, (column, count) in enumerate(((first, counts[0]), (other, counts[1]))):
            numbers = list(range(number * half, (number + 1) * half))
            part = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_INT32, half), numbers))
            place = _element(context, builder, matrix, array, row, column, part.type)
            mask = _mask(builder, ir.Constant(count.type, 0), count, half)
            written = [part, place, ir.Constant(_INT32, 2), mask]
            _call(builder, f"llvm.masked.store.{_suffix(part.type)}.p0", ir.VoidType(), written)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, halves, lanes), generate


@intrinsic
def spread(_, number):
    """``Lanes`` that are all ``number``."""
    lanes = Lanes(number)

    def generate(context, builder, signature, arguments):
        return _splat(builder, arguments[0], _vector(lanes))

    return lanes(number), generate


@intrinsic
def fma(_, left, right, added):
    """``left`` · ``right`` + ``added``, rounded once."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.fma.{_suffix(_vector(left))}", _vector(left), list(arguments))

    return left(left, left, left), generate


@intrinsic
def where_positive(_, tested, positive, other):
    """``positive`` where ``tested`` is above 0, elsewhere (NaN among it) ``other``."""

    def generate(context, builder, signature, arguments):
        zero = ir.Constant(_vector(tested), [0.0] * tested.count)
        return builder.select(builder.fcmp_ordered(">", arguments[0], zero), arguments[1], arguments[2])

    return tested(tested, tested, tested), generate


@intrinsic
def where_equal(_, left, right, equal, other):
    """``equal`` where ``left`` is ``right``, elsewhere ``other``."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered("==", *arguments[:2]), *arguments[2:])

    return left(left, left, left, left), generate


@intrinsic
def larger(_, left, right):
    """The larger of the two; NaN where either is."""

    def generate(context, builder, signature, arguments):
        keeps = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        keeps = builder.or_(keeps, builder.fcmp_ordered(">=", *arguments))
        return builder.select(keeps, *arguments)

    return left(left, left), generate


@intrinsic
def total(_, lanes):
    """The sum of all lanes: of those half a register apart, then a quarter, …"""
    return lanes.scalar(lanes), _halving(lambda builder, left, right: builder.fadd(left, right), lanes)


@intrinsic
def totals(_, first, second, third, fourth):
    """The sums of each of the four, in this order in the first four lanes: of those half a register apart, then a
    quarter, …, as ``total`` has them, in half as many steps as one by one."""

    def generate(context, builder, signature, arguments):
        count = first.count
        half, quarter = count // 2, count // 4

        def chosen(left, right, lanes):
            return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_INT32, count), lanes))

        def folded(left, right, begins, width):
            near = [begin + lane for begin in begins for lane in range(width)]
            far = [lane + width for lane in near]
            return builder.fadd(chosen(left, right, near), chosen(left, right, far))

        pairs = [folded(*pair, (0, count), half) for pair in (arguments[:2], arguments[2:])]
        value = folded(*pairs, (0, half, count, count + half), quarter)
        step = quarter // 2
        while step:
            value = builder.fadd(value, chosen(value, value, [(lane + step) % count for lane in range(count)]))
            step //= 2
        return chosen(value, value, [quarter * (lane % 4) for lane in range(count)])

    return first(first, first, first, first), generate


@intrinsic
def largest(_, lanes):
    """The largest of all lanes; NaN where any is."""

    def larger_of(builder, left, right):
        keeps = builder.fcmp_unordered("uno", left, left)
        keeps = builder.or_(keeps, builder.fcmp_ordered(">=", left, right))
        return builder.select(keeps, left, right)

    return lanes.scalar(lanes), _halving(larger_of, lanes)


def _halving(combine, lanes):
    def generate(context, builder, signature, arguments):
        value, count = arguments[0], lanes.count
        while count > 1:
            count //= 2
            kind = ir.VectorType(_INT32, count)
            low, high = ir.Constant(kind, list(range(count))), ir.Constant(kind, list(range(count, 2 * count)))
            value = combine(
                builder, builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high)
            )
        return builder.extract_element(value, ir.Constant(_INT32, 0))

    return generate


def _every_second(start):
    @intrinsic
    def of_lanes(_, left, right):
        def generate(context, builder, signature, arguments):
            numbers = list(range(start, 2 * left.count, 2))
            return builder.shuffle_vector(*arguments, ir.Constant(ir.VectorType(_INT32, left.count), numbers))

        return left(left, left), generate

    return of_lanes


evens, odds = _every_second(0), _every_second(1)
"""Every second of the lanes of two, the first of the first one among them or not."""


def _every_third(start):
    @intrinsic
    def of_lanes(_, first, second, third):
        def generate(context, builder, signature, arguments):
            count = first.count
            wanted = range(start, 3 * count, 3)
            kind = ir.VectorType(_INT32, count)
            near = [number if number < 2 * count else 0 for number in wanted]
            found = builder.shuffle_vector(*arguments[:2], ir.Constant(kind, near))
            far = [lane if number < 2 * count else number - count for lane, number in enumerate(wanted)]
            return builder.shuffle_vector(found, arguments[2], ir.Constant(kind, far))

        return first(first, first, first), generate

    return of_lanes


firsts, seconds, thirds = map(_every_third, range(3))
"""Every third of the lanes of three, from the first, second or third one of all."""


@intrinsic
def dots(_, own, row, matrix, rows, first, heads, own_columns, columns, channels, scale, out):
    """Write to ``out``, of every head from column ``first`` on, ``scale`` times the products of its columns of a row of
    ``own`` and of ``TOGETHER`` rows of ``matrix``, of ``rows[first]`` and those that come after it there.
    ``own_columns``, ``columns``: where those of the first head begin, and how many further on those of the next do."""
    lanes = Lanes(computed(matrix.dtype))
    number, vector, count = _ir(lanes.scalar), _vector(lanes), lanes.count

    def generate(context, builder, signature, arguments):
        own_array, row, array, numbers, first, heads, own_columns, columns, channels, scale, out_array = arguments
        one, of_four = first.type, ir.VectorType(number, TOGETHER)
        listed = context.make_array(rows)(context, builder, numbers).data
        listed = [builder.load(builder.gep(listed, [builder.add(first, one(place))])) for place in range(TOGETHER)]
        (own_at, own_step), (at, step) = (
            [builder.extract_value(pair, place) for place in (0, 1)] for pair in (own_columns, columns)
        )
        begins = [_element(context, builder, matrix, array, at_row, at, _stored(matrix)) for at_row in listed]
        begins.append(_element(context, builder, own, own_array, row, own_at, _stored(own)))
        factor = _splat(builder, context.cast(builder, scale, signature.args[9], lanes.scalar), of_four)
        whole = builder.and_(channels, one(-count))
        sums = [cgutils.alloca_once(builder, vector) for _ in listed]

        def add(head, channel, mask):
            def read(kind, begin, step):
                stored = context.get_data_type(kind.dtype)
                place = builder.add(builder.mul(head, step), channel)
                place = builder.gep(builder.bitcast(begin, stored.as_pointer()), [place], source_etype=stored)
                return _read(builder, kind, builder.bitcast(place, _stored(kind).as_pointer()), mask)

            left = read(own, begins[-1], own_step)
            for begin, total in zip(begins[:-1], sums, strict=True):
                added = [left, read(matrix, begin, step), builder.load(total)]
                builder.store(_call(builder, f"llvm.fma.{_suffix(vector)}", vector, added), total)

        with cgutils.for_range(builder, heads) as loop:
            for total in sums:
                builder.store(ir.Constant(vector, [0.0] * count), total)
            with cgutils.for_range_slice(builder, one(0), whole, one(count), inc=True) as (channel, _):
                add(loop.index, channel, None)
            with builder.if_then(builder.icmp_signed("<", whole, channels)):
                add(loop.index, whole, _mask(builder, whole, channels, count))
            value = builder.fmul(_side_by_side(builder, [builder.load(total) for total in sums]), factor)
            place = _element(context, builder, out, out_array, loop.index, first, of_four)
            builder.store(value, place, align=lanes.scalar.bitwidth // 8)
        return context.get_dummy_value()

    pair = types.UniTuple(types.intp, 2)
    of_rows = types.intp, matrix, rows, types.intp, types.intp
    return types.void(own, *of_rows, pair, pair, types.intp, scale, out), generate


def _side_by_side(builder, vectors):
    """The sums of the lanes of each of several vectors, one after the other: halves are added to halves."""
    parts, size = 1, vectors[0].type.count  # of a vector, so many lanes of one sum after the other

    def half(left, right, which):
        sums = parts if left is right else 2 * parts
        numbers = [part * size + which * size // 2 + lane for part in range(sums) for lane in range(size // 2)]
        return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_INT32, len(numbers)), numbers))

    while size > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0], vectors[0])]
        parts_then = parts * min(2, len(vectors))
        vectors = [builder.fadd(half(*pair, 0), half(*pair, 1)) for pair in pairs]
        parts, size = parts_then, size // 2
    return vectors[0]


@intrinsic
def _limited(_, lanes, least, most):
    """``lanes`` where they are between the two or NaN, elsewhere the nearer one."""

    def generate(context, builder, signature, arguments):
        value, least, most = arguments
        value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
        return builder.select(builder.fcmp_ordered(">", value, most), most, value)

    return lanes(lanes, lanes, lanes), generate


@intrinsic
def _power_of_two(_, lanes):
    """2 to the whole numbers, from the smallest normal one to the largest, that ``_SHIFTS`` was added to: the lowest
    bits of such a sum are these numbers'. (Converting them would take LLVM one after the other.)"""

    def generate(context, builder, signature, arguments):
        bits, fraction, bias = (32, 23, 127) if lanes.scalar is types.float32 else (64, 52, 1023)
        kind = ir.VectorType(ir.IntType(bits), lanes.count)
        exponent = builder.shl(builder.bitcast(arguments[0], kind), ir.Constant(kind, [fraction] * lanes.count))
        return builder.bitcast(
            builder.add(exponent, ir.Constant(kind, [bias << fraction] * lanes.count)), _vector(lanes)
        )

    return lanes(lanes), generate


def _arithmetic(name):
    @intrinsic
    def of_lanes(_, left, right):
        def generate(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        return left(left, left), generate

    return of_lanes


_add, _subtract, _multiply, _divide = map(_arithmetic, ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def _alike(_, lanes, number):
    """``Lanes`` of the type of ``lanes`` that are all ``number``."""

    def generate(context, builder, signature, arguments):
        return _splat(builder, context.cast(builder, arguments[1], number, lanes.scalar), _vector(lanes))

    return lanes(lanes, number), generate


def _operator(symbol, of_lanes):
    @overload(symbol, inline="always")
    def typed(left, right):
        if isinstance(left, Lanes) and isinstance(right, Lanes):
            return lambda left, right: of_lanes(left, right)
        if isinstance(left, Lanes):
            return lambda left, right: of_lanes(left, _alike(left, right))
        if isinstance(right, Lanes):
            return lambda left, right: of_lanes(_alike(right, left), right)
        return None


_operator(operator.add, _add)
_operator(operator.sub, _subtract)
_operator(operator.mul, _multiply)
_operator(operator.truediv, _divide)


@intrinsic
def prefetch(_, matrix, row):
    """Have all cache lines of a row of ``matrix`` fetched, which is going to be read."""

    def generate(context, builder, signature, arguments):
        array, row = arguments
        value, column = context.make_array(matrix)(context, builder, array), context.get_constant(types.intp, 0)
        first = _element(context, builder, matrix, array, row, column, _INT8)
        nbytes = builder.mul(cgutils.unpack_tuple(builder, value.shape)[1], value.itemsize)
        lines = builder.lshr(builder.add(nbytes, ir.Constant(nbytes.type, 2 * NBYTES - 1)), ir.Constant(nbytes.type, 6))
        constants = [
            ir.Constant(_INT32, number) for number in (0, 2, 1)
        ]  # read; to keep in all caches but the first; data
        with cgutils.for_range(builder, lines) as line:
            place = builder.gep(first, [builder.shl(line.index, ir.Constant(nbytes.type, 6))], source_etype=_INT8)
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *constants])
        return context.get_dummy_value()

    return types.void(matrix, types.intp), generate


def exp(lanes):
    """e to the power of ``lanes``: within two units of the last place, 0 where that would not be a normal number, and
    of what is larger than any power the largest."""
    raise NotImplementedError("is compiled")


@overload(exp)
def _exp(lanes):
    number = np.float32 if lanes.scalar is types.float32 else np.float64
    terms = 7 if lanes.scalar is types.float32 else 13
    lowest, highest = (-87.25, 88.375) if lanes.scalar is types.float32 else (-708.25, 709.0)
    least, most, shift = number(lowest), number(highest), number(_SHIFTS[lanes.scalar])
    log2_e, zero = number(1.4426950408889634), number(0.0)
    # ln 2 in two parts: the first has zeros behind, so that a whole number of it is exact.
    high, low = (0.693359375, -2.12194440e-4) if terms == 7 else (0.6931471803691238, 1.9082149292705877e-10)
    minus_high, minus_low = number(-high), number(-low)
    factors = tuple(number(1.0 / math.factorial(term)) for term in range(terms, -1, -1))

    def compiled(lanes):
        within = _limited(lanes, spread(least), spread(most))
        shifted = fma(within, spread(log2_e), spread(shift))
        power = shifted - shift
        rest = fma(power, spread(minus_low), fma(power, spread(minus_high), within))
        value = spread(factors[0])
        for factor in literal_unroll(factors[1:]):
            value = fma(value, rest, spread(factor))
        return where_positive(spread(least) - lanes, spread(zero), value * _power_of_two(shifted))

    return compiled
