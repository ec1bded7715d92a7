# SPDX-License-Identifier: Apache-2.0
"""Vector registers of numbers, for loops that numba compiles.

``Lanes`` are 64 bytes of numbers of the compute type, 16 of float32 or 8 of float64, on any processor (the compiler
splits them if registers are narrower); or ``TOGETHER`` such registers, for as many rows. They are loaded from rows of
matrices, stored, added, multiplied, compared and summed. So a loop itself says what is computed together and in which
order, and its bits do not depend on an optimiser: a column has the same bits whatever columns are beside it.

bfloat16 is read from int16, which stands for it in NumPy, and computed with in float32.
"""

import math
import operator
from functools import reduce
from inspect import Parameter, Signature

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

NBYTES = 64
"""Bytes of a register."""
TOGETHER = 4
"""Rows that are multiplied by numbers loaded once."""
_INT32, _INT8 = ir.IntType(32), ir.IntType(8)


class Lanes(types.Type):
    """Numbers of one type: a register of one row, or of ``TOGETHER`` rows."""

    def __init__(self, scalar, rows=1):
        self.scalar, self.rows = scalar, rows
        self.count = NBYTES * 8 // scalar.bitwidth
        super().__init__(f"Lanes({scalar}, {rows})")


def _ir(scalar):
    return ir.FloatType() if scalar is types.float32 else ir.DoubleType()


def _vector(lanes):
    return ir.VectorType(_ir(lanes.scalar), lanes.count)


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        vector = _vector(lanes)
        super().__init__(manager, lanes, vector if lanes.rows == 1 else ir.ArrayType(vector, lanes.rows))


def _row(builder, lanes, value, row):
    return value if lanes.rows == 1 else builder.extract_value(value, row)


def _rows(builder, vectors):
    if len(vectors) == 1:
        return vectors[0]
    nothing = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    return reduce(lambda rows, one: builder.insert_value(rows, one[1], one[0]), enumerate(vectors), nothing)


def _computed(stored):
    """Return the type in which a matrix's numbers are computed with."""
    return types.float32 if stored is types.int16 else stored


def _element(context, builder, array_type, array, row, column, stored):
    """Return a pointer to the element, as a vector."""
    value = context.make_array(array_type)(context, builder, array)
    place = cgutils.get_item_pointer(context, builder, array_type, value, [row, column], wraparound=False)
    return builder.bitcast(place, stored.as_pointer())


def _constant(number, like):
    return ir.Constant(like, [number] * like.count)


def _mask(builder, column, limit, count):
    """Return which of the lanes from ``column`` on are before ``limit``."""
    numbers = ir.Constant(ir.VectorType(_INT32, count), list(range(count)))
    left = builder.trunc(builder.sub(limit, column), _INT32)
    return builder.icmp_signed("<", numbers, _splat(builder, left, numbers.type))


def _shuffle(builder, left, right, lanes):
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes)))


def _splat(builder, value, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT32, 0))
    return _shuffle(builder, first, first, [0] * vector.count)


def _call(builder, name, result, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _suffix(vector):
    name = {"float": "f32", "double": "f64", "i16": "i16"}[str(vector.element)]
    return f"v{vector.count}{name}"


def _stored_vector(matrix, count):
    """Return the vector type of ``count`` numbers as they are stored in a matrix."""
    return ir.VectorType(ir.IntType(16) if matrix.dtype is types.int16 else _ir(matrix.dtype), count)


def _read(builder, matrix, place, mask):
    """Load numbers from ``place`` where the mask is set (None: all), zeros elsewhere, in the compute type."""
    stored = place.type.pointee
    if mask is None:
        found = builder.load(place, align=2)
    else:
        read = [place, ir.Constant(_INT32, 2), mask, ir.Constant(stored, [0] * stored.count)]
        found = _call(builder, f"llvm.masked.load.{_suffix(stored)}.p0", stored, read)
    return found if matrix.dtype is not types.int16 else _widen(builder, found)


def _widen(builder, halves):
    """Convert bfloat16 to float32."""
    wide = ir.VectorType(_INT32, halves.type.count)
    shifted = builder.shl(builder.zext(halves, wide), _constant(16, wide))
    return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), wide.count))


def _narrow(builder, numbers):
    """Convert float32 to the nearest bfloat16; a tie is rounded away from zero, as by FBGEMM."""
    whole = ir.VectorType(_INT32, numbers.type.count)
    rounded = builder.add(builder.bitcast(numbers, whole), _constant(1 << 15, whole))
    return builder.trunc(builder.lshr(rounded, _constant(16, whole)), ir.VectorType(ir.IntType(16), whole.count))


@intrinsic
def number(_, matrix, row, column):
    """Load one number of a matrix, in the compute type."""

    def generate(context, builder, signature, arguments):
        one = _stored_vector(matrix, 1)
        found = builder.load(_element(context, builder, matrix, *arguments, one), align=matrix.dtype.bitwidth // 8)
        found = found if matrix.dtype is not types.int16 else _widen(builder, found)
        return builder.extract_element(found, ir.Constant(_INT32, 0))

    return _computed(matrix.dtype)(matrix, types.intp, types.intp), generate


@intrinsic
def load(_, matrix, row, column, limit):
    """Load ``Lanes`` of a row of ``matrix`` from ``column`` on; zeros at and beyond column ``limit``."""
    lanes = Lanes(_computed(matrix.dtype))

    def generate(context, builder, signature, arguments):
        array, row, column, limit = arguments
        place = _element(context, builder, matrix, array, row, column, _stored_vector(matrix, lanes.count))
        return _read(builder, matrix, place, _mask(builder, column, limit, lanes.count))

    return lanes(matrix, types.intp, types.intp, types.intp), generate


@intrinsic
def load_rows(_, matrix, rows, first, column, limit):
    """As ``load``, for ``TOGETHER`` rows: ``rows[first]`` and the following ones."""
    lanes = Lanes(_computed(matrix.dtype), TOGETHER)

    def generate(context, builder, signature, arguments):
        array, numbers, first, column, limit = arguments
        listed, mask = context.make_array(rows)(context, builder, numbers).data, None
        mask = _mask(builder, column, limit, lanes.count)
        found = []
        for number in range(TOGETHER):
            row = builder.load(builder.gep(listed, [builder.add(first, first.type(number))]))
            place = _element(context, builder, matrix, array, row, column, _stored_vector(matrix, lanes.count))
            found.append(_read(builder, matrix, place, mask))
        return _rows(builder, found)

    return lanes(matrix, rows, types.intp, types.intp, types.intp), generate


@intrinsic
def load_side_by_side(_, matrix, row, column, limit):
    """As ``load``, for ``TOGETHER`` consecutive lanes of one row; without ``limit`` (None), the row has them all."""
    lanes, limited = Lanes(_computed(matrix.dtype), TOGETHER), not isinstance(limit, types.NoneType)

    def generate(context, builder, signature, arguments):
        array, row, column, limit = arguments
        found = []
        for number in range(TOGETHER):
            at = builder.add(column, column.type(number * lanes.count))
            place = _element(context, builder, matrix, array, row, at, _stored_vector(matrix, lanes.count))
            if not limited:
                found.append(_read(builder, matrix, place, None))
                continue
            before = builder.block
            # A load with an empty mask waits for memory all the same.
            with builder.if_then(builder.icmp_signed("<", at, limit), likely=True):
                read = _read(builder, matrix, place, _mask(builder, at, limit, lanes.count))
                within = builder.block
            either = builder.phi(read.type)
            either.add_incoming(read, within)
            either.add_incoming(_constant(0.0, read.type), before)
            found.append(either)
        return _rows(builder, found)

    return lanes(matrix, types.intp, types.intp, types.intp if limited else limit), generate


@intrinsic
def store_side_by_side(_, matrix, row, column, limit, lanes):
    """Store to one row what ``load_side_by_side`` loads."""

    def generate(context, builder, signature, arguments):
        array, row, column, limit, value = arguments
        for number in range(TOGETHER):
            one, at = _row(builder, lanes, value, number), builder.add(column, column.type(number * lanes.count))
            one = _narrow(builder, one) if matrix.dtype is types.int16 else one
            place = _element(context, builder, matrix, array, row, at, one.type)
            written = [one, place, ir.Constant(_INT32, 2), _mask(builder, at, limit, lanes.count)]
            _call(builder, f"llvm.masked.store.{_suffix(one.type)}.p0", ir.VoidType(), written)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, types.intp, lanes), generate


@intrinsic
def store(_, matrix, row, column, limit, lanes):
    """Store ``lanes`` to a row of ``matrix`` from ``column`` on, or to it and the following rows; not at and beyond
    column ``limit``."""

    def generate(context, builder, signature, arguments):
        array, row, column, limit, value = arguments
        mask = _mask(builder, column, limit, lanes.count)
        for number in range(lanes.rows):
            one, at_row = _row(builder, lanes, value, number), builder.add(row, row.type(number))
            place = _element(context, builder, matrix, array, at_row, column, one.type)
            written = [one, place, ir.Constant(_INT32, 2), mask]
            _call(builder, f"llvm.masked.store.{_suffix(one.type)}.p0", ir.VoidType(), written)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, types.intp, lanes), generate


@intrinsic
def load_halves(_, matrix, row, halves, like):
    """Load ``Lanes`` of the type of ``like`` from two stretches of a row of ``matrix``, half of the lanes each.
    ``halves``: where the stretches begin, and how many numbers each has; zeros behind them."""
    lanes, kind = Lanes(like.dtype), _computed(matrix.dtype)

    def generate(context, builder, signature, arguments):
        array, row, halves, _ = arguments
        first, other, *counts = cgutils.unpack_tuple(builder, halves)
        half, found = lanes.count // 2, []
        for column, count in ((first, counts[0]), (other, counts[1])):
            place = _element(context, builder, matrix, array, row, column, _stored_vector(matrix, half))
            found.append(_read(builder, matrix, place, _mask(builder, count.type(0), count, half)))
        both = _shuffle(builder, *found, range(2 * half))
        if kind is lanes.scalar:
            return both
        return (builder.fptrunc if lanes.scalar is types.float32 else builder.fpext)(both, _vector(lanes))

    return lanes(matrix, types.intp, halves, like), generate


@intrinsic
def store_halves(_, matrix, row, halves, lanes):
    """Store ``lanes`` to two stretches of a row of ``matrix``, as ``load_halves`` loads them."""

    def generate(context, builder, signature, arguments):
        array, row, halves, value = arguments
        first, other, *counts = cgutils.unpack_tuple(builder, halves)
        half = lanes.count // 2
        for number, (column, count) in enumerate(((first, counts[0]), (other, counts[1]))):
            part = _shuffle(builder, value, value, range(number * half, (number + 1) * half))
            place = _element(context, builder, matrix, array, row, column, part.type)
            written = [part, place, ir.Constant(_INT32, 2), _mask(builder, count.type(0), count, half)]
            _call(builder, f"llvm.masked.store.{_suffix(part.type)}.p0", ir.VoidType(), written)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, halves, lanes), generate


def _spreading(rows):
    @intrinsic
    def of_number(_, number):
        lanes = Lanes(number, rows)

        def generate(context, builder, signature, arguments):
            return _rows(builder, [_splat(builder, arguments[0], _vector(lanes))] * rows)

        return lanes(number), generate

    return of_number


spread, spread_rows = _spreading(1), _spreading(TOGETHER)
"""``Lanes`` that repeat one number, for one row or for ``TOGETHER``."""


def _spreading_several(down):
    @intrinsic
    def of_matrix(_, matrix, row, column):
        lanes = Lanes(matrix.dtype, TOGETHER)

        def generate(context, builder, signature, arguments):
            array, row, column = arguments
            found = []
            for number in range(TOGETHER):
                further = row.type(number)
                at = (builder.add(row, further), column) if down else (row, builder.add(column, further))
                value = builder.load(_element(context, builder, matrix, array, *at, _ir(matrix.dtype)))
                found.append(_splat(builder, value, _vector(lanes)))
            return _rows(builder, found)

        return lanes(matrix, types.intp, types.intp), generate

    return of_matrix


along, down = _spreading_several(False), _spreading_several(True)
"""``Lanes`` of ``TOGETHER`` rows, each of which repeats one of the consecutive numbers along a row of a matrix, or down
a column."""


@intrinsic
def row_of(_, lanes, row):
    """Return one of the rows of ``lanes``."""
    one = Lanes(lanes.scalar)

    def generate(context, builder, signature, arguments):
        value, row = arguments
        place = cgutils.alloca_once_value(builder, value)
        return builder.load(builder.gep(place, [row.type(0), row]))

    return one(lanes, types.intp), generate


def _intrinsic(names, define):
    """Return an intrinsic with this many arguments, which numba must know."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("_", *names)]
    define.__signature__ = Signature(parameters)
    return intrinsic(define)


def _elementwise(combine):
    """Return an intrinsic that applies ``combine`` to vectors, row by row; a single row is combined with all rows of
    the others."""

    def of_lanes(_, *lanes):
        most = max(lanes, key=lambda one: one.rows)

        def generate(context, builder, signature, arguments):
            return _by_row(builder, combine, lanes, arguments)

        return most(*lanes), generate

    _, *names = Signature.from_callable(combine).parameters
    return _intrinsic(names, of_lanes)


def _by_row(builder, combine, lanes, values):
    given = list(zip(lanes, values, strict=True))
    rows = range(max(one.rows for one in lanes))
    return _rows(builder, [combine(builder, *(_row(builder, *one, row) for one in given)) for row in rows])


def _fma(builder, left, right, added):
    return _call(builder, f"llvm.fma.{_suffix(left.type)}", left.type, [left, right, added])


@_elementwise
def larger(builder, left, right):
    """The larger of two numbers; NaN if either is."""
    keeps = builder.or_(builder.fcmp_unordered("uno", left, left), builder.fcmp_ordered(">=", left, right))
    return builder.select(keeps, left, right)


def _higher(builder, left, right):
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _where_positive(builder, tested, positive, other):
    return builder.select(builder.fcmp_ordered(">", tested, _constant(0.0, tested.type)), positive, other)


@_elementwise
def where_equal(builder, left, right, equal, other):
    """The third number if the first two are equal, otherwise the fourth."""
    return builder.select(builder.fcmp_ordered("==", left, right), equal, other)


@_elementwise
def exp(builder, value):
    """e to the power of lanes, within two units in the last place; 0 if the result would not be a normal number, and
    the largest power for larger arguments."""
    kind, is_single = value.type, isinstance(value.type.element, ir.FloatType)
    least, most = (_constant(end, kind) for end in ((-87.25, 88.375) if is_single else (-708.25, 709.0)))
    # A number so large that adding to it rounds to integers.
    shift = _constant(1.5 * 2**23 if is_single else 1.5 * 2**52, kind)
    # ln 2 in two parts: the first has zeros behind, so that a whole number of it is exact.
    high, low = (0.693359375, -2.12194440e-4) if is_single else (0.6931471803691238, 1.9082149292705877e-10)
    within = builder.select(builder.fcmp_ordered("<", value, least), least, value)
    within = builder.select(builder.fcmp_ordered(">", within, most), most, within)
    shifted = _fma(builder, within, _constant(1.4426950408889634, kind), shift)
    power = builder.fsub(shifted, shift)
    rest = _fma(builder, power, _constant(-low, kind), _fma(builder, power, _constant(-high, kind), within))
    factors = [_constant(1.0 / math.factorial(term), kind) for term in range(7 if is_single else 13, -1, -1)]
    found = reduce(lambda sums, factor: _fma(builder, sums, rest, factor), factors)
    # 2 to the whole number, of which the lowest bits are those of ``shifted``. (To convert would take longer.)
    bits, fraction, bias = (32, 23, 127) if is_single else (64, 52, 1023)
    whole = ir.VectorType(ir.IntType(bits), kind.count)
    exponent = builder.shl(builder.bitcast(shifted, whole), _constant(fraction, whole))
    scale = builder.bitcast(builder.add(exponent, _constant(bias << fraction, whole)), kind)
    return _where_positive(builder, builder.fsub(least, value), _constant(0.0, kind), builder.fmul(found, scale))


@_elementwise
def log_of_more(builder, value):
    """log(1 + u) for lanes u from 0 to 1, within some units in the last place: 2 artanh(u / (2 + u)), a series in which
    each term is at most a ninth of the one before."""
    kind, terms = value.type, 8 if isinstance(value.type.element, ir.FloatType) else 17
    ratio = builder.fdiv(value, builder.fadd(value, _constant(2.0, kind)))
    square = builder.fmul(ratio, ratio)
    factors = [_constant(2.0 / (2 * term + 1), kind) for term in range(terms - 1, -1, -1)]
    return builder.fmul(ratio, reduce(lambda sums, factor: _fma(builder, sums, square, factor), factors))


fma = _elementwise(_fma)
"""The product of the first two plus the third, rounded once."""
higher = _elementwise(_higher)
"""The larger of two numbers, in one instruction; the second if either is NaN."""
where_positive = _elementwise(_where_positive)
"""The second number if the first is above 0, otherwise (also for NaN) the third."""


def _reduction_by_halves(combine):
    @intrinsic
    def of_lanes(_, lanes):
        def generate(context, builder, signature, arguments):
            value, count = arguments[0], lanes.count
            while count > 1:
                count //= 2
                low, high = range(count), range(count, 2 * count)
                value = combine(builder, _shuffle(builder, value, value, low), _shuffle(builder, value, value, high))
            return builder.extract_element(value, ir.Constant(_INT32, 0))

        return lanes.scalar(lanes), generate

    return of_lanes


total = _reduction_by_halves(lambda builder, left, right: builder.fadd(left, right))
"""The sum of all lanes: of those half a register apart, then a quarter, …"""
largest = _reduction_by_halves(_higher)
"""The largest of all lanes, none of which is NaN."""


@intrinsic
def totals(_, lanes):
    """The ``total`` of each row, in the first lanes in this order, in half as many steps as one by one."""

    def generate(context, builder, signature, arguments):
        vectors, parts, size = [_row(builder, lanes, arguments[0], row) for row in range(lanes.rows)], 1, lanes.count

        def half(left, right, which):
            sums = parts if left is right else 2 * parts
            return _shuffle(
                builder,
                left,
                right,
                [part * size + which * size // 2 + at for part in range(sums) for at in range(size // 2)],
            )

        while size > 1:  # lanes of a vector per sum, one sum after another
            pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0], vectors[0])]
            parts_then = parts * min(2, len(vectors))
            vectors = [builder.fadd(half(*pair, 0), half(*pair, 1)) for pair in pairs]
            parts, size = parts_then, size // 2
        return _shuffle(builder, vectors[0], vectors[0], [lane % lanes.rows for lane in range(lanes.count)])

    return Lanes(lanes.scalar)(lanes), generate


def _strided_lanes(step, start):
    def of_lanes(_, *lanes):
        count = lanes[0].count

        def generate(context, builder, signature, arguments):
            found = arguments[0]
            for number, value in enumerate(arguments):
                wanted = enumerate(range(start - number * count, (step - number) * count, step))
                at = [count + place if 0 <= place < count else lane for lane, place in wanted]
                found = _shuffle(builder, found, value, at)
            return found

        return lanes[0](*lanes), generate

    return _intrinsic([f"lanes_{number}" for number in range(step)], of_lanes)


evens, odds = (_strided_lanes(2, start) for start in range(2))
"""The even, or the odd, lanes of two registers."""
firsts, seconds, thirds = (_strided_lanes(3, start) for start in range(3))
"""Every third lane of three registers, from the first, second or third lane on."""


def _has_operator(symbol, name):
    class Typed(AbstractTemplate):
        def generic(self, operands, _):
            lanes = [one for one in operands if isinstance(one, Lanes)]
            return signature(max(lanes, key=lambda one: one.rows), *operands) if lanes else None

    infer_global(symbol)(Typed)

    def lowered(context, builder, signature, arguments):
        scalar = signature.return_type.scalar
        lanes, values = [], []
        for kind, value in zip(signature.args, arguments, strict=True):
            lanes.append(kind if isinstance(kind, Lanes) else Lanes(scalar))
            if kind is not lanes[-1]:
                value = _splat(builder, context.cast(builder, value, kind, scalar), _vector(lanes[-1]))
            values.append(value)
        return _by_row(builder, lambda builder, *operands: getattr(builder, name)(*operands), lanes, values)

    for operands in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(symbol, *operands)(lowered)


_has_operator(operator.add, "fadd")
_has_operator(operator.sub, "fsub")
_has_operator(operator.mul, "fmul")
_has_operator(operator.truediv, "fdiv")


@intrinsic
def prefetch_side_by_side(_, matrix, row, column):
    """Prefetch the cache lines that ``load_side_by_side`` reads."""

    def generate(context, builder, signature, arguments):
        array, row, column = arguments
        constants = [_INT32(number) for number in (0, 2, 1)]
        bits = matrix.dtype.bitwidth
        for number in range(TOGETHER * bits // _computed(matrix.dtype).bitwidth):
            at = builder.add(column, column.type(number * NBYTES * 8 // bits))
            place = _element(context, builder, matrix, array, row, at, _INT8)
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *constants])
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate


@intrinsic
def prefetch_line(_, matrix, row, column):
    """Prefetch the cache line of one number of a matrix. There may be no such row."""

    def generate(context, builder, signature, arguments):
        constants = [_INT32(number) for number in (0, 2, 1)]  # read; to keep in all caches but the first; data
        place = _element(context, builder, matrix, *arguments, _INT8)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *constants])
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate


@intrinsic
def prefetch(_, matrix, row, columns):
    """Prefetch the cache lines of ``columns`` columns of a row of ``matrix``."""

    def generate(context, builder, signature, arguments):
        array, row, columns = arguments
        value, column = context.make_array(matrix)(context, builder, array), context.get_constant(types.intp, 0)
        first = _element(context, builder, matrix, array, row, column, _INT8)
        nbytes = builder.mul(columns, value.itemsize)
        within = builder.and_(builder.ptrtoint(first, nbytes.type), nbytes.type(NBYTES - 1))
        lines = builder.lshr(builder.add(builder.add(nbytes, within), nbytes.type(NBYTES - 1)), nbytes.type(6))
        constants = [_INT32(number) for number in (0, 2, 1)]  # read; to keep in all caches but the first; data
        with cgutils.for_range(builder, lines) as line:
            place = builder.gep(first, [builder.shl(line.index, nbytes.type(6))], source_etype=_INT8)
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *constants])
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate
