"""Mends and hastens Triton's interpreter, in which kernels run where there is no GPU.

Its classes are the compiler's too, which must not be touched: import it only to run kernels here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Change the interpreter until `patch` is undone."""
    _scalars_of_new_numpy(patch)
    _one_patch_for_each_launch(patch)
    _types_made_once(patch)
    _equal_types_are_not_converted(patch)
    _operands_that_fit_are_taken_as_they_are(patch)
    _operations_are_called_at_once(patch)


def _scalars_of_new_numpy(patch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 no longer accepts the interpreter's one-element arrays as loop bounds."""
    from triton.runtime import interpreter

    replace = interpreter._patch_lang_tensor

    def replace_and_index(tensor, scope) -> None:
        replace(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", replace_and_index)


def _one_patch_for_each_launch(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches Triton's language at a launch, and again at every call of a device
    function, which takes most of its time. Patch it once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()
    found: dict[int, tuple[set[ModuleType], Any]] = {}  # by the address of a function's globals

    class Scope(interpreter._LangPatchScope):
        """Undo the patch and forget it; calls of device functions restore nothing."""

        languages = frozenset()

        def restore(self) -> None:
            super().restore()
            replaced.difference_update(self.languages)

    def replace_once(function) -> interpreter._LangPatchScope:
        names = function.__globals__
        if id(names) not in found:
            modules = names.values()
            languages = {word for word in (tl, tl.core) if any(word is each for each in modules)}
            found[id(names)] = languages, names
        languages = found[id(names)][0]
        if languages <= replaced:
            return Scope()
        scope = replace(function)
        scope.__class__, scope.languages = Scope, frozenset(languages - replaced)
        replaced.update(languages)
        return scope

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _types_made_once(patch: pytest.MonkeyPatch) -> None:
    """For each operation the interpreter describes the type of the result anew, which takes a third
    of its time. Let results of equal types share what describes them; nothing changes that.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_numpy_type = interpreter._get_np_dtype
    # By the addresses of element types, which the values keep alive.
    types: dict[tuple[int, ...], dict[str, Any]] = {}
    scalars: dict[int, dict[str, Any]] = {}
    numpy_types: dict[int, tuple[Any, Any]] = {}

    def type_once(self, element_ty, shape) -> None:
        key = (id(element_ty), *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__ | {"of_tensors": {}}
        self.__dict__.update(types[key])

    def tensor_once(self, handle, type) -> None:
        fields = type.__dict__.get("of_tensors")
        if fields is None:
            fields = scalars.setdefault(id(type), {})
        if not fields:
            make_tensor(self, None, type)
            fields.update(self.__dict__)
        self.__dict__.update(fields, handle=handle, type=type)

    def numpy_type_once(of) -> Any:
        of = of.element_ty if isinstance(of, core.block_type) else of
        if id(of) not in numpy_types:
            numpy_types[id(of)] = of, find_numpy_type(of)
        return numpy_types[id(of)][1]

    patch.setattr(core.block_type, "__init__", type_once)
    patch.setattr(core.tensor, "__init__", tensor_once)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)


def _equal_types_are_not_converted(patch: pytest.MonkeyPatch) -> None:
    """Before each operation the interpreter converts both sides to one type and one shape, which
    takes long where nothing is to be done. Return them at once then.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    is_equal = core.dtype.__eq__

    def cast_others(self, given, to, *rounding) -> Any:
        return given if given.type.scalar is to else cast(self, given, to, *rounding)

    def broadcast_others(self, left, right) -> Any:
        shapes = left.type.__dict__.get("shape"), right.type.__dict__.get("shape")
        if shapes[0] is shapes[1] or (all(shapes) and shapes[0].values == shapes[1].values):
            return left, right
        return broadcast(self, left, right)

    patch.setattr(TritonSemantic, "cast", cast_others)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or is_equal(self, other))


def _operands_that_fit_are_taken_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """For each operation on two numbers the interpreter derives their common type, makes blocks of
    one shape of them, and repeats an integer operation with 64 bits to find an overflow, as a dozen
    operations of its own. For the usual types leave that to NumPy, which broadcasts as it computes.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import TensorHandle

    derive = TritonSemantic.binary_op_type_checking_impl
    # By the addresses of element types.
    integers = {id(core.int32): np.int32, id(core.int64): np.int64}
    numbers = integers | {id(core.float32): np.float32}
    constants: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, int], tuple[Any, ...]] = {}
    blocks: dict[tuple[int, int], tuple[Any, ...]] = {}

    def constant(value: float, like: Any) -> Any:
        """The value in each place of a block of `like`'s type; None: its type may differ."""
        scalar = like.type.scalar
        numpy_type = numbers.get(id(scalar))
        if numpy_type is None:
            return None
        if numpy_type is not np.float32:
            limits = np.iinfo(numpy_type)
            if isinstance(value, float) or not limits.min <= value <= limits.max:
                return None
        shape = like.handle.data.shape
        key = (type(value), value, str(value), numpy_type, shape)  # 0.0 is not -0.0
        if key not in constants:
            constants[key] = TensorHandle(np.full(shape, value, numpy_type), scalar)
        return core.tensor(constants[key], like.type)

    def common_shape(left: Any, right: Any) -> Any:
        """Of two blocks or numbers, which have no shape; None: they do not go together."""
        if left is None or right is None or left is right:
            return right if left is None else left
        key = id(left), id(right)
        if key not in shapes:
            sizes = [[getattr(size, "value", size) for size in shape] for shape in (left, right)]
            try:
                found = core.tuple(np.broadcast_shapes(*sizes))
            except ValueError:
                found = None
            shapes[key] = (found, left, right)  # whose addresses are not given to others
        return shapes[key][0]

    def block(given: Any, shape: Any) -> Any:
        """The operand with the type of a block of that shape. Its data keep their own shape."""
        scalar = given.type.scalar
        key = id(scalar), id(shape)
        if key not in blocks:
            blocks[key] = (core.block_type(scalar, [*shape]), scalar, shape)
        return core.tensor(given.handle, blocks[key][0])

    def fitting(left: Any, right: Any, may_point: bool) -> tuple[Any, Any] | None:
        are_numbers = isinstance(left, (int, float)), isinstance(right, (int, float))
        if all(are_numbers):
            return None
        if any(are_numbers):
            left = constant(left, right) if are_numbers[0] else left
            right = constant(right, left) if are_numbers[1] else right
            return None if left is None or right is None else (left, right)
        scalars = left.type.scalar, right.type.scalar
        is_pointer = isinstance(scalars[0], core.pointer_type)
        if is_pointer and not (may_point and id(scalars[1]) in integers):
            return None
        if not is_pointer and (scalars[0] is not scalars[1] or id(scalars[0]) not in numbers):
            return None
        given = [each.type.__dict__.get("shape") for each in (left, right)]
        if given[0] is given[1]:
            return left, right
        shape = common_shape(*given)
        return None if shape is None else (block(left, shape), block(right, shape))

    def operands(self, left, right, *options, **named) -> Any:
        may_point = bool(options and options[0])
        return fitting(left, right, may_point) or derive(self, left, right, *options, **named)

    def check_overflow(self, left, right, operation) -> None:
        if left.type.scalar.int_bitwidth < 64:
            compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
            pair = [each.handle.data for each in (left, right)]
            exact = compute(*(each.astype(np.int64) for each in pair))
            limits = np.iinfo(pair[0].dtype)
            assert limits.min <= exact.min() and exact.max() <= limits.max, "an integer overflows"

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", operands)
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)


def _operations_are_called_at_once(patch: pytest.MonkeyPatch) -> None:
    """Each call of an operation passes through wrappers that copy its arguments and check that the
    interpreter is among them, and each argument is asked for being one of four kinds of constants.
    """
    from triton.language import core
    from triton.runtime import interpreter

    is_wrapper = core.builtin(lambda: None).__code__
    unwrap = core._unwrap_if_constexpr
    semantic = interpreter.interpreter_semantic

    def patch_directly(place, name, member, builder, scope) -> None:
        if getattr(member, "__code__", None) is is_wrapper:
            member = member.__wrapped__

        def call(*args, **named) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(place, name, call)

    def unwrapped(given) -> Any:
        kind = type(given)
        if kind is core.tensor or kind is int:
            return given
        return given.value if kind is core.constexpr else unwrap(given)

    patch.setattr(interpreter, "_patch_attr", patch_directly)
    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)
