"""Finds the function that `--model` names, which makes workloads."""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmembp_jax.memory.devices import says_how_to_install_cudnn
from lowmembp_jax.memory.workload import Workload, WorkloadError, methods_of, workload_of
from lowmembp_jax.models.methods import METHODS
from lowmembp_jax.patching._patch import patch

#: What `lm.patch` does with any step: the line of code, and the context. "compress" takes over the
#: step's own checkpoints.
_PATCHES: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "lowmembp": ("lm.patch()", patch),
    "compress": ("lm.patch(checkpoint=True)", functools.partial(patch, checkpoint=True)),
}
_MANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True)
class Factory:
    """A function that makes workloads.

    Attributes:
      function: takes options by name, which may include `method` and `batch`.
      name: its name in messages.
      is_ours: whether the library defines it. Then its ValueErrors are about the options and are
        shown as one line. Errors from other code are shown in full.
    """

    function: Callable[..., Any]
    name: str
    is_ours: bool = False

    def methods(self, *, every: bool = False) -> tuple[str, ...]:
        """Its usual methods, or all of them.

        `lm.patch` works on any model; other methods need the argument `method`.
        """
        if self.takes("method"):
            return methods_of(self.function, every=every)
        return "default", *_PATCHES

    @property
    def default_batch(self) -> int | None:
        """The default of the argument `batch`, if it is a number."""
        batch = self._names().get("batch")
        return batch.default if batch and isinstance(batch.default, int) else None

    def takes(self, option: str) -> bool:
        """Whether the function has an argument of that name."""
        return option in self._names()

    def _names(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def __call__(self, method: str, batch: int | None, **options: Any) -> Workload:
        """Makes the workload of a method and a batch size.

        Raises:
          WorkloadError: the function does not take one of the options, or this method.
        """
        names, own = self._names(), self.methods(every=True)
        if method not in {*METHODS, *own}:
            accepted = own if self.takes("method") else METHODS
            raise WorkloadError(f"method: expected one of {', '.join(accepted)}, got {method!r}")
        if not self.takes("method") and method not in own:
            raise WorkloadError(
                f"method: {self.name} takes no argument `method`, so it can have only "
                f"{', '.join(own)} (with lm.patch), got {method!r}"
            )
        if batch is not None:
            options["batch"] = batch
        takes_all = any(p.kind is p.VAR_KEYWORD for p in names.values())
        if unknown := [key for key in options if key not in names and not takes_all]:
            raise WorkloadError(
                f"{self.name} takes no argument {', '.join(unknown)}; it takes "
                f"{', '.join(names) or 'none'}"
            )
        options = {key: _like_default(key, x, names.get(key)) for key, x in options.items()}
        if "method" in names:
            options["method"] = method
        required = [key for key, p in names.items() if p.default is p.empty and p.kind not in _MANY]
        if missing := ", ".join(key for key in required if key not in options):
            raise WorkloadError(
                f"--model: {self.name} needs {missing}: expected a function that makes the step: "
                f"it takes at most method, batch and --options, and returns (step, args), the step "
                f"and the tuple of its abstract arguments"
            )
        try:
            with says_how_to_install_cudnn():
                make = lambda *_: self.function(**options)  # noqa: E731
                workload = workload_of(make, method, batch, self.name)
        except ValueError as error:
            if self.is_ours:
                raise WorkloadError(f"{self.name}: {error}") from error
            raise
        if "method" in names or method not in _PATCHES:
            return workload
        line, context = _PATCHES[method]
        return dataclasses.replace(workload, context=context, how=f"with {line}:  # call the step")


def _like_default(key: str, value: Any, parameter: inspect.Parameter | None) -> Any:
    """Converts a value of `--options` to a number or a bool if the argument's default is one."""
    default = None if parameter is None else parameter.default
    if not isinstance(value, str) or not isinstance(default, int | float):
        return value
    if isinstance(default, bool) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    with contextlib.suppress(ValueError):
        if isinstance(default, float):
            return float(value)
    raise WorkloadError(f"--options: {key}: expected {type(default).__name__}, got {value!r}")


def load_factory(model: str) -> Factory:
    """Loads the factory that `--model` names.

    Args:
      model: the name of one of the library's models, the path of a Hugging Face config.json, or
        `path/to/file.py:function`, see `function_of_file`.

    Raises:
      WorkloadError: there is no such file, function or model.
    """
    from lowmembp_jax.models.workload import MODELS, of_config_json

    if model.endswith(".json"):
        try:
            name, function = of_config_json(model)
        except ValueError as error:
            raise WorkloadError(f"--model: {error}") from error
        return Factory(function, name, is_ours=True)
    if ":" in model:
        return Factory(function_of_file(model), model)
    if model in MODELS:
        return Factory(MODELS[model], model, is_ours=True)
    raise WorkloadError(
        f"--model: expected one of {', '.join(MODELS)}, path/to/config.json or "
        f"path/to/file.py:function, got {model!r}"
    )


def function_of_file(model: str) -> Callable[..., Any]:
    """Loads the function that `path/to/file.py:function` names.

    The file can import its neighbours, as with `python path/to/file.py`.

    Raises:
      WorkloadError: there is no such file or function, or the file is not Python. Errors that the
        file itself raises pass through.
    """
    where, _, name = model.rpartition(":")
    path = Path(where)
    if not path.is_file():
        raise WorkloadError(f"model: there is no file {path}")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"model: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        at = f"{error.filename}, line {error.lineno}" if error.lineno else path
        raise WorkloadError(f"model: {at}: {error.msg}") from error
    function: Any = getattr(module, name, None)
    try:
        inspect.signature(function)  # builtins have none
    except (TypeError, ValueError) as error:
        found = {n: inspect.unwrap(f) for n, f in vars(module).items() if n[0] != "_"}
        functions = [n for n, f in found.items() if inspect.isfunction(f)]
        raise WorkloadError(
            f"model: {path} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        ) from error
    return function
