"""Labels an equation by its operation, its module and the user's line that asked for it."""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

import lowmembp_jax as lm
from lowmembp_jax import _jax_internals as jax_internals
from lowmembp_jax._source_files import is_framework
from lowmembp_jax.compression import jaxprs
from lowmembp_jax.policies import CODES, NORM_AFFINE_OUTPUT, NORM_OUTPUT, NORM_RSTD

_OURS = {
    CODES: "codes",
    NORM_OUTPUT: "output",
    NORM_AFFINE_OUTPUT: "output",
    NORM_RSTD: "rstd",
}

_HERE = os.path.join(os.path.dirname(__file__), "_trace.py")

# Public functions and modules in these files are operations with a name. Calls inside an operation
# of jax.nn or of this library are parts of it. Calls inside a Flax module may be operations.
_WHOLE = re.compile(jax_internals.WHOLE)
_LIBRARY = os.path.dirname(lm.__file__) + os.sep
_MODULES = re.compile(
    r"/flax/(linen|nnx/nn)/"
    r"(activations?|attention|linear|lora|normalization|pooling|recurrent|stochastic)\.py$"
)
_FUNCTIONS = re.compile(jax_internals.FUNCTIONS)
_CUSTOM = re.compile(r"custom_(vjp|jvp)\.__call__$")
# jax.checkpoint and jnp.einsum push these scopes, which are not modules.
_NO_MODULE = re.compile(r"(checkpoint|remat|rematted_computation)$|.*->")


class Label(NamedTuple):
    """Names of an equation: see `lm.memory.Residual`."""

    op: str
    module: str
    source: str


class _Frame(NamedTuple):
    """A place in Python code: code object, instruction, line."""

    code: Any
    instruction: int
    line: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def is_user(self) -> bool:
        return not is_framework(self.file)

    @property
    def is_whole(self) -> bool:
        """Whether this frame is an operation, and all calls inside are parts of it."""
        is_operator = self.file.startswith(_LIBRARY) and self.public in lm.__all__
        return is_operator or _WHOLE.search(self.file) is not None

    @property
    def public(self) -> str:
        """The name of the frame's public function, or of its module's class, or ""."""
        name = self.code.co_qualname.removesuffix(".__call__")
        is_module = name != self.code.co_qualname
        fits = name.isidentifier() and not name.startswith("_")
        return name if fits and is_module == name[:1].isupper() else ""


def _frames(equations: Sequence[Any]) -> list[_Frame]:
    """The calls that led to the last of `equations`, outermost first.

    A traceback ends where its jaxpr starts, so the frames of the calling equations come first.
    """
    frames = []
    for equation in equations:
        if traceback := equation.source_info.traceback:
            codes, instructions = traceback.raw_frames()
            lines = (frame.line_num for frame in traceback.frames)
            frames += reversed([*map(_Frame, codes, instructions, lines)])
    ours = [i for i, frame in enumerate(frames) if frame.file == _HERE]
    return frames[ours[-1] + 1 :] if ours else frames


def _custom_call(frames: list[_Frame]) -> int | None:
    """Position of the outermost call of a custom_vjp or custom_jvp."""
    return next((i for i, f in enumerate(frames) if _CUSTOM.search(f.code.co_qualname)), None)


def _caller(frames: list[_Frame]) -> tuple[Any, int] | None:
    """The code that calls the outermost custom_vjp, and the place in it."""
    end = _custom_call(frames)
    outside = (f for f in reversed(frames[:end]) if jax_internals.SOURCE not in f.file)
    return next(((f.code, f.instruction) for f in outside), None)


def _equations(jaxpr, calls: tuple = ()) -> Iterator[tuple[Any, ...]]:
    for equation in jaxpr.eqns:
        yield (*calls, equation)
        for inner in jaxprs.bodies(equation):
            yield from _equations(inner, (*calls, equation))


class Labels:
    """Makes labels of equations of the differentiated program.

    Args:
      primal: makes the jaxpr of the program before differentiation. It still has what
        differentiation inlines: the names of custom_vjp functions, and calls of jax.checkpoint.
        It is called only if a label needs one of these.
    """

    def __init__(self, primal: Callable[[], Any]):
        self._primal = primal

    @functools.cached_property
    def _equations(self) -> list[tuple[Any, ...]]:
        return list(_equations(self._primal()))

    @functools.cached_property
    def _custom_names(self) -> dict[Any, set[str]]:
        """Names of custom_vjp functions, by the place and the module that call them."""
        names: dict[Any, set[str]] = {}
        for calls in self._equations:
            name, bodies = calls[-1].primitive.name, jaxprs.bodies(calls[-1])
            if name.startswith("custom_") and bodies:  # custom_linear_solve has no body
                function = bodies[0].debug_info.func_name
                # JAX 0.10 loses the place if it inlines a jaxpr from its cache.
                for caller in (_caller(_frames(calls)), None):
                    key = caller, _module(calls)
                    names.setdefault(key, set()).add(function.lstrip("_"))
        return names

    @functools.cached_property
    def _callers(self) -> dict[Any, set[str]]:
        """User's lines that reach an equation, by its traceback and module."""
        callers: dict[Any, set[str]] = {}
        for calls in self._equations:
            key = calls[-1].source_info.traceback, _module(calls)
            callers.setdefault(key, set()).add(_source(_user(_frames(calls))))
        return callers

    def label(self, equations: Sequence[Any], name: str = "") -> Label:
        """Labels the last of `equations`.

        Args:
          equations: the equation and the equations that call it, outermost first.
          name: the `checkpoint_name` of the result.
        """
        if not equations:
            return Label(name, "", "")
        frames = _frames(equations)
        custom = _custom_call(frames)
        user = _user(frames[:custom])
        module, source = _module(equations), _source(user)
        loops = [i for i, call in enumerate(equations[:-1]) if call.primitive.name == "scan"]
        if _user(_frames(equations[loops[-1] + 1 if loops else 0 :])) is None:
            # The equation comes from an inlined jax.checkpoint. The line of that call says more
            # than the line of the loop.
            key = equations[-1].source_info.traceback, module
            source = _only(self._callers.get(key, set())) or source
        op = _operation(frames[frames.index(user) + 1 if user else 0 : custom])
        if not op and custom is not None:
            op = _only(self._custom_names.get((_caller(frames), module), set()))
        op = op or equations[-1].primitive.name
        if name in _OURS:
            op = f"{op} {_OURS[name]}"
        return Label(op if name in _OURS else name or op, module, source)


def _only(names: set[str]) -> str:
    """Returns the name if there is exactly one, or ""."""
    return "".join(names) if len(names) == 1 else ""


def _user(frames: list[_Frame]) -> _Frame | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in reversed(frames) if frame.is_user), None)


def _operation(frames: list[_Frame]) -> str:
    """The name of the operation that the innermost frame belongs to; all `frames` are library
    code."""
    named = [f for f in frames if f.public and (f.is_whole or _MODULES.search(f.file))]
    if not named:
        functions = (f.public for f in frames if _FUNCTIONS.search(f.file))
        known = (name for name in functions if hasattr(jnp, name) or hasattr(lax, name))
        return next((name for name in known if name.islower()), "")
    outermost = named[-1]
    for frame in reversed(named):
        if not frame.is_whole:
            break
        outermost = frame
    return outermost.public


def _module(equations: Sequence[Any]) -> str:
    path: list[str] = []
    for equation in equations:
        inside: list[str] = []
        for scope in equation.source_info.name_stack.stack:
            if type(scope).__name__ != "Scope":
                # The backward of a jax.checkpoint repeats the path after another "jvp".
                path, inside = _joined(path, inside), []
            elif not _NO_MODULE.match(scope.name):
                inside.append(scope.name)
        path = _joined(path, inside)
    return "/".join(path)


def _joined(path: list[str], inside: list[str]) -> list[str]:
    return inside if path and inside[: len(path)] == path else path + inside


def _source(frame: _Frame | None) -> str:
    if frame is None:
        return ""
    relative = os.path.relpath(frame.file) if os.path.isabs(frame.file) else frame.file
    return f"{frame.file if relative.startswith('..') else relative}:{frame.line}"
