"""Compares methods to save memory for one training step, and chooses one that fits."""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from lowmembp_jax._sizes import as_bytes, format_bytes
from lowmembp_jax.memory.cache import cached_plan
from lowmembp_jax.memory.largest_batch import largest_batch
from lowmembp_jax.memory.lowering.lower import mesh_of
from lowmembp_jax.memory.lowering.step_arguments import StepError, check_call
from lowmembp_jax.memory.planning import LoweredStep, lower_step, plan_lowered
from lowmembp_jax.memory.result import WORK, Plan, aligned, explained, limit, work
from lowmembp_jax.memory.workers import Progress, workers
from lowmembp_jax.memory.workload import methods_of, workload_of
from lowmembp_jax.models.methods import HOW, TABLE
from lowmembp_jax.patching._report import PatchReport

# A method with approximate gradients is advised if the exact ones take this much longer.
_MUCH_LONGER = 1.1


@dataclass(frozen=True)
class MethodPlan:
    """One method of a comparison.

    Attributes:
      method: the method's name.
      plan: the plan of the step at the requested batch size.
      largest_batch: the largest batch that the search found within the budget, 0 if it found none,
        None without a search.
      how: the lines of code that switch the method on; "" for a custom method of the factory.
    """

    method: str
    plan: Plan
    largest_batch: int | None = None
    how: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the method is one of `lm.memory.METHODS` whose gradients are exact."""
        return self.method in TABLE and TABLE[self.method].is_exact

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "method": self.method,
            "plan": self.plan.to_dict(),
            "largest_batch": self.largest_batch,
        }


@dataclass(frozen=True)
class Comparison:
    """Plans by method, in the requested order.

    Attributes:
      batch: the batch size of each `MethodPlan.plan`, None if the factory decided.
      budget: bytes that each device may use, for `fits` and `largest_batch`.
      methods: a `MethodPlan` for each method.
      tokens: number of text tokens in the batch, None if the workload does not give it.
    """

    batch: int | None
    budget: int
    methods: tuple[MethodPlan, ...]
    tokens: int | None = None

    def __iter__(self) -> Iterator[MethodPlan]:
        return iter(self.methods)

    def __getitem__(self, method: str) -> MethodPlan:
        return {one.method: one for one in self.methods}[method]

    @property
    def fastest(self) -> MethodPlan | None:
        """The method with the least estimated time of those that fit; None on a TPU."""
        timed = [one for one in self if one.plan.fits and one.plan.cost]
        return min(timed, key=lambda one: (one.plan.estimated_seconds, one.plan.peak), default=None)

    @property
    def advised(self) -> MethodPlan | None:
        """The fastest exact method that fits, or `fastest` if exact ones take over 10% longer."""
        exact = dataclasses.replace(self, methods=tuple(one for one in self if one.is_exact))
        if (fastest := self.fastest) is None or (first := exact.fastest) is None:
            return fastest
        limit = _MUCH_LONGER * fastest.plan.estimated_seconds
        return first if first.plan.estimated_seconds <= limit else fastest

    @property
    def fits(self) -> bool:
        """Whether a method fits."""
        return any(one.plan.fits for one in self.methods)

    def __str__(self) -> str:
        plan, advised = self.methods[0].plan, self.advised
        counts = {"examples/s": self.batch, "tokens/s": self.tokens}
        rates = {name: count for name, count in counts.items() if count}
        searched = ["largest batch"] if self.methods[0].largest_batch is not None else []
        timed = WORK[:3]
        if plan.cost is None:
            timed, rates = (), {}
        head = ("method", "peak", "intermediates", "temporaries", *timed, *rates, *searched, "")
        rows = [
            (
                one.method,
                *map(format_bytes, (one.plan.peak, one.plan.intermediates, one.plan.temporaries)),
                *(work(one.plan.cost)[:3] if one.plan.cost else ()),
                *(f"{n / one.plan.estimated_seconds:,.0f}" for n in rates.values()),
                *([f"{one.largest_batch:,}"] if searched else []),
                one.plan.verdict + (", advised" if one is advised else ""),
            )
            for one in self
        ]
        notes = dict.fromkeys(note for one in self for note in one.plan.every_note)
        lines = [
            limit(plan) + ("" if self.batch is None else f", batch {self.batch:,}"),
            *aligned(head, *rows, left=("method", "")),
            "",
            *explained(plan),
            *(f"note: {note}" for note in notes),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        fastest, advised = self.fastest, self.advised
        return {
            "batch": self.batch,
            "tokens": self.tokens,
            "budget_bytes": self.budget,
            "fastest": fastest and fastest.method,
            "advised": advised and advised.method,
            "methods": [one.to_dict() for one in self.methods],
        }


class NothingFitsError(ValueError):
    """No method's peak is within the budget.

    Attributes:
      comparison: the comparison of all methods.
    """

    def __init__(self, comparison: Comparison):
        smallest = min(comparison, key=lambda one: one.plan.peak)
        super().__init__(
            f"no method fits in {format_bytes(comparison.budget)}: the smallest peak is "
            f"{format_bytes(smallest.plan.peak)}, with {smallest.method!r}"
        )
        self.comparison = comparison


@dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    Attributes:
      method: the method's name.
      plan: the plan of the step with this method.
      comparison: the comparison of all methods.
    """

    method: str
    plan: Plan
    comparison: Comparison

    @property
    def how(self) -> str:
        """The lines of code that switch the method on; "" for a custom method of the factory."""
        return self.comparison[self.method].how

    def __str__(self) -> str:
        plan, fastest = self.plan, self.comparison.fastest
        is_fastest = fastest is None or fastest.method == self.method
        text = (
            f"{self.method} is the fastest {'' if is_fastest else 'exact '}method that fits: "
            f"{format_bytes(plan.peak)} of {format_bytes(plan.limit)}, "
            f"{plan.estimated_seconds * 1e3:.3g} ms (estimate)"
        )
        if fastest is not None and not is_fastest:
            less = 1 - fastest.plan.estimated_seconds / plan.estimated_seconds
            text += f"; {fastest.method} takes {less:.0%} less time, with approximate gradients"
        return "\n".join(filter(None, (text, self.how)))


def compare(
    step_factory: Callable[[str, int | None], Any],
    methods: Sequence[str] | None = None,
    *,
    batch: int | None = None,
    budget: int | str | None = None,
    find_largest_batch: bool = False,
    batch_multiple: int | None = None,
    cache: bool = True,
    progress: bool = True,
    **plan_options: Any,
) -> Comparison:
    """Plans a training step with several methods to save memory.

        def step_factory(method, batch):
            model = MyModel(remat={"dots": jax.checkpoint_policies.dots_saveable}.get(method), ...)
            ...
            return train_step, (abstract_params, abstract_opt_state, abstract_batch)

        comparison = lm.memory.compare(step_factory, ["default", "dots"], batch=64, device="h200")
        comparison["dots"].plan.peak, comparison["dots"].plan.fits, comparison.advised

    Args:
      step_factory: takes a method and a batch size, and returns a step and the tuple of its
        abstract arguments, or a `lm.memory.Workload`.
      methods: names that the factory knows. Default: `step_factory.methods` if it exists, or the
        six of `lm.memory.METHODS` among which most users choose.
      batch: the batch size to compare at; None leaves it to the factory.
      budget: bytes that each device may use, or a size such as "24GB"; it decides `fits`. Default:
        the device's usable memory.
      find_largest_batch: search for each method's largest batch within the budget, with at most 8
        compilations. The result is the largest to about a percent, unless the peak jumps between
        two batches.
      batch_multiple: the largest batch is a multiple of this, for instance of the number of
        devices. Default: the greatest common divisor of 8 and `batch`.
      cache: store plans in `lm.memory.plan_cache_directory()`, so that the same program is compiled
        only once.
      progress: print a line to stderr for each plan as soon as it is made.
      **plan_options: options of `lm.memory.plan`: `device`, `mesh`, `memory_fraction`, ...

    Raises:
      TypeError: the factory is not callable.
      ValueError: the factory does not return a step and arguments that fit it; or see
        `lm.memory.plan`.
      ImportError: see `lm.memory.plan`.
    """
    if not callable(step_factory):
        raise TypeError(f"compare: step_factory must be callable, got {step_factory!r}")
    methods = methods_of(step_factory) if methods is None else methods
    if not methods or isinstance(methods, str):
        raise ValueError(f"compare: methods must be a sequence of names, got {methods!r}")
    methods = list(dict.fromkeys(methods))
    if find_largest_batch and batch is None:
        raise ValueError("compare: find_largest_batch=True needs a batch to start from, got None")
    for name, value in (("batch", batch), ("batch_multiple", batch_multiple)):
        if value is not None and value < 1:
            raise ValueError(f"compare: {name} must be at least 1, got {value}")

    most = as_bytes("compare: budget", budget)
    multiple = batch_multiple or math.gcd(batch or 8, 8)

    # Errors in the factory show before minutes of compilation.
    workloads = {(m, batch): workload_of(step_factory, m, batch) for m in methods}
    for workload in workloads.values():
        check_call(workload.step, workload.args)
    plans: dict[tuple[str, int | None], Plan] = {}
    patched: dict[tuple[str, int | None], tuple[str, ...]] = {}  # notes
    largest: dict[str, int] = {}

    def sizes(method: str) -> Generator[int | None, int, None]:
        """Yields batch sizes to plan. Send it the peak of each."""
        peak = yield batch
        if find_largest_batch and batch is not None:
            limit = plans[method, batch].limit
            known = None if batch % multiple else peak
            search = largest_batch(limit, start=batch, multiple=multiple, peak=known)
            largest[method] = yield from search

    def lower(method: str, size: int | None) -> LoweredStep:
        made = workloads.get((method, size)) or workload_of(step_factory, method, size)
        options = {**plan_options, "parts": plan_options.get("parts") or made.parts}
        if options.get("mesh") is not None or mesh_of(made.in_shardings) is not None:
            options.setdefault("in_shardings", made.in_shardings)
        with made.context() as report:
            donate = made.donate_argnums or None
            lowered = lower_step(made.step, *made.args, donate=donate, **options)
        if isinstance(report, PatchReport):
            patched[method, size] = tuple(f"{method}: {line}" for line in report.of_checkpoints())
        return lowered

    plan_of, at_once = cached_plan if cache else plan_lowered, workers()
    told = Progress(methods, at_once, batch) if progress else None
    pool = ThreadPoolExecutor(at_once)
    try:
        # Tracing stays in this thread, because the caller's contexts are thread-local. XLA mostly
        # uses one core for a program, so several programs compile in parallel.
        remaining = {method: sizes(method) for method in methods}
        todo = deque((method, next(search)) for method, search in remaining.items())
        compiling: dict[Future[Plan], tuple[str, int | None]] = {}
        while todo or compiling:
            # This thread traces on the core of a program that is not traced yet.
            while todo and len(compiling) < at_once:
                method, size = todo.popleft()
                compiling[pool.submit(plan_of, lower(method, size))] = method, size
            done, _ = wait(compiling, return_when=FIRST_COMPLETED)
            for future in done:
                method, size = key = compiling.pop(future)
                made = future.result()
                notes = made.notes + patched.get(key, ())
                plans[key] = dataclasses.replace(made, budget=most, notes=notes)
                following = None
                with contextlib.suppress(StopIteration):
                    following = method, remaining[method].send(plans[key].peak)
                    todo.append(following)
                if told is not None:
                    told.add(method, size, plans[key], is_last=following is None)
    finally:
        # Report an error or Ctrl-C at once: XLA cannot be interrupted.
        pool.shutdown(wait=False, cancel_futures=True)
    rows = [
        MethodPlan(
            method,
            plans[method, batch],
            largest.get(method),
            workloads[method, batch].how or HOW.get(method, ""),
        )
        for method in methods
    ]
    tokens = workloads[methods[0], batch].tokens
    return Comparison(batch, rows[0].plan.limit, tuple(rows), tokens)


def choose(
    step_factory: Callable[[str, int | None], Any],
    methods: Sequence[str] | None = None,
    **options: Any,
) -> Choice:
    """Plans a training step with each method and chooses one that fits.

    It chooses the fastest method whose gradients are exact. A method with approximate gradients
    comes first only if every exact one that fits takes over 10% longer. Methods that are not in
    `lm.memory.METHODS` count as approximate, because the planner does not know them. The times are
    estimates by the roofline.

        choice = lm.memory.choose(step_factory, budget="24GB", device="rtx4090", batch=64)
        train_step, _ = step_factory(choice.method, 64)

    Args:
      step_factory: see `compare`.
      methods: see `compare`.
      **options: the other arguments of `compare`, such as `budget`, `batch` and `device`.

    Returns:
      A `Choice`.

    Raises:
      NothingFitsError: no method fits; the message has the smallest peak and its method.
      TypeError, ValueError, ImportError: see `compare`.
    """
    return choice_of(compare(step_factory, methods, **options))


def choice_of(comparison: Comparison) -> Choice:
    """Chooses the advised method of a comparison.

    Raises:
      NothingFitsError: no method fits.
      ValueError: the devices are TPUs.
    """
    advised = comparison.advised
    if not comparison.fits:
        raise NothingFitsError(comparison)
    if advised is None:
        raise StepError(
            f"device: expected a GPU, got {comparison.methods[0].plan.device.name!r}: the planner "
            f"estimates no times on TPUs; lm.memory.compare plans the memory of each method"
        )
    return Choice(advised.method, advised.plan, comparison)
